"""How large a cache may be: the largest value of every index expression of a kernel, proven from its spec.

Every index into the cache is linear in the block's number, so its largest value in a pool of N blocks is known before
anything runs, and so is the largest N whose indices all fit their integers. A package states that N as `max_blocks` and
refuses a larger pool; a kernel that wrapped around instead would read memory of another sequence, or of nobody.

| index                     | C++      | Triton   | largest in a pool of N blocks                                  |
|---------------------------|----------|----------|----------------------------------------------------------------|
| block id, from the table  | int32    | int32    | N - 1                                                          |
| slot                      | int64    | int64    | (N - 1) * block_size + block_size - 1                          |
| K, V: element             | int64    | int32/64 | (N - 1) * block stride + the last element of a block           |
| K, V: byte                | int64    | int64    | the same times the item size                                   |
| scale, a token and head   | int64    | int32/64 | (N - 1) * block_size * kv_heads + block_size * kv_heads - 1    |
"""

from __future__ import annotations

import dataclasses
import math

from .spec import KernelSpec, KVScale

INDEX_BITS = (32, 64)  # of element offsets: what a Triton variant may choose, C++ has 64


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """An index expression: `per_block` for each block before the last, and at most `inside` in that."""

    name: str
    bits: int
    per_block: int
    inside: int

    def largest(self, num_blocks: int) -> int:
        """Its largest value in a pool."""
        return self.per_block * (num_blocks - 1) + self.inside

    @property
    def max_blocks(self) -> int:
        """The largest pool in which it fits its signed integer."""
        return max(0, ((1 << self.bits - 1) - 1 - self.inside) // self.per_block + 1)


def indices(spec: KernelSpec, index_bits: int = 64) -> tuple[Index, ...]:
    """Every index expression into a dense cache of the spec's layout, its element offsets in integers of `index_bits`."""
    layout, size = spec.kv_layout, spec.block_size
    found = [Index("block id", 32, 1, 0), Index("slot", 64, size, size - 1)]
    shapes = {"K": layout.k_shape(1, size, spec.kv_heads, spec.k_width)}
    if not spec.v_in_k:
        shapes["V"] = layout.v_shape(1, size, spec.kv_heads, spec.v_width)
    for name, shape in shapes.items():
        block, item = math.prod(shape), spec.cache_dtype.itemsize
        found.append(Index(f"{name} element", index_bits, block, block - 1))
        found.append(Index(f"{name} byte", 64, block * item, block * item - 1))
    if spec.kv_scale is KVScale.TOKEN_HEAD:
        rows = size * spec.kv_heads
        found.append(Index("scale", index_bits, rows, rows - 1))
    return tuple(found)


def max_blocks(spec: KernelSpec, index_bits: int = 64) -> int:
    """The largest pool for which every index of the spec's kernels fits."""
    return min(index.max_blocks for index in indices(spec, index_bits))


def index_bits(spec: KernelSpec, num_blocks: int) -> int:
    """The narrowest integers that hold every element offset in a pool of `num_blocks`; 64 if even they do not."""
    return next((bits for bits in INDEX_BITS if num_blocks <= max_blocks(spec, bits)), INDEX_BITS[-1])
