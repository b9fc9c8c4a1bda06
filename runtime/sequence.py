"""One request's state: its sequences, their tokens, how far they are computed, and how they ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from enum import StrEnum


class GroupStatus(StrEnum):
    """Where the scheduler keeps a request. A preempted one is waiting, or swapped if its KV is on the host."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What scheduling needs to know of a request, and all that it knows: a recorded run needs no more.

    `max_num_tokens` bounds prompt + output of each sequence. `num_sequences` samples, or `beams`, grow from the prompt.
    A lower `priority` number goes first, where a policy heeds it. `salt` keeps the request's KV from others with the
    same tokens; `score_prompt` has every prompt token computed, cached or not, as its logits are wanted.
    `final_num_tokens` is how long the request will turn out, which only a simulation knows.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_num_tokens: int
    num_sequences: int = 1
    beams: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: str = ""
    score_prompt: bool = False
    final_num_tokens: int | None = None


class Sequence:
    """Tokens and progress of one sample or beam.

    `num_computed_tokens` counts the leading tokens whose K and V are in the cache; a sampled token is not computed
    until the step after. `index` is its place among the request's sequences.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "group",
        "index",
        "num_computed_tokens",
        "seq_id",
        "token_ids",
    )

    def __init__(self, seq_id: int, group: SequenceGroup, index: int, token_ids: SequenceOf[int]) -> None:
        self.seq_id = seq_id
        self.group = group
        self.index = index
        self.token_ids = list(token_ids)
        self.num_computed_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        where = f"{self.num_computed_tokens}/{self.num_tokens} computed"
        return f"Sequence({self.group.request_id!r}, {self.index}, {self.finish_reason or self.group.status}, {where})"

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.group.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SequenceGroup:
    """One request: sequences that share a prompt, and are admitted, swapped and preempted all together or not at all.

    It begins with one sequence; the prompt's last logits give each of `num_sequences` its first token, and the others
    are forked from it. From then on all that live advance in step, one token an iteration, so they are equally long.
    Beams live until the whole request ends: one that no candidate goes on becomes a second child of another.
    After a preemption that threw their KV away, the first of several computes the prompt, the others are forked from
    it again, each computes its own output but for the newest token, and they go on: `recovering` until then.

    `live` are those that have not ended, `active` those of them that hold blocks: all, but for the first alone while
    the others wait to be forked from it. `decoding` says that each of them has just its newest token to compute.
    `width` counts what they will be once forked. `rank` orders requests: the lower is served first.
    """

    __slots__ = (
        "active",
        "decoding",
        "forked",
        "live",
        "num_cached_tokens",
        "num_preemptions",
        "num_saved_blocks",
        "rank",
        "recovering",
        "request",
        "reserved_blocks",
        "sequences",
        "status",
        "width",
    )

    def __init__(self, request: Request, seq_id: int, rank: tuple[int, int]) -> None:
        self.request = request
        self.rank = rank
        self.sequences = [Sequence(seq_id, self, 0, request.prompt_token_ids)]
        self.live = list(self.sequences)
        self.active = self.live
        self.width = request.num_sequences
        self.forked = request.num_sequences == 1
        self.status = GroupStatus.WAITING
        self.decoding = self.recovering = False
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, when it was admitted first
        self.num_saved_blocks = 0  # blocks that would have been needed more, had nothing been shared
        self.reserved_blocks = 0  # by policies that count what a request may come to need

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id!r}, {self.status}, {len(self.live)} of {self.width} live)"

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Cache slots that a sequence needs at its longest: the last token is sampled but never computed."""
        return self.request.max_num_tokens - 1

    @property
    def active_ids(self) -> list[int]:
        return [sequence.seq_id for sequence in self.active]

    def end_of(self, sequence: Sequence) -> int:
        """Tokens of an active sequence that are to be computed before its next one is sampled, or it is forked."""
        if not self.recovering:
            return sequence.num_tokens
        return sequence.num_tokens - 1 if len(self.active) > 1 else self.prompt_len

    def reset(self) -> None:
        """Forgets all that is computed: the blocks are gone."""
        for sequence in self.live:
            sequence.num_computed_tokens = 0
        self.decoding = False
        self.recovering = self.forked and len(self.live) > 1
        self.active = self.live[:1] if self.recovering else self.live

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Marks one of the live sequences as ended."""
        sequence.finish_reason, sequence.error = reason, error
        self.live.remove(sequence)
        if self.active is not self.live and sequence in self.active:
            self.active.remove(sequence)
        self.width -= 1
