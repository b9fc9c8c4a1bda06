"""What a kernel package does when it is used: refuse other hardware, verify, rebuild what is missing, dispatch.

Vendored into every kernel package, where it sits one folder below the package and finds everything it needs beside
itself; it never writes there. What it rebuilds or remembers goes to the user's cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, cast

import torch

from .abi import ABI_VERSION
from .build import cpp
from .check.compare import check_kernels
from .errors import BuildError, ConfigError, PackageError, SpecError, UntunedShapeWarning
from .kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    Attend,
    AttendExtras,
    CopyBlocks,
    KVScales,
    WriteExtras,
    WriteKV,
)
from .paths import cache_dir, write_atomic
from .records import BatchShape, DispatchTable
from .spec import PAGED_OPS, KernelSpec, Op, Phase, parse_slug
from .target import Fingerprint, Target, detect, detect_gpu, hardware_fingerprint, is_present, is_same, parse_target
from .transfer import AnyKernel

FORMAT = 1
MANIFEST = "manifest.json"
FIELDS: Mapping[str, type] = {
    **{name: int for name in ("format", "abi")},
    **{name: str for name in ("name", "version", "pagegen", "created", "target")},
    **{name: dict for name in ("spec", "fingerprint", "kernels", "dispatch", "files", "evidence")},
}
KERNEL_FIELDS: Mapping[str, type | UnionType] = {
    **{name: str for name in ("op", "language", "template", "key", "source")},
    "config": dict,
    "binary": str | None,
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the package in `folder`. Raises PackageError unless it is one of format 1."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        inside = sorted(str(each.parent) for each in folder.glob(f"*/{MANIFEST}"))[:1]
        wanted = f"name {inside[0]}, which lies in it" if inside else "name a folder that `pagegen tune` wrote"
        raise PackageError(f"{folder} is no kernel package: {MANIFEST} cannot be read ({error.strerror}); {wanted}") from None
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{folder / MANIFEST} is damaged ({error}); make the package again with `pagegen tune`") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise PackageError(
            f"package {folder.name} has format {version!r}, this code reads format {FORMAT}; "
            "make the package again with `pagegen tune`, or use the pagegen that wrote it"
        )
    fault = _fault(manifest)
    if fault:
        raise PackageError(f"{folder / MANIFEST} is damaged ({fault}); make the package again with `pagegen tune`")
    return cast(dict[str, Any], manifest)


def _fault(manifest: Mapping[str, Any]) -> str | None:
    """What in a manifest is not as format 1 has it; the spec and the dispatch tables are left to their own readers."""
    for name, kind in FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            return f"{name!r} is missing or is no {kind.__name__}"
    if not isinstance(manifest.get("max_blocks", 1), int):
        return "'max_blocks' is no int"
    for name in ("hardware", "toolchain"):
        if not isinstance(manifest["fingerprint"].get(name), dict):
            return f"fingerprint has no {name!r}"
    for name, entry in manifest["kernels"].items():
        fields = entry if isinstance(entry, dict) else {}
        wrong = [field for field, kind in KERNEL_FIELDS.items() if field not in fields or not isinstance(fields[field], kind)]
        if wrong:
            return f"kernel {name!r}: {wrong[0]!r} is missing or of another type"
        if entry["op"] not in PAGED_OPS or entry["language"] not in ("cpp", "triton"):
            return f"kernel {name!r}: op {entry['op']!r} in {entry['language']!r} is not known"
    return None


def toolchain(target: Target) -> dict[str, Any]:
    """The toolchain half of a fingerprint. A missing C++ compiler is a None: binaries run without one.

    Raises BuildError if Triton, which GPU kernels do not run without, is missing.
    """
    if target.kind == "cpu":
        try:
            return cpp.toolchain()
        except BuildError:
            return {"compiler": None, "flags": " ".join(cpp.FLAGS), "torch": torch.__version__}
    if importlib.util.find_spec("triton") is None:
        raise BuildError(f"kernels for {target.name} are compiled by triton, which is not installed; pip install triton")
    from .build import triton

    return triton.toolchain()


def fingerprint(target: Target) -> Fingerprint:
    """Both halves for `target`, which must be present on this machine."""
    return Fingerprint(hardware_fingerprint(target), toolchain(target))


def tune_command(spec: KernelSpec, target: Target, folder: Path) -> str:
    """The command that makes a package for `spec` on this machine."""
    try:
        word = spec.slug if parse_slug(spec.slug)[0] == spec else str(folder / "spec.json")
    except SpecError:  # the slug has a hash where its grammar lacks words
        word = str(folder / "spec.json")
    return f"pagegen tune {word} --target {target.name if is_present(target) else 'auto'}"


@dataclasses.dataclass(frozen=True, slots=True)
class OpKernels:
    """`PagedKernels` made of one loaded kernel an op."""

    spec: KernelSpec
    attend: Attend
    write_kv: WriteKV
    copy_blocks: CopyBlocks


def _longest(context_lens: torch.Tensor) -> int | None:
    """The longest context of a batch on the CPU; None for what no kernel accepts, and on a GPU, where a look would wait for it."""
    if not context_lens.is_cpu or context_lens.dtype != torch.int32 or context_lens.dim() != 1:
        return None
    lens: list[int] = context_lens.tolist()  # torch's own maximum takes longer for the few sequences of a batch that is done soon
    return max(lens) if lens else 0


class PackagedKernels:
    """`PagedKernels` on a package folder: `attend` picks the kernel that was measured best for the batch at hand.

    Construction reads the manifest only. The first call (or `prepare`) refuses foreign hardware, loads every kernel
    and, under a toolchain other than the one the package was made with, proves them again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.name: str = self.manifest["name"]
        self.spec = KernelSpec.from_dict(self.manifest["spec"])
        self.target = parse_target(self.manifest["target"])
        self.max_blocks: int | None = self.manifest.get("max_blocks")
        self.dispatch = {op: self._table(op) for op in PAGED_OPS}
        self._lock = threading.Lock()
        self._loaded: dict[str, AnyKernel] | None = None
        self._last: tuple[object, Attend | None] = (None, None)  # the batch that was asked for last, and its kernel
        self._told: set[tuple[Phase, tuple[str, ...]]] = set()  # ways of being outside the table that were warned of

    def _table(self, op: Op) -> DispatchTable:
        table, kernels = DispatchTable.from_dict(self.manifest["dispatch"].get(op.value, {})), self.manifest["kernels"]
        for name in (table.fallback, *(row.kernel for row in table.rows)):
            if not isinstance(name, str) or name not in kernels or kernels[name]["op"] != op.value:
                raise PackageError(
                    f"package {self.name}: the dispatch table of {op.value} names {name!r}, which is not among its kernels; "
                    "make the package again with `pagegen tune`"
                )
        if self.spec.deterministic and not table.is_uniform:
            raise PackageError(
                f"package {self.name}: its spec is deterministic, and the dispatch table of {op.value} gives batches different "
                "kernels; make the package again with `pagegen tune`"
            )
        return table

    @property
    def device(self) -> str:
        """The torch device that it runs on."""
        return "cpu" if self.target.kind == "cpu" else "cuda"  # torch calls AMD's devices cuda, too

    # --- the three operations ----------------------------------------------------------------------------------------

    def attend(
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
        """Paged attention over a ragged batch; the shapes stand in `_pagegen/kernel.py`.

        The two maxima choose the kernel. A CPU batch that comes without `max_context_len` is read for it (microseconds); a
        GPU batch is not, since that would wait for the device, and gets the rows of the table without a bound on it.
        """
        if max_context_len is None:
            max_context_len = _longest(context_lens)
        # The layers of a step ask for the same batch: all but the first take its answer, for between two of them much of what
        # Python would touch here has left the processor's caches. A tensor's size says as much as its shape, in half the time.
        asked = (q.numel(), context_lens.numel(), k_cache.numel(), max_query_len, max_context_len)
        known, kernel = self._last
        if kernel is None or asked != known:
            self._require_room(k_cache)
            chosen = cast(Attend, self._kernels()[self._choose(q, context_lens, max_query_len, max_context_len)])
            kernel = chosen.__call__  # the method: an object that is called makes a dict of its arguments first
            self._last = asked, kernel
        kernel(
            out,
            q,
            k_cache,
            v_cache,
            block_table,
            context_lens,
            cu_seqlens_q,
            scale=scale,
            lse=lse,
            extras=extras,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )

    def _choose(
        self, q: torch.Tensor, context_lens: torch.Tensor, max_query_len: int | None, max_context_len: int | None
    ) -> str:
        table = self.dispatch[Op.ATTEND]
        if q.dim() != 3 or context_lens.dim() != 1 or context_lens.dtype != torch.int32:
            return table.fallback  # any kernel refuses these, and says why
        shape = BatchShape.of_batch(q.shape[0], context_lens.shape[0], max_query_len, max_context_len)
        row = table.find(shape)
        if row:
            return row.kernel
        if table.rows and q.shape[0]:
            self._warn_outside(table, shape)
        return table.fallback

    def _warn_outside(self, table: DispatchTable, shape: BatchShape) -> None:
        """Says once for each way of being outside that the untuned default serves; a call that has been told costs microseconds."""
        outside = table.outside(shape)
        if (shape.phase, outside) in self._told:
            return
        self._told.add((shape.phase, outside))
        context = "unknown" if shape.context is None else shape.context
        cure = "pass max_context_len" if shape.context is None else "tune for them with `pagegen tune --workload FILE`"
        warnings.warn(
            f"package {self.name}: a {shape.phase} batch (sequences {shape.seqs}, longest query {shape.query}, longest context "
            f"{context}) lies outside what was measured ({', '.join(outside)}); the untuned default serves such batches; {cure}",
            UntunedShapeWarning,
            stacklevel=4,
        )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        extras: WriteExtras = NO_WRITE_EXTRAS,
    ) -> None:
        """Scatters new keys and values into the cache."""
        self._require_room(k_cache)
        kernel = cast(WriteKV, self._kernels()[self.dispatch[Op.WRITE_KV].fallback])
        kernel(k, v, k_cache, v_cache, slot_mapping, extras=extras)

    def copy_blocks(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        """Copies whole blocks inside the cache."""
        self._require_room(k_cache)
        cast(CopyBlocks, self._kernels()[self.dispatch[Op.COPY_BLOCKS].fallback])(k_cache, v_cache, pairs, scales=scales)

    def _require_room(self, k_cache: torch.Tensor) -> None:
        if self.max_blocks is not None and k_cache.shape[0] > self.max_blocks:  # not len: torch's costs microseconds
            raise PackageError(
                f"package {self.name}: the cache has {k_cache.shape[0]} blocks, and indices are proven to fit up to {self.max_blocks} "
                "(max_blocks in its manifest); use fewer blocks, or larger ones"
            )

    def default_kernels(self) -> OpKernels:
        """The untuned default, which is every table's fallback: what a bench compares the winners with."""
        return self._with_attend(self.dispatch[Op.ATTEND].fallback, self._kernels())

    def attend_kernels(self) -> dict[str, OpKernels]:
        """Every kernel that `attend` may be served by, the default first, whatever batches it was chosen for."""
        return {name: self._with_attend(name, self._kernels()) for name in self.dispatch[Op.ATTEND].kernels}

    # --- getting ready -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Checks and loads everything now rather than in the first call.

        Raises PackageError for other hardware, a damaged file, or kernels that fail under this toolchain; BuildError
        or ConfigError if a missing binary cannot be rebuilt.
        """
        self._kernels()

    def _kernels(self) -> dict[str, AnyKernel]:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    if self.manifest["abi"] != ABI_VERSION:
                        raise PackageError(f"package {self.name} states C ABI {self.manifest['abi']}, its code has {ABI_VERSION}")
                    self.require_hardware()
                    here = Fingerprint({}, toolchain(self.target))
                    names = dict.fromkeys(name for table in self.dispatch.values() for name in table.kernels)
                    kernels = {name: self._load(name) for name in names}
                    self._verify(here, kernels)
                    self._loaded = kernels
        return self._loaded

    def require_hardware(self) -> None:
        """Raises PackageError naming both sides unless this is the hardware that the package was measured on.

        The instruction set is a matter of safety, the rest of the claim that these configs are the best here.
        """
        made: Mapping[str, Any] = self.manifest["fingerprint"]["hardware"]
        gpu = detect_gpu()
        if is_present(self.target):
            here = hardware_fingerprint(self.target)
        elif self.target.kind == "cpu":
            here = {"device": detect().device, "target": ", ".join(f"cpu:{isa}" for isa in detect().isa) or None}
        else:
            here = {"device": torch.cuda.get_device_name(0) if gpu else None, "target": gpu.name if gpu else None}
        apart = [field for field in made if not is_same(field, here.get(field, made[field]), made[field])]
        differing = [f"{field}: {made[field]!r} there, {here[field]!r} here" for field in apart]
        if differing:
            raise PackageError(
                f"package {self.name} was made for other hardware ({'; '.join(differing)}); make the right one with "
                f"`{tune_command(self.spec, self.target, self.folder)}`"
            )

    def _load(self, name: str) -> AnyKernel:
        entry = self.manifest["kernels"][name]
        op, text = Op(entry["op"]), self._verified(entry["source"]).read_text()
        if entry["language"] == "triton":
            from .build import triton

            return triton.load(text, entry["key"], self.spec, op, entry["config"])
        if entry["binary"] and (self.folder / entry["binary"]).exists():
            return cpp.load(self._verified(entry["binary"]), self.spec, op)
        return cpp.build(text, self.target, self.spec, op)

    def _verified(self, relative: str) -> Path:
        path = self.folder / relative
        cure = "delete it and it is rebuilt from its source" if path.suffix == ".so" else "install the package again"
        try:
            found = cpp.file_sha256(path)
        except OSError as error:
            raise PackageError(f"package {self.name}: {relative} cannot be read ({error.strerror}); install it again") from None
        if found != self.manifest["files"].get(relative):
            raise PackageError(f"package {self.name}: {relative} is not the file that the manifest states (SHA-256 differs); {cure}")
        return path

    def _with_attend(self, name: str, kernels: Mapping[str, Any]) -> OpKernels:
        write_kv, copy_blocks = (kernels[self.dispatch[op].fallback] for op in (Op.WRITE_KV, Op.COPY_BLOCKS))
        return OpKernels(self.spec, kernels[name], write_kv, copy_blocks)

    def _verify(self, here: Fingerprint, kernels: Mapping[str, Any]) -> None:
        """Runs the quick suite once for every toolchain that is not the one the package was made with."""
        made = Fingerprint({}, self.manifest["fingerprint"]["toolchain"])
        differing = made.differences(here)[1]
        if not differing:
            return
        record = self._record_of(here)
        if record and record.exists():
            return
        fallback, *winners = self.dispatch[Op.ATTEND].kernels
        for name, ops in ((fallback, PAGED_OPS), *((winner, (Op.ATTEND,)) for winner in winners)):
            report = check_kernels(self._with_attend(name, kernels), "quick", ops, device=self.device)
            if not report.passed:
                raise PackageError(
                    f"package {self.name} fails its checks under this toolchain ({'; '.join(differing)}: made with, here): "
                    f"{name}: {report.reason}; make a new one with `{tune_command(self.spec, self.target, self.folder)}`"
                )
        if record:
            write_atomic(record, json.dumps({"package": self.name, "toolchain": dict(here.toolchain)}, indent=1))

    def _record_of(self, here: Fingerprint) -> Path | None:
        """Where it is remembered that this very package passed under this toolchain; None if nothing can be written."""
        content = (self.folder / MANIFEST).read_bytes() + json.dumps(here.toolchain, sort_keys=True).encode()
        try:
            folder = cache_dir() / "verified"
            folder.mkdir(mode=0o700, exist_ok=True)
        except (ConfigError, OSError) as error:
            warnings.warn(f"package {self.name} proves itself again at every start: {error}", stacklevel=2)
            return None
        return folder / f"{self.name}-{hashlib.sha256(content).hexdigest()[:16]}.json"
