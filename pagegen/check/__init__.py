"""The correctness gate: nothing is timed, packaged or served that did not pass it.

`check_variant` judges a source that may do anything, in a process of its own; `check_kernels` judges loaded kernels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..build import build
from ..build.cpp import compile_library
from ..catalog import Template
from ..render import Source
from ..spec import Op, Phase
from ..target import Target, require_present
from .case import Case
from .compare import CheckReport, Failure, check_calls, check_kernels
from .driver import TIMEOUT, Sanitizer, run_library, run_sanitized
from .shrink import shrink
from .snippet import snippet
from .suite import full_suite, quick_suite, suite_named

__all__ = [
    "Case",
    "CheckReport",
    "Failure",
    "Sanitizer",
    "check_cases",
    "check_kernels",
    "check_library",
    "check_sanitized",
    "check_variant",
    "full_suite",
    "quick_suite",
    "snippet",
]


def check_variant(
    source: Source,
    suite: str = "quick",
    seed: int = 0,
    *,
    phase: Phase | None = None,
    timeout: float = TIMEOUT,
    smallest: bool = False,
) -> CheckReport:
    """Builds a source for a target that is present and runs a suite on it, or those of its cases that are of `phase`.

    With `smallest` a failing input is made smaller while it fails. Raises BuildError if the source does not compile,
    ConfigError if the target is not present, CheckError if the gate cannot run.
    """
    variant = source.variant
    cases = suite_named(suite)(variant.spec, phase or _only_phase(variant.template), seed)
    return check_cases(source, cases, timeout, smallest=smallest)


def check_cases(source: Source, cases: Sequence[Case], timeout: float = TIMEOUT, *, smallest: bool = False) -> CheckReport:
    """The same for those of `cases` that are of the source's op."""
    op, target = source.variant.template.op, source.variant.target
    require_present(target)
    cases = [case for case in cases if case.op is op]
    if source.variant.template.language == "cpp":
        return check_library(compile_library(source.text, target), op, target, cases, timeout, smallest=smallest)
    cases = [case for case in cases if case.fault is None]
    kernel, begin = build(source), time.monotonic()
    return CheckReport.of(len(cases), check_calls({op: kernel}, cases, "cuda")).timed(begin)


def check_library(
    library: Path,
    op: Op,
    target: Target,
    cases: Sequence[Case],
    timeout: float = TIMEOUT,
    *,
    smallest: bool = False,
) -> CheckReport:
    """Runs those of `cases` that are of `op` on a built library, in a process of its own.

    PASSED; INCORRECT with every wrong case; RUN_ERROR or TIMEOUT with the case in which it happened. Raises CheckError
    if the gate cannot run, for want of memory or disk.
    """
    report = run_library(library, op, target, cases, timeout)
    if smallest:
        return shrink(report, lambda smaller: run_library(library, op, target, smaller, timeout))
    return report


def check_sanitized(source: Source, sanitizer: Sanitizer, suite: str = "quick", seed: int = 0, timeout: float = 10 * TIMEOUT) -> CheckReport:
    """Runs a suite on a C++ source built with a sanitizer, for a target that is present. Raises as `check_variant` does."""
    require_present(source.variant.target)
    return run_sanitized(source, sanitizer, suite_named(suite)(source.variant.spec, None, seed), timeout)


def _only_phase(template: Template) -> Phase | None:
    return next(iter(template.phases)) if len(template.phases) == 1 else None
