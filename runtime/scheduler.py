"""Which tokens run in the next iteration.

Iteration-level scheduling as in Yu et al. 2022 (Orca, https://www.usenix.org/conference/osdi22/presentation/yu),
on-demand blocks and preemption of the latest arrived as in Kwon et al. 2023 (vLLM, https://arxiv.org/abs/2309.06180,
section 4.5), chunked prefill beside decodes under a token budget as in Agrawal et al. 2024 (Sarathi-Serve,
https://arxiv.org/abs/2403.02310). Knows no tensor and no model: the same class can run in virtual time.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence as SequenceOf

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.policies import Allocation, Demand, MemoryPolicy
from pagegen.runtime.sequence import FinishReason, Sequence, SequenceStatus

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` bounds the tokens of one iteration, `max_num_seqs` the sequences that hold blocks."""

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"{field.name}={value} schedules nothing; it must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of one sequence, from position `start`."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether all of the sequence's tokens are computed after this iteration, so that its next one is sampled."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One iteration. `copies` are (source, destination) blocks to copy, in order, before the model runs."""

    rows: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class _Iteration:
    """A ScheduledBatch in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[ScheduledSequence] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[Sequence] = []

    def take(self, sequence: Sequence) -> None:
        """Schedules as many of the sequence's uncomputed tokens as the budget allows."""
        num_tokens = min(sequence.num_uncomputed_tokens, self.budget)
        self.rows.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """First come, first served: every running sequence arrived before every waiting one.

    Decodes go first, then prompts in chunks, then new sequences, until the token budget is spent. A sequence is
    admitted when the blocks of all its tokens are free and one more for each running sequence: those may need one
    within `block_size` iterations, and a sequence admitted without that would be preempted by its elders' growth. When
    a decode finds no block, the latest arrived gives all of its blocks back and is computed anew later; not in the same
    iteration, as it needs them all and an elder took one. The oldest is never chosen, and `add` refuses what cannot
    finish alone: so the oldest always advances, and all of them end.
    """

    def __init__(self, config: SchedulerConfig, block_manager: MemoryPolicy) -> None:
        self.config = config
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises RequestError for one that the whole pool could not hold."""
        blocks, demand = self.block_manager, _demand(sequence)
        if blocks.can_allocate(demand) is Allocation.NEVER:
            raise RequestError(
                f"request {sequence.request_id!r}: {sequence.prompt_len} prompt tokens and up to "
                f"{sequence.params.max_tokens} new ones need {blocks.blocks_needed(demand)} KV blocks, the "
                f"pool has {blocks.num_blocks} of {blocks.block_size} tokens; shorten the prompt, lower max_tokens, or "
                "give the engine more KV memory"
            )
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Plans one iteration and takes its blocks; empty only if there is no work. `update` must follow."""
        iteration = _Iteration(self.config.max_num_batched_tokens)
        self._schedule_decodes(iteration)
        self._schedule_prefills(iteration)
        self._admit(iteration)
        self.block_manager.audit()
        return ScheduledBatch(tuple(iteration.rows), tuple(iteration.copies), tuple(iteration.preempted))

    def update(self, batch: ScheduledBatch, token_ids: SequenceOf[int | None]) -> None:
        """Records that a batch was computed; `token_ids[i]` is what row i sampled, None if it sampled nothing.

        Rows whose sequence ended since `schedule` are skipped.
        """
        for row, token_id in zip(batch.rows, token_ids, strict=True):
            sequence = row.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.num_computed_tokens = row.start + row.num_tokens
            reason = None if token_id is None else sequence.append(token_id)
            if reason:
                self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a sequence wherever it stands and frees its blocks; one that has ended keeps its first reason."""
        if sequence.finished:
            return
        (self.waiting if sequence.status is SequenceStatus.WAITING else self.running).remove(sequence)
        self.block_manager.free(sequence.seq_id)
        sequence.status, sequence.finish_reason, sequence.error = SequenceStatus.FINISHED, reason, error

    # --- the three parts of an iteration -----------------------------------------------------------------------------

    def _schedule_decodes(self, iteration: _Iteration) -> None:
        for sequence in tuple(self.running):
            if not iteration.budget:
                return
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_uncomputed_tokens > 1:
                continue
            if self._make_room(sequence, iteration):
                iteration.take(sequence)

    def _schedule_prefills(self, iteration: _Iteration) -> None:
        for sequence in self.running:
            if not iteration.budget:
                return
            if sequence.num_uncomputed_tokens > 1:
                iteration.take(sequence)

    def _admit(self, iteration: _Iteration) -> None:
        blocks = self.block_manager
        while self.waiting and iteration.budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            demand = _demand(sequence)
            if blocks.can_allocate(demand, headroom=len(self.running)) is not Allocation.OK:
                return  # nobody overtakes
            blocks.allocate(sequence.seq_id, demand, sequence.num_tokens)
            self.running.append(self.waiting.popleft())
            sequence.status = SequenceStatus.RUNNING
            iteration.take(sequence)

    def _make_room(self, sequence: Sequence, iteration: _Iteration) -> bool:
        """Takes the newest token's slot, preempting later arrivals; False if the sequence was the latest itself."""
        blocks, seq_id = self.block_manager, sequence.seq_id
        while not blocks.can_append(seq_id, missing := sequence.num_tokens - blocks.num_tokens(seq_id)):
            victim = self.running[-1]
            self._preempt(victim)
            iteration.preempted.append(victim)
            if victim is sequence:
                return False
        iteration.copies += blocks.append(seq_id, missing)
        return True

    def _preempt(self, victim: Sequence) -> None:
        if len(self.running) == 1:
            raise RuntimeError(f"{victim} is alone and finds no block: it should have been refused by add")
        self.running.pop()
        self.block_manager.free(victim.seq_id)
        victim.status, victim.num_computed_tokens = SequenceStatus.WAITING, 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)


def _demand(sequence: Sequence) -> Demand:
    return Demand(sequence.token_ids, sequence.max_kv_tokens)
