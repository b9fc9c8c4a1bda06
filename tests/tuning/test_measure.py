"""Candidates are timed side by side; a clock that cannot be trusted is refused; intervals mean what they say."""

import fcntl
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagegen.build import build_kernels
from pagegen.spec import KernelSpec
from pagegen.target import best_cpu
from pagegen.tuning.machine import Watch
from pagegen.tuning.measure import (
    SAMPLE_SECONDS,
    Call,
    DeviceClock,
    Interval,
    MeasureError,
    Measurement,
    geomean_of_medians,
    measure,
)
from pagegen.tuning.workload import Inputs, Point, Pool

QUIET = Watch(work=lambda: None, proc=Path("/nowhere"), switches=lambda: 0)  # whatever goes on where the tests run


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
    result = measure(calls, "default", watch=QUIET, clock=machine.clock)
    assert result.timing("fast").median == pytest.approx(1e-3)
    assert all(ratio == pytest.approx(0.5) for ratio in result.ratios("fast"))
    assert all(ratio == 1.0 for ratio in result.ratios("default"))


def test_the_middle_of_a_ratio_is_that_of_its_interval() -> None:
    found = Measurement("a", {"a": (1.0, 2.0, 3.0, 5.0), "b": (2.0, 2.0, 9.0, 1.0)})
    assert found.middle_ratio("b") == found.ratio("b").median == pytest.approx(math.sqrt(2))


def test_drift_of_the_machine_cancels_in_the_ratio() -> None:
    machine = FakeMachine(drift=1.01)  # every call is one per cent slower than the one before
    calls = {name: machine.candidate(name, 1e-3) for name in ("default", "same")}
    result = measure(calls, "default", watch=QUIET, clock=machine.clock, seconds=1e9, max_rounds=60)
    assert max(result.seconds["same"]) > 2 * min(result.seconds["same"])
    ratio = geomean_of_medians([result.ratios("same")], [1.0])
    assert 0.98 < ratio.median < 1.02


def test_every_round_holds_every_candidate_in_changing_order() -> None:
    machine = FakeMachine()
    calls = {name: machine.candidate(name, 1e-3) for name in "abc"}
    result = measure(calls, "a", watch=QUIET, clock=machine.clock, seconds=1e9, max_rounds=20)
    rounds = [tuple(machine.log[i : i + 3]) for i in range(6, len(machine.log), 3)]  # 6: two warm-up calls each
    assert len(rounds) == 20 == len(result.seconds["b"])
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and len(set(rounds)) > 1


def test_each_measurement_has_an_order_of_its_own_which_its_seed_makes_again() -> None:
    def order(seed: int | None) -> tuple[list[str], int]:
        machine = FakeMachine()
        calls = {name: machine.candidate(name, 1e-3) for name in "abcdefgh"}
        made = measure(calls, "a", watch=QUIET, clock=machine.clock, max_rounds=5, seed=seed)
        return machine.log[16:], made.seed

    (first, seed), (second, other) = order(None), order(None)
    assert seed != other and first != second and order(seed)[0] == first
    assert first[8:16] == first[7::-1]  # every second round goes backwards: an even drift cancels


def test_a_sample_in_which_the_core_was_lost_is_taken_again_while_that_is_rare() -> None:
    machine, lost = FakeMachine(), itertools.count()
    stalled = iter([False] * 20 + [True] + [False] * 2000)
    switches = 0

    def call() -> None:
        nonlocal switches
        machine.now += 1e-3
        if next(stalled):
            machine.now += 1.0
            switches += 1

    watch = Watch(work=lambda: None, proc=Path("/nowhere"), switches=lambda: switches)
    calls = {"default": call, "other": machine.candidate("other", 1e-3)}
    result = measure(calls, "default", watch=watch, clock=lambda: machine.now, seconds=1e9, max_rounds=40)
    assert max(result.seconds["default"]) == pytest.approx(1e-3) and result.disturbance.retaken == 1
    always = Watch(work=lambda: None, proc=Path("/nowhere"), switches=lambda: next(lost))
    result = measure(calls, "default", watch=always, clock=lambda: machine.now, seconds=1e9, max_rounds=40)
    assert result.disturbance.retaken <= 80 == 2 * len(result.seconds["default"])  # it ends all the same


def test_no_other_timing_runs_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_TIMING_LOCK", str(tmp_path / "lock"))
    held: list[bool] = []

    def call() -> None:
        with (tmp_path / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)

    measure({"a": call}, "a", seconds=0.0)
    assert all(held) and held


class FakeDevice:
    """torch.cuda as far as it is used: calls are enqueued, and only the stream's own clock moves with them."""

    def __init__(self) -> None:
        self.now, self.asleep = 0.0, False

    def Event(self, *, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.asleep = True


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at, self.waited = device, 0.0, False

    def record(self) -> None:
        assert self.device.asleep  # the host is ahead of the device
        self.at = self.device.now

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.waited
        return (end.at - self.at) * 1e3


def test_a_devices_time_is_that_between_two_events_of_its_stream() -> None:
    device = FakeDevice()

    def call(seconds: float) -> Call:
        def enqueue() -> None:
            device.now += seconds

        return enqueue

    calls = {"default": call(2e-3), "fast": call(1e-3)}
    result = measure(calls, "default", seconds=0.0, stopwatch=DeviceClock(device))
    assert result.timing("default").median == pytest.approx(2e-3) and result.ratio("fast").median == pytest.approx(0.5)


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = FakeMachine()
    result = measure({"tiny": machine.candidate("tiny", 1e-5)}, "tiny", watch=QUIET, clock=machine.clock, max_rounds=5, seconds=1e9)
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


# --- what a ratio's interval is worth --------------------------------------------------------------------------------


class NoisyMachine:
    """A machine with neighbours: slow stretches that last for many calls, spread from call to call, and rare long stalls."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.slowness = random.Random(seed), 0.0, 1.0

    def candidate(self, seconds: float) -> Call:
        def call() -> None:
            if self.rng.random() < 0.02:
                self.slowness = self.rng.choice((1.0, 1.2, 1.6))
            stall = 5e-3 if self.rng.random() < 0.01 else 0.0
            self.now += seconds * self.slowness * self.rng.lognormvariate(0.0, 0.05) + stall

        return call

    def ratio(self, planted: float) -> Interval:
        calls = {"default": self.candidate(1e-3), "candidate": self.candidate(1e-3 * (1 + planted))}
        result = measure(calls, "default", watch=QUIET, clock=lambda: self.now, seconds=1e9, max_rounds=100, seed=self.rng.getrandbits(32))
        return result.ratio("candidate")


def test_a_slow_down_of_5_percent_is_found_and_one_of_0_is_not() -> None:
    found = [NoisyMachine(seed).ratio(0.05) for seed in range(20)]
    assert all(interval.low > 1.0 for interval in found)
    assert all(interval.median == pytest.approx(1.05, abs=0.025) for interval in found)
    nothing = [NoisyMachine(seed).ratio(0.0) for seed in range(40)]
    assert sum(interval.low <= 1.0 <= interval.high for interval in nothing) >= 34  # 95 % intervals


def test_two_timings_of_one_kernel_agree_within_their_intervals_in_19_of_20_repeats() -> None:
    agreed = 0
    for seed in range(20):
        machine = NoisyMachine(seed)
        first, second = machine.ratio(0.3), machine.ratio(0.3)
        agreed += first.low <= second.high and second.low <= first.high
    assert agreed >= 19


BUSY = "while True: sum(range(10000))"


@pytest.mark.long
@pytest.mark.compiler
def test_under_background_load_timings_agree_and_planted_slow_downs_are_told_apart() -> None:
    """Real kernels and a real clock, beside one process more than there are cores."""
    spec = KernelSpec(8, 2, 64)
    attend = build_kernels(spec, best_cpu()).attend
    torch.set_num_threads(1)
    pool = Pool(spec, 4 << 20, 0)

    def call(more: int = 0) -> Call:
        """Eight sequences of 512 tokens, the last with some more, always in the same blocks."""
        inputs = Inputs(pool, Point((1,) * 8, (512,) * 7 + (512 + more,)), warm=True)
        return lambda: inputs.run(attend, inputs.block_tables[0])

    neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        calls = {"default": call(), "same": call(), "slower": call(205)}  # 5 % of 4096 tokens
        taken = [measure(calls, "default", seconds=0.6, max_rounds=1000) for _ in range(40)]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    ratios = [(m.ratio("same"), m.ratio("slower")) for m in taken]
    pairs = list(zip(ratios[::2], ratios[1::2], strict=True))
    agreed = sum(a.low <= b.high and b.low <= a.high for (a, _), (b, _) in pairs)
    assert agreed >= 19, pairs
    assert all("used by other processes" in m.disturbance.line for m in taken)
    same = geomean_of_medians([m.ratios("same") for m in taken], [1.0] * len(taken))
    slow = geomean_of_medians([m.ratios("slower") for m in taken], [1.0] * len(taken))
    assert slow.low > 1.0 and same.low <= 1.0 <= same.high, (same, slow)


# --- statistics ------------------------------------------------------------------------------------------------------


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
