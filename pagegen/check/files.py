"""Cases as the files that the driver reads (templates/cpp/driver.c.jinja says what they hold), and its results read back."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ..abi import ABI_VERSION, AttendArgs, CopyBlocksArgs, WriteKVArgs, cache_strides
from ..spec import KernelSpec, KVScale, Op
from ..transfer import GatherBlocksArgs, RelayoutArgs, ScatterBlocksArgs
from .case import Case, Fault
from .pool import Tensors
from .tensors import SCALE_NAMES, flat, materialise, outputs_of, views_of

RUNS = 2  # of every case: on the workspace as it was left, and on a fresh one
FAR_ELEMENTS = 1 << 32  # where the upper half of a far cache's blocks begins
FAR_IDS = 1 << 13  # a far cache has so many blocks for each that is mapped: ids of 16 bits do not suffice

ARGS: dict[Op, type[ctypes.Structure]] = {
    Op.ATTEND: AttendArgs,
    Op.WRITE_KV: WriteKVArgs,
    Op.COPY_BLOCKS: CopyBlocksArgs,
    Op.GATHER_BLOCKS: GatherBlocksArgs,
    Op.SCATTER_BLOCKS: ScatterBlocksArgs,
    Op.RELAYOUT: RelayoutArgs,
}


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


# --- results ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What the driver wrote about one run of a case."""

    status: int
    workspace_bytes: int
    outputs: Tensors


def read_runs(prepared: PreparedCases, results: bytes) -> Iterator[tuple[Case, list[Run]]]:
    """Every case with its RUNS runs, from the driver's file of results."""
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
            runs.append(Run(status, workspace_bytes, outputs))
        yield case, runs


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
