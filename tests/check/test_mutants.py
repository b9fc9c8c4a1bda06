"""The gate kills planted faults: each is one edit of a rendered kernel (pagegen/check/mutants.py).

A mutant whose text no longer stands in its kernel fails here: it has to be planted anew. scripts/mutants.py writes the
whole table.
"""

from __future__ import annotations

import pytest

from pagegen.check import CheckReport, check_library, full_suite, quick_suite
from pagegen.check.mutants import MUTANTS, Mutant
from pagegen.errors import CheckError
from pagegen.records import Status
from pagegen.spec import Op
from tests.check.conftest import SCALAR, Builder
from tests.conftest import ROOT

KERNELS = {(mutant.op, mutant.spec): mutant for mutant in MUTANTS}
# One for every second kernel is planted in every run, the others in long ones.
SAMPLE = set([*KERNELS.values()][::2])


def ident(mutant: Mutant) -> str:
    return f"{mutant.op.value} {mutant.spec}: {mutant.name}"


def judge(mutant: Mutant, text: str, build_text: Builder) -> CheckReport:
    return check_library(build_text(text), mutant.op, SCALAR, quick_suite(mutant.kernel_spec()), timeout=30)


def test_there_are_enough_and_half_are_public() -> None:
    assert len({(mutant.op, mutant.spec, mutant.name) for mutant in MUTANTS}) == len(MUTANTS) > 100
    assert 2 * sum(bool(mutant.public) for mutant in MUTANTS) >= len(MUTANTS)


def test_the_page_has_every_mutant_and_each_is_noticed() -> None:
    """docs/mutants.md was made from these faults: the full suite notices all, the quick one at least 25."""
    text = (ROOT / "docs" / "mutants.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[:3] for row in rows] == [[m.name, f"{m.op.value}, {m.spec}", m.public or "-"] for m in MUTANTS]
    quick, full, alone = ([row[column] for row in rows] for column in (3, 4, 6))
    assert all(int(count) > 0 for count in full)
    noticed = sum(int(count) > 0 for count in quick)
    assert noticed >= 25
    said = f"the full suite notices {len(rows)}, the quick suite {noticed}, one allclose {alone.count('yes')}."
    assert said in " ".join(text.split())


@pytest.mark.parametrize("mutant", MUTANTS, ids=ident)
def test_a_mutant_is_one_edit(mutant: Mutant) -> None:
    assert mutant.planted(SCALAR).text != mutant.healthy(SCALAR).text


def test_a_mutant_that_no_longer_fits_says_so() -> None:
    with pytest.raises(CheckError, match="matches 0 times in attend for plain; plant it anew"):
        Mutant("gone", Op.ATTEND, "plain", "no such words", "").planted(SCALAR)


@pytest.mark.long
@pytest.mark.parametrize("mutant", KERNELS.values(), ids=lambda mutant: f"{mutant.op.value} {mutant.spec}")
def test_the_kernels_as_they_are_pass(mutant: Mutant, build_text: Builder) -> None:
    cases = [case for case in quick_suite(mutant.kernel_spec()) if case.op is mutant.op]
    assert judge(mutant, mutant.healthy(SCALAR).text, build_text) == CheckReport(Status.PASSED, len(cases))


@pytest.mark.parametrize("mutant", [pytest.param(m, marks=[] if m in SAMPLE else pytest.mark.long, id=ident(m)) for m in MUTANTS])
def test_a_planted_fault_is_noticed(mutant: Mutant, build_text: Builder) -> None:
    report = judge(mutant, mutant.planted(SCALAR).text, build_text)
    if report.passed:
        report = check_library(build_text(mutant.planted(SCALAR).text), mutant.op, SCALAR, full_suite(mutant.kernel_spec()))
    assert not report.passed
    assert report.failures[0].message
