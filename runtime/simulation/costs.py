"""How long an iteration takes on a machine that is not here."""

from __future__ import annotations

import dataclasses
import math

from pagegen.errors import ConfigError
from pagegen.runtime.scheduling.plan import ScheduledBatch, TransferKind


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """seconds = base + per_seq * rows + per_kv_token * kv_tokens + per_prefill_token * prefill tokens + swapped blocks.

    A row is a sequence of the iteration, its kv_tokens are what it attends to; prefill tokens are those of rows with
    more than one, and of a prompt's last. Copies on write cost nothing here: a block is some microseconds.

    The defaults are guesses at OPT-13B in fp16 on one A100-40GB, from its data sheet. 25.7 GB of weights at 1555 GB/s,
    of which three quarters are reached, are 22 ms; 800 KiB of K and V a token at the same rate are 0.7 us; 25.7 GFLOP a
    prompt token at 60 % of 312 TFLOP/s are 0.14 ms. The arithmetic of newest tokens hides behind the weights' way from
    memory up to some 150 sequences; what a sequence costs is the host's work on it, sampling and tables in Python:
    0.3 ms, the least certain of them. A block of 16 tokens crosses PCIe 4 at 25 GB/s in 0.5 ms.
    """

    base: float = 22e-3
    per_seq: float = 0.3e-3
    per_kv_token: float = 0.7e-6
    per_prefill_token: float = 0.14e-3
    per_swapped_block: float = 0.5e-3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ConfigError(f"{field.name}={value} is no number of seconds; it must be 0 or more")
        if not self.base and not self.per_seq:
            raise ConfigError("base and per_seq are both 0: a step would take no time; raise one of them")

    def seconds(self, batch: ScheduledBatch) -> float:
        """The time of one iteration."""
        num_kv_tokens = num_prefill_tokens = 0
        for sequence, start, num_tokens in batch.rows:
            num_kv_tokens += start + num_tokens
            if num_tokens > 1 or start < sequence.group.prompt_len:
                num_prefill_tokens += num_tokens
        swapped = [len(move.pairs) for move in batch.transfers if move.kind is not TransferKind.COPY]
        return (
            self.base
            + self.per_seq * len(batch.rows)
            + self.per_kv_token * num_kv_tokens
            + self.per_prefill_token * num_prefill_tokens
            + self.per_swapped_block * sum(swapped)
        )
