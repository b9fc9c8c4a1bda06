"""Runs C++ kernels on cases in a process of its own, through the generated driver of templates/cpp/driver.c.jinja.

A crash, a hang or a write out of bounds is thereby an outcome with the case's name, and a guilty kernel cannot harm the
process that judges it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import torch

from ..build.cpp import compile_program, emulator, run_compiler
from ..errors import CheckError
from ..records import Status
from ..render import Source, environment
from ..spec import Op
from ..target import Target
from .case import Case, Fault
from .compare import CheckReport, Failure, Verdicts
from .files import PreparedCases, Run, prepare, read_runs
from .pool import Tensors
from .tensors import flat

TIMEOUT = 60.0  # seconds for a whole suite; it takes well under one
WROTE_OUTSIDE, OUT_OF_RESOURCES = 1000, 71  # as in the driver


@functools.cache
def driver_text(op: Op, *, linked: bool = False) -> str:
    """The driver's C text; `linked` makes one to be linked with a kernel instead of opening a library."""
    return environment().get_template("cpp/driver.c.jinja").render(op=op.value, linked=linked)


def run_library(
    library: Path, op: Op, target: Target, cases: Sequence[Case], timeout: float
) -> CheckReport:
    """See `pagegen.check.check_library`."""
    program, begin = _Program(compile_program(driver_text(op), target), target, library), time.monotonic()
    prepared = prepare(tuple(case for case in cases if case.op is op))
    return _report(prepared, _execute(program, prepared, timeout)).timed(begin)


def library_outputs(
    library: Path, op: Op, target: Target, cases: Sequence[Case], timeout: float = TIMEOUT
) -> list[Tensors] | CheckReport:
    """What a library writes in the first run of each case, in the geometry of `materialise`; or how it ended instead."""
    prepared = prepare(tuple(cases))
    ending = _execute(_Program(compile_program(driver_text(op), target), target, library), prepared, timeout)
    if ending.results is None:
        return _report(prepared, ending)
    return [runs[0].outputs for _, runs in read_runs(prepared, ending.results)]


class Sanitizer(StrEnum):
    """What a kernel can be built with to find what no comparison sees."""

    ADDRESS = "address"
    UNDEFINED = "undefined"

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's arguments; every finding ends the process."""
        more = ",float-cast-overflow" if self is Sanitizer.UNDEFINED else ""
        return "-g", "-O1", f"-fsanitize={self.value}{more}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"


def run_sanitized(source: Source, sanitizer: Sanitizer, cases: Sequence[Case], timeout: float) -> CheckReport:
    """Runs those of `cases` that are of the source's op on a kernel built with a sanitizer and linked with its driver.

    What the sanitizer finds is a RUN_ERROR with its words. Raises BuildError if the compiler has no such sanitizer.
    """
    op, target = source.variant.template.op, source.variant.target
    prepared = prepare(tuple(case for case in cases if case.op is op))
    with tempfile.TemporaryDirectory(prefix="pagegen-check-") as name:
        folder = Path(name)
        (folder / "driver.c").write_text(driver_text(op, linked=True))
        (folder / "kernel.cpp").write_text(source.text)
        run_compiler(["-xc", "-std=gnu11", *sanitizer.flags, "-c", "driver.c", "-o", "driver.o"], folder, target)
        built = ["-std=c++17", "-fopenmp", "-Wall", "-Wextra", *sanitizer.flags, *target.flags]
        run_compiler([*built, "kernel.cpp", "driver.o", "-o", "driver"], folder, target)
        return _report(prepared, _execute(_Program(folder / "driver", target), prepared, timeout))


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
        lines = done.stderr.decode(errors="replace").splitlines()
        found = next((line for line in lines if "SUMMARY" in line), None)  # a sanitizer's one line among hundreds
        said = " ".join((found or " ".join(lines)).split())[-200:]
        if done.returncode == OUT_OF_RESOURCES:
            raise CheckError(f"the check driver lacks memory or disk ({said}); free some, or point TMPDIR to a larger disk")
        if done.returncode == 0 and done.stdout.endswith(b"done\n"):
            return _Ending(results.read_bytes())
        message = _told(done.returncode) + (f" after saying: {said}" if said else "")
        return _Ending(None, Status.RUN_ERROR, _reached(prepared, done.stdout), message)


def _report(prepared: PreparedCases, ending: _Ending) -> CheckReport:
    if ending.results is not None:
        return CheckReport.of(len(prepared.cases), _judge(prepared, ending.results))
    failures = [Failure(ending.reached, ending.message)] if ending.reached else []
    return CheckReport.of(len(prepared.cases), failures, ending.status)


def _told(code: int) -> str:
    if code < 0:
        known = -code in set(signal.Signals)
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended the process with status {code}"


def _environment() -> dict[str, str]:
    """This process's, with OpenMP's own variables replaced: a user's settings must not decide a verdict."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    kept |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=0"}  # OpenMP's pool is no leak
    return kept | {"OMP_NUM_THREADS": "1", "OMP_DYNAMIC": "false", "OMP_WAIT_POLICY": "passive", "LC_ALL": "C"}


def _reached(prepared: PreparedCases, stdout: bytes | None) -> Case:
    told = re.findall(rb"^case (\d+) run \d+$", stdout or b"", re.MULTILINE)
    return prepared.cases[int(told[-1]) if told else 0]


def _judge(prepared: PreparedCases, results: bytes) -> Iterator[Failure]:
    verdicts = Verdicts(prepared.cases)
    for case, runs in read_runs(prepared, results):
        messages = [_verdict(case, run, verdicts) for run in runs]
        if not any(messages) and any(not torch.equal(*(flat(run.outputs[name]).view(torch.uint8) for run in runs)) for name in runs[0].outputs):
            messages[1] = "gives other bits than the run before"
        wrong = next((index for index, message in enumerate(messages) if message), None)
        if wrong is not None:
            where = ("a used", "a fresh")[wrong % 2] + " workspace" if case.op is Op.ATTEND else f"run {wrong}"
            yield Failure(case, f"{messages[wrong]}" + ("" if all(messages) else f" (with {where} only)"))


def _verdict(case: Case, run: Run, verdicts: Verdicts) -> str | None:
    if run.status == WROTE_OUTSIDE:
        return "wrote outside its tensors or its workspace"
    wanted = case.fault.status if case.fault else 0
    if case.fault is Fault.WORKSPACE and run.workspace_bytes == 0:
        wanted = 0  # a kernel without workspace cannot be given too little
    if run.status != wanted:
        return f"answered status {run.status}, expected {wanted} (see templates/cpp/abi.h)"
    return None if case.fault else verdicts.of(case, run.outputs)
