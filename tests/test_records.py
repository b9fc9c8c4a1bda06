"""Claims about records: they survive JSON, say no to nonsense, and a dispatch table picks the row that it states."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.errors import PackageError
from pagegen.records import BatchShape, DispatchRow, DispatchTable, Evaluation, Status, Timing, phase_of
from pagegen.spec import Phase

bounds = st.none() | st.integers(0, 50)
rows = st.builds(
    DispatchRow,
    phase=st.sampled_from(Phase),
    kernel=st.sampled_from(["attend_0", "attend_1", "attend_2"]),
    min_seqs=bounds,
    max_seqs=bounds,
    min_context=bounds,
    max_context=bounds,
    min_query=bounds,
    max_query=bounds,
)
shapes = st.builds(
    BatchShape,
    phase=st.sampled_from(Phase),
    seqs=st.integers(0, 60),
    context=st.none() | st.integers(0, 60),
    query=st.integers(0, 60),
)
tables = st.builds(DispatchTable, rows=st.lists(rows, max_size=5).map(tuple), fallback=st.just("attend_0"))


@given(tables)
def test_a_table_survives_json(table: DispatchTable) -> None:
    assert DispatchTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


@given(tables, shapes)
def test_the_first_row_that_holds_the_batch_serves_it(table: DispatchTable, shape: BatchShape) -> None:
    name = table.select(shape)
    assert name in table.kernels and table.kernels[0] == table.fallback
    holding = [row.kernel for row in table.rows if row.holds(shape)]
    assert name == (holding[0] if holding else table.fallback)


def decode(seqs: int, context: int | None) -> BatchShape:
    return BatchShape(Phase.DECODE, seqs, context, 1)


def test_bounds_are_inclusive_and_none_bounds_nothing() -> None:
    row = DispatchRow(Phase.DECODE, "k", min_seqs=2, max_seqs=4, max_context=512)
    assert [row.holds(decode(seqs, 512)) for seqs in (1, 2, 4, 5)] == [False, True, True, False]
    assert [row.holds(decode(3, context)) for context in (0, 512, 513)] == [True, True, False]
    assert not row.holds(BatchShape(Phase.PREFILL, 3, 10, 10))
    assert DispatchRow(Phase.DECODE, "k").holds(decode(0, None))
    prompts = DispatchRow(Phase.PREFILL, "k", min_query=3, max_query=5)
    assert [prompts.holds(BatchShape(Phase.PREFILL, 1, 9, query)) for query in (2, 3, 5, 6)] == [False, True, True, False]


def test_a_context_that_is_not_known_fits_no_bound_on_it() -> None:
    assert not DispatchRow(Phase.DECODE, "k", max_context=10**9).holds(decode(1, None))
    assert not DispatchRow(Phase.DECODE, "k", min_context=0).holds(decode(1, None))


def test_a_table_says_how_a_batch_lies_outside_it() -> None:
    rows = (DispatchRow(Phase.DECODE, "k", 1, 8, 16, 100), DispatchRow(Phase.DECODE, "k", 9, 64, 16, 200))
    table = DispatchTable(rows, "default")
    said = {
        decode(65, 50): ("more than 64 sequences",),
        decode(90, 201): ("more than 64 sequences", "more than 200 tokens of context"),
        decode(1, 15): ("less than 16 tokens of context",),
        decode(1, None): ("tokens of context not said",),
        decode(1, 150): ("between rows of the table",),
        BatchShape(Phase.MIXED, 1, 50, 2): ("no mixed batch was measured",),
    }
    assert {shape: table.outside(shape) for shape in said} == said
    assert all(table.find(shape) is None for shape in said)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rows": []},
        {"rows": [{"phase": "decode"}], "fallback": "k"},
        {"rows": [{"phase": "training", "kernel": "k"}], "fallback": "k"},
        {"rows": [{"phase": "decode", "kernel": "k", "colour": 1}], "fallback": "k"},
        {"rows": [1], "fallback": "k"},
        {"rows": None, "fallback": "k"},
    ],
)
def test_a_malformed_table_is_refused_with_the_cure(values: dict[str, Any]) -> None:
    with pytest.raises(PackageError, match=r"dispatch table is malformed .* `pagegen tune`"):
        DispatchTable.from_dict(values)


@pytest.mark.parametrize(
    ("query_lens", "phase"),
    [
        ([1], Phase.DECODE),
        ([1] * 7, Phase.DECODE),
        ([0, 1, 1], Phase.DECODE),
        ([5], Phase.PREFILL),
        ([2], Phase.PREFILL),
        ([5, 9, 3], Phase.PREFILL),
        ([1, 1, 1, 1, 3], Phase.MIXED),
        ([1] * 15 + [2], Phase.MIXED),
        ([], Phase.DECODE),
    ],
)
def test_the_phase_is_read_from_counts(query_lens: list[int], phase: Phase) -> None:
    assert phase_of(sum(query_lens), len(query_lens), max(query_lens, default=0)) is phase
    assert BatchShape.of_batch(sum(query_lens), len(query_lens), max(query_lens, default=0), 7).phase is phase
    if phase is not Phase.MIXED and len(query_lens) < 2:
        assert phase_of(sum(query_lens), len(query_lens), None) is phase  # one sequence's length needs no hint


EVALUATION = Evaluation(
    Status.PASSED,
    {"tile_kv": 64},
    score=0.81,
    timings={"1x1@512": Timing(1e-5, 0.9e-5, 1.1e-5, 9)},
    environment={"torch": "2.13.0"},
    seconds=1.5,
)


def test_an_evaluation_survives_json() -> None:
    failed = Evaluation(Status.TIMEOUT, {"tile_kv": 16}, reason="over 20 s")
    for evaluation in (EVALUATION, failed):
        assert Evaluation.from_dict(json.loads(json.dumps(evaluation.to_dict()))) == evaluation


def test_a_partial_score_goes_with_pruned_only() -> None:
    assert Evaluation.from_dict(Evaluation(Status.PRUNED, {}, partial=1.1).to_dict()).partial == 1.1
    with pytest.raises(ValueError, match="PRUNED only"):
        Evaluation(Status.PASSED, {}, score=1.0, partial=1.1)


@pytest.mark.parametrize("status", Status)
def test_a_score_goes_with_passed_and_only_with_it(status: Status) -> None:
    score = None if status is Status.PASSED else 1.0
    with pytest.raises(ValueError, match="a score goes with PASSED"):
        Evaluation(status, {}, score=score)
