"""How a preempted request gets its KV back: from the host, or by computing it anew.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), sections 4.5 and 7.3: swapping costs memory bandwidth, out and in;
recomputation costs one prefill of prompt and output. Which is cheaper depends on the machine and on the request.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Preemption(StrEnum):
    """What happens to the blocks of a request that must yield. `none` lets nobody yield."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What this machine was measured to do: blocks moved between device and host, tokens computed, in a second."""

    blocks_per_second: float
    tokens_per_second: float

    def cheaper(self, num_blocks: int, num_tokens: int) -> Preemption:
        """The way that takes less time for a request of so many blocks to move and tokens to compute."""
        swap = 2 * num_blocks / self.blocks_per_second
        return Preemption.SWAP if swap < num_tokens / self.tokens_per_second else Preemption.RECOMPUTE
