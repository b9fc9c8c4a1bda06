"""Plants every fault of pagegen/check/mutants.py and writes docs/mutants.md: which case of the gate notices which.

    python scripts/mutants.py            runs all (minutes; at OMP_NUM_THREADS=1) and writes the page
    python scripts/mutants.py WORD       runs those with WORD in their name, and prints their rows

"one allclose" is what a test usually is: one ragged batch of random numbers, every cache slot filled with ordinary ones,
compared with torch.allclose(rtol=1e-2, atol=1e-2).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pagegen.build.cpp import run_compiler
from pagegen.check import CheckReport, check_library, full_suite, quick_suite
from pagegen.check.case import Case
from pagegen.check.compare import expected
from pagegen.check.driver import library_outputs
from pagegen.check.mutants import MUTANTS, Mutant
from pagegen.records import Status
from pagegen.spec import Op
from pagegen.target import parse_target

PAGE = Path(__file__).parents[1] / "docs" / "mutants.md"
SCALAR = parse_target("cpu:scalar")
FLAGS = ("-shared", "-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fvisibility=hidden")
TIMEOUT = 60.0

HEAD = """# Planted faults

Written by `python scripts/mutants.py`, which plants each fault in a rendered C++ kernel, runs the gate on it, and notes
which cases notice; the faults are in `pagegen/check/mutants.py`. *Public* is where the same mistake was made before
(repository#issue or pull request). *Quick* and *full* count the cases of each suite that notice; the case named is the
smallest of the quick suite, or of the full one where the quick misses. *One allclose*: whether one comparison with
`torch.allclose(rtol=1e-2, atol=1e-2)` on one random batch notices, in caches filled with ordinary numbers.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What noticed a mutant."""

    mutant: Mutant
    quick: int
    full: int
    case: str
    allclose: bool

    def __str__(self) -> str:
        m, seen = self.mutant, "yes" if self.allclose else "-"
        return f"| {m.name} | {m.op.value}, {m.spec} | {m.public or '-'} | {self.quick} | {self.full} | {self.case} | {seen} |"


def build(text: str, folder: Path) -> Path:
    """The library of a text, quickly."""
    (folder / "kernel.cpp").write_text(text)
    run_compiler([*FLAGS, *SCALAR.flags, "kernel.cpp", "-o", "kernel.so"], folder)
    return folder / "kernel.so"


def random_case(mutant: Mutant) -> Case:
    """What a usual test would ask."""
    spec = mutant.kernel_spec()
    if mutant.op in (Op.ATTEND, Op.WRITE_KV):
        return Case("random", mutant.op, spec, (1, 17, 40), (37, 100, 64), poisoned="")
    return Case("random", mutant.op, spec, (), (37, 100), poisoned="", source=spec if mutant.op is Op.RELAYOUT else None)


def allclose_notices(mutant: Mutant, library: Path) -> bool:
    """Whether one random comparison would have noticed; a crash is noticed by anybody."""
    case = random_case(mutant)
    found = library_outputs(library, mutant.op, SCALAR, [case], TIMEOUT)
    if isinstance(found, CheckReport):
        return True
    want = expected(case).tensors
    return not all(
        torch.allclose(got.float(), want[name].float(), rtol=1e-2, atol=1e-2, equal_nan=True) for name, got in found[0].items()
    )


def judge(mutant: Mutant) -> Row:
    """Runs both suites on a mutant: the full one, which begins with the quick one, and that alone after a crash."""
    torch.set_num_threads(1)
    quick, full = (suite(mutant.kernel_spec()) for suite in (quick_suite, full_suite))
    with tempfile.TemporaryDirectory() as folder:
        library = build(mutant.planted(SCALAR).text, Path(folder))
        found = check_library(library, mutant.op, SCALAR, full, TIMEOUT)
        if found.status is Status.INCORRECT:
            early = tuple(failure for failure in found.failures if failure.case in quick)
        else:
            early = check_library(library, mutant.op, SCALAR, quick, TIMEOUT).failures if found.failures else ()
        first = next(iter((*early, *found.failures)), None)
        return Row(mutant, len(early), len(found.failures), first.case.label if first else "", allclose_notices(mutant, library))


def page(rows: list[Row]) -> Iterator[str]:
    """The page's lines."""
    quick, full, allclose = (sum(map(bool, counts)) for counts in zip(*((r.quick, r.full, r.allclose) for r in rows), strict=True))
    yield HEAD
    yield (
        f"{len(rows)} faults, {sum(bool(row.mutant.public) for row in rows)} of them public: the full suite notices {full}, the quick "
        f"suite {quick}, one allclose {allclose}.\n"
    )
    yield "| fault | kernel | public | quick | full | smallest case | one allclose |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(str, rows)


def main(words: list[str]) -> int:
    """Exit status 1 if a fault went unnoticed."""
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        rows = []
        for row in workers.map(judge, chosen):
            rows.append(row)
            print(row, flush=True)
    if not words:
        PAGE.write_text("\n".join(page(rows)) + "\n")
    return 0 if all(row.full for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
