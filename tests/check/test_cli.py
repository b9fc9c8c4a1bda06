"""`pagegen check`: verdicts as exit statuses, tables and JSON, for specs and packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.catalog import template_for, variant
from pagegen.package import Packaged, write_package
from pagegen.records import DispatchTable
from pagegen.render import Source, render
from pagegen.spec import PAGED_OPS, Op, parse_slug
from tests.check.conftest import SCALAR
from tests.cli.helpers import run

SLUG = "fp32-d8-h2x1-b3-NHD"
SPEC = parse_slug(SLUG)[0]


def make_package(folder: Path, edit: tuple[str, str] = ("", "")) -> Path:
    """A package with small tiles whose copy_blocks is edited."""
    sources = {}
    for op in PAGED_OPS:
        changes = {"row_block": 1, "row_block_packed": 2} if op is Op.ATTEND else {}
        sources[op.value] = render(variant(op, SPEC, SCALAR, template_for(op, SPEC, SCALAR).space(SPEC, SCALAR).config(changes)))
    wrong = sources["copy_blocks"]
    sources["copy_blocks"] = Source(wrong.variant, wrong.text.replace(*edit) if edit[0] else wrong.text)
    dispatch = {op: DispatchTable((), op.value) for op in PAGED_OPS}
    kernels = {name: Packaged(source) for name, source in sources.items()}
    return write_package(folder, spec=SPEC, target=SCALAR, kernels=kernels, dispatch=dispatch, evidence={})


def test_a_spec_is_checked_op_by_op() -> None:
    result = run("check", SLUG, "--target", "cpu:scalar", "--seed", "3", "--json")
    assert result.status == 0, result.stderr
    document = result.document
    assert document["passed"] is True
    assert document["cases"] > 40
    assert document["failures"] == []
    assert all(0 < seconds < 60 for seconds in document["seconds"].values())
    assert document["kernels"] == {"attend": "PASSED", "write_kv": "PASSED", "copy_blocks": "PASSED"}
    assert (document["target"], document["suite"], document["seed"]) == ("cpu:scalar", "quick", 3)


def test_people_get_a_table() -> None:
    result = run("check", f"decode-{SLUG}", "--target", "cpu:scalar")
    assert result.status == 0
    assert "write_kv" in result.stdout and "PASSED" in result.stdout and "seconds" in result.stdout


def test_a_package_is_checked_kernel_by_kernel_and_as_a_whole(tmp_path: Path) -> None:
    document = run("check", str(make_package(tmp_path)), "--json").document
    assert document["passed"] is True
    assert list(document["kernels"]) == ["attend", "write_kv", "copy_blocks", "package"]


def test_a_wrong_package_is_a_no_with_the_smallest_failing_input(tmp_path: Path) -> None:
    package = make_package(tmp_path, ("    v_cache.copy(", "    if (false) v_cache.copy("))
    result = run("check", str(package), "--json")
    assert result.status == 1
    failure = result.document["failures"][0]
    assert result.document["passed"] is False
    assert result.document["kernels"]["copy_blocks"] == "INCORRECT"
    assert "package" not in result.document["kernels"]  # what failed alone is not run in this process
    assert (failure["kernel"], failure["context_lens"]) == ("copy_blocks", [1])
    assert failure["message"].startswith("v_cache[")
    assert "op=Op.COPY_BLOCKS" in result.document["snippets"]["copy_blocks"]
    told = run("check", str(package))
    assert told.status == 1
    assert "copy_blocks, one block: v_cache[" in told.stderr
    assert "print(check_cases(render(" in told.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bf16-d64-h9x3-b16-auto"], "layout is `auto`"),
        ([SLUG, "--target", "cuda:sm_90"], "not present"),
        ([SLUG, "--suite", "slow"], "slow"),
        ([SLUG, "--seed", "-1"], "--seed"),
        (["."], "no kernel package"),
        ([".", "--lse"], "leave out"),
        ([], "name one spec"),
    ],
)
def test_a_wrong_request_is_one_line(words: list[str], said: str) -> None:
    result = run("check", *words)
    assert result.status == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
