"""How a case becomes tensors.

What a kernel must not read is poisoned: free blocks and the tails of last pages, their scales, table entries past the
context, rows of cos_sin at no position. What it must not write is filled beforehand and compared afterwards.
Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from ..kernel import TORCH_DTYPES, AttendExtras, KVScales, WriteExtras
from ..spec import DType, KernelSpec, KVScale, Op
from ..transfer import block_bytes
from .case import Case, Fault
from .pool import Pool, Tensors, reverse_blocks, spread

SCALE_NAMES = ("k_scale", "v_scale", "k_zero", "v_zero")


def outputs_of(case: Case) -> tuple[str, ...]:
    """Names of the tensors that an op writes; those of `materialise` that a case lacks included."""
    match case.op:
        case Op.ATTEND:
            return ("out", "lse")
        case Op.GATHER_BLOCKS:
            return ("staging",)
        case _:
            by_token = case.spec.kv_scale is KVScale.TOKEN_HEAD
            return ("k_cache", "v_cache", "q_out", *(SCALE_NAMES if by_token else ()))


def materialise(case: Case, device: str | torch.device = "cpu") -> Tensors:
    """Fresh tensors for a case, made on the CPU from its seed and moved with their strides; see `Tensors` for the names.

    Outputs of attend hold NaN. With spec.v_in_k v_cache is a view of k_cache, in place q_out is q.
    """
    made = _Maker(case)
    tensors: Tensors = getattr(made, case.op.value)()
    if case.reversed_blocks:
        reverse_blocks(case.spec, tensors)
    if case.part is not None:
        tensors = _part_of(case, tensors)
    if case.fault is not None:
        _spoil(case.fault, tensors, case.spec)
    moved = {name: move(tensor, device) for name, tensor in tensors.items()}
    for view, of in views_of(case).items():
        if view in moved:
            moved[view] = moved[of] if view == "q_out" else moved[of][..., : case.spec.dim_v]
    return moved


def views_of(case: Case) -> dict[str, str]:
    """Tensors that share the memory of others, with which they begin."""
    views = {"v_cache": "k_cache", "source_v": "source_k"} if case.spec.v_in_k else {}
    return views | ({"q_out": "q"} if case.in_place else {})


def arguments(case: Case, tensors: Tensors) -> dict[str, Any]:
    """The tensors as an op's arguments (see pagegen.kernel); extras only if there are any."""
    names = {
        Op.ATTEND: ("out", "q", "k_cache", "v_cache", "block_table", "context_lens", "cu_seqlens_q", "lse"),
        Op.WRITE_KV: ("k", "v", "k_cache", "v_cache", "slot_mapping"),
        Op.COPY_BLOCKS: ("k_cache", "v_cache", "pairs"),
        Op.GATHER_BLOCKS: ("k_cache", "v_cache", "blocks", "staging"),
        Op.SCATTER_BLOCKS: ("k_cache", "v_cache", "blocks", "staging"),
        Op.RELAYOUT: ("k_cache", "v_cache", "source_k", "source_v", "slots"),
    }[case.op]
    found: dict[str, Any] = {name: tensors[name] for name in names if name in tensors}
    scales = _scales(tensors, "")
    match case.op:
        case Op.ATTEND:
            options: dict[str, Any] = {name: tensors[name] for name in ("alibi_slopes", "sinks", "mask") if name in tensors}
            if scales or options or case.shared_prefix_len:
                found["extras"] = AttendExtras(scales, **options, shared_prefix_len=case.shared_prefix_len)
            return found | {"scale": case.scale}
        case Op.WRITE_KV:
            names = ("q", "q_out", "positions", "cos_sin", "q_weight", "k_weight")
            options = {name: tensors[name] for name in names if name in tensors}
            return found | ({"extras": WriteExtras(scales, **options)} if scales or options else {})
        case Op.RELAYOUT:
            found["source"] = case.source
            return found | ({"scales": scales, "source_scales": _scales(tensors, "source_")} if scales else {})
        case _:
            return found | ({"scales": scales} if scales else {})


def _scales(tensors: Tensors, prefix: str) -> KVScales | None:
    if f"{prefix}k_scale" not in tensors:
        return None
    k_scale, v_scale, k_zero, v_zero = (tensors.get(prefix + name) for name in SCALE_NAMES)
    assert k_scale is not None and v_scale is not None
    return KVScales(k_scale, v_scale, k_zero, v_zero)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between the first and the last element of a view, gaps included, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


def move(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A private copy on `device` with the same strides and the same bytes in its gaps."""
    return flat(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), 0)


class _Maker:
    """Draws a case's tensors in a fixed order from one generator; a method an op."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec = case, case.spec
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {case.op}".encode()) * 64 + case.seed)
        self.pool = Pool(case, case.spec, self.generator, copies=case.op is Op.COPY_BLOCKS)

    # --- attend ------------------------------------------------------------------------------------------------------

    def attend(self) -> Tensors:
        case, spec = self.case, self.spec
        tokens, dtype = sum(case.query_lens) + case.padding, TORCH_DTYPES[spec.dtype]
        q = self.normal(tokens, spec.q_heads, spec.head_dim) * case.gain
        # Flat, ordinary and peaked softmaxes side by side: each hides mistakes that another shows.
        q *= torch.tensor([0.25, 1.0, 3.0])[torch.arange(tokens)[:, None] % 3 - torch.arange(spec.q_heads) % 3][..., None]
        q[tokens - case.padding :] = math.nan
        out = torch.full((tokens, spec.q_heads, spec.dim_v), math.nan)
        tensors = {
            "out": self.rows(out, dtype),
            "q": self.rows(q.clamp(-6e4, 6e4), dtype, heads_outside=True),
            **self.pool.caches([*case.context_lens], self.unseen()),
            "block_table": self.pool.block_table(),
            "context_lens": torch.tensor(case.context_lens, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32),
        }
        if spec.lse:
            tensors["lse"] = self.rows(torch.full((tokens, spec.q_heads), math.nan), torch.float32)
        if spec.alibi:
            tensors["alibi_slopes"] = 2.0 ** (-8 * torch.arange(spec.q_heads) / spec.q_heads)
        if spec.sinks:  # one that takes most of the weight, one that takes none, ordinary ones
            tensors["sinks"] = torch.where(torch.arange(spec.q_heads) % 3 == 1, 12.0, 2 * self.normal(spec.q_heads))
            tensors["sinks"][spec.q_heads - 1 :] = -30.0
        if spec.mask:
            tensors["mask"] = self.mask(tokens)
        return tensors

    def unseen(self) -> list[int]:
        """Keys at the start of each context that lie before every row's window: their blocks may have been given away."""
        case, window = self.case, self.spec.window
        if window is None or case.shared_blocks:
            return [0] * len(case.context_lens)
        return [max(0, c - q + 1 - window) if q else c for q, c in zip(case.query_lens, case.context_lens, strict=True)]

    def mask(self, tokens: int) -> torch.Tensor:
        """`[tokens, M]` uint8, right-aligned to the contexts: a tree over each sequence's own rows, coins elsewhere.

        Any value but 0 is true. The last row of every third sequence sees nothing at all.
        """
        width = max(self.case.query_lens, default=0) if self.case.mask_width is None else self.case.mask_width
        truths = torch.tensor([1, 2, 128, 255], dtype=torch.uint8)[torch.randint(4, (tokens, width), generator=self.generator)]
        seen = torch.rand(tokens, width, generator=self.generator) < 0.7
        row = 0
        for sequence, count in enumerate(self.case.query_lens):
            ancestors = torch.eye(count, dtype=torch.bool)
            for i in range(1, count):  # a node's parent is any node before it
                ancestors[i] |= ancestors[int(torch.randint(i, (1,), generator=self.generator))]
            if not self.spec.causal:
                ancestors |= torch.rand(count, count, generator=self.generator) < 0.5
            own = min(count, width)
            seen[row : row + count, width - own :] = ancestors[:, count - own :]
            row += count
            if sequence % 3 == 2 and count:
                seen[row - 1] = False
        mask = torch.where(seen, truths, 0).to(torch.uint8)
        return spread(mask, 1) if self.case.strided else mask

    # --- write_kv ----------------------------------------------------------------------------------------------------

    def write_kv(self) -> Tensors:
        case, spec = self.case, self.spec
        new = [min(query, context) for query, context in zip(case.query_lens, case.context_lens, strict=True)]
        held = [context - count for context, count in zip(case.context_lens, new, strict=True)]
        slots, positions = [-1] * case.padding, [0] * case.padding
        for sequence, (first, context) in enumerate(zip(held, case.context_lens, strict=True)):
            slots += self.pool.slots(sequence, first, context)
            positions += range(first, context)
        mixed = len(slots) - len(slots) // 2  # in any order; the rest side by side, as a prompt's are
        order = torch.cat([torch.randperm(mixed, generator=self.generator), torch.arange(mixed, len(slots))])
        raw = spec.rope is not None or spec.cache_dtype.quantised
        dtype = TORCH_DTYPES[spec.dtype if raw else spec.cache_dtype]
        k, v = (self.source_rows(len(slots), dim) for dim in (spec.head_dim, spec.dim_v))
        tensors = {
            "k": self.rows(k, dtype),
            "v": self.rows(v, dtype, heads_outside=True),
            **self.pool.caches(held),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64)[order],
        }
        if spec.rope is not None:
            tensors |= self.rotation(torch.tensor(positions, dtype=torch.int64)[order], dtype)
        return tensors

    def source_rows(self, tokens: int, dim: int) -> torch.Tensor:
        """Rows to be written; where they get quantised one is all zeros and one lies on ties of the rounding."""
        rows = self.normal(tokens, self.spec.kv_heads, dim) * self.case.gain
        if tokens > 2 and self.spec.kv_scale is KVScale.TOKEN_HEAD:
            rows[-1] = 0.0
            limits = {DType.FP8_E4M3: 448, DType.FP8_E5M2: 57344, DType.INT8: 127, DType.INT4: 7}
            most = limits[self.spec.cache_dtype]
            if self.spec.kv_zero:
                most = {127: 255, 7: 15}[most]
            offset = 16.0 if most > 255 else 0.0  # steps of 1 from 0.5 on; of 1, between steps of 2 and 4, from 16.5 on
            rows[-2] = offset + torch.arange(dim) % min(7, most) + (0.0 if offset else 0.5)
            rows[-2, :, 0] = most
        return rows

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """The arguments of a rotation; rows of cos_sin at none of the positions are NaN."""
        spec, tokens = self.spec, len(positions)
        size = spec.rotary_dim or 0
        table = torch.full((int(positions.max()) + 3 if tokens else 3, size), math.nan)
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        table[positions] = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
        q = self.normal(tokens, spec.q_heads, spec.head_dim) * min(self.case.gain, 8.0)
        tensors = {
            "q": self.rows(q, dtype, heads_outside=True),
            "q_out": self.rows(torch.full_like(q, math.nan), dtype),
            "positions": positions,
            "cos_sin": spread(table, math.nan) if self.case.strided else table,
        }
        if spec.qk_norm:
            tensors |= {name: 1 + 0.3 * self.normal(spec.head_dim) for name in ("q_weight", "k_weight")}
        return tensors

    # --- what moves a cache ------------------------------------------------------------------------------------------

    def copy_blocks(self) -> Tensors:
        pairs = [(source, self.pool.free.pop()) for table in self.pool.tables for source in table]
        if len(pairs) > 2:  # a fork in three: one source, several destinations
            pairs[1] = (pairs[0][0], pairs[1][1])
        caches = self.pool.caches([*self.case.context_lens])
        return {**caches, "pairs": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)}

    def gather_blocks(self) -> Tensors:
        blocks = [block for table in self.pool.tables for block in table]
        staging = torch.full((len(blocks), block_bytes(self.spec)), 0xA5, dtype=torch.uint8)
        tensors = {"blocks": torch.tensor(blocks, dtype=torch.int64), "staging": staging}
        if self.case.strided:
            tensors["staging"] = spread(staging, 0x5A)
        return {**self.pool.caches([*self.case.context_lens]), **tensors}

    def scatter_blocks(self) -> Tensors:
        tensors = self.gather_blocks()
        noise = torch.randint(256, tensors["staging"].shape, generator=self.generator, dtype=torch.uint8)
        tensors["staging"].copy_(noise)
        return tensors

    def relayout(self) -> Tensors:
        case, spec = self.case, self.case.source or self.spec
        source = Pool(case, spec, self.generator)
        pairs = [
            pair
            for sequence, context in enumerate(case.context_lens)
            for pair in zip(source.slots(sequence, 0, context), self.pool.slots(sequence, 0, context), strict=True)
        ]
        pairs += [(-1, self.pool.free[0] * self.spec.block_size), (source.free[0] * spec.block_size, -1)] * (case.padding // 2)
        slots = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        theirs = source.caches([*case.context_lens], prefix="source_")
        order = torch.randperm(len(slots), generator=self.generator)
        return {**self.pool.caches([0] * len(case.context_lens)), **theirs, "slots": slots[order]}

    # --- rows --------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def rows(self, values: torch.Tensor, dtype: torch.dtype, heads_outside: bool = False) -> torch.Tensor:
        """`[tokens, heads, dim]` as asked: dense, or with gaps of NaN, heads outermost if `heads_outside`."""
        values = values.to(dtype)
        if not self.case.strided:
            return values.contiguous()
        if heads_outside:
            return spread(values.transpose(0, 1), math.nan).transpose(0, 1)
        return spread(values, math.nan)


def _part_of(case: Case, tensors: Tensors) -> Tensors:
    """The tensors of a batch that has only the part's rows."""
    part = case.part
    assert part is not None
    begin = sum(case.query_lens[: part.sequence])
    hidden = case.query_lens[part.sequence] - part.last  # keys that came after its last row
    sequence, rows = slice(part.sequence, part.sequence + 1), slice(begin + part.first, begin + part.last)
    cut = dict(tensors)
    cut |= {name: tensors[name][rows] for name in ("out", "q", "lse", "mask") if name in tensors}
    cut |= {"block_table": tensors["block_table"][sequence], "context_lens": tensors["context_lens"][sequence] - hidden}
    cut["cu_seqlens_q"] = torch.tensor([0, part.last - part.first], dtype=torch.int32)
    if "mask" in cut:  # it ends with the context, wherever that ends now
        cut["mask"] = cut["mask"][:, : max(0, cut["mask"].shape[1] - hidden)]
    return cut


def _spoil(fault: Fault, tensors: Tensors, spec: KernelSpec) -> None:
    """Writes the wrong value; ARGS_SIZE, WORKSPACE and PREFIX_TOO_LONG are no tensor's and left to the driver."""
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
        case Fault.PREFIX_DIFFERS:
            tensors["block_table"][-1, 0] = tensors["block_table"][-1, 1]
        case Fault.SLOT_BELOW:
            tensors["slot_mapping"][-1] = -2
        case Fault.SLOT_PAST_END:
            tensors["slot_mapping"][0] = num_blocks * spec.block_size
        case Fault.PAIR_NEGATIVE:
            tensors["pairs"][-1, 0] = -1
        case Fault.PAIR_PAST_END:
            tensors["pairs"][0, 1] = num_blocks
        case Fault.ROW_NEGATIVE:
            tensors["blocks"][-1] = -1
        case Fault.ROW_PAST_END:
            tensors["blocks"][0] = num_blocks
        case Fault.SOURCE_PAST_END:
            tensors["slots"][0, 0] = 2**40
        case Fault.POSITION_NEGATIVE:
            tensors["positions"][-1] = -1
        case Fault.POSITION_PAST_END:
            tensors["positions"][0] = tensors["cos_sin"].shape[0]
        case Fault.SCALE_ZERO:
            tensors["v_scale"][0] = 0.0
        case Fault.SCALE_NAN:
            tensors["k_scale"][-1] = math.nan
        case Fault.ARGS_SIZE | Fault.WORKSPACE | Fault.PREFIX_TOO_LONG:
            pass
