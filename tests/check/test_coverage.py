"""The family on both backends: specs in which every two options meet are proven; a few in every run, 900 in long ones.

scripts/coverage.py writes the account of a whole run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest

from pagegen.build.triton import Interpreter
from pagegen.catalog import variant
from pagegen.check import check_cases
from pagegen.check.cover import prove_cpp, prove_triton, refusal
from pagegen.check.grid import AXES, PLAIN, Choice, all_pairs, pairs_of, probe, sample, spec_of, why_not
from pagegen.errors import SpecError
from pagegen.render import render
from pagegen.spec import KernelSpec, Op
from pagegen.target import Target
from tests.conftest import ROOT, cpu_targets

PAGE = ROOT / "docs" / "coverage.md"
CHUNK = 10  # specs of one test
CPP, TRITON = 600, 300  # specs of a long run
CPP_SLICE, TRITON_SLICE = (2, 1), (0, 1)  # first and count of the specs of every run: small ones


@functools.cache
def drawn(language: str, count: int) -> tuple[Choice, ...]:
    """The first `count` specs that scripts/coverage.py proves, too."""
    return tuple(itertools.islice(sample(0, functools.partial(refusal, language)), count))


def chunks(count: int) -> list[object]:
    return [pytest.param(first, marks=pytest.mark.long) for first in range(0, count, CHUNK)]


@pytest.fixture(scope="module")
def interpreter(cache: None) -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def slug(choice: Choice) -> str:
    return spec_of(choice).slug


def prove_all_cpp(first: int, count: int) -> None:
    outcomes = [prove_cpp(choice, first + i) for i, choice in enumerate(drawn("cpp", first + count)[first:])]
    assert not [(slug(outcome.choice), outcome.target, outcome.failures) for outcome in outcomes if outcome.failures]
    assert len(outcomes) == count and all(outcome.cases > 30 for outcome in outcomes)


def prove_all_triton(first: int, count: int, interpreter: Interpreter) -> None:
    choices = drawn("triton", first + count)[first:]
    outcomes = [prove_triton(choice, first + i, interpreter) for i, choice in enumerate(choices)]
    assert not [(slug(outcome.choice), outcome.failures) for outcome in outcomes if outcome.failures]
    assert len(outcomes) == count and all(outcome.cases > 10 for outcome in outcomes)


def test_a_few_specs_of_cpp() -> None:
    prove_all_cpp(*CPP_SLICE)


@pytest.mark.triton
def test_a_few_specs_of_triton(interpreter: Interpreter) -> None:
    prove_all_triton(*TRITON_SLICE, interpreter)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", chunks(CPP))
def test_specs_of_cpp(first: int) -> None:
    prove_all_cpp(first, CHUNK)


@pytest.mark.triton
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", chunks(TRITON))
def test_specs_of_triton(first: int, interpreter: Interpreter) -> None:
    prove_all_triton(first, CHUNK, interpreter)


def test_the_page_has_every_word_and_nothing_wrong() -> None:
    """docs/coverage.md was made from these axes, by as many specs as a long run proves."""
    text = PAGE.read_text()
    assert "\nWrong: 0.\n" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    specs = {row[0]: int(row[1]) for row in rows if len(row) == 6 and row[1].isdigit()}
    assert specs["C++"] >= CPP and specs["Triton"] >= TRITON
    words = [row for row in rows if row[0] in AXES]
    assert [(row[0], row[1]) for row in words] == [(axis, word) for axis, found in AXES.items() for word in found]
    assert all(cell.isdigit() and int(cell) > 0 for row in words for cell in row[2:])


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_every_pair_that_is_allowed_is_drawn_early() -> None:
    allowed = {pair for pair in all_pairs() if why_not(dict(pair), lambda spec: None) is None}
    met = set().union(*(pairs_of(choice) for choice in itertools.islice(sample(0, lambda spec: None), 260)))
    assert allowed <= met
    assert len(allowed) > 0.95 * len(all_pairs())


def test_each_word_of_each_axis_is_a_spec_of_its_own() -> None:
    """Different words give different specs, and none is refused by the family; axes do not shadow each other."""
    for axis, words in AXES.items():
        assert all(why_not({axis: word}, lambda spec: None) is None for word in words)
        found = [spec_of({**PLAIN, axis: word}) for word in words if word not in ("576", "512")]
        assert len(set(found)) == len(found)


def test_a_backend_refuses_in_words() -> None:
    assert refusal("cpp", spec_of(PLAIN)) is None and refusal("triton", spec_of(PLAIN)) is None
    assert why_not({"heads": "6x2", "head dim": "576"}, lambda spec: None) == (
        "head_dim=576 is not supported; allowed: multiples of 8 from 8 to 256; change head_dim, or pad the heads with zeros and state `scale`"
    )
    with pytest.raises(SpecError):
        spec_of({**PLAIN, "head dim": "576"})


# --- what long runs found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", cpu_targets(long=lambda target: target.name != "cpu:avx2"))
def test_a_row_has_its_bits_whichever_copy_of_a_function_computes_it(target: Target) -> None:
    """GCC fused one inlined copy of a function and not another, for AVX2: -ffp-contract=off leaves nothing to fuse."""
    spec = KernelSpec.from_dict(
        {
            "q_heads": 6, "kv_heads": 2, "head_dim": 16, "dtype": "fp32", "kv_dtype": "int8", "kv_zero": True, "block_size": 1024,
            "layout": "HDN8_HDN", "causal": False, "lse": True, "window": 7, "window_right": 3, "soft_cap": 5.0, "alibi": True,
            "sinks": True, "mask": True, "deterministic": True,
            "score_mod": "where(k_idx < 3 or q_idx - k_idx < 40, score, -inf)",
        }
    )
    cases = [case for case in probe(spec, 388) if case.label.startswith("shared prefix")]
    assert len(cases) > 4
    report = check_cases(render(variant(Op.ATTEND, spec, target)), cases)
    assert report.passed, report.reason
