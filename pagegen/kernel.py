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
including its own. A row that sees no key gives out = 0 and lse = -inf.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from .errors import KernelError
from .spec import DType, KernelSpec, KVLayout, Op, Order

ABI_VERSION = 1

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


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
    ) -> None: ...


class CopyBlocks(Protocol):
    """Copies whole blocks inside the cache (copy-on-write)."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None: ...


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
    """Zeroed (k_cache, v_cache) for `num_blocks` blocks of one layer."""
    layout, dtype = spec.kv_layout, TORCH_DTYPES[spec.cache_dtype]
    k = torch.zeros(layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.head_dim), dtype=dtype, device=device)
    v = torch.zeros(layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.dim_v), dtype=dtype, device=device)
    return k, v


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


def _require(ok: bool, name: str, got: object, want: object) -> None:
    if not ok:
        raise KernelError(f"{name}: got {got}, expected {want}")


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.stride(-1) == 1:
        return  # nearly every call of a decode step ends here, a dozen times a layer
    _require(tensor.shape == shape, f"{name} shape", tuple(tensor.shape), shape)
    _require(tensor.dtype == dtype, f"{name} dtype", tensor.dtype, dtype)
    _require(tensor.device == device, f"{name} device", tensor.device, device)
    _require(tensor.shape[-1] <= 1, f"{name} last stride", tensor.stride(-1), 1)


def _length(tensor: torch.Tensor, dim: int = 0) -> int:
    return tensor.shape[dim] if tensor.dim() else 0  # a 0-d tensor then fails its shape check, with a message


def check_cache(spec: KernelSpec, k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Checks both caches against the spec and each other; returns the number of blocks."""
    layout, dtype, num_blocks = spec.kv_layout, TORCH_DTYPES[spec.cache_dtype], _length(k_cache)
    k_shape = layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
    v_shape = layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.dim_v)
    _check_rows("k_cache", k_cache, k_shape, dtype, k_cache.device)
    _check_rows("v_cache", v_cache, v_shape, dtype, k_cache.device)
    return num_blocks


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
) -> int:
    """Checks shapes, dtypes, devices and strides (not values: a kernel checks those); returns the number of blocks.

    Raises KernelError with what was got and what is expected.
    """
    num_blocks = check_cache(spec, k_cache, v_cache)
    device, dtype = k_cache.device, TORCH_DTYPES[spec.dtype]
    tokens, seqs = _length(q), _length(context_lens)
    _check_rows("q", q, (tokens, spec.q_heads, spec.head_dim), dtype, device)
    _check_rows("out", out, (tokens, spec.q_heads, spec.dim_v), dtype, device)
    _check_rows("block_table", block_table, (seqs, _length(block_table, -1)), torch.int32, device)
    _check_rows("context_lens", context_lens, (seqs,), torch.int32, device)
    _check_rows("cu_seqlens_q", cu_seqlens_q, (seqs + 1,), torch.int32, device)
    if (lse is not None) != spec.lse:
        _require(False, "lse tensor", "none" if lse is None else "given", "one" if spec.lse else "none (spec.lse is false)")
    if lse is not None:
        _check_rows("lse", lse, (tokens, spec.q_heads), torch.float32, device)
    return num_blocks


def check_write_kv(
    spec: KernelSpec,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> int:
    """The same for write_kv; k and v come in the cache's dtype."""
    num_blocks = check_cache(spec, k_cache, v_cache)
    device, dtype, tokens = k_cache.device, TORCH_DTYPES[spec.cache_dtype], _length(k)
    _check_rows("k", k, (tokens, spec.kv_heads, spec.head_dim), dtype, device)
    _check_rows("v", v, (tokens, spec.kv_heads, spec.dim_v), dtype, device)
    _check_rows("slot_mapping", slot_mapping, (tokens,), torch.int64, device)
    return num_blocks


def check_copy_blocks(spec: KernelSpec, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> int:
    """The same for copy_blocks; also refuses a block that is both source and destination, or a destination twice."""
    num_blocks = check_cache(spec, k_cache, v_cache)
    _check_rows("pairs", pairs, (_length(pairs), 2), torch.int64, k_cache.device)
    _require(pairs.is_contiguous(), "pairs", "strided", "contiguous")
    rows: list[list[int]] = pairs.tolist()
    sources, destinations = {row[0] for row in rows}, [row[1] for row in rows]
    _require(len(set(destinations)) == len(rows), "pairs", "a destination twice", "distinct destinations")
    both = sources.intersection(destinations)
    _require(not both, "pairs", f"block {min(both, default=0)} as source and destination", "no block that is both")
    return num_blocks


# --- the C ABI (templates/cpp/abi.h) --------------------------------------------------------------------------------


def _struct(name: str, fields: Sequence[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [("size", ctypes.c_uint64), *fields]})


_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


_CACHE_STRIDES = _fields(
    _I64,
    "k_stride_block k_stride_token k_stride_head k_stride_dim v_stride_block v_stride_token v_stride_head v_stride_dim",
)

AttendArgs = _struct(
    "AttendArgs",
    [
        *_fields(_P, "q out lse k_cache v_cache block_table context_lens cu_seqlens_q workspace"),
        ("workspace_bytes", ctypes.c_uint64),
        *_fields(_I64, "num_tokens num_seqs num_blocks table_width"),
        *_fields(_I64, "q_stride_token q_stride_head out_stride_token out_stride_head lse_stride_token lse_stride_head"),
        *_CACHE_STRIDES,
        ("block_table_stride", _I64),
        ("scale", ctypes.c_float),
        ("num_threads", _I32),
    ],
)
WriteKVArgs = _struct(
    "WriteKVArgs",
    [
        *_fields(_P, "k v k_cache v_cache slot_mapping"),
        *_fields(_I64, "num_tokens num_blocks"),
        *_fields(_I64, "src_k_stride_token src_k_stride_head src_v_stride_token src_v_stride_head"),
        *_CACHE_STRIDES,
        *_fields(_I32, "num_threads reserved"),
    ],
)
CopyBlocksArgs = _struct(
    "CopyBlocksArgs",
    [
        *_fields(_P, "k_cache v_cache pairs"),
        *_fields(_I64, "num_pairs num_blocks"),
        *_CACHE_STRIDES,
        *_fields(_I32, "num_threads reserved"),
    ],
)

_STATUS = {
    1: "the library needs a newer caller (args struct too small)",
    2: "the workspace is smaller than the kernel asked for",
    3: "cu_seqlens_q must start at 0, never decrease, and end at or before the number of rows of q",
    4: "context_lens must be at least 0 and at most block_table width * block_size",
    5: "block_table names a block outside the cache",
    6: "slot_mapping or pairs names a slot or block outside the cache (-1 skips a slot)",
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


def _cache_strides(layout: KVLayout, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, ...]:
    return (*k_strides(layout, k_cache), *v_strides(layout, v_cache))


class CppAttend(CppKernel):
    """`Attend` on a C++ library; uses torch.get_num_threads() threads."""

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
        max_query_len: int | None = None,
        max_context_len: int | None = None,
    ) -> None:
        spec = self.spec
        num_blocks = check_attend(spec, out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, lse)
        args = AttendArgs(
            ctypes.sizeof(AttendArgs),
            q.data_ptr(),
            out.data_ptr(),
            lse.data_ptr() if lse is not None else None,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.data_ptr(),
            context_lens.data_ptr(),
            cu_seqlens_q.data_ptr(),
            None,
            0,
            q.shape[0],
            context_lens.shape[0],
            num_blocks,
            block_table.shape[1],
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            lse.stride(0) if lse is not None else 0,
            lse.stride(1) if lse is not None else 0,
            *_cache_strides(spec.kv_layout, k_cache, v_cache),
            block_table.stride(0),
            spec.softmax_scale if scale is None else scale,
            torch.get_num_threads(),
        )
        size = self._workspace_bytes(ctypes.byref(args))
        if size < 0:
            self._check(-size)
        buffer = _workspace(size)
        args.workspace = -(-buffer.data_ptr() // 64) * 64
        args.workspace_bytes = size
        self._check(self._run(ctypes.byref(args)))


class CppWriteKV(CppKernel):
    """`WriteKV` on a C++ library."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_blocks = check_write_kv(self.spec, k, v, k_cache, v_cache, slot_mapping)
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
            *_cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
        )
        self._check(self._run(ctypes.byref(args)))


class CppCopyBlocks(CppKernel):
    """`CopyBlocks` on a C++ library."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
        num_blocks = check_copy_blocks(self.spec, k_cache, v_cache, pairs)
        args = CopyBlocksArgs(
            ctypes.sizeof(CopyBlocksArgs),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            pairs.data_ptr(),
            pairs.shape[0],
            num_blocks,
            *_cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
        )
        self._check(self._run(ctypes.byref(args)))


CPP_KERNELS: dict[Op, type[CppAttend | CppWriteKV | CppCopyBlocks]] = {
    Op.ATTEND: CppAttend,
    Op.WRITE_KV: CppWriteKV,
    Op.COPY_BLOCKS: CppCopyBlocks,
}
