"""One request's state: its tokens, how far they are computed, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import StrEnum

from pagegen.runtime.sampling_params import SamplingParams


class SequenceStatus(StrEnum):
    """Where the scheduler keeps a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """Tokens and progress of one request; the scheduler moves it, the block manager holds its blocks.

    `seq_id` is the order of arrival, unique in an engine. `num_computed_tokens` counts the leading tokens whose K and V
    are in the cache; a sampled token is not computed until the step after. `max_num_tokens` bounds prompt + output.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "max_num_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "params",
        "prompt_len",
        "request_id",
        "seq_id",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        max_num_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.params = params
        self.max_num_tokens = max_num_tokens
        self.stop_token_ids = stop_token_ids
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.status}, {self.num_computed_tokens}/{self.num_tokens} computed)"

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """One while decoding; more while the prompt, or what a preemption threw away, is being computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Cache slots that the sequence needs at its longest: the last token is sampled but never computed."""
        return self.max_num_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.prompt_len]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> FinishReason | None:
        """Appends a sampled token; returns the reason to end if this token is one."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_num_tokens else None
