"""How a case becomes tensors.

What a kernel must not read is poisoned: free blocks and the tails of last pages with NaN, infinity or a huge number,
table entries past the context with ids of no block. What it must not write is filled beforehand and compared afterwards.
Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from ..kernel import TORCH_DTYPES
from ..spec import KernelSpec, Op, Order
from .suite import Case, Fault

Tensors = dict[str, torch.Tensor]  # the arguments of an op by their names in pagegen.kernel

OUTPUTS: dict[Op, tuple[str, ...]] = {
    Op.ATTEND: ("out", "lse"),
    Op.WRITE_KV: ("k_cache", "v_cache"),
    Op.COPY_BLOCKS: ("k_cache", "v_cache"),
}
SPARE_BLOCKS = 3  # that belong to no sequence


def materialise(case: Case, device: str | torch.device = "cpu") -> Tensors:
    """Fresh tensors for a case, made on the CPU from its seed and moved with their strides.

    `scale` is not among them. Outputs of attend hold NaN.
    """
    made = _CaseMaker(case)
    tensors = {Op.ATTEND: made.attend, Op.WRITE_KV: made.write_kv, Op.COPY_BLOCKS: made.copy_blocks}[case.op]()
    if case.fault is not None:
        _spoil(case.fault, tensors, case.spec)
    return {name: move(tensor, device) for name, tensor in tensors.items()}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between the first and the last element of a view, gaps included, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


def move(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A private copy on `device` with the same strides and the same bytes in its gaps."""
    return flat(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), 0)


def blocks_of(spec: KernelSpec, context: int) -> int:
    """Blocks that hold `context` tokens."""
    return -(-context // spec.block_size)


class _CaseMaker:
    """Draws a case's tensors in a fixed order from one generator."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec = case, case.spec
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {case.op}".encode()) * 64 + case.seed)
        self.counts = [blocks_of(self.spec, context) for context in case.context_lens]
        copies = sum(self.counts) if case.op is Op.COPY_BLOCKS else 0
        self.num_blocks = sum(self.counts) + copies + SPARE_BLOCKS
        self.free: list[int] = torch.randperm(self.num_blocks, generator=self.generator).tolist()
        self.tables = [[self.free.pop() for _ in range(count)] for count in self.counts]

    def attend(self) -> Tensors:
        case, spec = self.case, self.spec
        tokens, dtype = sum(case.query_lens) + case.padding, TORCH_DTYPES[spec.dtype]
        q = self.normal(tokens, spec.q_heads, spec.head_dim) * case.gain
        # Flat, ordinary and peaked softmaxes side by side: each hides mistakes that another shows.
        q *= torch.tensor([0.25, 1.0, 3.0])[torch.arange(tokens)[:, None] % 3 - torch.arange(spec.q_heads) % 3][..., None]
        q[tokens - case.padding :] = math.nan
        out = torch.full((tokens, spec.q_heads, spec.dim_v), math.nan)
        k_cache, v_cache = self.caches([*case.context_lens])
        tensors = {
            "out": self.rows(out, dtype),
            "q": self.rows(q, dtype, heads_outside=True),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": self.block_table(),
            "context_lens": torch.tensor(case.context_lens, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32),
        }
        if spec.lse:
            tensors["lse"] = self.rows(torch.full((tokens, spec.q_heads), math.nan), torch.float32)
        return tensors

    def write_kv(self) -> Tensors:
        case, spec = self.case, self.spec
        new = [min(query, context) for query, context in zip(case.query_lens, case.context_lens, strict=True)]
        held = [context - count for context, count in zip(case.context_lens, new, strict=True)]
        slots = [
            table[position // spec.block_size] * spec.block_size + position % spec.block_size
            for table, first, context in zip(self.tables, held, case.context_lens, strict=True)
            for position in range(first, context)
        ]
        slots += [-1] * case.padding
        order = torch.randperm(len(slots), generator=self.generator)
        dtype = TORCH_DTYPES[spec.cache_dtype]
        k_cache, v_cache = self.caches(held)
        return {
            "k": self.rows(self.normal(len(slots), spec.kv_heads, spec.head_dim), dtype),
            "v": self.rows(self.normal(len(slots), spec.kv_heads, spec.dim_v), dtype, heads_outside=True),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": torch.tensor(slots, dtype=torch.int64)[order],
        }

    def copy_blocks(self) -> Tensors:
        pairs = [(source, self.free.pop()) for table in self.tables for source in table]
        if len(pairs) > 2:  # a fork in three: one source, several destinations
            pairs[1] = (pairs[0][0], pairs[1][1])
        k_cache, v_cache = self.caches([*self.case.context_lens])
        return {"k_cache": k_cache, "v_cache": v_cache, "pairs": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def rows(self, values: torch.Tensor, dtype: torch.dtype, heads_outside: bool = False) -> torch.Tensor:
        """`[tokens, heads, dim]` as asked: dense, or with gaps of NaN, heads outermost if `heads_outside`."""
        values = values.to(dtype)
        if not self.case.strided:
            return values.contiguous()
        if heads_outside:
            return _spread(values.transpose(0, 1), math.nan).transpose(0, 1)
        return _spread(values, math.nan)

    def caches(self, held: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in their layouts; everything but the first held[s] tokens of sequence s is poison."""
        spec, layout = self.spec, self.spec.kv_layout
        written = torch.zeros(self.num_blocks, spec.block_size, dtype=torch.bool)
        for table, count in zip(self.tables, held, strict=True):
            position = torch.arange(count)
            written[torch.tensor(table, dtype=torch.int64)[position // spec.block_size], position % spec.block_size] = True
        k = self.cache(written, spec.head_dim, layout.k_order, layout.x)
        return k, self.cache(written, spec.dim_v, layout.v_order, None)

    def cache(self, written: torch.Tensor, dim: int, order: Order, x: int | None) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.spec.cache_dtype]
        tokens = self.normal(*written.shape, self.spec.kv_heads, dim).to(dtype)
        poison = self.case.poison.value_for(dtype)
        tokens[~written] = poison
        match order:
            case Order.NHD:
                cache = tokens
            case Order.HND:
                cache = tokens.transpose(1, 2)
            case Order.HDN:
                cache = tokens.permute(0, 2, 3, 1)
                if x is not None:
                    cache = cache.reshape(*cache.shape[:2], dim // x, x, -1).transpose(3, 4)
        return _spread(cache, poison, packed=x is not None and order is Order.HDN) if self.case.strided else cache.contiguous()

    def block_table(self) -> torch.Tensor:
        """Rows of block ids, each followed by ids of no block."""
        bad = [-1, self.num_blocks, 2**31 - 1, -(2**31), self.num_blocks + 70]
        width = max(self.counts, default=0) + 2
        rows = [[*table, *(bad[i % len(bad)] for i in range(width - len(table)))] for table in self.tables]
        table = torch.tensor(rows, dtype=torch.int32).reshape(-1, width)
        return _spread(table, -1) if self.case.strided else table


def _spread(tensor: torch.Tensor, filler: float, packed: bool = False) -> torch.Tensor:
    """The same values with gaps of `filler` between all dimensions; a packed last dimension keeps its neighbour."""
    last = tensor.dim() - packed
    shape = [n + 3 if 0 < i < last else n for i, n in enumerate(tensor.shape)]
    room = torch.full(shape, filler, dtype=tensor.dtype)
    view = room[tuple(slice(n) for n in tensor.shape)]
    return view.copy_(tensor)


def _spoil(fault: Fault, tensors: Tensors, spec: KernelSpec) -> None:
    """Writes the wrong value; ARGS_SIZE and WORKSPACE are no tensor's and left to the driver."""
    num_blocks = tensors["k_cache"].shape[0]
    match fault:
        case Fault.CU_SEQLENS_START:
            tensors["cu_seqlens_q"][0] = 1
        case Fault.CU_SEQLENS_DECREASES:
            tensors["cu_seqlens_q"][1] = tensors["cu_seqlens_q"][-1] + 1
        case Fault.CU_SEQLENS_END:
            tensors["cu_seqlens_q"][-1] += 1
        case Fault.CONTEXT_NEGATIVE:
            tensors["context_lens"][-1] = -1
        case Fault.CONTEXT_PAST_TABLE:
            tensors["context_lens"][-1] = tensors["block_table"].shape[1] * spec.block_size + 1
        case Fault.BLOCK_NEGATIVE:
            tensors["block_table"][-1, 1] = -1
        case Fault.BLOCK_PAST_END:
            tensors["block_table"][0, 0] = num_blocks
        case Fault.SLOT_BELOW:
            tensors["slot_mapping"][-1] = -2
        case Fault.SLOT_PAST_END:
            tensors["slot_mapping"][0] = num_blocks * spec.block_size
        case Fault.PAIR_NEGATIVE:
            tensors["pairs"][-1, 0] = -1
        case Fault.PAIR_PAST_END:
            tensors["pairs"][0, 1] = num_blocks
        case Fault.ARGS_SIZE | Fault.WORKSPACE:
            pass
