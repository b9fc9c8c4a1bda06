"""Orca's scheduling: iterations, first come first served, memory reserved ahead.

Yu et al. 2022 (https://www.usenix.org/conference/osdi22/presentation/yu), section 4.2 and Algorithm 1, with one worker.
"""

from __future__ import annotations

from pagegen.runtime.scheduling.base import SchedulingPolicy
from pagegen.runtime.scheduling.plan import Iteration
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason
from pagegen.runtime.sequence import SequenceGroup


class OrcaPolicy(SchedulingPolicy):
    """`Select` of Algorithm 1: requests by arrival, up to `max_bs`, a new one only if what it may come to need fits
    into `n_slots` beside what is reserved; it stops at the first that does not fit.

    `max_bs` is max_num_seqs, `n_slots` the pool, and `n_rsrv` is counted in blocks, so that rounding to blocks cannot
    break the promise: a request that has started is never preempted and never short of a slot. It only counts; whether
    the blocks are apart, in a row or taken on demand is the memory policy's. Prompts are computed whole.
    """

    name = "orca"

    def plan(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        pool.decode(iteration)  # those that have started arrived before those that have not
        return self.admit(pool, iteration)

    def misfit(self, group: SequenceGroup, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        group.reserved_blocks = pool.memory.blocks_needed(pool.demand(group))
        reserved = sum([member.reserved_blocks for member in pool.running])
        if reserved + group.reserved_blocks > pool.memory.num_blocks:
            return WaitReason.BLOCKS
        return super().misfit(group, pool, iteration)
