"""The C ABI of templates/cpp/abi.h: its structs, and the kernels of a generated shared library as Python calls them.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import KernelError
from .kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    AttendExtras,
    KVScales,
    WriteExtras,
    check_attend_extras,
    check_cache,
    check_copy_blocks,
    check_query,
    check_tables,
    check_write_kv,
    k_strides,
    length,
    needs_extras,
    v_strides,
)
from .spec import KernelSpec, KVLayout, KVScale, Op

ABI_VERSION = 1


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


def _geometry_of(out: torch.Tensor, q: torch.Tensor) -> tuple[Any, ...]:
    return (q.shape, q.stride(), out.shape, out.stride(), q.dtype, out.dtype, q.device, out.device)


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
        geometry = _geometry_of(out, q)
        if geometry != self._geometry or lse is not None or spec.lse:
            check_query(spec, out, q, lse, k_cache.device)
            self._geometry = geometry
        if not self._are_checked(block_table, context_lens, cu_seqlens_q):  # by the first layer of a step
            check_tables(block_table, context_lens, cu_seqlens_q, k_cache.device)
            self._are_checked = _same(block_table, context_lens, cu_seqlens_q)
        packed = self._pack(_workspace(0), layer, geometry, out, q, block_table, context_lens, cu_seqlens_q, scale, lse)
        status = self._run(packed)
        if status == WORKSPACE_TOO_SMALL:  # this thread's buffer grows, once in a while
            buffer = _workspace(self._room(packed))
            status = self._run(self._pack(buffer, layer, geometry, out, q, block_table, context_lens, cu_seqlens_q, scale, lse))
        if status:
            self._check(status)

    def prepared(
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
    ) -> Callable[[], None]:
        """A call on these very tensors, checked and packed now, so that it costs hardly more than the kernel.

        What they hold may change from one call to the next; where they lie, their shapes and the number of torch's threads may
        not. It keeps them alive, has a workspace of its own, and is for one thread at a time. Raises KernelError as a call does.
        """
        check_query(self.spec, out, q, lse, k_cache.device)
        check_tables(block_table, context_lens, cu_seqlens_q, k_cache.device)
        layer = self._checked_layer(k_cache, v_cache, extras, length(q))
        geometry, buffer = _geometry_of(out, q), torch.empty(64, dtype=torch.uint8)
        packed = self._pack(buffer, layer, geometry, out, q, block_table, context_lens, cu_seqlens_q, scale, lse)

        def call(_kept: object = (k_cache, v_cache)) -> None:  # which the layer does not hold
            nonlocal buffer, packed
            status = self._run(packed)
            if status == WORKSPACE_TOO_SMALL:
                buffer = torch.empty(self._room(packed) + 64, dtype=torch.uint8)
                packed = self._pack(buffer, layer, geometry, out, q, block_table, context_lens, cu_seqlens_q, scale, lse)
                status = self._run(packed)
            if status:
                self._check(status)

        return call

    def _room(self, packed: bytes) -> int:
        """Bytes of workspace that a call needs. Raises KernelError for what the library refuses."""
        size = int(self._workspace_bytes(packed))
        self._check(-min(size, 0))
        return size

    def _pack(
        self,
        buffer: torch.Tensor,
        layer: _Layer,
        geometry: tuple[Any, ...],
        out: torch.Tensor,
        q: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        scale: float | None,
        lse: torch.Tensor | None,
    ) -> bytes:
        """AttendArgs with `buffer` as the workspace; `geometry` as `_geometry` has it."""
        workspace = -(-buffer.data_ptr() // 64) * 64
        (tokens, _, _), (q_token, q_head, _), _, (out_token, out_head, _) = geometry[:4]
        seqs, width = block_table.shape
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
        return plain + layer.tail

    def _checked_layer(self, k_cache: torch.Tensor, v_cache: torch.Tensor, extras: AttendExtras, tokens: int) -> _Layer:
        """Checks caches and extras, and remembers them for the next call."""
        spec, num_blocks = self.spec, check_cache(self.spec, k_cache, v_cache)
        if extras is not NO_ATTEND_EXTRAS or needs_extras(spec):
            check_attend_extras(spec, extras, num_blocks, tokens, k_cache.device)
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
