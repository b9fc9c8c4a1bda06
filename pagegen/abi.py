"""The C ABI of templates/cpp/abi.h: its structs, and the kernels of a generated shared library as Python calls them.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .errors import KernelError
from .kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    REFUSALS,
    AttendExtras,
    KVScales,
    WriteExtras,
    check_attend,
    check_copy_blocks,
    check_write_kv,
    k_strides,
    require,
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

    def _check(self, status: int) -> None:
        if status:
            raise KernelError(f"{self.op.value}: {REFUSALS.get(status, f'status {status}')}")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of an optional tensor."""
    return None if tensor is None else tensor.data_ptr()


def number(name: str, value: float) -> float:
    """A number as it is now: what a caller changes later may be a tensor or an array. Raises KernelError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise KernelError(f"{name}: got a {type(value).__name__}, expected a number") from None


def scale_tensors(scales: KVScales | None) -> tuple[torch.Tensor | None, ...]:
    """Those of the first fields of `SCALES`."""
    return (None, None, None, None) if scales is None else (scales.k_scale, scales.v_scale, scales.k_zero, scales.v_zero)


def scale_strides(spec: KernelSpec, scales: KVScales | None) -> tuple[int, ...]:
    """Values of the other fields of `SCALES`."""
    if scales is None or spec.kv_scale is KVScale.TENSOR:
        return (0,) * 6
    k, v = ((0, 0, scale.stride(0)) if scale.dim() == 1 else scale.stride() for scale in (scales.k_scale, scales.v_scale))
    return (*k, *v)


def scale_arguments(spec: KernelSpec, scales: KVScales | None) -> tuple[int | None, ...]:
    """Values of the fields `SCALES`."""
    return (*map(pointer, scale_tensors(scales)), *scale_strides(spec, scales))


def cache_strides(layout: KVLayout, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, ...]:
    """Values of the fields `CACHE_STRIDES`."""
    return (*k_strides(layout, k_cache), *v_strides(layout, v_cache))


# --- calls from Python (templates/cpp/python_call.h) -----------------------------------------------------------------

_MAX_TENSORS, _MAX_DIMS = 16, 5
_OTHER_TENSORS, _WORKSPACE_TOO_SMALL = -1, 2  # python::OTHER_TENSORS, PG_E_WORKSPACE
_FASTCALL = 0x0080  # METH_FASTCALL


class _ExchangeAPI(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1, as far as it is read."""

    _fields_ = [*c_fields(ctypes.c_uint32, "major minor"), *c_fields(POINTER, "older allocate from_object to_object dl_tensor")]


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", POINTER), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


class _Call(ctypes.Structure):
    """python::Call."""

    _fields_ = [
        ("dl_tensor", POINTER),
        *c_fields(INT64, "state count"),
        ("fields", INT64 * _MAX_TENSORS),
        ("kinds", INT64 * (4 + 2 * _MAX_DIMS) * _MAX_TENSORS),
    ]


_capsule_pointer = ctypes.PYFUNCTYPE(POINTER, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_new_function = ctypes.PYFUNCTYPE(ctypes.py_object, POINTER, ctypes.py_object, POINTER)(("PyCFunction_NewEx", ctypes.pythonapi))


@functools.cache
def _dl_tensor() -> int | None:
    """Address of the function that says what a tensor of torch is like; None in a torch that has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    api = _ExchangeAPI.from_address(_capsule_pointer(capsule, b"dlpack_exchange_api"))
    return api.dl_tensor if api.major == 1 else None


class _Checked:
    """A call that is checked and packed into `args`. `run(*tensors)` makes it; and again, on tensors that differ in their
    places only. It takes them in the order of their fields, None for one that is not given; those at the end may be left out.

    For one thread at a time.
    """

    def __init__(self, method: _Method, args: ctypes.Structure, settings: object) -> None:
        """`settings` is what `args` was packed from beside tensors."""
        memory = bytearray(ctypes.sizeof(_Call)) + bytes(args)
        fields = [field[0] for field in args._fields_ if field[1] is POINTER and field[0] != "workspace"]
        call = _Call.from_buffer(memory)
        call.dl_tensor, call.count = _dl_tensor(), len(fields)
        for index, name in enumerate(fields):
            call.fields[index] = getattr(type(args), name).offset
        self.args, self.settings = type(args).from_buffer(memory, ctypes.sizeof(_Call)), settings
        self.run: Callable[..., int] = _new_function(ctypes.addressof(method), memory, None)
        self.kept: object = None  # memory that `args` points to and the tensors do not hold


class _Thread(threading.local):
    """A kernel's last call in each thread."""

    call: _Checked | None = None


class _OftenCalled(CppKernel):
    """A kernel that every layer of every step calls."""

    def __init__(self, path: Path, spec: KernelSpec, op: Op) -> None:
        super().__init__(path, spec, op)
        function = ctypes.cast(getattr(self._library, f"pagegen_{op.value}_call"), POINTER)
        self._method = _Method(op.value.encode(), function, _FASTCALL)
        self._thread = _Thread()


_scratch = threading.local()  # one grow-only workspace a thread: calls from two threads never share it


def _workspace(size: int) -> torch.Tensor:
    buffer: torch.Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < size + 64:
        buffer = _scratch.buffer = _buffer(size)
    return buffer


def _buffer(size: int) -> torch.Tensor:
    return torch.empty(size + 64, dtype=torch.uint8)


def _give(call: _Checked, buffer: torch.Tensor) -> None:
    """Makes `buffer` the workspace of a call of attend."""
    start = -(-buffer.data_ptr() // 64) * 64
    call.args.workspace, call.args.workspace_bytes = start, buffer.data_ptr() + buffer.numel() - start
    call.kept = buffer


class CppAttend(_OftenCalled):
    """`Attend` on a C++ library; uses torch.get_num_threads() threads."""

    def __init__(self, path: Path, spec: KernelSpec, op: Op) -> None:
        super().__init__(path, spec, op)
        self._workspace_bytes = self._library.pagegen_attend_workspace
        self._workspace_bytes.restype = INT64

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
        tensors: tuple[torch.Tensor | None, ...] = (q, out, lse, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)
        if extras is not NO_ATTEND_EXTRAS:
            tensors += (*scale_tensors(extras.scales), extras.alibi_slopes, extras.sinks, extras.mask)
        scale = None if scale is None else number("scale", scale)
        settings = (scale, torch.get_num_threads(), extras.shared_prefix_len)
        call = self._thread.call
        status = call.run(*tensors) if call is not None and call.settings == settings else _OTHER_TENSORS
        if call is None or status == _OTHER_TENSORS:
            args = self._pack(out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, lse, extras)
            call = _Checked(self._method, args, settings)
            _give(call, _workspace(0))
            status = call.run(*tensors)
            self._thread.call = call
        if status == _WORKSPACE_TOO_SMALL:
            status = self._run_with_room(call, _workspace)
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
        tensors = (out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)
        call = _Checked(self._method, self._pack(*tensors, scale, lse, extras), None)
        _give(call, _buffer(0))
        args = ctypes.byref(call.args)

        def run(_kept: object = (*tensors, lse, extras)) -> None:
            status = self._run(args)
            if status == _WORKSPACE_TOO_SMALL:
                status = self._run_with_room(call, _buffer)
            if status:
                self._check(status)

        return run

    def _run_with_room(self, call: _Checked, allocate: Callable[[int], torch.Tensor]) -> int:
        """Runs a call in as much workspace as it needs. Raises KernelError for what the library refuses."""
        args = ctypes.byref(call.args)
        size = int(self._workspace_bytes(args))
        self._check(-min(size, 0))
        _give(call, allocate(size))
        return int(self._run(args))

    def _pack(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        scale: float | None,
        lse: torch.Tensor | None,
        extras: AttendExtras,
    ) -> ctypes.Structure:
        """AttendArgs of a call that is checked here, without a workspace."""
        spec, mask = self.spec, extras.mask
        num_blocks = check_attend(spec, out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, lse, extras)
        require(k_cache.device.type == "cpu", "k_cache device", k_cache.device, "cpu")
        return AttendArgs(
            ctypes.sizeof(AttendArgs),
            *map(pointer, (q, out, lse, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)),
            None,
            0,
            q.shape[0],
            block_table.shape[0],
            num_blocks,
            block_table.shape[1],
            *q.stride()[:2],
            *out.stride()[:2],
            *((0, 0) if lse is None else lse.stride()),
            *cache_strides(spec.kv_layout, k_cache, v_cache),
            block_table.stride(0),
            spec.softmax_scale if scale is None else number("scale", scale),
            torch.get_num_threads(),
            *scale_arguments(spec, extras.scales),
            *map(pointer, (extras.alibi_slopes, extras.sinks, mask)),
            *((0, 0) if mask is None else (mask.stride(0), mask.shape[1])),
            extras.shared_prefix_len,
        )


class CppWriteKV(_OftenCalled):
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
        tensors: tuple[torch.Tensor | None, ...] = (k, v, k_cache, v_cache, slot_mapping)
        if extras is not NO_WRITE_EXTRAS:
            tensors += (*scale_tensors(extras.scales), *_rotated(extras))
        settings = (number("eps", extras.eps), torch.get_num_threads())
        call = self._thread.call
        status = call.run(*tensors) if call is not None and call.settings == settings else _OTHER_TENSORS
        if status == _OTHER_TENSORS:
            call = _Checked(self._method, self._pack(k, v, k_cache, v_cache, slot_mapping, extras), settings)
            status = call.run(*tensors)
            self._thread.call = call
        if status:
            self._check(status)

    def _pack(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        extras: WriteExtras,
    ) -> ctypes.Structure:
        """WriteKVArgs of a call that is checked here."""
        q, q_out, cos_sin = extras.q, extras.q_out, extras.cos_sin
        num_blocks = check_write_kv(self.spec, k, v, k_cache, v_cache, slot_mapping, extras)
        require(k_cache.device.type == "cpu", "k_cache device", k_cache.device, "cpu")
        return WriteKVArgs(
            ctypes.sizeof(WriteKVArgs),
            *map(pointer, (k, v, k_cache, v_cache, slot_mapping)),
            k.shape[0],
            num_blocks,
            *k.stride()[:2],
            *v.stride()[:2],
            *cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
            *scale_arguments(self.spec, extras.scales),
            *map(pointer, _rotated(extras)),
            *((0, 0) if q is None else q.stride()[:2]),
            *((0, 0) if q_out is None else q_out.stride()[:2]),
            *((0, 0) if cos_sin is None else (cos_sin.stride(0), cos_sin.shape[0])),
            number("eps", extras.eps),
        )


def _rotated(extras: WriteExtras) -> tuple[torch.Tensor | None, ...]:
    """The fields of WriteKVArgs that rotating and normalising need."""
    return extras.q, extras.q_out, extras.positions, extras.cos_sin, extras.q_weight, extras.k_weight


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
