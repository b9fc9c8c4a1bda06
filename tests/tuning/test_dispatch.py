"""A dispatch table is the smallest that is nearly as fast as choosing anew for each batch, and says what it means."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.records import BatchShape, DispatchTable, Evaluation, Status, Timing
from pagegen.space import ConfigSpace, Knob
from pagegen.spec import Phase
from pagegen.tuning.dispatch import MAX_CELLS, MAX_REGRET, Fit, encode, fit, portfolio, regret, span_of
from pagegen.tuning.workload import Point

NAMES = ("default", "a", "b", "c")
SIZES = (1, 2, 3, 8, 32, 100, 512, 2048)


def prompt(seqs: int, context: int, query: int, weight: float = 1.0) -> Point:
    return Point((min(query, context),) * seqs, (context,) * seqs, weight)


points = st.builds(prompt, st.sampled_from(SIZES[:5]), st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from((0.5, 1.0, 7.0)))
microseconds = st.integers(1, 100).map(lambda value: value * 1e-6)
timed = st.dictionaries(points, st.fixed_dictionaries(dict.fromkeys(NAMES, microseconds)), min_size=1, max_size=6)


def shape_of(phase: Phase, point: Point) -> BatchShape:
    seqs, context, query = point.shape
    return BatchShape(phase, seqs, context, query)


def time(seconds: dict[Point, dict[str, float]], name: str) -> float:
    return sum(point.weight * taken[name] for point, taken in seconds.items())


def decode(times: dict[str, dict[str, float]]) -> Fit:
    """The table of batches such as `8x1@512`."""
    return fit(Phase.DECODE, {Point.parse(name): taken for name, taken in times.items()})


@given(timed, st.integers(1, 4))
def test_a_table_keeps_its_bound_or_is_as_large_as_allowed_and_never_loses_to_one_config(
    seconds: dict[Point, dict[str, float]], most: int
) -> None:
    found = fit(Phase.PREFILL, seconds, max_rows=most)
    cells = {point.shape for point in seconds}
    assert 1 <= len(found.rows) <= min(most, len(cells))
    mine = sum(point.weight * taken[found.assigned[point]] for point, taken in seconds.items())
    assert mine <= min(time(seconds, name) for name in NAMES) * (1 + 1e-9)
    assert found.regret == regret(seconds, found.assigned) >= -1e-9
    if most >= len(cells) == len(seconds):  # every point can have a row of its own
        assert found.regret <= MAX_REGRET + 1e-9
    if found.regret > MAX_REGRET + 1e-9:  # then no table of that size does better: one of more rows may
        assert found.regret <= fit(Phase.PREFILL, seconds, max_rows=max(1, most - 1)).regret + 1e-9


@given(timed)
def test_every_measured_batch_gets_the_config_that_it_was_assigned(seconds: dict[Point, dict[str, float]]) -> None:
    found = fit(Phase.PREFILL, seconds)
    for rows in (found.rows, encode(Phase.PREFILL, found.assigned)):
        table = DispatchTable(rows, fallback="nobody")
        assert {point: table.select(shape_of(Phase.PREFILL, point)) for point in seconds} == found.assigned
    assert len(encode(Phase.PREFILL, found.assigned)) <= len(found.rows)


@given(timed)
def test_no_smaller_table_keeps_the_bound(seconds: dict[Point, dict[str, float]]) -> None:
    found = fit(Phase.PREFILL, seconds)
    if len(found.rows) > 1:
        smaller = fit(Phase.PREFILL, seconds, max_rows=len(found.rows) - 1)
        assert smaller.regret > MAX_REGRET and smaller.regret > found.regret


def test_three_rows_are_found_where_no_two_do() -> None:
    fast = {1: "a", 4: "b", 16: "a", 64: "c"}
    found = decode({f"{seqs}x1@512": {name: 1.0 + (name != own) for name in NAMES} for seqs, own in fast.items()})
    assert {point.shape[0]: name for point, name in found.assigned.items()} == fast
    assert len(found.rows) == 3 and found.regret == 0.0


def test_the_search_is_exact_on_a_grid() -> None:
    """Against every decision list of two boxes and the rest, tried one by one."""
    cells = [(seqs, context) for seqs in (1, 8) for context in (64, 512, 4096)]
    best = dict(zip(cells, "abcbab", strict=True))
    seconds = {prompt(s, c, 1): {name: 1.0 if name == best[s, c] else 1.0 + i / 4 for i, name in enumerate(NAMES)} for s, c in cells}
    found = fit(Phase.DECODE, seconds, max_regret=0.0, max_rows=3)
    some, contexts = (list(itertools.combinations_with_replacement(values, 2)) for values in ((1, 8), (64, 512, 4096)))
    rows = list(itertools.product(some, contexts, NAMES))
    least = math.inf
    for first, second, rest in itertools.product(rows, rows, NAMES):
        total = 0.0
        for (s, c), taken in zip(cells, seconds.values(), strict=True):
            held = (name for (sl, sh), (cl, ch), name in (first, second) if sl <= s <= sh and cl <= c <= ch)
            total += taken[next(held, rest)]
        least = min(least, total)
    mine = sum(taken[found.assigned[point]] for point, taken in seconds.items())
    assert mine == pytest.approx(least)


def test_bounds_lie_in_the_geometric_middle_and_the_range_ends_a_factor_of_two_outside() -> None:
    found = decode({"1x1@100": {"default": 9, "a": 1}, "16x1@100": {"default": 1, "a": 9}, "16x1@400": {"default": 1, "a": 9}})
    table = DispatchTable(found.rows, fallback="outside")
    served = {seqs: table.select(BatchShape(Phase.DECODE, seqs, 100, 1)) for seqs in (1, 4, 5, 32, 33)}
    assert served == {1: "a", 4: "a", 5: "default", 32: "default", 33: "outside"}
    contexts = {context: table.select(BatchShape(Phase.DECODE, 16, context, 1)) for context in (49, 50, 800, 801)}
    assert contexts == {49: "outside", 50: "default", 800: "default", 801: "outside"}


def test_the_range_reaches_as_far_as_the_batches_that_others_stand_for() -> None:
    assigned = {Point.parse("4x1@100"): "a", Point.parse("16x1@400"): "b"}
    stood_for = [Point.parse(name) for name in ("1x1@9", "128x1@32768")]
    table = DispatchTable(encode(Phase.DECODE, assigned, span_of([*assigned, *stood_for])), fallback="outside")
    shapes = [(1, 9), (4, 100), (16, 400), (128, 32768), (129, 32768), (128, 32769), (1, 8)]
    served = [table.select(BatchShape(Phase.DECODE, *shape, 1)) for shape in shapes]
    assert served == ["a", "a", "b", "b", "outside", "outside", "outside"]
    inside = span_of(assigned)  # what reaches less far than a factor of two takes nothing away
    assert encode(Phase.DECODE, assigned, inside) == encode(Phase.DECODE, assigned)


def test_batches_of_the_same_numbers_share_a_config() -> None:
    ragged, even = Point.parse("1x1@64+1x1@512"), Point.parse("2x1@512")
    found = fit(Phase.DECODE, {ragged: {"default": 1.0, "a": 3.0}, even: {"default": 2.0, "a": 1.0}})
    assert set(found.assigned.values()) == {"default"} and found.regret == pytest.approx(0.5)


def test_a_config_that_may_not_serve_a_batch_does_not() -> None:
    found = decode({"1x1@64": {"default": 5.0, "a": 1.0}, "1x1@512": {"default": 5.0, "a": math.inf}})
    assert set(found.assigned.values()) == {"a", "default"}


def test_more_shapes_than_can_be_searched_exactly_are_refused() -> None:
    with pytest.raises(ValueError, match="more than a table is fitted to"):
        decode({f"1x1@{context + 1}": {"default": 1.0} for context in range(MAX_CELLS + 1)})


def test_the_finalists_are_those_that_make_a_fast_table_together() -> None:
    space = ConfigSpace((Knob("tile", (0, 1, 2, 3, 4), 0),))
    batches = [Point.parse("1x1@64"), Point.parse("64x1@64")]

    def found(tile: int, one: float, many: float, drift: float = 1.0, noise: float = 0.0) -> Evaluation:
        timings = {p.name: Timing(drift * t, drift * t, drift * (t + noise), 9) for p, t in zip(batches, (one, many), strict=True)}
        return Evaluation(Status.PASSED, {"tile": tile}, score=math.sqrt(one * many), timings=timings)

    ranked = [found(1, 0.8, 0.8), found(2, 0.79, 0.85, noise=0.5), found(3, 0.7, 1.0, drift=3.0), found(0, 1.0, 1.0), found(4, 1.5, 0.9)]
    chosen = [found.config["tile"] for found in portfolio(ranked, space.default, batches, 3)]
    assert chosen == [1, 3, 2]  # the best, the best beside it, the next best
    failed = Evaluation(Status.PASSED, {"tile": 2}, score=0.5)  # timed elsewhere: it ranks by its score alone
    assert [f.config["tile"] for f in portfolio([failed, *ranked[2:4]], space.default, batches, 9)] == [2, 3]
