"""The policy for serving: blocks on demand, prompts in chunks beside decodes, priorities with ageing.

Chunked prefill under a token budget as in Agrawal et al. 2024 (Sarathi-Serve, https://arxiv.org/abs/2403.02310).
"""

from __future__ import annotations

from pagegen.runtime.scheduling.base import SchedulingPolicy
from pagegen.runtime.scheduling.plan import Iteration
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason
from pagegen.runtime.scheduling.preemption import Preemption
from pagegen.runtime.sequence import GroupStatus, Request, SequenceGroup

PRIORITY_LEVEL = 64  # later arrivals that one level of priority is worth


class DefaultPolicy(SchedulingPolicy):
    """Decodes go first, then prompts that have begun, then new ones, until the token budget is spent.

    A request is admitted when its blocks are free and one more for each running sequence: those may need one within
    `block_size` iterations, and what is admitted without that would be preempted by its elders' growth. When one finds
    no block, the highest rank gives up all of its own. The lowest is never chosen, and what cannot finish alone was
    refused: so the lowest always advances, and all of them end.

    The rank is the arrival number, plus PRIORITY_LEVEL for each level of priority. It is fixed and without ties, so
    equals never change places; and priorities age: of those one level more urgent, at most PRIORITY_LEVEL that arrive
    later go first. A more urgent request takes a running one's place if it can start by that.
    """

    name = "default"
    chunked = True
    preempts = True
    prefix_cache = True

    def rank(self, request: Request, arrival: int) -> tuple[int, int]:
        return (arrival + PRIORITY_LEVEL * request.priority, arrival)

    def plan(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        if self.preemption is not Preemption.NONE:
            self._displace(pool, iteration)
        pool.decode(iteration)
        pool.prefill(iteration)
        return self.admit(pool, iteration)

    def headroom(self, pool: RequestPool, iteration: Iteration) -> int:
        return self.limits.max_num_seqs - iteration.seats

    def _displace(self, pool: RequestPool, iteration: Iteration) -> None:
        """Preempts running requests of higher rank than the first that waits, if that lets it start."""
        group = pool.waiting.head
        if group is None or not pool.running or pool.running[-1].rank < group.rank:
            return
        reason = self.misfit(group, pool, iteration)
        if reason is None or reason is WaitReason.BUDGET:
            return
        victims = [member for member in pool.running if member.rank > group.rank]
        if not self._suffices(victims, group, pool, iteration):
            return
        while victims and self.misfit(group, pool, iteration):
            pool.preempt(victims.pop(), iteration)

    def _suffices(
        self, victims: list[SequenceGroup], group: SequenceGroup, pool: RequestPool, iteration: Iteration
    ) -> bool:
        """Whether the group could start if all victims were gone. Counts shared blocks twice: it may say yes wrongly,
        and then those who yielded wait for a more urgent one that waits itself."""
        memory, stay = pool.memory, len(pool.running) - len(victims)
        seats = iteration.seats + sum([victim.width for victim in victims])
        tables = [memory.block_table(seq_id) for victim in victims for seq_id in victim.active_ids]
        free = memory.num_free_blocks + sum(map(len, tables))
        if group.status is GroupStatus.SWAPPED or not stay:
            return seats >= group.width
        needed = -(-group.end_of(group.active[0]) // memory.block_size) + stay
        return seats >= group.width and free >= needed
