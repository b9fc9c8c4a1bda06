"""Times candidates against each other in interleaved rounds, so that drift of the machine hits all of them alike.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import PagegenError
from ..records import Timing
from .machine import NO_DISTURBANCE, Disturbance, Setting, Watch, exclusive  # noqa: TID251  # vendored: must stay relative

CONFIDENCE = 0.95
RESAMPLES = 1000
SAMPLE_SECONDS = 50e-6  # a sample repeats its call until it is about this long: well above the clock's own cost
MAX_CALLS = 64  # calls of one sample
MAX_TAKES = 3  # of one sample that is disturbed

Call = Callable[[], None]


class MeasureError(PagegenError):
    """Times that cannot be compared: zero, negative or not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate and its bootstrap interval."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of one call, one value a round; values at the same place were taken in the same round."""

    anchor: str
    seconds: Mapping[str, tuple[float, ...]]
    seed: int = 0  # of the order of the calls
    disturbance: Disturbance = NO_DISTURBANCE
    setting: Setting | None = None

    def timing(self, name: str) -> Timing:
        """The median call of `name`, with its interval."""
        interval = geomean_of_medians([self.seconds[name]], [1.0])
        return Timing(interval.median, interval.low, interval.high, len(self.seconds[name]))

    def ratios(self, name: str) -> tuple[float, ...]:
        """Time of `name` over the anchor's, round by round: below 1 is faster."""
        return tuple(mine / its for mine, its in zip(self.seconds[name], self.seconds[self.anchor], strict=True))

    def ratio(self, name: str) -> Interval:
        """The median of `ratios`, with its interval: `name` is slower than the anchor if that lies above 1."""
        return geomean_of_medians([self.ratios(name)], [1.0])

    def middle_ratio(self, name: str) -> float:
        """The median of `ratio` without its interval, which takes a thousand times as long."""
        return math.exp(statistics.median(map(math.log, self.ratios(name))))


class Stopwatch(Protocol):
    """Seconds of one of `count` calls that follow each other."""

    def __call__(self, call: Call, count: int) -> float: ...


class HostClock:
    """Time on the host, for calls that have ended when they return."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def __call__(self, call: Call, count: int) -> float:
        """See `Stopwatch`."""
        begin = self._clock()
        for _ in range(count):
            call()
        return (self._clock() - begin) / count


class DeviceClock:
    """Time on a GPU, between two events in its stream (`runtime` is torch.cuda, also for AMD's devices).

    The device sleeps first, so that the host is ahead and its launches are not what is timed.
    """

    SLEEP_CYCLES = 2_000_000  # about a millisecond

    def __init__(self, runtime: Any = torch.cuda) -> None:
        self._runtime = runtime

    def __call__(self, call: Call, count: int) -> float:
        """See `Stopwatch`."""
        begin, end = (self._runtime.Event(enable_timing=True) for _ in range(2))
        self._runtime._sleep(self.SLEEP_CYCLES)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count


def stopwatch_for(device: str) -> Stopwatch:
    """How calls on a torch device are timed."""
    return HostClock() if device == "cpu" else DeviceClock()


def measure(
    candidates: Mapping[str, Call],
    anchor: str,
    *,
    seconds: float = 0.2,
    min_rounds: int = 5,
    max_rounds: int = 200,
    stopwatch: Stopwatch | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
    lock: contextlib.AbstractContextManager[None] | None = None,
    setting: Setting | None = None,
    watch: Watch | None = None,
) -> Measurement:
    """Runs every candidate once a round for about `seconds` of wall time in all, while no other timing runs.

    A round's order is drawn, the next round goes through it backwards: what drifts evenly cancels over the two. `seed`
    makes the orders again; by default each measurement has its own. A sample in which a thread was made to give up its
    core is thrown away and taken again, as long as such samples are in the minority: who took the core has nothing to do
    with the candidate. `lock` is `exclusive()` unless the caller holds it; `setting` goes into the record.
    Raises MeasureError for times that are zero, negative or not finite.
    """
    if anchor not in candidates:
        raise MeasureError(f"anchor {anchor!r} is not measured; candidates: {', '.join(candidates) or 'none'}")
    timed = stopwatch or HostClock(clock)
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    shuffler, order = random.Random(seed), list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with lock or exclusive():
        fastest = min(_warm_up(call, timed) for call in candidates.values())
        calls = min(MAX_CALLS, max(1, math.ceil(SAMPLE_SECONDS / fastest))) if fastest > 0 else 1
        watch, begin, taken = watch or Watch(), clock(), 0
        for done in range(max_rounds):
            if done >= min_rounds and clock() - begin >= seconds:
                break
            if done % 2:
                order.reverse()
            else:
                shuffler.shuffle(order)
            watch.tick()
            for name in order:
                for _ in range(MAX_TAKES):
                    switches, value = watch.switches(), timed(candidates[name], calls)
                    if watch.switches() == switches or watch.retaken >= taken:
                        break
                    watch.retaken += 1
                samples[name].append(value)
                taken += 1
        disturbance = watch.disturbance()
    for name, values in samples.items():
        bad = next((value for value in values if not (math.isfinite(value) and value > 0)), None)
        if bad is not None:
            raise MeasureError(f"{name}: the clock measured {bad} s for one call; times must be positive and finite")
    return Measurement(anchor, {name: tuple(values) for name, values in samples.items()}, seed, disturbance, setting)


def _warm_up(call: Call, timed: Stopwatch) -> float:
    timed(call, 1)  # page faults, thread pool, instruction cache
    return timed(call, 1)


def geomean_of_medians(groups: Sequence[Sequence[float]], weights: Sequence[float], seed: int = 0) -> Interval:
    """Weighted geometric mean of each group's median, with its interval, as `mean_of_medians`. All values must be positive."""
    found = mean_of_medians([list(map(math.log, group)) for group in groups], weights, seed)
    return Interval(math.exp(found.median), math.exp(found.low), math.exp(found.high))


def mean_of_medians(groups: Sequence[Sequence[float]], weights: Sequence[float], seed: int = 0) -> Interval:
    """Weighted mean of each group's median, with its percentile bootstrap interval (Efron 1979).

    Groups are resampled one by one, as they were measured.
    """
    generator, total = random.Random(seed), sum(weights)
    estimate, resampled = 0.0, [0.0] * RESAMPLES
    for group, weight in zip(groups, weights, strict=True):
        values, share = sorted(group), weight / total
        estimate += share * statistics.median(values)
        for i in range(RESAMPLES):
            resampled[i] += share * _resampled_median(values, generator)
    resampled.sort()
    tail = round((1 - CONFIDENCE) / 2 * (RESAMPLES - 1))
    low, high = resampled[tail], resampled[-1 - tail]
    return Interval(estimate, min(low, estimate), max(high, estimate))


def _resampled_median(values: Sequence[float], generator: random.Random) -> float:
    """The median of as many picks from sorted `values`, without making them.

    The picks are those at n * U of n uniform U; the k-th smallest U has the distribution Beta(k, n + 1 - k), and those above
    it are uniform again.
    """
    n = len(values)
    k = (n + 1) // 2
    middle = generator.betavariate(k, n + 1 - k)
    lower = values[min(n - 1, int(n * middle))]
    if n % 2:
        return lower
    above = 1 - (1 - middle) * generator.random() ** (1 / (n - k))  # the smallest of n - k
    return (lower + values[min(n - 1, int(n * above))]) / 2
