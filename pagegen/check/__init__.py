"""The correctness gate: nothing is timed, packaged or served that did not pass it.

`check_variant` judges a source that may do anything, in a process of its own; `check_kernels` judges loaded kernels.
"""

from __future__ import annotations

from ..build import build
from ..build.cpp import compile_library
from ..catalog import ALL_PHASES
from ..render import Source
from ..spec import Phase
from ..target import require_present
from .compare import CheckReport, Failure, check_calls, check_kernels
from .driver import TIMEOUT, check_library
from .shrink import shrink
from .suite import Case, full_suite, quick_suite, suite_named

__all__ = [
    "Case",
    "CheckReport",
    "Failure",
    "check_kernels",
    "check_library",
    "check_variant",
    "full_suite",
    "quick_suite",
]


def check_variant(
    source: Source, suite: str = "quick", seed: int = 0, *, timeout: float = TIMEOUT, smallest: bool = False
) -> CheckReport:
    """Builds a source for a target that is present and runs a suite on it; with `smallest` a failing input is shrunk.

    Raises BuildError if it does not compile, ConfigError if the target is not present, CheckError if the gate cannot run.
    """
    variant = source.variant
    op, spec, target = variant.template.op, variant.spec, variant.target
    require_present(target)
    phases = variant.template.phases
    phase = None if phases == ALL_PHASES or Phase.MIXED in phases else next(iter(phases))
    cases = [case for case in suite_named(suite)(spec, phase, seed) if case.op is op]
    if variant.template.language == "cpp":
        library = compile_library(source.text, target)
        report = check_library(library, spec, op, target, cases, timeout)
        return shrink(report, lambda smaller: check_library(library, spec, op, target, smaller, timeout)) if smallest else report
    cases = [case for case in cases if case.fault is None]
    return CheckReport.of(len(cases), check_calls({op: build(source)}, cases, "cuda"))
