"""What a scheduling policy is: the order of requests, whom it refuses, and who runs in the next iteration."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

from pagegen.errors import RequestError
from pagegen.runtime.scheduling.plan import Iteration
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason
from pagegen.runtime.scheduling.preemption import Preemption
from pagegen.runtime.sequence import Request, SequenceGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """`max_num_batched_tokens` bounds the tokens of one iteration, `max_num_seqs` the sequences that hold blocks."""

    max_num_seqs: int
    max_num_batched_tokens: int


class SchedulingPolicy(ABC):
    """Plans iterations over a request pool. Whoever is admitted runs in the same iteration.

    Within a policy nobody overtakes: admission goes by rank and stops at the first that does not fit. `chunked` says
    whether a prompt may be computed over several iterations, `preempts` whether those that run may lose their blocks,
    `prefix_cache` whether it goes with one.
    """

    name: ClassVar[str]
    chunked: ClassVar[bool] = False
    preempts: ClassVar[bool] = False
    prefix_cache: ClassVar[bool] = False

    def __init__(self, limits: Limits, preemption: Preemption) -> None:
        self.limits = limits
        self.preemption = preemption if self.preempts else Preemption.NONE
        self.num_idle_slot_iterations = 0

    def rank(self, request: Request, arrival: int) -> tuple[int, int]:
        """The request's place: lower is earlier, and no two are equal. First come, first served."""
        return (arrival, arrival)

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that could never be given the tokens of an iteration that it needs."""
        for name, limit in (
            ("max_num_seqs", self.limits.max_num_seqs),
            ("max_num_batched_tokens", self.limits.max_num_batched_tokens),
        ):
            if request.num_sequences > limit:
                raise RequestError(
                    f"request {request.request_id!r}: its {request.num_sequences} sequences run together, "
                    f"{name} is {limit}; ask for fewer, or raise {name}",
                    "n",
                )
        # What yields to others by losing its blocks is computed anew with its output, in one go too.
        longest = request.max_num_tokens - 1 if self.preempts else len(request.prompt_token_ids)
        if not self.chunked and longest > self.limits.max_num_batched_tokens:
            raise RequestError(
                f"request {request.request_id!r}: policy {self.name} computes up to {longest} tokens of it in one "
                f"iteration, max_num_batched_tokens is {self.limits.max_num_batched_tokens}; shorten the prompt or "
                "lower max_tokens, or raise max_num_batched_tokens, or take policy default, which computes in chunks",
                "prompt",
            )

    @abstractmethod
    def plan(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        """Fills an iteration; returns why the first of those that still wait does."""

    def holds(self, pool: RequestPool) -> bool:
        """Whether sequences that have ended keep their place for now."""
        return False

    def admit(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        """Starts those that wait, in order, until one does not fit; returns why it does not."""
        while group := pool.waiting.head:
            if reason := self.misfit(group, pool, iteration):
                return reason
            pool.start(group, iteration)
            pool.take(group, iteration)
        return None

    def misfit(self, group: SequenceGroup, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        """Why a group cannot start in this iteration. What yielded in it does not come back in it."""
        if group in iteration.preempted:
            return WaitReason.BLOCKS
        if iteration.budget < self._tokens_to_start(group):
            return WaitReason.BUDGET
        if iteration.seats < group.width:
            return WaitReason.SEATS
        return pool.misfit(group, self.headroom(pool, iteration))

    def headroom(self, pool: RequestPool, iteration: Iteration) -> int:
        """Blocks that stay free when a request is admitted."""
        return 0

    def _tokens_to_start(self, group: SequenceGroup) -> int:
        if self.chunked:
            return group.width if group.decoding else 1
        return sum([group.end_of(sequence) - sequence.num_computed_tokens for sequence in group.active])
