"""Runs C++ libraries on cases in a process of its own, through the generated driver of templates/cpp/driver.c.jinja.

A crash, a hang or a write out of bounds is thereby an outcome with the case's name, and a guilty kernel cannot harm the
process that judges it. This module writes the driver's files and reads them; the template says what they hold.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ..build.cpp import compile_program, emulator
from ..errors import CheckError
from ..kernel import ABI_VERSION, AttendArgs, CopyBlocksArgs, WriteKVArgs, cache_strides
from ..records import Status
from ..render import environment
from ..spec import KernelSpec, KVScale, Op
from ..target import Target
from ..transfer import GatherBlocksArgs, RelayoutArgs, ScatterBlocksArgs
from .case import Case, Fault
from .compare import CheckReport, Failure, Verdicts
from .pool import Tensors
from .tensors import SCALE_NAMES, flat, materialise, outputs_of, views_of

RUNS = 2  # of every case: on the workspace as it was left, and on a fresh one
TIMEOUT = 60.0  # seconds for a whole suite; it takes well under one
FAR_ELEMENTS = 1 << 32  # where the upper half of a far cache's blocks begins
FAR_IDS = 1 << 13  # a far cache has so many blocks for each that is mapped: ids of 16 bits do not suffice
WROTE_OUTSIDE, OUT_OF_RESOURCES = 1000, 71  # as in the driver

ARGS: dict[Op, type[ctypes.Structure]] = {
    Op.ATTEND: AttendArgs,
    Op.WRITE_KV: WriteKVArgs,
    Op.COPY_BLOCKS: CopyBlocksArgs,
    Op.GATHER_BLOCKS: GatherBlocksArgs,
    Op.SCATTER_BLOCKS: ScatterBlocksArgs,
    Op.RELAYOUT: RelayoutArgs,
}


@functools.cache
def driver_text(op: Op, *, linked: bool = False) -> str:
    """The driver's C text; `linked` makes one to be linked with a kernel instead of opening a library."""
    return environment().get_template("cpp/driver.c.jinja").render(op=op.value, linked=linked)


# --- cases to a file -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory that fields of the args struct point to; block i of a far cache begins `stride` elements after i - 1."""

    field: str
    tensor: torch.Tensor
    writable: bool
    also: str | None = None  # a second field: of a view that begins where this begins
    stride: int | None = None

    def segments(self) -> list[torch.Tensor]:
        """What is mapped, each as one dimension."""
        if self.stride is None:
            return [flat(self.tensor)]
        return [flat(block) for block in self.tensor]

    def offsets(self) -> list[int]:
        """Where each segment begins, in bytes."""
        return [i * (self.stride or 0) * self.tensor.element_size() for i in range(len(self.segments()))]


class PreparedCases:
    """Cases as the driver's file, written once for all candidates of a spec; removed with this object."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = tuple(cases)
        self._folder = tempfile.TemporaryDirectory(prefix="pagegen-check-")
        self.path = Path(self._folder.name) / "cases"
        self.outputs: list[list[_Buffer]] = []
        with self.path.open("wb") as file:
            file.write(struct.pack("2Q", ABI_VERSION, len(self.cases)))
            for case in self.cases:
                self.outputs.append(_write_case(file, case))


@functools.lru_cache(maxsize=4)
def prepare(cases: tuple[Case, ...]) -> PreparedCases:
    """`PreparedCases`, kept for the next candidate."""
    return PreparedCases(cases)


def _write_case(file: BinaryIO, case: Case) -> list[_Buffer]:
    tensors, kind = materialise(case), ARGS[case.op]
    fields = _fields(case, tensors)
    strides = _far_strides(case, tensors) if case.far else {}
    if case.far:
        fields |= _far_fields(fields, strides)
        _spread_ids(case, tensors)
    if case.fault is Fault.PREFIX_TOO_LONG:
        fields["shared_prefix_len"] = (max(case.context_lens) // case.spec.block_size + 1) * case.spec.block_size
    size = ctypes.sizeof(kind) - 8 * (case.fault is Fault.ARGS_SIZE)
    args = bytes(kind(size=size, num_threads=case.threads, **fields))
    views = {of: view for view, of in views_of(case).items() if view in tensors}
    written = {*outputs_of(case)}
    written |= {of for of, view in views.items() if view in written}
    buffers = [
        _Buffer(name, tensor, name in written, views.get(name), strides.get(name))
        for name, tensor in tensors.items()
        if name not in views.values()
    ]
    file.write(struct.pack("3Q", 1 + len(buffers), RUNS, case.fault is Fault.WORKSPACE))
    file.write(struct.pack("7Q", 0, 0, len(args), 0, 1, 0, len(args)))
    for buffer in buffers:
        sizes = [segment.nbytes for segment in buffer.segments()]
        spans = list(zip(buffer.offsets(), sizes, strict=True))
        field, also = (getattr(kind, name).offset if name else 0 for name in (buffer.field, buffer.also))
        file.write(struct.pack("5Q", field, also, sum(spans[-1]) if spans else 0, buffer.writable, len(spans)))
        file.writelines(struct.pack("2Q", *span) for span in spans)
    file.write(args)
    for buffer in buffers:
        file.writelines(segment.view(torch.uint8).numpy().data for segment in buffer.segments())
    file.write(bytes(-file.tell() % 8))
    return [buffer for buffer in buffers if buffer.writable]


# --- far caches: few blocks are mapped, many bytes apart, under ids with gaps ----------------------------------------


def _far_strides(case: Case, tensors: Tensors) -> dict[str, int]:
    """Elements from a mapped block to the next, of every tensor whose first dimension is the block."""
    names = ["k_cache", "v_cache", "source_k", "source_v"]
    if case.spec.kv_scale is KVScale.TOKEN_HEAD:
        names += [prefix + name for prefix in ("", "source_") for name in SCALE_NAMES]
    return {name: _far_stride(tensors[name]) for name in names if name in tensors}


def _far_stride(cache: torch.Tensor) -> int:
    """Whole pages, and the upper half of the blocks lies past FAR_ELEMENTS."""
    return -(-FAR_ELEMENTS // max(1, cache.shape[0] // 2) // 65536) * 65536


def _far_fields(fields: Mapping[str, int | float], strides: Mapping[str, int]) -> dict[str, int | float]:
    """The args struct's block strides and numbers of blocks, for ids that are FAR_IDS times as many."""
    far: dict[str, int | float] = {
        f"{name.removesuffix('_cache')}_stride_block": stride // FAR_IDS for name, stride in strides.items() if "zero" not in name
    }
    return far | {name: fields[name] * FAR_IDS for name in ("num_blocks", "source_num_blocks") if name in fields}


def _spread_ids(case: Case, tensors: Tensors) -> None:
    """Renames block i to i * FAR_IDS wherever it is meant; what names no block stays."""
    match case.op:
        case Op.ATTEND:
            table = tensors["block_table"]
            table[(table >= 0) & (table < tensors["k_cache"].shape[0])] *= FAR_IDS
        case Op.WRITE_KV:
            _spread_slots(tensors["slot_mapping"], case.spec)
        case Op.RELAYOUT:
            _spread_slots(tensors["slots"][:, 0], case.source or case.spec)
            _spread_slots(tensors["slots"][:, 1], case.spec)
        case Op.COPY_BLOCKS:
            tensors["pairs"] *= FAR_IDS
        case Op.GATHER_BLOCKS | Op.SCATTER_BLOCKS:
            tensors["blocks"] *= FAR_IDS


def _spread_slots(slots: torch.Tensor, spec: KernelSpec) -> None:
    size = spec.block_size
    slots += torch.where(slots >= 0, slots // size * (FAR_IDS - 1) * size, 0)


# --- the args struct's numbers ---------------------------------------------------------------------------------------


def _fields(case: Case, tensors: Tensors) -> dict[str, int | float]:
    """Counts and strides; pointers are the driver's."""
    fields = _cache_fields(case.spec, tensors, "", ("k_cache", "v_cache"))
    match case.op:
        case Op.ATTEND:
            table = tensors["block_table"]
            fields |= {"num_tokens": tensors["q"].shape[0], "num_seqs": table.shape[0], "table_width": table.shape[1]}
            fields |= {"block_table_stride": table.stride(0), "shared_prefix_len": case.shared_prefix_len}
            fields |= {"scale": case.spec.softmax_scale if case.scale is None else case.scale}
            if "mask" in tensors:
                fields |= {"mask_stride_token": tensors["mask"].stride(0), "mask_width": tensors["mask"].shape[1]}
            rows = {"q": "q", "out": "out", "lse": "lse"}
        case Op.WRITE_KV:
            fields |= {"num_tokens": tensors["k"].shape[0]}
            rows = {"k": "src_k", "v": "src_v", "q": "q", "q_out": "q_out"}
            if "cos_sin" in tensors:
                table = tensors["cos_sin"]
                fields |= {"cos_sin_stride": table.stride(0), "max_positions": table.shape[0], "eps": 1e-6}
        case Op.RELAYOUT:
            source = case.source or case.spec
            fields |= _cache_fields(source, tensors, "source_", ("source_k", "source_v"))
            fields |= {"num_pairs": tensors["slots"].shape[0]}
            fields |= {"source_block_size": source.block_size, "source_x": source.kv_layout.x}
            rows = {}
        case Op.COPY_BLOCKS:
            fields, rows = fields | {"num_pairs": tensors["pairs"].shape[0]}, {}
        case Op.GATHER_BLOCKS | Op.SCATTER_BLOCKS:
            staging, rows = tensors["staging"], {}
            fields |= {"num_rows": staging.shape[0], "staging_stride": staging.stride(0)}
    for name, prefix in rows.items():
        if name in tensors:
            fields |= {f"{prefix}_stride_token": tensors[name].stride(0), f"{prefix}_stride_head": tensors[name].stride(1)}
    return fields


def _cache_fields(spec: KernelSpec, tensors: Tensors, prefix: str, names: tuple[str, str]) -> dict[str, int | float]:
    k_cache, v_cache = (tensors[name] for name in names)
    fields: dict[str, int | float] = {f"{prefix}num_blocks": k_cache.shape[0]}
    axes = [f"{prefix}{letter}_stride_{what}" for letter in "kv" for what in ("block", "token", "head", "dim")]
    fields |= dict(zip(axes, cache_strides(spec.kv_layout, k_cache, v_cache), strict=True))
    for letter in "kv":
        name = f"{prefix}{letter}_scale"
        if spec.kv_scale is KVScale.TOKEN_HEAD:
            fields |= {f"{name}_stride_{what}": n for what, n in zip(("block", "token", "head"), tensors[name].stride(), strict=True)}
        elif spec.kv_scale is KVScale.HEAD:
            fields[f"{name}_stride_head"] = tensors[name].stride(0)
    return fields


# --- running ---------------------------------------------------------------------------------------------------------


def run_library(
    library: Path, op: Op, target: Target, cases: Sequence[Case], timeout: float
) -> CheckReport:
    """See `pagegen.check.check_library`."""
    prepared = prepare(tuple(case for case in cases if case.op is op))
    ending = _execute(_Program(compile_program(driver_text(op), target), target, library), prepared, timeout)
    return _report(prepared, ending)


def library_outputs(
    library: Path, op: Op, target: Target, cases: Sequence[Case], timeout: float = TIMEOUT
) -> list[Tensors] | CheckReport:
    """What a library writes in the first run of each case, in the geometry of `materialise`; or how it ended instead."""
    prepared = prepare(tuple(cases))
    ending = _execute(_Program(compile_program(driver_text(op), target), target, library), prepared, timeout)
    if ending.results is None:
        return _report(prepared, ending)
    return [runs[0].outputs for _, runs in _runs(prepared, ending.results)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A driver, for the target it was built for; without a library the kernel is linked into it."""

    path: Path
    target: Target
    library: Path | None = None

    @property
    def command(self) -> list[str]:
        return [*emulator(self.target), str(self.path), *([str(self.library)] if self.library else [])]


@dataclasses.dataclass(frozen=True, slots=True)
class _Ending:
    """How the driver ended: with the results of all cases, or with a status, where, and why."""

    results: bytes | None
    status: Status = Status.PASSED
    reached: Case | None = None
    message: str = ""


def _execute(program: _Program, prepared: PreparedCases, timeout: float) -> _Ending:
    with tempfile.TemporaryDirectory(prefix="pagegen-check-") as folder:
        results = Path(folder) / "results"
        command = [*program.command, str(prepared.path), str(results)]
        try:
            done = subprocess.run(command, env=_environment(), capture_output=True, timeout=timeout, check=False, cwd=folder)
        except subprocess.TimeoutExpired as error:
            message = f"no answer within {timeout:g} s for the suite"
            return _Ending(None, Status.TIMEOUT, _reached(prepared, error.stdout), message)
        said = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        if done.returncode == OUT_OF_RESOURCES:
            raise CheckError(f"the check driver lacks memory or disk ({said}); free some, or point TMPDIR to a larger disk")
        if done.returncode == 0 and done.stdout.endswith(b"done\n"):
            return _Ending(results.read_bytes())
        message = _ending(done.returncode) + (f" after saying: {said}" if said else "")
        return _Ending(None, Status.RUN_ERROR, _reached(prepared, done.stdout), message)


def _report(prepared: PreparedCases, ending: _Ending) -> CheckReport:
    if ending.results is not None:
        return CheckReport.of(len(prepared.cases), _judge(prepared, ending.results))
    failures = [Failure(ending.reached, ending.message)] if ending.reached else []
    return CheckReport.of(len(prepared.cases), failures, ending.status)


def _ending(code: int) -> str:
    if code < 0:
        known = -code in set(signal.Signals)
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended the process with status {code}"


def _environment() -> dict[str, str]:
    """This process's, with OpenMP's own variables replaced: a user's settings must not decide a verdict."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_DYNAMIC": "false", "OMP_WAIT_POLICY": "passive", "LC_ALL": "C"}


def _reached(prepared: PreparedCases, stdout: bytes | None) -> Case:
    told = re.findall(rb"^case (\d+) run \d+$", stdout or b"", re.MULTILINE)
    return prepared.cases[int(told[-1]) if told else 0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """What the driver wrote about one run of a case."""

    status: int
    workspace_bytes: int
    outputs: Tensors


def _runs(prepared: PreparedCases, results: bytes) -> Iterator[tuple[Case, list[_Run]]]:
    at = 0
    for case, buffers in zip(prepared.cases, prepared.outputs, strict=True):
        runs = []
        for _ in range(RUNS):
            status, workspace_bytes = struct.unpack_from("2q", results, at)
            at += 16
            outputs: Tensors = {}
            for buffer in buffers if status == 0 else ():
                name = "q_out" if case.in_place and buffer.field == "q" else buffer.field
                outputs[name] = _read(buffer, results, at)
                at += sum(segment.nbytes for segment in buffer.segments())
            runs.append(_Run(status, workspace_bytes, outputs))
        yield case, runs


def _judge(prepared: PreparedCases, results: bytes) -> Iterator[Failure]:
    verdicts = Verdicts(prepared.cases)
    for case, runs in _runs(prepared, results):
        messages = [_verdict(case, run, verdicts) for run in runs]
        if not any(messages) and any(not torch.equal(*(flat(run.outputs[name]).view(torch.uint8) for run in runs)) for name in runs[0].outputs):
            messages[1] = "gives other bits than the run before"
        wrong = next((index for index, message in enumerate(messages) if message), None)
        if wrong is not None:
            where = ("a used", "a fresh")[wrong % 2] + " workspace" if case.op is Op.ATTEND else f"run {wrong}"
            yield Failure(case, f"{messages[wrong]}" + ("" if all(messages) else f" (with {where} only)"))


def _read(buffer: _Buffer, results: bytes, at: int) -> torch.Tensor:
    """An output in the geometry of `materialise`."""
    room = flat(buffer.tensor).clone()
    made = room.as_strided(buffer.tensor.shape, buffer.tensor.stride())
    targets = [room] if buffer.stride is None else [flat(block) for block in made]
    for target in targets:
        if target.nbytes:
            target.copy_(torch.frombuffer(bytearray(results[at : at + target.nbytes]), dtype=target.dtype))
        at += target.nbytes
    return made


def _verdict(case: Case, run: _Run, verdicts: Verdicts) -> str | None:
    if run.status == WROTE_OUTSIDE:
        return "wrote outside its tensors or its workspace"
    wanted = case.fault.status if case.fault else 0
    if case.fault is Fault.WORKSPACE and run.workspace_bytes == 0:
        wanted = 0  # a kernel without workspace cannot be given too little
    if run.status != wanted:
        return f"answered status {run.status}, expected {wanted} (see templates/cpp/abi.h)"
    return None if case.fault else verdicts.of(case, run.outputs)
