"""Request-level batching: what served models before Orca, and what it is compared with."""

from __future__ import annotations

from pagegen.runtime.scheduling.orca import OrcaPolicy
from pagegen.runtime.scheduling.plan import Iteration
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason


class RequestLevelPolicy(OrcaPolicy):
    """A batch is collected from those that wait, and runs until all of it has ended.

    Who ends early keeps slot and blocks, and gets its answer when the last has ended; who comes late waits for that.
    `num_idle_slot_iterations` counts the slots that ended members held, iteration by iteration. As in FasterTransformer
    under Yu et al. 2022 (https://www.usenix.org/conference/osdi22/presentation/yu), section 3.1, the blocks for all
    that a member may generate are set aside when it is admitted.
    """

    name = "request"

    def plan(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        if not pool.running:
            return self.admit(pool, iteration)
        pool.decode(iteration)
        ended = [sequence for group in pool.running for sequence in group.sequences if sequence.finished]
        self.num_idle_slot_iterations += len(ended)
        return WaitReason.BATCH

    def holds(self, pool: RequestPool) -> bool:
        return any(group.live for group in pool.running)
