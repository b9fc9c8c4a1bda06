"""Claims about `pagegen compile`: rows for absent targets, and exit statuses."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pagegen.cli.compile import PROMISED, REPORTED
from pagegen.spec import PAGED_OPS, DType
from pagegen.target import TARGETS, parse_target

from .helpers import run

SPEC = "fp16-d16-h2x1-b16-NHD"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.triton
def test_rows_state_what_every_binary_uses() -> None:
    result = run("compile", SPEC, "--target", "cuda:sm_90,hip:gfx942", "--op", "write_kv", "--op", "copy_blocks", "--json")
    rows = result.document["rows"]
    assert result.status == 0
    assert [(row["target"], row["kernel"]) for row in rows] == [
        (target, op) for target in ("cuda:sm_90", "hip:gfx942") for op in ("write_kv", "copy_blocks")
    ]
    for row in rows:
        assert row["error"] is None and row["spills"] == 0 and row["registers"] > 0 and 0 < row["occupancy"] <= 1
        assert row["instructions"]["load"] > 0 and row["spec"] == SPEC


@pytest.mark.triton
def test_people_get_a_table_a_target() -> None:
    result = run("compile", SPEC, "--target", "cuda:sm_80", "--op", "write_kv")
    assert result.status == 0 and f"{SPEC} on cuda:sm_80" in result.stdout and "write_kv" in result.stdout


@pytest.mark.compiler
def test_a_cpu_library_has_an_instruction_mix_and_no_registers() -> None:
    result = run("compile", SPEC, "--target", "cpu:avx2", "--op", "write_kv", "--json")
    (row,) = result.document["rows"]
    assert result.status == 0 and row["registers"] is None and row["kernel"] == "write_kv"


def test_a_target_that_does_not_compile_is_a_row_and_the_answer_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CXX", "no-such-compiler")
    result = run("compile", SPEC, "--target", "cpu:avx2", "--op", "write_kv", "--json")
    (row,) = result.document["rows"]
    assert result.status == 1 and "no C++ compiler" in row["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", SPEC, "--all"), "leave out SPEC"),
        (("compile", SPEC, "--target", "cuda:sm_1"), "target 'cuda:sm_1' is not known"),
        (("compile", SPEC, "--target", "cuda:sm_90", "--set", "tile_kv=7"), "knob tile_kv='7' is not allowed"),
        (("compile", SPEC, "--op", "write_kv", "--set", "tile_kv=16", "--set", "tile_kv=32"), "set each knob once"),
        (("compile",), "name one spec"),
    ],
)
def test_a_wrong_request_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_what_is_promised_are_16_bit_specs_of_the_usual_widths_and_three_ratios() -> None:
    assert {(spec.dtype, spec.head_dim) for spec in PROMISED} == set(itertools.product((DType.FP16, DType.BF16), (64, 96, 128)))
    assert {spec.group for spec in PROMISED} == {1, 3, 4}
    assert any(spec.v_in_k for spec in REPORTED)
    assert {DType.FP32} < {spec.dtype for spec in REPORTED} and 256 in {spec.head_dim for spec in REPORTED}


@pytest.mark.long
@pytest.mark.triton
@pytest.mark.compiler
@pytest.mark.timeout(3600)
def test_the_whole_matrix_compiles_and_what_is_promised_does_not_spill() -> None:
    """Every target, present or not; a second run finds everything built."""
    result = run("compile", "--all", "--target", "all", "--json")
    rows = result.document["rows"]
    wanted = {(spec.slug, target.name, op.value) for spec in (*PROMISED, *REPORTED) for target in TARGETS for op in PAGED_OPS}
    assert {(row["spec"], row["target"], row["op"]) for row in rows} == wanted
    promised = {spec.slug for spec in PROMISED}
    for row in rows:
        lacks = row["error"] is not None and "cpu:" in row["target"]  # a cross compiler that this machine does not have
        assert lacks or row["error"] is None, row
        if not row["target"].startswith("cpu"):
            assert row["spills"] is not None and row["shared_memory"] is not None
            limit = parse_target(row["target"]).shared_memory
            if row["spec"] in promised:
                assert row["spills"] == 0 and row["shared_memory"] <= limit and row["occupancy"] > 0, row


@pytest.mark.triton
def test_what_was_read_from_a_binary_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compile", "bf16-d64-h4x2-b16-NHD", "--target", "cuda:sm_90", "--op", "copy_blocks", "--json")
    (first,) = run(*words).document["rows"]
    monkeypatch.setattr("pagegen.build.triton.compile_for", None)  # not compiled, nor read, again
    (second,) = run(*words).document["rows"]
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
