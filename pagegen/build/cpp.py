"""C++ text to a loaded kernel (and C text to a program): compile once per (text, flags, compiler), publish whole, verify
before loading. A CPU target that is not this machine's is compiled by a cross compiler, and runs in an emulator if at all.

Check, lock, check again, build, rename: a killed build leaves nothing that a later one trusts, and the kernel releases
its lock. Vendored into every kernel package, which rebuilds a missing binary with it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ..abi import ABI_VERSION, CppAttend, CppCopyBlocks, CppWriteKV
from ..errors import BuildError, ConfigError, KernelError
from ..paths import compiler_override, kernel_cache, lock_of, locked, remove_entry
from ..spec import KernelSpec, Op
from ..target import Target, is_native
from ..transfer import CppGatherBlocks, CppRelayout, CppScatterBlocks

# -fno-math-errno and no-trapping let loops vectorise; infinities and NaN keep their IEEE meaning (no -ffast-math). What is
# fused stands in the text (fma): left to the compiler it may differ from one inlined copy of a function to the next, and a
# row's bits with the copy that its company leads to.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
AnyCppKernel = CppAttend | CppWriteKV | CppCopyBlocks | CppGatherBlocks | CppScatterBlocks | CppRelayout

CACHE_ENTRIES = 4000  # builds kept, at about 100 kB each; several long tuning runs
COMPILE_TIMEOUT = 300  # seconds; a template of ours takes a few
ATTEMPTS = 5  # at an entry that others remove while it is built or loaded


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """What a text becomes: file names inside its cache folder, and the compiler's arguments around the source."""

    source: str
    output: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ()


_LIBRARY = _Product("kernel.cpp", "kernel.so", ("-shared", *FLAGS))
_PROGRAM = _Product("driver.c", "driver", ("-xc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"), ("-ldl",))


def compiler(target: Target | None = None) -> str:
    """The C++ compiler's path: $PAGEGEN_CXX, else g++, else clang++; for a foreign `target` the cross compiler.

    Raises BuildError if there is none.
    """
    if target is not None and not is_native(target):
        return cross_compiler(target)
    override = compiler_override()
    names = (override,) if override else ("g++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(
        f"no C++ compiler: looked for {' and '.join(names)}; install g++ (Debian, Ubuntu: apt-get install g++) "
        "or set PAGEGEN_CXX to one"
    )


def cross_compiler(target: Target) -> str:
    """The path of GCC for a foreign CPU target, by the name that Debian gives it. Raises BuildError if there is none."""
    name = f"{target.machine}-linux-gnu-g++"
    if path := shutil.which(name):
        return path
    package = f"g++-{target.machine.replace('_', '-')}-linux-gnu"
    raise BuildError(f"no cross compiler for {target.name}: looked for {name}; install it (Debian, Ubuntu: apt-get install {package})")


def emulator(target: Target) -> tuple[str, ...]:
    """What stands before a command built for `target`: nothing on its own machine, else QEMU with Debian's libraries.

    Raises BuildError if there is no emulator.
    """
    if is_native(target):
        return ()
    name = f"qemu-{target.machine}"
    if path := shutil.which(name) or shutil.which(f"{name}-static"):
        return path, "-L", f"/usr/{target.machine}-linux-gnu"
    raise BuildError(f"no emulator for {target.name}: looked for {name}; install it (Debian, Ubuntu: apt-get install qemu-user)")


@functools.cache
def compiler_version(path: str) -> str:
    """First line of `--version`: the name and version that fingerprints hold, never the path."""
    try:
        result = _run([path, "--version"], timeout=60)
        result.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {path} does not run ({error}); set PAGEGEN_CXX to one that does") from None
    version = result.stdout.partition("\n")[0].strip()
    if not version:
        raise BuildError(f"{path} says nothing to --version, as a C++ compiler would; set PAGEGEN_CXX to one")
    return version


def _run(command: list[str], timeout: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a compiler in English, which `run_compiler` reads; what it prints need not be UTF-8."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )


def toolchain() -> dict[str, Any]:
    """The toolchain half of a CPU fingerprint."""
    import torch

    return {"compiler": compiler_version(compiler()), "flags": " ".join(FLAGS), "torch": torch.__version__}


def compile_library(text: str, target: Target) -> Path:
    """The shared library built from C++ `text` for `target`, from the cache if it is there and whole.

    Raises BuildError with the compiler's own log.
    """
    return _compile(_LIBRARY, text, target)


def compile_program(text: str, target: Target) -> Path:
    """The same for the program built from C `text`."""
    return _compile(_PROGRAM, text, target)


def _compile(product: _Product, text: str, target: Target) -> Path:
    folder = kernel_cache() / _key(product, text, target)
    for _ in range(ATTEMPTS):
        try:
            if not _is_whole(product, folder):
                with locked(lock_of(folder)):
                    if not _is_whole(product, folder):
                        _build(product, text, target, folder)
                _evict(folder.parent)
            os.utime(folder)  # last use, for `pagegen cache`
            return folder / product.output
        except FileNotFoundError:
            kernel_cache()  # somebody clears the cache at this very moment
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error.strerror}); make room, or set PAGEGEN_CACHE to another folder") from None
    raise BuildError(f"{folder} was removed {ATTEMPTS} times while it was built; clear the cache when nobody builds")


def _evict(cache: Path) -> None:
    """Removes the least recently used builds beyond CACHE_ENTRIES."""
    builds = sorted((_last_use(build.parent), build.parent) for build in cache.glob("[!.]*/build.json"))
    for _, folder in builds[:-CACHE_ENTRIES]:
        remove_entry(folder)


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # removed by another process
        return 0.0


def _key(product: _Product, text: str, target: Target) -> str:
    path = compiler(target)  # a wrapper that adds a flag says the version of what it wraps
    parts = (text, *product.flags, *target.flags, os.path.realpath(path), compiler_version(path), str(ABI_VERSION))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _is_whole(product: _Product, folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        stored = json.loads((folder / "build.json").read_text())["sha256"]
        if stored == file_sha256(folder / product.output):
            return True
    except (OSError, ValueError, KeyError, TypeError):
        pass  # told below, once, like a wrong hash
    warnings.warn(f"cached kernel {folder.name} is damaged; building it again", stacklevel=4)
    return False


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(product: _Product, text: str, target: Target, folder: Path) -> None:
    unfinished = f".build-{folder.name}-"
    for stale in folder.parent.glob(f"{unfinished}*"):  # of a killed builder: this one holds the key's lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=unfinished) as name:
        work = Path(name) / "entry"
        work.mkdir()
        (work / product.source).write_text(text, encoding="utf-8")
        arguments = [*product.flags, *target.flags, product.source, "-o", product.output, *product.libraries]
        run_compiler(arguments, work, target)
        made_by = compiler_version(compiler(target))
        record = {"sha256": file_sha256(work / product.output), "target": target.name, "compiler": made_by}
        (work / "build.json").write_text(json.dumps(record, indent=1))
        if folder.exists():  # damaged
            folder.rename(Path(name) / "damaged")
        work.rename(folder)


def run_compiler(arguments: list[str], folder: Path, target: Target | None = None) -> None:
    """Runs the compiler (for `target`) in `folder`; `arguments` name the output with -o.

    Raises BuildError: one line, the log attached; ConfigError where the disk is full.
    """
    path = compiler(target)
    try:
        result = _run([path, *arguments], COMPILE_TIMEOUT, folder)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler took over {COMPILE_TIMEOUT} s; choose smaller tiles") from None
    except OSError as error:
        raise BuildError(f"the C++ compiler {path} does not run ({error}); set PAGEGEN_CXX to one that does") from None
    if result.returncode and (full := os.strerror(errno.ENOSPC)) in result.stderr:
        raise ConfigError(f"{folder} cannot be written ({full}); make room, or set PAGEGEN_CACHE to another folder")
    if result.returncode:
        ended = f"signal {-result.returncode}" if result.returncode < 0 else f"exit status {result.returncode}"
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
        raise BuildError(f"the C++ compiler failed ({first.strip() or ended}); see the log with --debug", log=result.stderr)
    if not (folder / arguments[arguments.index("-o") + 1]).is_file():
        raise BuildError(f"{path} ended well but wrote nothing, as no C++ compiler does; set PAGEGEN_CXX to one")


CPP_KERNELS: dict[Op, type[AnyCppKernel]] = {
    Op.ATTEND: CppAttend,
    Op.WRITE_KV: CppWriteKV,
    Op.COPY_BLOCKS: CppCopyBlocks,
    Op.GATHER_BLOCKS: CppGatherBlocks,
    Op.SCATTER_BLOCKS: CppScatterBlocks,
    Op.RELAYOUT: CppRelayout,
}


def load(path: Path, spec: KernelSpec, op: Op) -> AnyCppKernel:
    """A built library as the callable for `op`."""
    return CPP_KERNELS[op](path, spec, op)


def build(text: str, target: Target, spec: KernelSpec, op: Op) -> AnyCppKernel:
    """`compile_library` and `load`, even if another process clears the cache in between."""
    for _ in range(ATTEMPTS - 1):
        library = compile_library(text, target)
        try:
            return load(library, spec, op)
        except KernelError:
            if library.exists():
                raise
    return load(compile_library(text, target), spec, op)
