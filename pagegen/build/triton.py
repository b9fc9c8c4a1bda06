"""Triton text to a kernel: loaded for the GPU that is here, interpreted on the CPU, or compiled for a GPU that is absent.

Vendored into every kernel package. Triton is imported when a function needs it: whether it interprets is decided at its
import, so a process either interprets (the worker of `Interpreter`) or compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from ..errors import BuildError, CheckError
from ..kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    TORCH_DTYPES,
    AttendExtras,
    KVScales,
    WriteExtras,
    allocate_cache,
    allocate_scales,
    check_attend,
    check_copy_blocks,
    check_write_kv,
)
from ..paths import kernel_cache, write_atomic
from ..spec import KernelSpec, KVScale, Op
from ..target import Target
from ..transfer import block_bytes, check_gather_blocks, check_scatter_blocks

if TYPE_CHECKING:
    from ..render import Source

Launch = Callable[..., None]  # `launch` of a generated module, or a stand-in for it


def load(
    text: str, key: str, spec: KernelSpec, op: Op, config: Mapping[str, Any]
) -> AnyTritonKernel:
    """A generated module as the callable for `op`, on the GPU that its tensors are on."""
    _keep_cache()
    return TRITON_KERNELS[op](spec, config, _module(text, key).launch)


def _module(text: str, key: str) -> ModuleType:
    """Imports the text from a file of the kernel cache: Triton reads a kernel's source through its file."""
    folder = kernel_cache() / key
    folder.mkdir(exist_ok=True)
    path = folder / "kernel.py"
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomic(path, text)
    os.utime(folder)  # last use, for `pagegen cache`
    found = importlib.util.spec_from_file_location(f"pagegen_triton_{key}", path)
    if found is None or found.loader is None:
        raise BuildError(f"{path} cannot be imported; delete it and it is written again")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _keep_cache() -> None:
    """Has Triton keep its binaries beside ours, unless the user has chosen a folder (TRITON_CACHE_DIR)."""
    import triton

    cache = triton.knobs.cache
    if cache.dir == cache.get_triton_dir("cache"):
        cache.dir = str(kernel_cache() / "triton")


def toolchain() -> dict[str, Any]:
    """The toolchain half of a GPU fingerprint. (FP fusion needs no entry: a kernel's text states it.)"""
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}


# --- the calling convention ------------------------------------------------------------------------------------------


class TritonKernel:
    """A generated launcher with a spec. Tensors are checked by shape, stride and dtype; values are not (that would sync)."""

    def __init__(self, spec: KernelSpec, config: Mapping[str, Any], launch: Launch) -> None:
        self.spec, self.config = spec, config
        self._launch = launch

    def _device(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Makes the tensor's GPU the current one, on which Triton launches; does nothing for a CPU tensor."""
        return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def _given(scales: KVScales | None, *others: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """What a spec asks for beyond the plain arguments, in the order in which `launch` takes it; the rest is None here."""
    of_scales = (scales.k_scale, scales.v_scale, scales.k_zero, scales.v_zero) if scales else ()
    return (tensor for tensor in (*of_scales, *others) if tensor is not None)


def _by_token(spec: KernelSpec, scales: KVScales | None) -> Iterator[torch.Tensor]:
    """The scales that lie in blocks, as the cache does."""
    return _given(scales if spec.kv_scale is KVScale.TOKEN_HEAD else None)


class TritonAttend(TritonKernel):
    """`Attend` on a generated module. That a shared prefix is shared is taken on trust: tables are not read here."""

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
        check_attend(self.spec, out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, lse, extras)
        scale = self.spec.softmax_scale if scale is None else scale
        with self._device(q):
            self._launch(
                *(out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, lse, extras.shared_prefix_len),
                *_given(extras.scales, extras.alibi_slopes, extras.sinks, extras.mask),
            )


class TritonWriteKV(TritonKernel):
    """`WriteKV` on a generated module."""

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
        check_write_kv(self.spec, k, v, k_cache, v_cache, slot_mapping, extras)
        rotation = (extras.q, extras.q_out, extras.positions, extras.cos_sin, extras.q_weight, extras.k_weight)
        eps = (extras.eps,) if self.spec.qk_norm else ()
        with self._device(k):
            self._launch(k, v, k_cache, v_cache, slot_mapping, *_given(extras.scales, *rotation), *eps)


class TritonCopyBlocks(TritonKernel):
    """`CopyBlocks` on a generated module."""

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        check_copy_blocks(self.spec, k_cache, v_cache, pairs, scales)
        with self._device(k_cache):
            self._launch(k_cache, v_cache, pairs, *_by_token(self.spec, scales))


class _TritonStageBlocks(TritonKernel):
    def _stage(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        scales: KVScales | None,
    ) -> None:
        with self._device(k_cache):
            self._launch(k_cache, v_cache, blocks, staging, *_by_token(self.spec, scales))


class TritonGatherBlocks(_TritonStageBlocks):
    """`GatherBlocks` on a generated module."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        check_gather_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        self._stage(k_cache, v_cache, blocks, staging, scales)


class TritonScatterBlocks(_TritonStageBlocks):
    """`ScatterBlocks` on a generated module."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        check_scatter_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        self._stage(k_cache, v_cache, blocks, staging, scales)


AnyTritonKernel = TritonAttend | TritonWriteKV | TritonCopyBlocks | TritonGatherBlocks | TritonScatterBlocks
TRITON_KERNELS: dict[Op, type[AnyTritonKernel]] = {
    Op.ATTEND: TritonAttend,
    Op.WRITE_KV: TritonWriteKV,
    Op.COPY_BLOCKS: TritonCopyBlocks,
    Op.GATHER_BLOCKS: TritonGatherBlocks,
    Op.SCATTER_BLOCKS: TritonScatterBlocks,
}


# --- interpreting ----------------------------------------------------------------------------------------------------


class Interpreter:
    """A worker process that runs generated modules under Triton's interpreter, on CPU tensors.

    Kernels that it loads raise CheckError with the worker's last line when a kernel fails there. Triton 3.6 interprets
    with numpy below 2.4 only.
    """

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_interpret, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def load(
        self, text: str, key: str, spec: KernelSpec, op: Op, config: Mapping[str, Any]
    ) -> AnyTritonKernel:
        """The counterpart of the function `load`."""
        return TRITON_KERNELS[op](spec, config, functools.partial(self._run, text, key, COMPUTED[op]))

    def _run(self, text: str, key: str, computed: frozenset[str], *arguments: object) -> None:
        try:
            self._connection.send((text, key, computed, arguments))  # moves tensors into shared memory: the worker writes in place
            failure: str | None = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise CheckError(f"the interpreting process died (exit status {self._process.exitcode})") from None
        if failure:
            raise CheckError(f"the interpreted kernel failed: {failure.splitlines()[-1]}") from RuntimeError(failure)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid or 0

    def close(self) -> None:
        """Ends the worker."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _interpret(connection: Any) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton's first import, and in this process only
    torch.set_num_threads(1)
    import triton._utils

    triton._utils.TRITON_MAX_TENSOR_NUMEL = 1 << 24  # the compiler's limit, which sums without a dot exceed only here
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, about infinities and NaN, which are meant
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            text, key, computed, arguments = connection.recv()
        except EOFError:
            return
        try:
            if key not in modules:
                modules[key] = _module(text, key)
            _launch_rounded(modules[key].launch, computed, arguments)
            connection.send(None)
        except Exception:  # noqa: BLE001 - whatever a kernel raises is the caller's to see
            connection.send(traceback.format_exc())


# What an op may compute rather than move. The interpreter's stores truncate to bf16, so there it goes through fp32.
COMPUTED = {
    Op.ATTEND: frozenset(("out",)),
    Op.WRITE_KV: frozenset(("k_cache", "v_cache", "q_out")),
    Op.COPY_BLOCKS: frozenset[str](),
    Op.GATHER_BLOCKS: frozenset[str](),
    Op.SCATTER_BLOCKS: frozenset[str](),
}


def _launch_rounded(launch: Launch, computed: frozenset[str], arguments: tuple[Any, ...]) -> None:
    """Launches; bf16 tensors among the parameters `computed` are replaced by fp32 ones, and rounded afterwards."""
    exact = list(arguments)
    for index, name in enumerate(inspect.signature(launch).parameters):
        if name in computed and arguments[index].dtype == torch.bfloat16:
            exact[index] = arguments[index].float()
    launch(*exact)
    changed = [(old, new, new.view(torch.int32) != old.float().view(torch.int32)) for old, new in zip(arguments, exact, strict=True) if new is not old]
    for old, new, where in changed:  # what was not written keeps its bits, those of a NaN too; V may lie inside K
        old[where] = new[where].to(old.dtype)


# --- compiling for an absent GPU -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledTriton:
    """One binary that a launcher would run: `decode`, `split`, `merge`, `prefill`, or the op's name."""

    name: str
    target: Target
    num_warps: int
    shared_memory: int  # bytes
    assembly: str  # PTX or AMDGCN
    binary: bytes  # cubin or hsaco

    @property
    def threads(self) -> int:
        """Threads of one program."""
        return self.num_warps * self.target.warp_size


def compile_for(source: Source) -> tuple[CompiledTriton, ...]:
    """Compiles what the launcher would launch on typical batches, for the source's target, present or not.

    The launcher itself runs, on meta tensors, with its kernels replaced by recorders; so what is compiled (types,
    alignment, constants) is what Triton would compile on the device. Raises BuildError with the compiler's words.
    """
    made_of = source.variant
    compiled: dict[tuple[object, ...], CompiledTriton] = {}
    for name, arguments in _typical_calls(made_of.spec, made_of.template.op):
        for call in _record(_module(source.text, source.key), arguments):
            if call.identity not in compiled:
                compiled[call.identity] = compile_call("merge" if call.kernel.__name__ == "merge" else name, call, made_of.target)
    return tuple(compiled.values())


def attend_calls(source: Source, batches: Sequence[tuple[int, int, int]]) -> list[list[KernelCall]]:
    """The kernels, with their grids, that an attend's launcher would launch for each (tokens, sequences, context); not compiled.

    `context` is that of the longest sequence, without a shared prefix.
    """
    module, spec = _module(source.text, source.key), source.variant.spec
    return [_record(module, _attend_arguments(spec, *batch)) for batch in batches]


TYPICAL_BATCHES = (  # name, tokens, sequences, context, of it a shared prefix
    ("decode", 4096, 4096, 128, 0),
    ("split", 1, 1, 8192, 0),
    ("prefill", 8192, 4, 2048, 0),
)


def _typical_calls(spec: KernelSpec, op: Op) -> Iterator[tuple[str, tuple[Any, ...]]]:
    k_cache, v_cache = allocate_cache(spec, 64, "meta")
    scales = allocate_scales(spec, 64, "meta")
    dtype = TORCH_DTYPES[spec.dtype]
    if op is Op.WRITE_KV:
        computed = spec.rope is not None or spec.cache_dtype.quantised
        k = _meta((64, spec.kv_heads, spec.head_dim), dtype if computed else k_cache.dtype)
        v = _meta((64, spec.kv_heads, spec.dim_v), k.dtype)
        extras: list[torch.Tensor | float] = [*_given(scales)]
        if spec.rotary_dim is not None:
            q = _meta((64, spec.q_heads, spec.head_dim), dtype)
            extras += [q, q, _meta((64,), torch.int64), _meta((4096, spec.rotary_dim), torch.float32)]
        if spec.qk_norm:
            weight = _meta((spec.head_dim,), torch.float32)
            extras += [weight, weight, 1e-6]
        yield op.value, (k, v, k_cache, v_cache, _meta((64,), torch.int64), *extras)
    elif op is Op.COPY_BLOCKS:
        yield op.value, (k_cache, v_cache, _meta((4, 2), torch.int64), *_by_token(spec, scales))
    elif op in (Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS):
        staging = _meta((4, block_bytes(spec)), torch.uint8)
        yield op.value, (k_cache, v_cache, _meta((4,), torch.int64), staging, *_by_token(spec, scales))
    else:
        for name, tokens, seqs, context, prefix in TYPICAL_BATCHES:
            yield name, _attend_arguments(spec, tokens, seqs, context, prefix)


def _attend_arguments(spec: KernelSpec, tokens: int, seqs: int, context: int, prefix: int = 0) -> tuple[Any, ...]:
    k_cache, v_cache = allocate_cache(spec, 64, "meta")
    q, out = (_meta((tokens, spec.q_heads, dim), TORCH_DTYPES[spec.dtype]) for dim in (spec.head_dim, spec.dim_v))
    lse = _meta((tokens, spec.q_heads), torch.float32) if spec.lse else None
    table = _meta((seqs, -(-context // spec.block_size)), torch.int32)
    lens, starts = _meta((seqs,), torch.int32), _meta((seqs + 1,), torch.int32)
    heads = (_meta((spec.q_heads,), torch.float32) if wanted else None for wanted in (spec.alibi, spec.sinks))
    mask = _meta((tokens, 32), torch.uint8) if spec.mask else None
    shared, extras = prefix // spec.block_size * spec.block_size, _given(allocate_scales(spec, 64, "meta"), *heads, mask)
    return (out, q, k_cache, v_cache, table, lens, starts, spec.softmax_scale, lse, shared, *extras)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """A recorded kernel call, as Triton's own specialisation would see it."""

    kernel: Any
    grid: tuple[int, ...]
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[int, ...]  # positions of arguments that are multiples of 16
    options: Mapping[str, Any]

    @property
    def program(self) -> tuple[object, ...]:
        """What tells a module's binaries apart, but for what strides that depend on a batch happen to be multiples of."""
        return (self.kernel.__name__, *map(tuple, (self.signature.items(), self.constants.items())))

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells a module's binaries apart."""
        return (*self.program, self.aligned)


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorder:
    """Stands for a kernel: `kernel[grid](...)` is noted, not run."""

    kernel: Any
    calls: list[KernelCall]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._note, grid)

    def _note(self, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        names = self.kernel.arg_names
        values = dict(zip(names, arguments, strict=False)) | {n: keywords.pop(n) for n in list(keywords) if n in names}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: list[int] = []
        for parameter in self.kernel.params:
            value, specialised = values[parameter.name], not parameter.do_not_specialize
            kind = _kind(value)
            if parameter.is_constexpr or value is None or (kind.startswith("i") and value == 1 and specialised):
                kind, constants[parameter.name] = "constexpr", value
            elif (_offset(value) if kind.startswith("*") else value if kind.startswith("i") and specialised else 1) % 16 == 0:
                aligned.append(parameter.num)
            signature[parameter.name] = kind
        self.calls.append(KernelCall(self.kernel, grid, signature, constants, tuple(aligned), keywords))


_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def _offset(tensor: torch.Tensor) -> int:
    """Bytes from the start of its memory, which allocators align to far more than 16 bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _record(module: ModuleType, arguments: tuple[Any, ...]) -> list[KernelCall]:
    from triton.runtime.jit import JITFunction

    calls: list[KernelCall] = []
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    try:
        vars(module).update({name: _Recorder(kernel, calls) for name, kernel in kernels.items()})
        module.launch(*arguments)
    finally:
        vars(module).update(kernels)  # they call each other when they are compiled
    return calls


def compile_call(name: str, call: KernelCall, target: Target) -> CompiledTriton:
    """Compiles a recorded call for a target, present or not. Raises BuildError with the compiler's words."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(position,): [["tt.divisibility", 16]] for position in call.aligned}
    arch = int(target.arch.removeprefix("sm_")) if target.kind == "cuda" else target.arch
    said = io.StringIO()  # Triton prints an assembler's complaint on stdout, where a program reads our JSON
    try:
        with triton.knobs.cache.scope(), contextlib.redirect_stdout(said):
            triton.knobs.cache.dir = str(kernel_cache() / "triton")
            result = triton.compile(
                ASTSource(call.kernel, dict(call.signature), dict(call.constants), attributes),
                target=GPUTarget(target.kind, arch, target.warp_size),
                options=dict(call.options),
            )
    except (triton.TritonError, RuntimeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BuildError(f"triton cannot compile {name} for {target.name}: {first.strip()}; see the log with --debug", f"{error}\n{said.getvalue()}") from error
    print(said.getvalue(), end="", file=sys.stderr)  # what TRITON_* variables ask for
    text, binary = ("ptx", "cubin") if target.kind == "cuda" else ("amdgcn", "hsaco")
    return CompiledTriton(
        name, target, result.metadata.num_warps, result.metadata.shared, result.asm[text], result.asm[binary]
    )
