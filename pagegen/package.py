"""The kernel package: the winners as a folder that is an import package and installable by pip, without pagegen.

    <name>/  __init__.py  __main__.py  py.typed  manifest.json  spec.json  pyproject.toml  README.md
             sources/   rendered text, one file a kernel
             bin/       shared libraries (CPU); one that is missing is rebuilt from its source
             _pagegen/  the modules of pagegen that it runs on, word for word
             _build/    the PEP 517 backend of `pip install <folder>`

Everything but the manifest is listed in the manifest with its SHA-256: that proves integrity, not trust. Hence
`load_package` also wants the folder to belong to this user or root and to be writable by nobody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import jinja2
import torch

from pagegen import __version__, errors
from pagegen.abi import ABI_VERSION
from pagegen.build.cpp import file_sha256
from pagegen.catalog import variant
from pagegen.errors import PackageError, PagegenError, RenderError
from pagegen.explain import explain
from pagegen.kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    Attend,
    AttendExtras,
    CopyBlocks,
    KVScales,
    PagedKernels,
    WriteExtras,
    WriteKV,
)
from pagegen.loader import FORMAT, MANIFEST, OpKernels, fingerprint, read_manifest
from pagegen.offsets import max_blocks
from pagegen.paths import package_cache
from pagegen.records import DispatchTable
from pagegen.render import Source, environment, render
from pagegen.spec import PAGED_OPS, KernelSpec, Op, Phase
from pagegen.target import Fingerprint, Target, hardware_fingerprint, is_present, parse_target

VENDORED = (
    *("errors.py", "expression.py", "paths.py", "memory.py", "spec.py", "target.py", "space.py", "records.py", "kernel.py", "abi.py", "transfer.py", "reference.py"),
    *("build/cpp.py", "build/triton.py", "explain.py", "loader.py"),
    *(f"check/{name}.py" for name in ("case", "suite", "pool", "tensors", "tolerance", "compare")),
    *("tuning/machine.py", "tuning/measure.py", "tuning/workload.py", "tuning/baselines.py"),
)
RENDERED = {
    "pyproject.toml": "package/pyproject.toml.jinja",
    "README.md": "package/README.md.jinja",
    "__init__.py": "package/__init__.py.jinja",
    "__main__.py": "package/__main__.py.jinja",
    "_build/backend.py": "package/backend.py.jinja",
}
REQUIRES = {"cpu": ("torch>=2.11",), "cuda": ("torch>=2.11", "triton>=3.6"), "hip": ("torch>=2.11", "triton>=3.6")}
SUFFIXES = {"cpp": ".cpp", "triton": ".py"}


@dataclasses.dataclass(frozen=True, slots=True)
class Packaged:
    """A kernel to be packaged; without a binary it is built at first use."""

    source: Source
    binary: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPackage:
    """`PagedKernels` of a package on disk, checked and loaded."""

    spec: KernelSpec
    target: Target
    path: Path
    manifest: Mapping[str, Any]
    attend: Attend
    write_kv: WriteKV
    copy_blocks: CopyBlocks
    _default: PagedKernels

    @property
    def name(self) -> str:
        """The import name."""
        return cast(str, self.manifest["name"])

    def default_kernels(self) -> PagedKernels:
        """The untuned default that is in the package: what a bench compares it with."""
        return self._default


@dataclasses.dataclass(frozen=True, slots=True)
class _OlderKernels:
    """`PagedKernels` of a package whose own code is older than extras: they are passed on only if there are any."""

    spec: KernelSpec
    kernels: Any

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
        attend = self.kernels.attend if extras is NO_ATTEND_EXTRAS else functools.partial(self.kernels.attend, extras=extras)
        attend(
            out,
            q,
            k_cache,
            v_cache,
            block_table,
            context_lens,
            cu_seqlens_q,
            scale=scale,
            lse=lse,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
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
        given = {} if extras is NO_WRITE_EXTRAS else {"extras": extras}
        self.kernels.write_kv(k, v, k_cache, v_cache, slot_mapping, **given)

    def copy_blocks(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        given = {} if scales is None else {"scales": scales}
        self.kernels.copy_blocks(k_cache, v_cache, pairs, **given)


def _kernels_of(spec: KernelSpec, own: Any) -> PagedKernels:
    """`PagedKernels` of a package's own code, by `attend`, `write_kv` and `copy_blocks`; called as they are, for speed."""
    if "extras" not in inspect.signature(own.attend).parameters:
        return _OlderKernels(spec, own)
    return OpKernels(spec, own.attend, own.write_kv, own.copy_blocks)


def package_name(spec: KernelSpec, target: Target) -> str:
    """The import name, such as `pagegen_bf16_d64_h9x3_b16_nhd_cpu_avx512`."""
    return f"pagegen_{spec.slug}_{target.slug}".lower().replace("-", "_").replace(".", "p")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_package(
    out: Path,
    *,
    spec: KernelSpec,
    target: Target,
    kernels: Mapping[str, Packaged],
    dispatch: Mapping[Op, DispatchTable],
    evidence: Mapping[str, Any],
    made_on: Fingerprint | None = None,
) -> Path:
    """Writes the package into the folder `out`, under its import name, and returns its path; replaces an older one.

    The folder appears whole or not at all. `made_on` defaults to this machine, where `target` must then be present.
    Raises PackageError if kernels and dispatch do not fit each other, or `out` cannot be written.
    """
    _check_dispatch(spec, target, kernels, dispatch)
    name = package_name(spec, target)
    made_on = made_on or fingerprint(target)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "abi": ABI_VERSION,
        "name": name,
        "version": f"{__version__}+{_digest(kernels, dispatch)}",
        "pagegen": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "spec": spec.to_dict(),
        "target": target.name,
        "max_blocks": max_blocks(spec),
        "fingerprint": {"hardware": dict(made_on.hardware), "toolchain": dict(made_on.toolchain)},
        "kernels": {key: _entry(key, packaged) for key, packaged in kernels.items()},
        "dispatch": {op.value: dispatch[op].to_dict() for op in PAGED_OPS},
        "evidence": dict(evidence),
    }
    with _staged(out / name) as root:
        for key, entry in manifest["kernels"].items():
            _write(root / entry["source"], kernels[key].source.text)
            binary = kernels[key].binary
            if binary:
                _write(root / entry["binary"], binary.read_bytes())
        for module in VENDORED:
            _write(root / "_pagegen" / module, (Path(__file__).parent / module).read_bytes())
            _write((root / "_pagegen" / module).with_name("__init__.py"), "")
        facts = {"requires": REQUIRES[target.kind], "generator": __version__, "explanation": explain(manifest)}
        summary = f"Paged attention kernels for {spec.slug} on {target.name}."
        for path, template in RENDERED.items():
            _write(root / path, _render(template, {**manifest, **facts, "summary": summary, "manifest": manifest}))
        _write(root / "py.typed", "")
        _write(root / "spec.json", _json(spec.to_dict()))
        manifest["files"] = {path.as_posix(): file_sha256(root / path) for path in _files(root)}
        _write(root / MANIFEST, _json(manifest))
    return out / name


def install_package(path: Path) -> Path:
    """Copies a package into this user's package cache, where `generate`, `chat` and `serve` find it."""
    manifest = read_manifest(path)
    destination = _installed(manifest["name"], manifest["fingerprint"]["hardware"])
    _require_whole(path, manifest)
    with _staged(destination) as root:
        for relative in (*_files(path), Path(MANIFEST)):
            _write(root / relative, (path / relative).read_bytes())
    return destination


def installed_for(spec: KernelSpec, target: Target) -> tuple[frozenset[Phase], str]:
    """The phases that have rows in what `install_package` would replace on this machine, and the workload that it was tuned for;
    none, and "", if nothing that can be read."""
    try:
        manifest = read_manifest(_installed(package_name(spec, target), hardware_fingerprint(target)))
        rows = DispatchTable.from_dict(manifest["dispatch"][Op.ATTEND.value]).rows
        return frozenset(row.phase for row in rows), str(manifest["evidence"].get("workload", {}).get("name", ""))
    except (PackageError, KeyError):
        return frozenset(), ""


def _installed(name: str, hardware: Mapping[str, Any]) -> Path:
    """Where in this user's package cache a package lies: a home may serve several machines."""
    return package_cache() / f"{name}-{Fingerprint(hardware, {}).hardware_key}"


def find_package(spec: KernelSpec, target: Target, *, any_block_size: bool = False) -> Path | None:
    """The newest package of the user's cache that was made for `spec` and `target` on this machine; a layout of `auto`
    takes any, and so does `any_block_size`. What cannot be read is passed over with a warning, and so are those of other hardware if none fits."""
    if not is_present(target):
        return None
    here = Fingerprint(hardware_fingerprint(target), {})
    fitting: list[tuple[str, Path]] = []
    foreign: list[str] = []
    for path in package_cache().iterdir():
        if path.name.startswith(".") or not path.is_dir():  # being written; a lock
            continue
        try:
            manifest = read_manifest(path)
            found = KernelSpec.from_dict(manifest["spec"])
        except PagegenError as error:
            warnings.warn(f"passed over in the package cache: {error}", stacklevel=2)
            continue
        its = found.replace(
            layout=None if spec.layout is None else found.layout,
            block_size=spec.block_size if any_block_size else found.block_size,
        )
        if its == spec and manifest["target"] == target.name:
            apart = Fingerprint(manifest["fingerprint"]["hardware"], {}).differences(here)[0]
            if apart:
                foreign.append(f"{path.name} was tuned on other hardware (there, here: {'; '.join(apart)})")
            else:
                fitting.append((manifest["created"], path))
    if not fitting:
        for line in foreign:
            warnings.warn(f"passed over in the package cache: {line}", stacklevel=2)
        return None
    path = max(fitting)[1]
    with contextlib.suppress(FileNotFoundError):  # removed just now; who loads it will say so
        os.utime(path)  # last use, for `pagegen cache`
    return path


def _check_dispatch(
    spec: KernelSpec, target: Target, kernels: Mapping[str, Packaged], dispatch: Mapping[Op, DispatchTable]
) -> None:
    for name, packaged in kernels.items():
        made_of = packaged.source.variant
        if (made_of.spec, made_of.target) != (spec, target):
            raise PackageError(f"kernel {name} is {made_of.name}; the package is for {target.name} {spec.slug}")
        if not name.isidentifier():
            raise PackageError(f"kernel name {name!r} is no identifier; it names files and rows of the dispatch table")
    for op in PAGED_OPS:
        if op not in dispatch:
            raise PackageError(f"the package has no dispatch table for {op.value}; allowed is one for each of {', '.join(PAGED_OPS)}")
        if op is not Op.ATTEND and dispatch[op].rows:
            raise PackageError(f"{op.value} is not dispatched by batch; leave the rows of its table empty")
        if spec.deterministic and not dispatch[op].is_uniform:
            raise PackageError(f"{spec.slug} is deterministic: one kernel for all batches; change the dispatch table of {op.value}")
        for name in dispatch[op].kernels:
            if name not in kernels or kernels[name].source.variant.template.op is not op:
                raise PackageError(f"the dispatch table of {op.value} names {name!r}, which is not among its kernels")


def _entry(name: str, packaged: Packaged) -> dict[str, Any]:
    made_of = packaged.source.variant
    return {
        "op": made_of.template.op.value,
        "language": made_of.template.language,
        "template": made_of.template.file,
        "config": made_of.config.to_dict(),
        "key": packaged.source.key,
        "source": f"sources/{name}{SUFFIXES[made_of.template.language]}",
        "binary": f"bin/{name}.so" if packaged.binary else None,
    }


def _digest(kernels: Mapping[str, Packaged], dispatch: Mapping[Op, DispatchTable]) -> str:
    """Short content hash: packages that behave differently have different versions."""
    content = [{name: packaged.source.key for name, packaged in kernels.items()}, {op: dispatch[op].to_dict() for op in PAGED_OPS}]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _render(template: str, values: Mapping[str, Any]) -> str:
    try:
        return environment().get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise RenderError(f"template {template}: {error}") from error


def _json(document: object) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _write(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def _files(root: Path) -> list[Path]:
    """Relative paths of all files but the manifest and Python's own bytecode."""
    found = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(path for path in found if "__pycache__" not in path.parts and path != Path(MANIFEST))


def _is_something_else(destination: Path) -> bool:
    """Whether there is something, and it is no package. In one look: between two it may be replaced."""
    try:
        return MANIFEST not in os.listdir(destination)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


@contextlib.contextmanager
def _staged(destination: Path) -> Iterator[Path]:
    """Yields a folder that becomes `destination` when the block ends well: synced, mode 0755 and 0644, by one rename."""
    if all(_is_something_else(destination) for _ in range(3)):  # another writer may replace it just now
        raise PackageError(f"{destination} exists and is no kernel package; name another folder with --out")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as name:
            root = Path(name) / destination.name
            root.mkdir()
            yield root
            for path in (root, *root.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
                _sync(path)
            _replace(destination, root)
            _sync(destination.parent)
    except OSError as error:
        raise PackageError(f"the package {destination} cannot be written ({error}); name another folder with --out") from None


def _replace(destination: Path, root: Path) -> None:
    """Puts the folder `root` in the place of `destination`; of several that do so at once, the last one stays."""
    for attempt in itertools.count():
        with contextlib.suppress(FileNotFoundError):
            destination.rename(root.with_name(f"replaced-{attempt}"))
        try:
            root.rename(destination)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_package(path: str | Path) -> KernelPackage:
    """Loads a kernel package, ready for its first call. What runs is the package's own code, not this pagegen's.

    Raises PackageError if the folder is no package, of an unknown format, open to others, damaged, or made for other
    hardware; BuildError or ConfigError if a missing binary cannot be rebuilt.
    """
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    try:
        _require_owned(folder)
        _require_whole(folder, manifest)
        module = _import(folder)
    except (OSError, ImportError) as error:  # removed or replaced meanwhile: its files had been there, and right
        raise PackageError(f"package {folder} cannot be read ({error}); try again, or make it again with `pagegen tune`") from None
    spec = KernelSpec.from_dict(manifest["spec"])
    kernels = _kernels_of(spec, module)
    return KernelPackage(
        spec=spec,
        target=parse_target(manifest["target"]),
        path=folder,
        manifest=manifest,
        attend=kernels.attend,
        write_kv=kernels.write_kv,
        copy_blocks=kernels.copy_blocks,
        _default=_kernels_of(spec, module.default_kernels()),
    )


def _require_owned(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if "__pycache__" in path.relative_to(folder).parts:
            continue  # never read
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise PackageError(f"package {folder.name}: {path.relative_to(folder)} is a link; a package holds files only")
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise PackageError(
                f"package {folder}: {path.relative_to(folder)} can be changed by others (owner {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):04o}) and is code that is run; own it and `chmod -R go-w` it if you trust it"
            )


def _require_whole(folder: Path, manifest: Mapping[str, Any]) -> None:
    binaries = {entry["binary"] for entry in manifest["kernels"].values()}
    for relative, problem in _damage(folder, manifest).items():
        if relative in binaries and problem == "missing":
            continue  # rebuilt from its source
        cure = "delete it and it is rebuilt from its source" if relative in binaries else "make the package again with `pagegen tune`"
        raise PackageError(f"package {folder}: {relative} is {problem}; {cure}")


def _damage(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Files that are not as the manifest states, each with what it is."""
    listed: Mapping[str, str] = manifest["files"]
    found = {path.as_posix() for path in _files(folder)}
    damage = {name: "not in the manifest" for name in sorted(found - listed.keys())}
    for name, digest in listed.items():
        if name not in found:
            damage[name] = "missing"
        elif file_sha256(folder / name) != digest:
            damage[name] = "not the file that the manifest states (SHA-256 differs)"
    return damage


class _VerifiedSource(SourceFileLoader):
    """Runs source, which the hashes cover; neither reads nor writes bytecode, which they do not."""

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the file."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(folder: Path) -> ModuleType:
    """The package as a module of its own, prepared. Its errors are this pagegen's, so that callers can catch them."""
    digest = hashlib.sha256(f"{folder}\0".encode() + (folder / MANIFEST).read_bytes()).hexdigest()[:12]
    name = f"_pagegen_package_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _VerifiedSource(name, str(folder / "__init__.py"))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=loader.path, is_package=True))
    module.__path__ = [str(folder)]
    module.__file__ = loader.path
    sys.modules[name] = module
    sys.modules[f"{name}._pagegen.errors"] = errors
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sys.path_importer_cache[str(place)] = FileFinder(str(place), (_VerifiedSource, [".py"]))
    try:
        loader.exec_module(module)
        module.prepare()
    except BaseException:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


# --- verifying -------------------------------------------------------------------------------------------------------


def verify_package(path: str | Path) -> list[str]:
    """What is wrong with a package, one line each: files against their hashes, and every source against what this
    pagegen renders from the package's spec, target and config. Runs none of its code."""
    folder = Path(path)
    manifest = read_manifest(folder)
    problems = [f"{name}: {problem}" for name, problem in _damage(folder, manifest).items()]
    spec, target = KernelSpec.from_dict(manifest["spec"]), parse_target(manifest["target"])
    for name, entry in manifest["kernels"].items():
        try:
            made_of = variant(Op(entry["op"]), spec, target)
            config = made_of.template.space(spec, target).config(entry["config"])
            text = render(dataclasses.replace(made_of, config=config)).text
        except PagegenError as error:
            problems.append(f"{name}: does not render again ({error})")
            continue
        if entry["source"] not in manifest["files"]:
            problems.append(f"{name}: its source {entry['source']!r} is not among the files")
        elif (folder / entry["source"]).is_file() and (folder / entry["source"]).read_bytes() != text.encode():
            problems.append(
                f"{entry['source']}: pagegen {__version__} renders other text from the same spec and config "
                f"(the package was written by {manifest['pagegen']})"
            )
    return problems
