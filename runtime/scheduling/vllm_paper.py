"""The scheduling of the vLLM paper: blocks on demand, groups all or nothing, the latest arrived yields.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), sections 4.3 to 4.5.
"""

from __future__ import annotations

from pagegen.runtime.scheduling.base import SchedulingPolicy
from pagegen.runtime.scheduling.plan import Iteration
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason

WATERMARK = 0.01  # of the pool stays free at admission, as vLLM's own scheduler of that time had it


class VllmPaperPolicy(SchedulingPolicy):
    """First come, first served. Those that run grow first; when one finds no block, the latest arrived gives up all of
    its own. Those that were preempted come back in order before anybody new is admitted: they all arrived earlier, and
    nobody overtakes. Prompts are computed whole, in one batch with the newest tokens of the others.
    """

    name = "vllm-paper"
    preempts = True

    def plan(self, pool: RequestPool, iteration: Iteration) -> WaitReason | None:
        pool.decode(iteration)
        pool.prefill(iteration)  # groups on their way back: the samples' own outputs
        return self.admit(pool, iteration)

    def headroom(self, pool: RequestPool, iteration: Iteration) -> int:
        return int(WATERMARK * pool.memory.num_blocks)
