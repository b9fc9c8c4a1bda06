"""A candidate that is clearly worse than the best is not timed to its end; one that may be better always is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.tuning.pruning import MARGIN, MIN_BATCHES, P_VALUE, Judge, signed_rank

VALUES = st.lists(st.floats(-5, 5).map(lambda value: round(value, 1)), max_size=9)


@given(VALUES)
def test_the_p_value_is_the_share_of_sign_patterns_that_are_as_extreme(values: list[float]) -> None:
    values = [value for value in values if value]
    sizes = sorted(map(abs, values))
    rank = {size: sum(place for place, each in enumerate(sizes, 1) if each == size) / sizes.count(size) for size in sizes}
    reached = sum(rank[abs(value)] for value in values if value > 0)
    patterns = list(itertools.product((0, 1), repeat=len(values)))
    sums = [sum(rank[abs(value)] for value, sign in zip(values, signs, strict=True) if sign) for signs in patterns]
    expected = sum(total >= reached - 1e-9 for total in sums) / len(patterns)
    assert signed_rank(values) == pytest.approx(expected)


@given(VALUES)
def test_scipy_agrees_where_it_is_exact_too(values: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats")
    sizes = [abs(value) for value in values]
    if not values or 0 in sizes or len(set(sizes)) < len(sizes):
        return
    assert signed_rank(values) == pytest.approx(stats.wilcoxon(values, alternative="greater", method="exact").pvalue)


def heard(ratios: list[float], incumbent: list[float], weights: list[float] | None = None) -> list[str]:
    """What a judge says after each batch."""
    judge = Judge(dict(enumerate(incumbent)))
    return [judge.hear(step, ratio, (weights or [1.0] * 99)[step]) for step, ratio in enumerate(ratios)]


def test_one_that_is_worse_everywhere_is_stopped_after_the_fewest_batches_that_prove_it() -> None:
    said = heard([1.1] * 8, [1.0] * 8)
    assert not any(said[: MIN_BATCHES - 1]) and all(said[MIN_BATCHES - 1 :])
    assert said[MIN_BATCHES - 1] == "10% slower than the best so far over 4 batches (p = 0.062)"


@given(st.lists(st.floats(0.5, 1 + MARGIN), min_size=1, max_size=10))
def test_one_within_the_margin_is_never_stopped(ratios: list[float]) -> None:
    assert not any(heard(ratios, [1.0] * len(ratios)))


def test_one_that_is_better_where_most_time_is_spent_is_never_stopped() -> None:
    assert not any(heard([0.985] + [1.1] * 8, [1.0] * 9, [100.0] + [1.0] * 8))
    assert heard([1.0] + [1.1] * 8, [1.0] * 9, [1.0] * 9)[-1]


def test_one_that_is_better_on_any_batch_is_never_stopped_as_a_table_may_want_it_there() -> None:
    assert not any(heard([0.9] + [1.5] * 8, [1.0] * 9))


def test_without_an_incumbent_nothing_is_stopped() -> None:
    assert not any(heard([9.0] * 9, []))


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=9), st.lists(st.floats(0.2, 5), min_size=9, max_size=9))
def test_whoever_is_stopped_has_lost_beyond_margin_and_chance(ratios: list[float], incumbent: list[float]) -> None:
    if heard(ratios, incumbent)[-1]:
        worse = [mine > (1 + MARGIN) * its for mine, its in zip(ratios, incumbent, strict=False)]
        assert len(ratios) >= MIN_BATCHES and sum(worse) > len(worse) / 2 and 0.5 ** len(worse) <= P_VALUE


def test_what_was_heard_is_reported_by_step() -> None:
    reported: list[tuple[int, float]] = []
    judge = Judge({}, lambda step, ratio: reported.append((step, ratio)))
    judge.hear(0, 1.5, 1.0)
    judge.hear(1, 0.5, 1.0)
    assert reported == [(0, 1.5), (1, 0.5)]
