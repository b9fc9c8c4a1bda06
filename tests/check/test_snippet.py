"""A failing case is printed as a program: it runs as it stands, and makes the same case."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagegen.catalog import Variant, template_for
from pagegen.check import quick_suite, snippet
from pagegen.check.case import Case
from pagegen.spec import KernelSpec, Op
from tests.check.conftest import SCALAR
from tests.conftest import ROOT

SPEC = KernelSpec.from_dict(
    {"q_heads": 3, "kv_heads": 1, "head_dim": 8, "kv_dtype": "int4", "mask": True, "deterministic": True, "rope": "neox", "block_size": 3}
)


def text_of(case: Case) -> str:
    template = template_for(case.op, SPEC, SCALAR)
    config = template.space(SPEC, SCALAR).config({"row_block": 1, "row_block_packed": 2} if case.op is Op.ATTEND else {})
    return snippet(case, Variant(SPEC, SCALAR, template, config))


def test_it_makes_the_same_case() -> None:
    """Every case of the quick suite, by running all of its text but the last line."""
    for case in quick_suite(SPEC):
        found: dict[str, object] = {}
        exec(text_of(case).rsplit("print(", 1)[0], found)  # noqa: S102 - the text is our own
        assert found["case"] == case


@pytest.mark.parametrize("name", ["prefill chunks", pytest.param("many blocks", marks=pytest.mark.long)])
def test_it_runs(name: str) -> None:
    case = next(case for case in reversed(quick_suite(SPEC)) if case.name == name)
    command = [sys.executable, "-c", text_of(case)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("passed\n", "")
