"""The calling convention: one for the reference, C++ and Triton; outputs are passed in.

`attend(out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)`, `write_kv(k, v, k_cache, v_cache,
slot_mapping)` and `copy_blocks(k_cache, v_cache, pairs)`. Shapes, with T tokens, S sequences, N blocks:

============== ==================================== =====================================================
tensor         shape, dtype                         meaning
============== ==================================== =====================================================
q              [T, q_heads, head_dim], dtype        any token and head stride; the head dim is dense
out            [T, q_heads, head_dim_v], dtype      the same; every row of a sequence is written
k_cache        KVLayout.k_shape(N, ...), kv_dtype   any block, token and head stride
v_cache        KVLayout.v_shape(N, ...), kv_dtype   the same
block_table    [S, W], int32                        entries past the context are never read
context_lens   [S], int32                           keys of each sequence, this step's included
cu_seqlens_q   [S + 1], int32                       rows of sequence s are q[cu[s]:cu[s + 1]]
lse            [T, q_heads], fp32                   natural log of the softmax's sum; only with spec.lse
slot_mapping   [T], int64                           table[pos // B] * B + pos % B; -1 skips the token
pairs          [P, 2], int64                        (source block, destination block); no block is both
============== ==================================== =====================================================

Row i of a sequence with n rows and context c stands at position c - n + i and, when causal, sees the keys up to and
including its own. A key that no row of its sequence sees (before a window) may hold anything. A row that sees no key gives out = 0 and lse = -inf (with sinks: the sink's logit).

What a spec asks for beyond that comes in `AttendExtras`, `WriteExtras` and `KVScales`. A quantised cache holds fp8, int8,
or int4 in pairs (uint8 `[..., head_dim / 2]`: dim i in the low half, dim i + head_dim / 2 in the high half of a byte); a
stored number s stands for s * scale, (s - 8) * scale for int4, and (s - zero) * scale with kv_zero.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import torch

from .errors import KernelError
from .memory import HUGE_PAGE, zeros_in_huge_pages
from .spec import DType, KernelSpec, KVLayout, KVScale, Order

MAX_BLOCKS = 2**31  # that a block table of int32 can name

TORCH_DTYPES = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.INT8: torch.int8,
    DType.INT4: torch.uint8,
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Scales of a quantised cache, fp32, shaped by spec.kv_scale: `[1]`, `[kv_heads]` or `[blocks, block_size, kv_heads]`.

    K's zero points have the strides of K's scales, V's of V's; they are given exactly if spec.kv_zero.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_zero: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttendExtras:
    """Arguments of attend that a spec may ask for; each is given exactly if it does.

    ================= ====================== =================================================================
    scales            KVScales               of a quantised cache
    alibi_slopes      [q_heads], fp32        spec.alibi
    sinks             [q_heads], fp32        spec.sinks: a logit beside the scores, whose value is 0
    mask              [T, M], uint8 or bool  spec.mask: row t sees key context - M + j only if mask[t, j]; keys
                                             before the mask are not masked by it
    shared_prefix_len                        tokens at the start of every context that lie in the same blocks,
                                             a multiple of block_size: read once for the whole batch (cascade);
                                             allowed for any spec, 0 means none
    ================= ====================== =================================================================
    """

    scales: KVScales | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    shared_prefix_len: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WriteExtras:
    """Arguments of write_kv that a spec may ask for; each is given exactly if it does.

    With spec.rope, q `[T, q_heads, head_dim]` and k are rotated on their first rotary_dim dims by `positions` `[T]` int64
    and `cos_sin` `[P, rotary_dim]` fp32 (cosines, then sines); the rotated q is written to `q_out`, which may be q. With
    spec.qk_norm, each head of q and k is first divided by its root mean square (`eps` inside the root) and multiplied by
    `q_weight`, `k_weight` `[head_dim]` fp32. All of it is computed in fp32 and rounded once.
    Tokens whose slot is -1 have a q, and a position, too.
    Scales per token and head are written by write_kv (the largest magnitude, or the range, of the row fills the type);
    coarser ones are read.
    """

    scales: KVScales | None = None
    q: torch.Tensor | None = None
    q_out: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6


NO_ATTEND_EXTRAS = AttendExtras()
NO_WRITE_EXTRAS = WriteExtras()


class Attend(Protocol):
    """Paged attention over a ragged batch. `scale` None means spec.softmax_scale.

    The two maxima are hints for choosing a config without reading tensors; a kernel may ignore them.
    """

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        *,
        scale: float | None = None,
        lse: torch.Tensor | None = None,
        extras: AttendExtras = NO_ATTEND_EXTRAS,
        max_query_len: int | None = None,
        max_context_len: int | None = None,
    ) -> None: ...


class WriteKV(Protocol):
    """Scatters new keys and values into the cache."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        extras: WriteExtras = NO_WRITE_EXTRAS,
    ) -> None: ...


class CopyBlocks(Protocol):
    """Copies whole blocks inside the cache (copy-on-write), with their scales where each token has some."""

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None: ...


class PagedKernels(Protocol):
    """One spec's three operations: what the runtime needs, and what a kernel package gives."""

    @property
    def spec(self) -> KernelSpec: ...
    @property
    def attend(self) -> Attend: ...
    @property
    def write_kv(self) -> WriteKV: ...
    @property
    def copy_blocks(self) -> CopyBlocks: ...


def allocate_cache(spec: KernelSpec, num_blocks: int, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed (k_cache, v_cache) for `num_blocks` blocks of one layer; with v_in_k the second is a view of the first.

    On a CPU K and V of a block lie side by side: where blocks are scattered, half as many addresses have to be translated.
    The memory is in pages of 2 MiB where it is as large and the system grants them.
    """
    layout, dtype = spec.kv_layout, TORCH_DTYPES[spec.cache_dtype]
    k_shape = layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.k_width)
    v_shape = layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.v_width)
    if torch.device(device).type != "cpu":
        k = torch.zeros(k_shape, dtype=dtype, device=device)
        return k, k[..., : spec.dim_v] if spec.v_in_k else torch.zeros(v_shape, dtype=dtype, device=device)
    k_size, v_size = math.prod(k_shape[1:]), 0 if spec.v_in_k else math.prod(v_shape[1:])
    memory = allocate_bytes(num_blocks * (k_size + v_size) * dtype.itemsize).view(dtype)  # both are views of this one, as torch.compile wants
    blocks = memory.view(num_blocks, k_size + v_size)
    k = blocks[:, :k_size].view(k_shape)
    return k, k[..., : spec.dim_v] if spec.v_in_k else blocks[:, k_size:].view(v_shape)


def allocate_bytes(num_bytes: int) -> torch.Tensor:
    """Zeroed uint8 host memory, in pages of 2 MiB where it is as large and the system grants them."""
    if num_bytes < HUGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        return torch.frombuffer(zeros_in_huge_pages(num_bytes), dtype=torch.uint8)
    except OSError as error:  # as torch says it
        raise RuntimeError(f"no memory for {num_bytes} bytes: {error}") from error


def allocate_scales(spec: KernelSpec, num_blocks: int, device: str | torch.device = "cpu") -> KVScales | None:
    """Scales of 1 and zero points of 0 for `num_blocks` blocks of one layer; None unless the cache is quantised."""
    if spec.kv_scale is None:
        return None
    shape = scale_shape(spec, num_blocks)
    k_scale, v_scale = (torch.ones(shape, device=device) for _ in "kv")
    if not spec.kv_zero:
        return KVScales(k_scale, v_scale)
    return KVScales(k_scale, v_scale, torch.zeros(shape, device=device), torch.zeros(shape, device=device))


def scale_shape(spec: KernelSpec, num_blocks: int) -> tuple[int, ...]:
    """Shape of each of a cache's scales."""
    match spec.kv_scale:
        case KVScale.TENSOR:
            return (1,)
        case KVScale.HEAD:
            return (spec.kv_heads,)
        case _:
            return (num_blocks, spec.block_size, spec.kv_heads)


def k_strides(layout: KVLayout, cache: torch.Tensor) -> tuple[int, int, int, int]:
    """(block, token, kv head, dim) strides of K in elements; dim is one step of head_dim / x."""
    return _strides(layout.k_order, cache)


def v_strides(layout: KVLayout, cache: torch.Tensor) -> tuple[int, int, int, int]:
    """(block, token, kv head, dim) strides of V in elements."""
    return _strides(layout.v_order, cache)


def _strides(order: Order, cache: torch.Tensor) -> tuple[int, int, int, int]:
    s = cache.stride()
    match order:
        case Order.NHD:
            return s[0], s[1], s[2], s[3]
        case Order.HND:
            return s[0], s[2], s[1], s[3]
        case Order.HDN:
            return s[0], s[3], s[1], s[2]


# --- argument checks ---------------------------------------------------------------------------------------------


# What a kernel says of numbers inside its tensors, by the PG_E_* of templates/cpp/abi.h.
REFUSALS = {
    1: "the library needs a newer caller (args struct too small)",
    2: "the workspace is smaller than the kernel asked for",
    3: "cu_seqlens_q must start at 0, never decrease, and end at or before the number of rows of q",
    4: "context_lens must be at least 0 and at most block_table width * block_size",
    5: "block_table names a block outside the cache",
    6: "slot_mapping, pairs, blocks or slots names a slot or block outside the cache (-1 skips a slot)",
    7: "shared_prefix_len exceeds a context, or block_table does not begin with the same blocks for every sequence",
    8: "positions lie outside cos_sin",
    9: "k_scale and v_scale of a tensor or head must be positive, finite numbers",
    10: "the system does not let this process use the matrix unit (AMX); build for cpu:avx512 instead",
}


def require(ok: bool, name: str, got: object, want: object) -> None:
    """Raises KernelError naming both sides unless `ok`."""
    if not ok:
        raise KernelError(f"{name}: got {got}, expected {want}")


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks a tensor whose last dimension is dense."""
    as_it_lies = tensor.data_ptr() != 0 and not tensor.is_neg()
    if as_it_lies and tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.stride(-1) == 1:
        return  # nearly every check ends here, a dozen a layer
    require(tensor.shape == shape, f"{name} shape", tuple(tensor.shape), shape)
    require(tensor.dtype == dtype, f"{name} dtype", tensor.dtype, dtype)
    require(tensor.device == device, f"{name} device", tensor.device, device)
    require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name} last stride", tensor.stride(-1), 1)
    require(tensor.data_ptr() != 0 or tensor.numel() == 0, f"{name} memory", "none", "some: no fake or functional tensor, and none that was freed")
    require(not tensor.is_neg(), f"{name} view", "one whose numbers are negated when they are read", "what resolve_neg() gives")


def check_tensors(**tensors: object) -> None:
    """Checks that there is a tensor of each name."""
    for name, tensor in tensors.items():
        require(isinstance(tensor, torch.Tensor), name, f"a {type(tensor).__name__}", "a tensor")


def length(tensor: torch.Tensor, dim: int = 0) -> int:
    """A tensor's extent; 0 for a 0-d one, which then fails its shape check, with a message."""
    return tensor.shape[dim] if tensor.dim() else 0


def check_cache(spec: KernelSpec, k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Checks both caches against the spec and each other; returns the number of blocks."""
    layout, dtype, num_blocks = spec.kv_layout, TORCH_DTYPES[spec.cache_dtype], length(k_cache)
    if num_blocks > MAX_BLOCKS:
        raise KernelError(f"k_cache: got {num_blocks} blocks, expected at most {MAX_BLOCKS}: block tables hold int32")
    k_shape = layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.k_width)
    v_shape = layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.v_width)
    check_rows("k_cache", k_cache, k_shape, dtype, k_cache.device)
    check_rows("v_cache", v_cache, v_shape, dtype, k_cache.device)
    if layout.k_order is Order.HDN and spec.block_size > 1:
        require(k_cache.stride(3) == layout.x, "k_cache token stride", k_cache.stride(3), f"{layout.x} (tokens lie side by side)")
    if spec.v_in_k and (v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride()):
        raise KernelError("v_cache: got memory of its own, expected the view k_cache[..., :head_dim_v] (spec.v_in_k)")
    return num_blocks


def given(name: str, value: object, wanted: bool, field: str) -> bool:
    """Whether an optional argument is there; raises KernelError unless that is what the spec asks for."""
    if (value is not None) != wanted:
        raise KernelError(f"{name}: got {'none' if wanted else 'one'}, expected {'one' if wanted else 'none'} (spec.{field})")
    return wanted


def check_scales(spec: KernelSpec, scales: KVScales | None, num_blocks: int, device: torch.device) -> None:
    """Checks a quantised cache's scales and zero points against the spec."""
    if not given("scales", scales, spec.kv_scale is not None, "kv_dtype") or scales is None:
        return
    shape = scale_shape(spec, num_blocks)
    for name, scale, zero in (("k", scales.k_scale, scales.k_zero), ("v", scales.v_scale, scales.v_zero)):
        require(scale.shape == shape, f"{name}_scale shape", tuple(scale.shape), shape)
        require(scale.dtype == torch.float32 and scale.device == device, f"{name}_scale", scale.dtype, f"float32 on {device}")
        if given(f"{name}_zero", zero, spec.kv_zero, "kv_zero") and zero is not None:
            require(zero.shape == shape and zero.stride() == scale.stride(), f"{name}_zero", "another geometry", f"{name}_scale's")
            require(zero.dtype == torch.float32 and zero.device == device, f"{name}_zero", zero.dtype, f"float32 on {device}")


def check_attend(
    spec: KernelSpec,
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lse: torch.Tensor | None,
    extras: AttendExtras = NO_ATTEND_EXTRAS,
) -> int:
    """Checks shapes, dtypes, devices and strides (not values: a kernel checks those); returns the number of blocks.

    Raises KernelError with what was got and what is expected.
    """
    check_tensors(
        out=out, q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q
    )
    num_blocks = check_cache(spec, k_cache, v_cache)
    check_query(spec, out, q, lse, k_cache.device)
    check_tables(block_table, context_lens, cu_seqlens_q, k_cache.device)
    if extras is not NO_ATTEND_EXTRAS or needs_extras(spec):
        check_attend_extras(spec, extras, num_blocks, length(q), k_cache.device)
    return num_blocks


def check_query(
    spec: KernelSpec, out: torch.Tensor, q: torch.Tensor, lse: torch.Tensor | None, device: torch.device
) -> None:
    dtype, tokens = TORCH_DTYPES[spec.dtype], length(q)
    check_rows("q", q, (tokens, spec.q_heads, spec.head_dim), dtype, device)
    check_rows("out", out, (tokens, spec.q_heads, spec.dim_v), dtype, device)
    spread = all(size < 2 or stride for size, stride in zip(out.shape, out.stride(), strict=True))
    require(spread, "out strides", out.stride(), "none of 0: its rows would lie on one another")
    if (lse is not None) != spec.lse:
        require(False, "lse tensor", "none" if lse is None else "given", "one" if spec.lse else "none (spec.lse is false)")
    if lse is not None:
        check_rows("lse", lse, (tokens, spec.q_heads), torch.float32, device)


def check_tables(
    block_table: torch.Tensor, context_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, device: torch.device
) -> None:
    seqs = length(context_lens)
    check_rows("block_table", block_table, (seqs, length(block_table, -1)), torch.int32, device)
    check_rows("context_lens", context_lens, (seqs,), torch.int32, device)
    check_rows("cu_seqlens_q", cu_seqlens_q, (seqs + 1,), torch.int32, device)


def needs_extras(spec: KernelSpec) -> bool:
    return spec.kv_scale is not None or spec.alibi or spec.sinks or spec.mask


def check_attend_extras(spec: KernelSpec, extras: AttendExtras, num_blocks: int, tokens: int, device: torch.device) -> None:
    check_scales(spec, extras.scales, num_blocks, device)
    for name, tensor, field in (("alibi_slopes", extras.alibi_slopes, "alibi"), ("sinks", extras.sinks, "sinks")):
        if given(name, tensor, getattr(spec, field), field) and tensor is not None:
            check_rows(name, tensor, (spec.q_heads,), torch.float32, device)
    mask = extras.mask
    if given("mask", mask, spec.mask, "mask") and mask is not None:
        dtype = torch.bool if mask.dtype == torch.bool else torch.uint8
        check_rows("mask", mask, (tokens, length(mask, -1)), dtype, device)
    prefix = extras.shared_prefix_len
    ok = prefix >= 0 and prefix % spec.block_size == 0
    require(ok, "shared_prefix_len", prefix, f"a multiple of block_size={spec.block_size}, 0 for none")


def check_write_kv(
    spec: KernelSpec,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    extras: WriteExtras = NO_WRITE_EXTRAS,
) -> int:
    """The same for write_kv; k and v come in the cache's dtype, or in spec.dtype if write_kv rotates or quantises them."""
    check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    num_blocks = check_cache(spec, k_cache, v_cache)
    raw = spec.rope is not None or spec.cache_dtype.quantised
    device, dtype, tokens = k_cache.device, TORCH_DTYPES[spec.dtype if raw else spec.cache_dtype], length(k)
    check_rows("k", k, (tokens, spec.kv_heads, spec.head_dim), dtype, device)
    check_rows("v", v, (tokens, spec.kv_heads, spec.dim_v), dtype, device)
    check_rows("slot_mapping", slot_mapping, (tokens,), torch.int64, device)
    if raw or extras is not NO_WRITE_EXTRAS:
        check_scales(spec, extras.scales, num_blocks, device)
        _check_rope(spec, extras, tokens, dtype, device)
    return num_blocks


def _check_rope(spec: KernelSpec, extras: WriteExtras, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    heads = (tokens, spec.q_heads, spec.head_dim)
    fields = (
        ("q", extras.q, "rope", heads, dtype),
        ("q_out", extras.q_out, "rope", heads, dtype),
        ("positions", extras.positions, "rope", (tokens,), torch.int64),
        ("cos_sin", extras.cos_sin, "rope", (length(extras.cos_sin) if extras.cos_sin is not None else 0, spec.rotary_dim), torch.float32),
        ("q_weight", extras.q_weight, "qk_norm", (spec.head_dim,), torch.float32),
        ("k_weight", extras.k_weight, "qk_norm", (spec.head_dim,), torch.float32),
    )
    for name, tensor, field, shape, kind in fields:
        if given(name, tensor, bool(getattr(spec, field)), field) and tensor is not None:
            check_rows(name, tensor, shape, kind, device)  # type: ignore[arg-type]  # rotary_dim is filled where rope is


def check_copy_blocks(
    spec: KernelSpec, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, scales: KVScales | None = None
) -> int:
    """The same for copy_blocks; also refuses a block that is both source and destination, or a destination twice."""
    check_tensors(k_cache=k_cache, v_cache=v_cache, pairs=pairs)
    num_blocks = check_cache(spec, k_cache, v_cache)
    check_scales(spec, scales, num_blocks, k_cache.device)
    check_rows("pairs", pairs, (length(pairs), 2), torch.int64, k_cache.device)
    require(pairs.is_contiguous(), "pairs", "strided", "contiguous")
    rows: list[list[int]] = pairs.tolist()
    sources, destinations = {row[0] for row in rows}, [row[1] for row in rows]
    require(len(set(destinations)) == len(rows), "pairs", "a destination twice", "distinct destinations")
    both = sources.intersection(destinations)
    require(not both, "pairs", f"block {min(both, default=0)} as source and destination", "no block that is both")
    return num_blocks
