"""What is timed: weighted ragged batches, and the tensors of one of them.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..kernel import NO_ATTEND_EXTRAS, TORCH_DTYPES, Attend, AttendExtras, allocate_cache, allocate_scales
from ..memory import free_bytes, huge_page_share
from ..spec import DType, KernelSpec, Phase
from ..target import detect
from ..transfer import block_bytes
from .machine import Setting, pinned_threads  # noqa: TID251  # vendored: must stay relative

WORKLOAD_FORMAT = 1
UNKNOWN_CACHE = 128 << 20  # bytes of a last-level cache that nobody tells us
MAX_COPIES = 1 << 15  # of a batch; a measurement makes fewer calls, so that none comes round again in it
COLD_SHARE = 8  # of the memory that is free, copies of a batch take at most one in so many parts
MAX_SEQS = 1 << 16  # of a batch
MAX_WEIGHT = 1e9  # of a batch
MAX_SUM = 1e15  # of a batch that stands for others
MAX_NUMBER = 999_999_999  # in a batch's name
RUN = 8  # blocks of a sequence that lie side by side in `Order.RUNS`, as in tables of the runtime (block_pool.LONGEST_RUN)
_GROUP = re.compile(r"(\d{1,99})x(\d{1,99})@(\d{1,99})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One ragged batch. `8x1@2048+1x256@512` is 8 sequences with 1 query at context 2048 and one with 256 at 512."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        pairs = list(zip(self.query_lens, self.context_lens, strict=False))
        if not pairs or len(self.query_lens) != len(self.context_lens) or any(not 1 <= q <= c for q, c in pairs):
            raise ConfigError(f"point {self.name!r}: every sequence needs 1 <= query <= context; change its numbers")
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"point {self.name!r}: weight {self.weight} is not a positive finite number")

    @classmethod
    def parse(cls, name: str, weight: float = 1.0) -> Point:
        """Reads a name; the inverse of `name`. Raises ConfigError."""
        groups = [_GROUP.fullmatch(word) for word in name.split("+")]
        counts = [tuple(map(int, match.groups())) for match in groups if match]
        if len(counts) != len(groups):
            raise ConfigError(f"point {name!r} is not SEQSxQUERY@CONTEXT, joined by +; write for example 8x1@2048")
        if max(map(max, counts)) > MAX_NUMBER:
            raise ConfigError(f"point {name!r} has a number above {MAX_NUMBER:,}; write a smaller batch")
        if sum(seqs for seqs, _, _ in counts) > MAX_SEQS:
            raise ConfigError(f"point {name!r} has more than {MAX_SEQS} sequences; write a smaller batch")
        flat = [(query, context) for seqs, query, context in counts for _ in range(seqs)]
        return cls(tuple(q for q, _ in flat), tuple(c for _, c in flat), weight)

    @property
    def name(self) -> str:
        """Runs of equal sequences, joined by `+`."""
        runs = itertools.groupby(zip(self.query_lens, self.context_lens, strict=False))
        return "+".join(f"{len(list(run))}x{query}@{context}" for (query, context), run in runs)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, longest context, longest query: what it is dispatched by."""
        return len(self.query_lens), max(self.context_lens), max(self.query_lens)

    @property
    def place(self) -> tuple[float, ...]:
        """Logarithms of the shape: how unlike two batches are is how far apart they lie, all told."""
        return tuple(map(math.log, self.shape))

    def kv_bytes(self, spec: KernelSpec) -> int:
        """Bytes of K, V and their scales that the batch must read once: of every key that one of its rows sees."""
        pairs = zip(self.query_lens, self.context_lens, strict=True)
        seen = sum(context - _first_seen(spec, context - rows) for rows, context in pairs)
        return seen * block_bytes(spec) // spec.block_size

    def io_bytes(self, spec: KernelSpec) -> int:
        """Bytes of q, out and lse, each moved once."""
        per_head = (spec.head_dim + spec.dim_v) * spec.dtype.itemsize + (4 if spec.lse else 0)
        return sum(self.query_lens) * spec.q_heads * per_head

    def flops(self, spec: KernelSpec) -> int:
        """Floating point operations of both products: 2 * (head_dim + head_dim_v) a query head and visible key.

        What a mask hides is counted: its values are not known here.
        """
        pairs = 0
        for rows, context in zip(self.query_lens, self.context_lens, strict=True):
            ahead = 0 if spec.causal else context if spec.window_right is None else spec.window_right
            pairs += _sum_up_to(context, context - rows + ahead + 1, context + ahead + 1)  # the key after the last seen
            if spec.window is not None:
                first, end = context - rows - spec.window + 1, context - spec.window + 1
                pairs -= _sum_up_to(end, first, end) - _sum_up_to(0, first, end)  # the first seen: 0 at least
        return 2 * pairs * spec.q_heads * (spec.head_dim + spec.dim_v)


def _sum_up_to(most: int, first: int, end: int) -> int:
    """The sum of min(most, i) over i in range(first, end)."""
    below = min(max(most, first), end)
    return (first + below - 1) * (below - first) // 2 + most * (end - below)


def _first_seen(spec: KernelSpec, own: int) -> int:
    """The first key that the row at position `own` sees."""
    return 0 if spec.window is None else max(0, own - spec.window + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Weighted points of one phase. The weights say how much of the traffic a batch stands for.

    A `warm` one is timed on the same blocks again and again, as where the KV of a whole step stays in cache.
    """

    phase: Phase
    points: tuple[Point, ...]
    warm: bool = False

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError(f"workload for {self.phase} holds no points; name at least one such as 1x1@512")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Workload:
        """Reads `{format: 1, phase: decode, points: {1x1@512: 1.0, ...}}`, with `warm: true` where the KV is.

        Raises ConfigError on anything else.
        """
        if type(values.get("format")) is not int or values["format"] != WORKLOAD_FORMAT:
            raise ConfigError(f"workload format {values.get('format')!r} is not known; allowed: {WORKLOAD_FORMAT}")
        if values.get("phase") not in tuple(Phase):
            raise ConfigError(f"workload phase {values.get('phase')!r} is not known; allowed: {', '.join(Phase)}")
        points = values.get("points")
        if not isinstance(points, Mapping):
            raise ConfigError("workload points must map a batch such as 8x1@2048 to its weight")
        for name, weight in points.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or abs(weight) > MAX_SUM:
                raise ConfigError(f"point {name!r}: weight {weight!r} is not a number up to {MAX_SUM:g}")
        warm = values.get("warm", False)
        if not isinstance(warm, bool):
            raise ConfigError(f"workload warm={warm!r} is not true or false; leave it out for KV that is out of cache")
        return cls(Phase(values["phase"]), tuple(Point.parse(name, float(w)) for name, w in points.items()), warm)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        points = {point.name: point.weight for point in self.points}
        plain = {"format": WORKLOAD_FORMAT, "phase": self.phase.value, "points": points}
        return {**plain, "warm": True} if self.warm else plain

    @property
    def digest(self) -> str:
        """Short hash of the content: scores of two workloads do not compare."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def within(self, spec: KernelSpec, fits: Callable[[Point], bool]) -> Workload:
        """The points that fit, each with the weight of those left out that it is nearest to; the smallest stays whatever it is."""
        kept = [point for point in self.points if fits(point)] or [min(self.points, key=lambda point: point.kv_bytes(spec))]
        weights, places = {point: point.weight for point in kept}, [(point.place, point) for point in kept]
        for point in self.points:
            if point not in weights:
                own = point.place  # once, not once a pair: a shape takes a look at every sequence
                weights[min(places, key=lambda other: sum(abs(a - b) for a, b in zip(own, other[0], strict=True)))[1]] += point.weight
        return dataclasses.replace(self, points=tuple(dataclasses.replace(p, weight=w) for p, w in weights.items()))


def cold_bytes(caches: Mapping[str, int], free: int | None = None) -> int:
    """KV bytes to rotate through so that a call finds its KV out of cache: twice the last level.

    At most an eighth of `free` bytes of memory: then a record that says how much was rotated says what it was worth.
    """
    wanted = 2 * max(caches.values(), default=UNKNOWN_CACHE)
    return wanted if free is None else min(wanted, free // COLD_SHARE)


def cold_bytes_on(device: str) -> int:
    """`cold_bytes` for this machine's CPU or GPU."""
    if device == "cpu":
        return cold_bytes(detect().caches, free_bytes())
    return cold_bytes({"L2": torch.cuda.get_device_properties(0).L2_cache_size})


class Pool:
    """One layer's KV cache with random values: room for `num_bytes`, and for `min_blocks` blocks at least."""

    def __init__(self, spec: KernelSpec, num_bytes: int, min_blocks: int, device: str = "cpu", seed: int = 0) -> None:
        num_blocks = max(min_blocks, -(-num_bytes // block_bytes(spec)))
        self.spec, self.device = spec, device
        self.k_cache, self.v_cache = allocate_cache(spec, num_blocks, device)
        self.scales = allocate_scales(spec, num_blocks, device)
        sample, scale, zero = _stored_normals(spec.cache_dtype, device, seed)
        for cache in (self.k_cache, self.v_cache):  # on a CPU one memory
            _tile(torch.empty(0, dtype=torch.uint8, device=device).set_(cache.untyped_storage()), sample)
        if self.scales is not None:
            for tensor, value in ((self.scales.k_scale, scale), (self.scales.v_scale, scale), (self.scales.k_zero, zero), (self.scales.v_zero, zero)):
                if tensor is not None:
                    tensor.fill_(value)
        self.permutation = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()

    @functools.cached_property
    def huge_pages(self) -> float | None:
        """Share of the KV's memory that lies in pages of 2 MiB; None on a device, or where it is not known."""
        if self.device != "cpu":
            return None
        memory = self.k_cache.untyped_storage()
        return huge_page_share(memory.data_ptr(), memory.nbytes())

    @classmethod
    def for_points(
        cls, spec: KernelSpec, points: tuple[Point, ...], num_bytes: int, device: str = "cpu", seed: int = 0
    ) -> Pool:
        """A pool that every point fits into."""
        return cls(spec, num_bytes, max(blocks_of(spec, point) for point in points), device, seed)


def _stored_normals(dtype: DType, device: str, seed: int) -> tuple[torch.Tensor, float, float]:
    """(items, scale, zero): a piece of a cache whose values are about standard normal, and what they were divided by."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = torch.empty(1 << 20, device=device).normal_(generator=generator)
    match dtype:
        case DType.INT8:
            return (32 * normal).round().clamp(-128, 127).to(torch.int8), 1 / 32, 0.0
        case DType.INT4:
            low, high = (3 * normal + 8).round().clamp(0, 15).to(torch.uint8).chunk(2)
            return low | high << 4, 1 / 3, 8.0
        case _:
            return normal.to(TORCH_DTYPES[dtype]), 1.0, 0.0


def _tile(memory: torch.Tensor, sample: torch.Tensor) -> None:
    """Fills `memory` with copies of `sample`: random numbers for gigabytes would take longer than the timing."""
    memory, sample = memory.view(torch.uint8), sample.view(torch.uint8)
    whole = len(memory) // len(sample) * len(sample)
    memory[:whole].view(-1, len(sample)).copy_(sample)
    memory[whole:].copy_(sample[: len(memory) - whole])


def blocks_of(spec: KernelSpec, point: Point) -> int:
    """KV blocks that the batch's sequences hold."""
    return sum(-(-context // spec.block_size) for context in point.context_lens)


class Order(enum.StrEnum):
    """Where the blocks of a batch's sequences lie."""

    RANDOM = "random"  # each somewhere
    RUNS = "runs"  # up to RUN of a sequence side by side, each run somewhere
    ORDERED = "ordered"  # all side by side, sequence after sequence


def _blocks(pool: Pool, widths: list[int], copies: int, order: Order, seed: int) -> torch.Tensor:
    """The blocks of the first copy's first sequence, of its second, ..., of the next copy's."""
    count = copies * sum(widths)
    match order:
        case Order.RANDOM:
            return pool.permutation[:count]
        case Order.ORDERED:
            return torch.arange(count)
        case Order.RUNS:
            lengths = torch.tensor([min(RUN, width - at) for width in widths for at in range(0, width, RUN)]).repeat(copies)
            shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
            begins = torch.empty_like(lengths)
            begins[shuffled] = lengths[shuffled].cumsum(0) - lengths[shuffled]
            first = lengths.cumsum(0) - lengths  # where a run stands in the tables
            return torch.arange(count) + (begins - first).repeat_interleave(lengths)


class Inputs:
    """The tensors of a point: q, out, and as many disjoint block tables as the pool holds.

    Calls take the tables in turn, whoever calls, so that each finds its KV cold and its blocks in `order`; if `warm`,
    there is one table.
    """

    def __init__(self, pool: Pool, point: Point, seed: int = 0, warm: bool = False, order: Order = Order.RANDOM) -> None:
        spec, device, dtype = pool.spec, pool.device, TORCH_DTYPES[pool.spec.dtype]
        self.pool, self.point, self.spec = pool, point, spec
        tokens, seqs = sum(point.query_lens), len(point.query_lens)
        generator = torch.Generator(device).manual_seed(seed)
        self.q = torch.empty(tokens, spec.q_heads, spec.head_dim, dtype=dtype, device=device).normal_(generator=generator)
        self.out = torch.empty(tokens, spec.q_heads, spec.dim_v, dtype=dtype, device=device)
        self.lse = torch.empty(tokens, spec.q_heads, device=device) if spec.lse else None
        starts = [0, *itertools.accumulate(point.query_lens)]
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=device)
        self.context_lens = torch.tensor(point.context_lens, dtype=torch.int32, device=device)
        widths = [-(-context // spec.block_size) for context in point.context_lens]
        self.warm = warm
        copies = 1 if warm else min(MAX_COPIES, len(pool.permutation) // sum(widths))
        self.rotated_bytes = copies * sum(widths) * block_bytes(spec)
        self.extras = _extras(spec, pool, tokens, max(point.query_lens))
        tables = torch.full((copies, seqs, max(widths)), -1, dtype=torch.int32)
        blocks = _blocks(pool, widths, copies, order, seed).view(copies, -1)
        for row, (width, end) in enumerate(zip(widths, itertools.accumulate(widths), strict=True)):
            tables[:, row, :width] = blocks[:, end - width : end]
        self.block_tables = tables.to(device).unbind()
        self._turn = itertools.cycle(range(copies))

    def next_table(self) -> torch.Tensor:
        """The block table whose turn it is."""
        return self.block_tables[next(self._turn)]

    def run(self, attend: Attend, block_table: torch.Tensor) -> None:
        """One call of `attend` into `out`."""
        attend(
            self.out,
            self.q,
            self.pool.k_cache,
            self.pool.v_cache,
            block_table,
            self.context_lens,
            self.cu_seqlens_q,
            lse=self.lse,
            extras=self.extras,
            max_query_len=max(self.point.query_lens),
            max_context_len=max(self.point.context_lens),
        )

    def setting(self) -> Setting:
        """What a timing of this batch is given, threads that torch has started included: to be asked after a call."""
        threads = torch.get_num_threads()
        return Setting(self.warm, self.rotated_bytes, threads, pinned_threads() >= threads, self.pool.huge_pages)

    def bind(self, attend: Attend) -> Callable[[], None]:
        """`attend` on the next copy of the batch, as `measure` takes it."""
        return lambda: self.run(attend, self.next_table())


def _extras(spec: KernelSpec, pool: Pool, tokens: int, mask_width: int) -> AttendExtras:
    """What the spec asks for beside the tensors: slopes of the ALiBi paper, sinks of 0, a mask that hides nothing."""
    if not (spec.kv_scale or spec.alibi or spec.sinks or spec.mask):
        return NO_ATTEND_EXTRAS
    heads = torch.arange(1, spec.q_heads + 1, device=pool.device)
    return AttendExtras(
        scales=pool.scales,
        alibi_slopes=2.0 ** (-8.0 * heads / spec.q_heads) if spec.alibi else None,
        sinks=torch.zeros(spec.q_heads, device=pool.device) if spec.sinks else None,
        mask=torch.ones(tokens, mask_width, dtype=torch.uint8, device=pool.device) if spec.mask else None,
    )
