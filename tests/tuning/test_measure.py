"""Candidates are timed side by side; a clock that cannot be trusted is refused; intervals mean what they say."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagegen.tuning.measure import SAMPLE_SECONDS, MeasureError, Measurement, geomean_of_medians, measure


class FakeMachine:
    """A clock that only candidates move, and whose speed drifts."""

    def __init__(self, drift: float = 1.0) -> None:
        self.now, self.slowness, self.drift, self.log = 0.0, 1.0, drift, list[str]()

    def candidate(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.log.append(name)
            self.now += seconds * self.slowness
            self.slowness *= self.drift

        return call

    def clock(self) -> float:
        return self.now


def test_a_candidate_twice_as_fast_has_half_the_anchors_time() -> None:
    machine = FakeMachine()
    calls = {"default": machine.candidate("default", 2e-3), "fast": machine.candidate("fast", 1e-3)}
    result = measure(calls, "default", clock=machine.clock)
    assert result.timing("fast").median == pytest.approx(1e-3)
    assert all(ratio == pytest.approx(0.5) for ratio in result.ratios("fast"))
    assert all(ratio == 1.0 for ratio in result.ratios("default"))


def test_drift_of_the_machine_cancels_in_the_ratio() -> None:
    machine = FakeMachine(drift=1.01)  # every call is one per cent slower than the one before
    calls = {name: machine.candidate(name, 1e-3) for name in ("default", "same")}
    result = measure(calls, "default", clock=machine.clock, seconds=1e9, max_rounds=60)
    assert max(result.seconds["same"]) > 2 * min(result.seconds["same"])
    ratio = geomean_of_medians([result.ratios("same")], [1.0])
    assert 0.98 < ratio.median < 1.02


def test_every_round_holds_every_candidate_in_changing_order() -> None:
    machine = FakeMachine()
    calls = {name: machine.candidate(name, 1e-3) for name in "abc"}
    result = measure(calls, "a", clock=machine.clock, seconds=1e9, max_rounds=20)
    rounds = [tuple(machine.log[i : i + 3]) for i in range(6, len(machine.log), 3)]  # 6: two warm-up calls each
    assert len(rounds) == 20 == len(result.seconds["b"])
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and len(set(rounds)) > 1


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = FakeMachine()
    result = measure({"tiny": machine.candidate("tiny", 1e-5)}, "tiny", clock=machine.clock, max_rounds=5, seconds=1e9)
    assert len(machine.log) == 2 + 5 * round(SAMPLE_SECONDS / 1e-5)
    assert result.timing("tiny").median == pytest.approx(1e-5)


def _clocks() -> dict[str, Iterator[float]]:
    return {
        "zero": itertools.repeat(0.0),
        "constant": itertools.repeat(12.5),
        "decreasing": itertools.count(0.0, -1.0),
        "nan": itertools.repeat(float("nan")),
    }


@pytest.mark.parametrize("kind", _clocks())
def test_a_broken_clock_is_refused_not_divided_by(kind: str) -> None:
    ticks = _clocks()[kind]
    with pytest.raises(MeasureError, match="clock"):
        measure({"a": lambda: None, "b": lambda: None}, "a", clock=lambda: next(ticks))


def test_an_anchor_that_is_not_measured_is_refused() -> None:
    with pytest.raises(MeasureError, match="anchor"):
        measure({}, "default")


def test_a_real_clock_gives_as_many_ratios_as_rounds() -> None:
    result = measure({"a": lambda: None, "b": lambda: None}, "a", seconds=0.0, min_rounds=7)
    assert result.timing("a").rounds == len(result.ratios("b")) == 7


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.integers(0, 2**31))
def test_the_interval_holds_its_estimate_and_stays_within_the_values(values: list[float], seed: int) -> None:
    found = geomean_of_medians([values], [1.0], seed)
    assert min(values) * 0.999999 <= found.low <= found.median <= found.high <= max(values) * 1.000001


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for trial in range(200):
        values = [rng.lognormvariate(0.0, 0.3) for _ in range(25)]  # median 1
        found = geomean_of_medians([values], [1.0], trial)
        hits += found.low <= 1.0 <= found.high
    assert 175 <= hits <= 200


def test_weights_weigh() -> None:
    found = geomean_of_medians([[4.0], [0.25]], [3.0, 1.0])
    assert found.median == pytest.approx(2.0) and found.low == pytest.approx(2.0) == found.high


def test_measuring_leaves_torchs_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Measurement("a", {"a": (1.0, 2.0)}).timing("a")
    assert torch.equal(before, torch.get_rng_state())
