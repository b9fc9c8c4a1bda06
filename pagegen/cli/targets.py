"""`pagegen targets`: what this machine is, what runs on it, and what can be compiled for others."""

from __future__ import annotations

import importlib.util
from typing import Any

from pagegen.cli._common import JsonOption, format_size, print_json, print_table
from pagegen.errors import BuildError
from pagegen.target import TARGETS, Target, detect, is_present

EXAMPLE = "pagegen targets --json"


def command(json: JsonOption = False) -> None:
    """Show this machine and the targets it runs or compiles for."""
    rows = [describe(target) for target in TARGETS]
    present = [row for row in rows if row["present"]]
    cross = [row for row in rows if not row["present"]]
    if json:
        here = detect()
        machine = {"device": here.device, "cores": here.cores, "threads": here.threads, "caches": dict(here.caches)}
        print_json({"machine": machine, "present": present, "cross": cross})
        return
    here = detect()
    caches = ", ".join(f"{name} {format_size(size)}" for name, size in here.caches.items())
    print(f"{here.device}: {here.cores} cores, {here.threads} threads for this process, {caches or 'caches unknown'}")
    columns = ("target", "here", "fp32 lanes", "shared KiB", "registers", "threads")
    print_table("", columns, [_cells(row) for row in (*present, *cross)])
    for kind in ("cpu", "gpu"):
        row = next(row for row in rows if row["name"].startswith("cpu:") == (kind == "cpu"))
        print(f"{kind} compiler: {row['compiler'] or row['missing']}")


def describe(target: Target) -> dict[str, Any]:
    """A target, whether it is present, its limits and its compiler (None with the reason in `missing`)."""
    compiler, missing = _compiler(target)
    return {
        "name": target.name,
        "arch": target.arch,
        "present": is_present(target),
        "limits": _limits(target),
        "compiler": compiler,
        "missing": missing,
    }


def _limits(target: Target) -> dict[str, int]:
    if target.kind == "cpu":
        return {"fp32_lanes": target.lanes}
    return {
        "warp_size": target.warp_size,
        "shared_memory": target.shared_memory,
        "registers": target.registers,
        "max_threads": target.max_threads,
    }


def _compiler(target: Target) -> tuple[str | None, str | None]:
    if target.kind == "cpu":
        from pagegen.build.cpp import compiler, compiler_version

        try:
            return compiler_version(compiler(target)), None
        except BuildError as error:
            return None, str(error)
    if importlib.util.find_spec("triton") is None:
        return None, "triton is not installed; pip install triton (Linux on x86-64)"
    from importlib.metadata import version

    return f"triton {version('triton')}", None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A GPU's lanes are those of a warp; its other limits are those of a multiprocessor."""
    limits, here = row["limits"], "runs" if row["present"] else "cross"
    if "fp32_lanes" in limits:
        return row["name"], here, str(limits["fp32_lanes"]), "", "", ""
    shared = f"{limits['shared_memory'] / 1024:g}"
    return row["name"], here, str(limits["warp_size"]), shared, str(limits["registers"]), str(limits["max_threads"])
