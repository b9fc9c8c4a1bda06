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

import ctypes
import dataclasses
import itertools
import math
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from .errors import KernelError
from .memory import HUGE_PAGE, zeros_in_huge_pages
from .spec import DType, KernelSpec, KVLayout, KVScale, Op, Order

ABI_VERSION = 1
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

    On a CPU both lie in one piece of memory, in pages of 2 MiB where it is as large and the system grants them.
    """
    layout, dtype = spec.kv_layout, TORCH_DTYPES[spec.cache_dtype]
    k_shape = layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.k_width)
    v_shape = layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.v_width)
    k_size, v_size = math.prod(k_shape), 0 if spec.v_in_k else math.prod(v_shape)
    begin_v = -(-k_size // 64) * 64  # every row of V stays as well aligned as it was
    count = begin_v + v_size
    on_host = torch.device(device).type == "cpu"
    memory = allocate_bytes(count * dtype.itemsize).view(dtype) if on_host else torch.zeros(count, dtype=dtype, device=device)
    k = memory[:k_size].view(k_shape)
    if spec.v_in_k:
        return k, k[..., : spec.dim_v]
    return k, memory[begin_v : begin_v + v_size].view(v_shape)


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


def require(ok: bool, name: str, got: object, want: object) -> None:
    """Raises KernelError naming both sides unless `ok`."""
    if not ok:
        raise KernelError(f"{name}: got {got}, expected {want}")


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks a tensor whose last dimension is dense."""
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.stride(-1) == 1:
        return  # nearly every call of a decode step ends here, a dozen times a layer
    require(tensor.shape == shape, f"{name} shape", tuple(tensor.shape), shape)
    require(tensor.dtype == dtype, f"{name} dtype", tensor.dtype, dtype)
    require(tensor.device == device, f"{name} device", tensor.device, device)
    require(tensor.shape[-1] <= 1, f"{name} last stride", tensor.stride(-1), 1)


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
    num_blocks = check_cache(spec, k_cache, v_cache)
    _check_query(spec, out, q, lse, k_cache.device)
    _check_tables(block_table, context_lens, cu_seqlens_q, k_cache.device)
    if extras is not NO_ATTEND_EXTRAS or _needs_extras(spec):
        _check_attend_extras(spec, extras, num_blocks, length(q), k_cache.device)
    return num_blocks


def _check_query(
    spec: KernelSpec, out: torch.Tensor, q: torch.Tensor, lse: torch.Tensor | None, device: torch.device
) -> None:
    dtype, tokens = TORCH_DTYPES[spec.dtype], length(q)
    check_rows("q", q, (tokens, spec.q_heads, spec.head_dim), dtype, device)
    check_rows("out", out, (tokens, spec.q_heads, spec.dim_v), dtype, device)
    if (lse is not None) != spec.lse:
        require(False, "lse tensor", "none" if lse is None else "given", "one" if spec.lse else "none (spec.lse is false)")
    if lse is not None:
        check_rows("lse", lse, (tokens, spec.q_heads), torch.float32, device)


def _check_tables(
    block_table: torch.Tensor, context_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, device: torch.device
) -> None:
    seqs = length(context_lens)
    check_rows("block_table", block_table, (seqs, length(block_table, -1)), torch.int32, device)
    check_rows("context_lens", context_lens, (seqs,), torch.int32, device)
    check_rows("cu_seqlens_q", cu_seqlens_q, (seqs + 1,), torch.int32, device)


def _needs_extras(spec: KernelSpec) -> bool:
    return spec.kv_scale is not None or spec.alibi or spec.sinks or spec.mask


def _check_attend_extras(spec: KernelSpec, extras: AttendExtras, num_blocks: int, tokens: int, device: torch.device) -> None:
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


# --- the C ABI (templates/cpp/abi.h) --------------------------------------------------------------------------------


def c_struct(name: str, fields: Sequence[tuple[str, type]]) -> type[ctypes.Structure]:
    """An args struct: `size`, then `fields`."""
    return type(name, (ctypes.Structure,), {"_fields_": [("size", ctypes.c_uint64), *fields]})


POINTER, INT64, INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def c_fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type."""
    return [(name, kind) for name in names.split()]


CACHE_STRIDES = c_fields(
    INT64,
    "k_stride_block k_stride_token k_stride_head k_stride_dim v_stride_block v_stride_token v_stride_head v_stride_dim",
)

SCALES = [
    *c_fields(POINTER, "k_scale v_scale k_zero v_zero"),
    *c_fields(INT64, "k_scale_stride_block k_scale_stride_token k_scale_stride_head"),
    *c_fields(INT64, "v_scale_stride_block v_scale_stride_token v_scale_stride_head"),
]

AttendArgs = c_struct(
    "AttendArgs",
    [
        *c_fields(POINTER, "q out lse k_cache v_cache block_table context_lens cu_seqlens_q workspace"),
        ("workspace_bytes", ctypes.c_uint64),
        *c_fields(INT64, "num_tokens num_seqs num_blocks table_width"),
        *c_fields(INT64, "q_stride_token q_stride_head out_stride_token out_stride_head lse_stride_token lse_stride_head"),
        *CACHE_STRIDES,
        ("block_table_stride", INT64),
        ("scale", ctypes.c_float),
        ("num_threads", INT32),
        *SCALES,
        *c_fields(POINTER, "alibi_slopes sinks mask"),
        *c_fields(INT64, "mask_stride_token mask_width shared_prefix_len"),
    ],
)
WriteKVArgs = c_struct(
    "WriteKVArgs",
    [
        *c_fields(POINTER, "k v k_cache v_cache slot_mapping"),
        *c_fields(INT64, "num_tokens num_blocks"),
        *c_fields(INT64, "src_k_stride_token src_k_stride_head src_v_stride_token src_v_stride_head"),
        *CACHE_STRIDES,
        *c_fields(INT32, "num_threads reserved"),
        *SCALES,
        *c_fields(POINTER, "q q_out positions cos_sin q_weight k_weight"),
        *c_fields(INT64, "q_stride_token q_stride_head q_out_stride_token q_out_stride_head cos_sin_stride max_positions"),
        ("eps", ctypes.c_float),
        ("reserved2", INT32),
    ],
)
CopyBlocksArgs = c_struct(
    "CopyBlocksArgs",
    [
        *c_fields(POINTER, "k_cache v_cache pairs"),
        *c_fields(INT64, "num_pairs num_blocks"),
        *CACHE_STRIDES,
        *c_fields(INT32, "num_threads reserved"),
        *SCALES,
    ],
)

_STATUS = {
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

_scratch = threading.local()  # one grow-only workspace a thread: calls from two threads never share it


def _workspace(size: int) -> torch.Tensor:
    buffer: torch.Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < size + 64:
        buffer = _scratch.buffer = torch.empty(size + 64, dtype=torch.uint8)
    return buffer


class CppKernel:
    """A generated shared library, called by pointer and stride. Raises KernelError for what the library refuses."""

    def __init__(self, path: Path, spec: KernelSpec, op: Op) -> None:
        self.path, self.spec, self.op = path, spec, op
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path.name} cannot be loaded: {error}; delete it and it is rebuilt from its source") from None
        version = self._library.pagegen_abi_version()
        if version != ABI_VERSION:
            raise KernelError(f"{path.name} has C ABI {version}, this caller {ABI_VERSION}; rebuild it from its source")
        self._run = getattr(self._library, f"pagegen_{op.value}")
        if op is Op.ATTEND:
            self._workspace_bytes = self._library.pagegen_attend_workspace
            self._workspace_bytes.restype = ctypes.c_int64

    def _check(self, status: int) -> None:
        if status:
            raise KernelError(f"{self.op.value}: {_STATUS.get(status, f'status {status}')}")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of an optional tensor."""
    return None if tensor is None else tensor.data_ptr()


_NO_SCALES = (None,) * 4 + (0,) * 6


def scale_arguments(spec: KernelSpec, scales: KVScales | None) -> tuple[int | None, ...]:
    """Values of the fields `SCALES`."""
    if scales is None:
        return _NO_SCALES
    strides = [(0, 0, scale.stride(0)) if scale.dim() == 1 else scale.stride() for scale in (scales.k_scale, scales.v_scale)]
    if spec.kv_scale is KVScale.TENSOR:
        strides = [(0, 0, 0), (0, 0, 0)]
    pointers = (scales.k_scale, scales.v_scale, scales.k_zero, scales.v_zero)
    return (*map(pointer, pointers), *strides[0], *strides[1])


def cache_strides(layout: KVLayout, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, ...]:
    """Values of the fields `CACHE_STRIDES`."""
    return (*k_strides(layout, k_cache), *v_strides(layout, v_cache))


_CODES: dict[object, str] = {POINTER: "Q", ctypes.c_uint64: "Q", INT64: "q", ctypes.c_float: "f", INT32: "i"}
# AttendArgs up to its scales; packed in a third of the time that ctypes takes.
_PLAIN = struct.Struct("=" + "".join(_CODES[field[1]] for field in itertools.takewhile(lambda field: field[0] != SCALES[0][0], AttendArgs._fields_)))
_ARGS_SIZE = ctypes.sizeof(AttendArgs)
WORKSPACE_TOO_SMALL = 2  # PG_E_WORKSPACE
MAX_LAYERS = 1024  # whose caches are remembered


def _same(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    """Says of three tensors whether they are these, in the same place and of the same shape, as when they were checked."""
    ref_a, ref_b, ref_c = weakref.ref(a), weakref.ref(b), weakref.ref(c)
    at_a, at_b, at_c = a.data_ptr(), b.data_ptr(), c.data_ptr()
    shape_a, shape_b, shape_c = a.shape, b.shape, c.shape

    def holds(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
        return (
            ref_a() is a
            and ref_b() is b
            and ref_c() is c
            and (a.data_ptr(), b.data_ptr(), c.data_ptr()) == (at_a, at_b, at_c)
            and a.shape == shape_a
            and b.shape == shape_b
            and c.shape == shape_c
        )

    return holds


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What a call's arguments say of the caches and the extras, checked and packed: they are looked at once."""

    k_cache: weakref.ref[torch.Tensor]
    v_cache: weakref.ref[torch.Tensor]
    addresses: tuple[int, int]
    shapes: tuple[torch.Size, torch.Size]
    extras: AttendExtras
    num_blocks: int
    strides: tuple[int, ...]
    tail: bytes  # AttendArgs from its scales on

    def holds(self, k_cache: torch.Tensor, v_cache: torch.Tensor, extras: AttendExtras) -> bool:
        """Whether these are they, in the same place and of the same shape; a mask is another one in each step."""
        return (
            self.extras is extras
            and self.k_cache() is k_cache
            and self.v_cache() is v_cache
            and (k_cache.data_ptr(), v_cache.data_ptr()) == self.addresses
            and (k_cache.shape, v_cache.shape) == self.shapes
            and extras.mask is None
        )


class CppAttend(CppKernel):
    """`Attend` on a C++ library; uses torch.get_num_threads() threads."""

    def __init__(self, path: Path, spec: KernelSpec, op: Op) -> None:
        super().__init__(path, spec, op)
        self._layers: dict[int, _Layer] = {}
        self._are_checked: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool] = lambda *_: False
        self._geometry: tuple[object, ...] = ()  # of q and out, as they were checked last
        self._scale = spec.softmax_scale

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
    ) -> None:
        spec = self.spec
        layer = self._layers.get(id(k_cache))
        if layer is None or not layer.holds(k_cache, v_cache, extras):
            layer = self._checked_layer(k_cache, v_cache, extras, length(q))
        geometry = (q.shape, q.stride(), out.shape, out.stride(), q.dtype, out.dtype, q.device, out.device)
        if geometry != self._geometry or lse is not None or spec.lse:
            _check_query(spec, out, q, lse, k_cache.device)
            self._geometry = geometry
        if not self._are_checked(block_table, context_lens, cu_seqlens_q):  # by the first layer of a step
            _check_tables(block_table, context_lens, cu_seqlens_q, k_cache.device)
            self._are_checked = _same(block_table, context_lens, cu_seqlens_q)
        (tokens, _, _), (q_token, q_head, _), _, (out_token, out_head, _) = geometry[:4]
        seqs, width = block_table.shape
        size = 0
        while True:
            buffer = _workspace(size)
            workspace = -(-buffer.data_ptr() // 64) * 64
            plain = _PLAIN.pack(
                _ARGS_SIZE,
                q.data_ptr(),
                out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                *layer.addresses,
                block_table.data_ptr(),
                context_lens.data_ptr(),
                cu_seqlens_q.data_ptr(),
                workspace,
                buffer.data_ptr() + buffer.numel() - workspace,
                tokens,
                seqs,
                layer.num_blocks,
                width,
                q_token,
                q_head,
                out_token,
                out_head,
                *((0, 0) if lse is None else lse.stride()),
                *layer.strides,
                block_table.stride(0),
                self._scale if scale is None else scale,
                torch.get_num_threads(),
            )
            status = self._run(plain + layer.tail)
            if status != WORKSPACE_TOO_SMALL or size:
                break
            size = self._workspace_bytes(plain + layer.tail)  # this thread's buffer grows, once in a while
            if size < 0:
                status = -size
                break
        self._check(status)

    def _checked_layer(self, k_cache: torch.Tensor, v_cache: torch.Tensor, extras: AttendExtras, tokens: int) -> _Layer:
        """Checks caches and extras, and remembers them for the next call."""
        spec, num_blocks = self.spec, check_cache(self.spec, k_cache, v_cache)
        if extras is not NO_ATTEND_EXTRAS or _needs_extras(spec):
            _check_attend_extras(spec, extras, num_blocks, tokens, k_cache.device)
        mask, args = extras.mask, AttendArgs()
        for (name, _), value in zip(SCALES, scale_arguments(spec, extras.scales), strict=True):
            setattr(args, name, value)
        args.alibi_slopes, args.sinks, args.mask = map(pointer, (extras.alibi_slopes, extras.sinks, mask))
        if mask is not None:
            args.mask_stride_token, args.mask_width = mask.stride(0), mask.shape[1]
        args.shared_prefix_len = extras.shared_prefix_len
        strides = cache_strides(spec.kv_layout, k_cache, v_cache)
        addresses, shapes = (k_cache.data_ptr(), v_cache.data_ptr()), (k_cache.shape, v_cache.shape)
        references = weakref.ref(k_cache), weakref.ref(v_cache)
        layer = _Layer(*references, addresses, shapes, extras, num_blocks, strides, bytes(args)[_PLAIN.size :])
        if len(self._layers) >= MAX_LAYERS:
            self._layers = {key: known for key, known in self._layers.items() if known.k_cache() is not None}
        if len(self._layers) < MAX_LAYERS:
            self._layers[id(k_cache)] = layer
        return layer


class CppWriteKV(CppKernel):
    """`WriteKV` on a C++ library."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        extras: WriteExtras = NO_WRITE_EXTRAS,
    ) -> None:
        num_blocks = check_write_kv(self.spec, k, v, k_cache, v_cache, slot_mapping, extras)
        args = WriteKVArgs(
            ctypes.sizeof(WriteKVArgs),
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            k.shape[0],
            num_blocks,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
            *scale_arguments(self.spec, extras.scales),
        )
        if extras.q is not None and extras.q_out is not None and extras.cos_sin is not None:
            pointers = (extras.q, extras.q_out, extras.positions, extras.cos_sin, extras.q_weight, extras.k_weight)
            args.q, args.q_out, args.positions, args.cos_sin, args.q_weight, args.k_weight = map(pointer, pointers)
            args.q_stride_token, args.q_stride_head = extras.q.stride()[:2]
            args.q_out_stride_token, args.q_out_stride_head = extras.q_out.stride()[:2]
            args.cos_sin_stride, args.max_positions = extras.cos_sin.stride(0), extras.cos_sin.shape[0]
            args.eps = extras.eps
        self._check(self._run(ctypes.byref(args)))


class CppCopyBlocks(CppKernel):
    """`CopyBlocks` on a C++ library."""

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        num_blocks = check_copy_blocks(self.spec, k_cache, v_cache, pairs, scales)
        args = CopyBlocksArgs(
            ctypes.sizeof(CopyBlocksArgs),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            pairs.data_ptr(),
            pairs.shape[0],
            num_blocks,
            *cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
            *(scale_arguments(self.spec, scales)),
        )
        self._check(self._run(ctypes.byref(args)))
