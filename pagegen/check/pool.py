"""The cache of a case: which blocks a sequence has, what they hold, and the poison everywhere else.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernel import TORCH_DTYPES
from ..reference import quantise
from ..spec import KernelSpec, KVScale, Order
from .case import Case

Tensors = dict[str, torch.Tensor]  # arguments of an op, by the names of templates/cpp/abi.h

SPARE_BLOCKS = 3  # that belong to no sequence


def blocks_of(spec: KernelSpec, context: int) -> int:
    """Blocks that hold `context` tokens."""
    return -(-context // spec.block_size)


class Pool:
    """A case's blocks in one cache: a block table for every sequence, `room` free blocks and a few spare ones."""

    def __init__(self, case: Case, spec: KernelSpec, generator: torch.Generator, copies: bool = False) -> None:
        self.case, self.spec, self.generator = case, spec, generator
        shared = case.shared_blocks
        self.counts = [blocks_of(spec, context) for context in case.context_lens]
        own = sum(max(0, count - shared) for count in self.counts)
        self.num_blocks = own + shared + (sum(self.counts) if copies else 0) + SPARE_BLOCKS
        self.free: list[int] = torch.randperm(self.num_blocks, generator=generator).tolist()
        prefix = [self.free.pop() for _ in range(shared)]
        self.tables = [[*prefix, *(self.free.pop() for _ in range(count - shared))][:count] for count in self.counts]

    def slots(self, sequence: int, first: int, last: int) -> list[int]:
        """Slots of a sequence's tokens first to last (exclusive)."""
        table, size = self.tables[sequence], self.spec.block_size
        return [table[position // size] * size + position % size for position in range(first, last)]

    def block_table(self) -> torch.Tensor:
        """`[S, W]` int32: rows of block ids, each followed by ids of no block."""
        bad = [-1, self.num_blocks, 2**31 - 1, -(2**31), self.num_blocks + 70]
        width = max(self.counts, default=0) + 2
        rows = [[*table, *(bad[i % len(bad)] for i in range(width - len(table)))] for table in self.tables]
        table = torch.tensor(rows, dtype=torch.int32).reshape(-1, width)
        return spread(table, -1) if self.case.strided else table

    def caches(self, held: Sequence[int], unseen: Sequence[int] | None = None, prefix: str = "") -> Tensors:
        """k_cache, v_cache and the scales; everything but tokens unseen[s] to held[s] of sequence s is poison."""
        spec, layout = self.spec, self.spec.kv_layout
        written = torch.zeros(self.num_blocks, spec.block_size, dtype=torch.bool)
        for sequence, count in enumerate(held):
            slots = torch.tensor(self.slots(sequence, unseen[sequence] if unseen else 0, count), dtype=torch.int64)
            written.view(-1)[slots] = True
        names = ("source_k", "source_v") if prefix else ("k_cache", "v_cache")
        tensors: Tensors = {}
        for letter, name, order, dim in (("k", names[0], layout.k_order, spec.head_dim), ("v", names[1], layout.v_order, spec.dim_v)):
            if letter == "v" and spec.v_in_k:
                tensors[name] = tensors[names[0]][..., : spec.dim_v]
                continue
            values = torch.randn(*written.shape, spec.kv_heads, dim, generator=self.generator)
            stored, scales = self._stored(values)
            poisoned = ~written if letter in self.case.poisoned else torch.zeros_like(written)
            tensors[name] = self._laid_out(stored, poisoned, order, layout.x if letter == "k" else None)
            tensors |= {f"{prefix}{letter}_{kind}": self._scale(tensor, poisoned) for kind, tensor in scales.items()}
        return tensors

    def _stored(self, values: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Values as the cache holds them, with their scales: none, coarse ones that are given, or one a token and head."""
        spec = self.spec
        match spec.kv_scale:
            case None:
                return values.to(TORCH_DTYPES[spec.cache_dtype]), {}
            case KVScale.TOKEN_HEAD:
                stored, scale, zero = quantise(spec, values, None)
                scale = scale * (torch.rand(scale.shape, generator=self.generator) > 0.03)  # a scale of 0 makes zeros of anything
                return stored, {"scale": scale} if zero is None else {"scale": scale, "zero": zero}
            case kind:
                count = 1 if kind is KVScale.TENSOR else spec.kv_heads
                scale = 0.02 * 2 ** (4 * torch.rand(count, generator=self.generator))  # heads differ by up to 16 times
                return quantise(spec, values, scale)[0], {"scale": scale}

    def _laid_out(self, tokens: torch.Tensor, poisoned: torch.Tensor, order: Order, x: int | None) -> torch.Tensor:
        """`[blocks, block_size, heads, width]` in the layout's order, poison included."""
        poison = self.case.poison.value_for(tokens.dtype)
        raw = _fillable(tokens)
        raw[poisoned] = _fillable(torch.tensor([poison]).to(tokens.dtype)).item()
        match order:
            case Order.NHD:
                cache = tokens
            case Order.HND:
                cache = tokens.transpose(1, 2)
            case Order.HDN:
                cache = tokens.permute(0, 2, 3, 1)
                if x is not None:
                    cache = cache.reshape(*cache.shape[:2], cache.shape[2] // x, x, -1).transpose(3, 4)
        if not self.case.strided:
            return cache.contiguous()
        return spread(cache, poison, packed=x is not None and order is Order.HDN)

    def _scale(self, scale: torch.Tensor, poisoned: torch.Tensor) -> torch.Tensor:
        if self.spec.kv_scale is KVScale.TOKEN_HEAD:
            scale[poisoned] = self.case.poison.value_for(scale.dtype)
        return spread(scale, self.case.poison.value_for(scale.dtype)) if self.case.strided else scale.contiguous()


def _fillable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type whose elements torch can assign by mask; fp8 is seen as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def spread(tensor: torch.Tensor, filler: float, packed: bool = False) -> torch.Tensor:
    """The same values with gaps of `filler` between all dimensions; a packed last dimension keeps its neighbour."""
    last = tensor.dim() - packed
    shape = [n + 3 if 0 < i < last else n for i, n in enumerate(tensor.shape)]
    room = torch.empty(shape, dtype=tensor.dtype)
    _fillable(room).fill_(_fillable(torch.tensor([filler]).to(tensor.dtype)).item())
    view = room[tuple(slice(n) for n in tensor.shape)]
    _fillable(view).copy_(_fillable(tensor))
    return view


def reverse_blocks(spec: KernelSpec, tensors: Tensors) -> None:
    """Moves block i to N - 1 - i, in caches, scales and the block table alike; what names no block stays."""
    num_blocks = tensors["k_cache"].shape[0]
    scales = ("k_scale", "v_scale", "k_zero", "v_zero") if spec.kv_scale is KVScale.TOKEN_HEAD else ()
    for name in ("k_cache", *(() if spec.v_in_k else ("v_cache",)), *scales):
        if name in tensors:
            _fillable(tensors[name]).copy_(_fillable(tensors[name]).flip(0))
    table = tensors["block_table"]
    table.copy_(torch.where((table >= 0) & (table < num_blocks), num_blocks - 1 - table, table))

