"""What is timed: weighted ragged batches, and the tensors of one of them.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..kernel import TORCH_DTYPES, Attend, allocate_cache
from ..spec import KernelSpec, Phase

WORKLOAD_FORMAT = 1
MAX_COLD_BYTES = 256 << 20  # of KV that the copies of a batch cover at most
_GROUP = re.compile(r"(\d+)x(\d+)@(\d+)")


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
        flat = [(query, context) for seqs, query, context in counts for _ in range(seqs)]
        return cls(tuple(q for q, _ in flat), tuple(c for _, c in flat), weight)

    @property
    def name(self) -> str:
        """Runs of equal sequences, joined by `+`."""
        runs = itertools.groupby(zip(self.query_lens, self.context_lens, strict=False))
        return "+".join(f"{len(list(run))}x{query}@{context}" for (query, context), run in runs)

    def kv_bytes(self, spec: KernelSpec) -> int:
        """Bytes of K and V that the batch must read once."""
        per_token = spec.kv_heads * (spec.head_dim + spec.dim_v) * spec.cache_dtype.itemsize
        return sum(self.context_lens) * per_token

    def flops(self, spec: KernelSpec) -> int:
        """Floating point operations of both products: 2 * (head_dim + head_dim_v) a query head and visible key."""
        pairs = 0
        for rows, context in zip(self.query_lens, self.context_lens, strict=True):
            hidden = rows * (rows - 1) // 2 if spec.causal else 0
            pairs += rows * context - hidden
        return 2 * pairs * spec.q_heads * (spec.head_dim + spec.dim_v)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Weighted points of one phase. The weights say how much of the traffic a batch stands for."""

    phase: Phase
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError(f"workload for {self.phase} holds no points; name at least one such as 1x1@512")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Workload:
        """Reads `{format: 1, phase: decode, points: {1x1@512: 1.0, ...}}`. Raises ConfigError on anything else."""
        if values.get("format") != WORKLOAD_FORMAT:
            raise ConfigError(f"workload format {values.get('format')!r} is not known; allowed: {WORKLOAD_FORMAT}")
        if values.get("phase") not in set(Phase):
            raise ConfigError(f"workload phase {values.get('phase')!r} is not known; allowed: {', '.join(Phase)}")
        points = values.get("points")
        if not isinstance(points, Mapping):
            raise ConfigError("workload points must map a batch such as 8x1@2048 to its weight")
        for name, weight in points.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"point {name!r}: weight {weight!r} is not a number")
        return cls(Phase(values["phase"]), tuple(Point.parse(name, float(w)) for name, w in points.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        points = {point.name: point.weight for point in self.points}
        return {"format": WORKLOAD_FORMAT, "phase": self.phase.value, "points": points}

    @property
    def digest(self) -> str:
        """Short hash of the content: scores of two workloads do not compare."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def within(self, spec: KernelSpec, kv_bytes: int) -> Workload:
        """The points that read at most `kv_bytes`; the smallest one stays whatever it reads."""
        smallest = min(self.points, key=lambda point: point.kv_bytes(spec))
        kept = tuple(point for point in self.points if point.kv_bytes(spec) <= kv_bytes)
        return Workload(self.phase, kept or (smallest,))


def cold_bytes(caches: Mapping[str, int]) -> int:
    """KV bytes to rotate through so that a call finds its KV out of cache: twice the last level, bounded."""
    return min(MAX_COLD_BYTES, 2 * max(caches.values(), default=MAX_COLD_BYTES))


class Pool:
    """One layer's KV cache with random values: room for `num_bytes` and at least for `largest` tokens' blocks."""

    def __init__(self, spec: KernelSpec, num_bytes: int, min_blocks: int, device: str = "cpu", seed: int = 0) -> None:
        one_block = Point((1,), (spec.block_size,)).kv_bytes(spec)
        num_blocks = max(min_blocks, -(-num_bytes // one_block))
        self.spec, self.device = spec, device
        self.k_cache, self.v_cache = allocate_cache(spec, num_blocks, device)
        generator = torch.Generator(device).manual_seed(seed)
        for cache in (self.k_cache, self.v_cache):
            cache.normal_(generator=generator)
        self.permutation = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()

    @classmethod
    def for_points(
        cls, spec: KernelSpec, points: tuple[Point, ...], num_bytes: int, device: str = "cpu", seed: int = 0
    ) -> Pool:
        """A pool that every point fits into."""
        return cls(spec, num_bytes, max(blocks_of(spec, point) for point in points), device, seed)


def blocks_of(spec: KernelSpec, point: Point) -> int:
    """KV blocks that the batch's sequences hold."""
    return sum(-(-context // spec.block_size) for context in point.context_lens)


class Inputs:
    """The tensors of a point: q, out, and as many disjoint block tables as the pool holds.

    Calls take the tables in turn, whoever calls, so that each finds its KV cold and its blocks scattered.
    """

    def __init__(self, pool: Pool, point: Point, seed: int = 0) -> None:
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
        copies = len(pool.permutation) // sum(widths)
        self.block_tables: list[torch.Tensor] = []
        blocks = iter(pool.permutation.tolist())
        for _ in range(copies):
            table = torch.full((seqs, max(widths)), -1, dtype=torch.int32)
            for row, width in enumerate(widths):
                table[row, :width] = torch.tensor(list(itertools.islice(blocks, width)), dtype=torch.int32)
            self.block_tables.append(table.to(device))
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
            max_query_len=max(self.point.query_lens),
            max_context_len=max(self.point.context_lens),
        )

    def bind(self, attend: Attend) -> Callable[[], None]:
        """`attend` on the next copy of the batch, as `measure` takes it."""
        return lambda: self.run(attend, self.next_table())
