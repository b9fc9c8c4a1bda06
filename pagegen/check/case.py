"""A case: one call of one op, said in a few numbers; tensors.py makes it real.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum

import torch

from ..spec import KernelSpec, Op, Phase

QUICK_THREADS = 3  # more than most test machines have cores: threads without work are part of the test


class Poison(StrEnum):
    """What lies where nothing may be read. NaN shows in any sum; infinity and a huge number win any maximum.

    Types without NaN or infinity hold their largest magnitude, and their scales, where each token has some, the poison.
    """

    NAN = "nan"
    INF = "inf"
    HUGE = "huge"

    def value_for(self, dtype: torch.dtype) -> float:
        """The value in an element of `dtype`."""
        if not dtype.is_floating_point:
            return torch.iinfo(dtype).max
        return {"nan": math.nan, "inf": math.inf, "huge": min(1e30, torch.finfo(dtype).max)}[self.value]


class Fault(StrEnum):
    """An argument that the C ABI promises to refuse; `status` is the code of templates/cpp/abi.h it must answer."""

    ARGS_SIZE = "args_size"
    WORKSPACE = "workspace"
    CU_SEQLENS_START = "cu_seqlens_start"
    CU_SEQLENS_DECREASES = "cu_seqlens_decreases"
    CU_SEQLENS_END = "cu_seqlens_end"
    CONTEXT_NEGATIVE = "context_negative"
    CONTEXT_PAST_TABLE = "context_past_table"
    BLOCK_NEGATIVE = "block_negative"
    BLOCK_PAST_END = "block_past_end"
    PREFIX_TOO_LONG = "prefix_too_long"
    PREFIX_DIFFERS = "prefix_differs"
    SLOT_BELOW = "slot_below"
    SLOT_PAST_END = "slot_past_end"
    PAIR_NEGATIVE = "pair_negative"
    PAIR_PAST_END = "pair_past_end"
    ROW_NEGATIVE = "row_negative"
    ROW_PAST_END = "row_past_end"
    SOURCE_PAST_END = "source_past_end"
    POSITION_NEGATIVE = "position_negative"
    POSITION_PAST_END = "position_past_end"
    SCALE_ZERO = "scale_zero"
    SCALE_NAN = "scale_nan"

    @property
    def status(self) -> int:
        """PG_E_*."""
        codes = {"args": 1, "workspace": 2, "cu": 3, "context": 4, "block": 5, "slot": 6, "pair": 6, "row": 6, "source": 6}
        return (codes | {"prefix": 7, "position": 8, "scale": 9})[self.value.split("_")[0]]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Rows first to last (exclusive) of one sequence of a batch, called alone with the context that they had there."""

    sequence: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call of one op: equal cases make equal tensors.

    Sequence s brings query_lens[s] rows and has context_lens[s] keys. For write_kv the rows are the last ones of the
    context, those that fit; the ops that move a cache take every block, or token, of every sequence, and no query_lens.
    """

    name: str
    op: Op
    spec: KernelSpec
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seed: int = 0
    threads: int = QUICK_THREADS
    padding: int = 0  # rows of no sequence: at the end of q; slots of -1 among those of write_kv and relayout
    strided: bool = False  # gaps in every tensor that may have them; q's heads outside its tokens
    far: bool = False  # offsets past 32 and block ids past 16 bits; only the driver can: see check/driver.py
    gain: float = 1.0  # multiplies q, and the rows of write_kv: large scores, and values that saturate
    scale: float | None = None  # passed as attend's argument
    poison: Poison = Poison.NAN
    poisoned: str = "kv"  # the caches that hold it: kv, k or v
    shared_blocks: int = 0  # with which every sequence's table begins: attend's shared prefix
    mask_width: int | None = None  # with spec.mask; None: the longest query
    in_place: bool = False  # write_kv with rope: q_out is q
    reversed_blocks: bool = False  # block i lies where block N - 1 - i would
    part: Part | None = None
    source: KernelSpec | None = None  # of the cache that relayout reads
    like: Case | None = None  # over the same values: attend's rows must have the same bits as there
    fault: Fault | None = None

    @property
    def label(self) -> str:
        """The name, and what sets the case apart from the one it is like."""
        words = ["blocks reversed"] if self.reversed_blocks else []
        if self.part:
            words.append(f"rows {self.part.first} to {self.part.last} of sequence {self.part.sequence} alone")
        elif self.like and not words:
            words.append(f"{self.threads} threads")
        return ", ".join([self.name, *words])

    @property
    def size(self) -> int:
        """How much there is to look at: what makes a failing input small."""
        return sum(self.query_lens) + sum(self.context_lens) + len(self.context_lens) + self.padding

    @property
    def phase(self) -> Phase:
        """DECODE without a query longer than 1, PREFILL without one shorter than 2, else MIXED."""
        queries = [self.part.last - self.part.first] if self.part else self.query_lens
        if max(queries, default=0) <= 1:
            return Phase.DECODE
        return Phase.PREFILL if min(queries) > 1 else Phase.MIXED

    @property
    def shared_prefix_len(self) -> int:
        """What attend is told; a part is called without."""
        return 0 if self.part else self.shared_blocks * self.spec.block_size

    def replace(self, **changes: object) -> Case:
        """A copy with fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def of_sequences(self, queries: Sequence[int], contexts: Sequence[int]) -> Case:
        """A copy with other sequences."""
        return self.replace(query_lens=tuple(queries) if self.query_lens else (), context_lens=tuple(contexts))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values with which the case can be made again; specs as their slugs."""
        values: dict[str, object] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"name": self.label, "spec": self.spec.slug, "source": self.source.slug if self.source else None}
        values |= {"part": list(dataclasses.astuple(self.part)) if self.part else None, "like": self.like.name if self.like else None}
        return values
