"""Backends are held against each other: what two of them give may differ by both their bounds, and by no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagegen.build.triton import Interpreter
from pagegen.catalog import variant
from pagegen.check import Case
from pagegen.check.compare import expected, invoke, written
from pagegen.check.cover import INTERPRETED, interpreted, isas, prove_pairs
from pagegen.check.grid import PLAIN
from pagegen.check.pairs import compiled_outputs, disagreements, interpreted_outputs
from pagegen.check.pool import Tensors
from pagegen.check.tensors import materialise
from pagegen.errors import CheckError
from pagegen.reference import ReferenceKernels
from pagegen.render import render
from pagegen.spec import KernelSpec, Op, parse_slug
from pagegen.target import parse_target
from tests.check.conftest import SCALAR, Builder

SPEC = parse_slug("bf16-d16v24-h6x2-b5-HND-lse")[0]
ATTEND = Case("three sequences", Op.ATTEND, SPEC, (1, 0, 4), (7, 3, 2), padding=2)
ROTATED = KernelSpec(6, 2, 16, block_size=4, kv_dtype="int8", rope="neox")  # type: ignore[arg-type]
WRITE = Case("rotated", Op.WRITE_KV, ROTATED, (3, 1), (7, 4))


@pytest.fixture(scope="module")
def interpreter(cache: None) -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def given(case: Case) -> Tensors:
    tensors = materialise(case)
    invoke(getattr(ReferenceKernels(case.spec), case.op.value), case, tensors)
    return written(case, tensors)


def moved(case: Case, name: str, index: tuple[int, ...], bounds: float) -> Tensors:
    """The reference's outputs with one element moved by so many of its bounds."""
    tensors = given(case)
    bound = float(expected(case).tolerances[name][index])
    tensors[name][index] = float(tensors[name][index].double()) + bounds * bound
    return tensors


def told(case: Case, **outputs: Tensors) -> list[str]:
    return [str(found) for found in disagreements([case], {name: [tensors] for name, tensors in outputs.items()})]


def test_two_kernels_may_be_apart_by_the_sum_of_their_bounds() -> None:
    above, below = moved(ATTEND, "lse", (0, 1), 0.9), moved(ATTEND, "lse", (0, 1), -0.9)
    assert told(ATTEND, above=above, exact=given(ATTEND), below=below) == []


def test_the_two_that_are_further_apart_are_named_and_how() -> None:
    above, below = moved(ATTEND, "lse", (0, 1), 1.3), moved(ATTEND, "lse", (0, 1), -1.3)
    (found,) = told(ATTEND, above=above, exact=given(ATTEND), below=below)
    assert found.startswith("above and below differ in attend, three sequences: lse[0, 1] is off: got ")


def test_agreement_is_not_asked_of_the_reference() -> None:
    """Two that make the same mistake agree: this is the half of the oracle that the reference's values have no part in."""
    wrong = moved(ATTEND, "out", (0, 1, 2), 100.0)
    assert told(ATTEND, one=wrong, other=wrong) == []
    assert len(told(ATTEND, one=wrong, other=wrong, right=given(ATTEND))) == 2


@pytest.mark.parametrize("name", ["v_cache", "v_scale"])
def test_what_is_quantised_is_held_to_the_bit(name: str) -> None:
    other = given(WRITE)
    flat = other[name].view(torch.uint8).flatten()
    flat[0] ^= 1
    (found,) = told(WRITE, one=given(WRITE), other=other)
    assert found.startswith(f"one and other differ in write_kv, rotated: {name}[")


def test_rotated_keys_are_held_to_their_bound() -> None:
    other = given(WRITE)
    other["k_cache"][expected(WRITE).tensors["k_cache"] == 127] = 100
    (found,) = told(WRITE, one=given(WRITE), other=other)
    assert found.startswith("one and other differ in write_kv, rotated: k of row ")


def test_a_kernel_that_gives_nothing_is_not_compared(build_text: Builder) -> None:
    text = render(variant(Op.ATTEND, SPEC, SCALAR)).text.replace("if (a.size < sizeof(pg_attend_args)) return PG_E_SIZE;", "__builtin_trap();")
    with pytest.raises(CheckError, match="attend on cpu:scalar gave nothing to compare: RUN_ERROR, attend, three sequences: killed by SIGILL"):
        compiled_outputs(build_text(text), Op.ATTEND, SCALAR, [ATTEND])


@pytest.mark.triton
def test_a_planted_disagreement_between_backends_is_noticed(interpreter: Interpreter, build_text: Builder) -> None:
    """C++ with the causal mask one key late, beside C++ and Triton as they are."""
    cases = [case for case in interpreted(SPEC, 0) if case.op is Op.ATTEND and case.like is None and max(case.query_lens, default=0) > 1][:4]
    healthy = render(variant(Op.ATTEND, SPEC, SCALAR)).text
    sick = healthy.replace("std::clamp<int64_t>(position + 1,", "std::clamp<int64_t>(position + 2,")
    assert sick != healthy
    outputs = {
        "C++": compiled_outputs(build_text(healthy), Op.ATTEND, SCALAR, cases),
        "Triton": interpreted_outputs(render(variant(Op.ATTEND, SPEC, parse_target(INTERPRETED))), cases, interpreter),
        "sick": compiled_outputs(build_text(sick), Op.ATTEND, SCALAR, cases),
    }
    found = {disagreement.backends for disagreement in disagreements(cases, outputs)}
    assert found == {("C++", "sick"), ("Triton", "sick")}


@pytest.mark.long
@pytest.mark.triton
def test_a_spec_on_every_backend(interpreter: Interpreter) -> None:
    outcome = prove_pairs(PLAIN, 0, interpreter)
    assert outcome.failures == ()
    assert outcome.target == f"{len(isas()) + 1} backends"
    assert outcome.cases > 10
