"""How long an iteration takes on a machine that is not here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from pagegen.errors import ConfigError
from pagegen.runtime.scheduling.plan import ScheduledBatch, TransferKind


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of an iteration: `base`, and so many for each thing in it.

    A seq is a sequence of the iteration, its KV tokens are what it attends to, in KV blocks; prefill tokens are those
    of rows with more than one, and of a prompt's last. A swapped block costs its tokens and a sum of its own. Copies
    on write cost nothing here: a block is some microseconds.

    The defaults are guesses at OPT-13B in fp16 (40 layers, 40 heads of 128) on one A100-40GB, from its data sheet
    (1555 GB/s, 312 TFLOP/s, 108 multiprocessors, PCIe 4) before any figure was looked at, but for `per_seq`
    (docs/papers.md):

    - base: 25.7 GB of weights at 1555 GB/s, of which three quarters are reached: 22 ms. The arithmetic of newest tokens
      hides behind the weights' way from memory up to some 150 sequences.
    - per_seq: the host's work on a sequence, sampling and tables in Python: 0.3 ms, the least certain of them.
    - per_kv_token: 800 KiB of K and V at the same rate: 0.7 us.
    - per_kv_block: a warp reads a block (section 5.1 of the vLLM paper). It waits for the block's number from the L2,
      0.2 us, then for its first bytes from memory, 0.5 us, once for K and once for V: 1.4 us, 1600 times in 40 layers
      and heads, by 16 warps on each multiprocessor at a time (a thread has 128 registers): 1.3 us. What lies in one
      piece has no such blocks.
    - per_prefill_token: 25.7 GFLOP at 60 % of 312 TFLOP/s: 0.14 ms.
    - per_swapped_token: 800 KiB over PCIe 4 at 25 of its 31.5 GB/s: 33 us.
    - per_swapped_block: it lies in 80 pieces, K and V of each layer, each a copy that takes 5 us to start: 0.4 ms.
    """

    base: float = 22e-3
    per_seq: float = 0.3e-3
    per_kv_token: float = 0.7e-6
    per_kv_block: float = 1.3e-6
    per_prefill_token: float = 0.14e-3
    per_swapped_token: float = 33e-6
    per_swapped_block: float = 0.4e-3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ConfigError(f"{field.name}={value} is no number of seconds; it must be 0 or more")
        if not self.base and not self.per_seq:
            raise ConfigError("base and per_seq are both 0: a step would take no time; raise one of them")

    def seconds(self, batch: ScheduledBatch, block_size: int) -> float:
        """The time of one iteration."""
        num_kv_tokens = num_kv_blocks = num_prefill_tokens = 0
        for sequence, start, num_tokens in batch.rows:
            num_kv_tokens += start + num_tokens
            num_kv_blocks -= -(start + num_tokens) // block_size
            if num_tokens > 1 or start < sequence.group.prompt_len:
                num_prefill_tokens += num_tokens
        num_swapped = sum([len(move.pairs) for move in batch.transfers if move.kind is not TransferKind.COPY])
        return (
            self.base
            + self.per_seq * len(batch.rows)
            + self.per_kv_token * num_kv_tokens
            + self.per_kv_block * num_kv_blocks
            + self.per_prefill_token * num_prefill_tokens
            + self.swapping(num_swapped, block_size)
        )

    def swapping(self, num_blocks: int, block_size: int) -> float:
        """The time that so many blocks take one way."""
        return num_blocks * (self.per_swapped_token * block_size + self.per_swapped_block)

    def varied(self, share: float) -> Iterator[tuple[str, StepCosts]]:
        """These with one constant raised or lowered by a share of itself, and its name: twice as many as are not 0."""
        for field in dataclasses.fields(self):
            if value := getattr(self, field.name):
                for change in (-share, share):
                    yield field.name, dataclasses.replace(self, **{field.name: value * (1 + change)})
