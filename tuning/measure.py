"""Times candidates against each other in interleaved rounds, so that drift of the machine hits all of them alike.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import PagegenError
from ..records import Timing

CONFIDENCE = 0.95
RESAMPLES = 1000
SAMPLE_SECONDS = 50e-6  # a sample repeats its call until it is about this long: well above the clock's own cost
MAX_CALLS = 64  # calls of one sample

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

    def timing(self, name: str) -> Timing:
        """The median call of `name`, with its interval."""
        interval = geomean_of_medians([self.seconds[name]], [1.0])
        return Timing(interval.median, interval.low, interval.high, len(self.seconds[name]))

    def ratios(self, name: str) -> tuple[float, ...]:
        """Time of `name` over the anchor's, round by round: below 1 is faster."""
        return tuple(mine / its for mine, its in zip(self.seconds[name], self.seconds[self.anchor], strict=True))


def measure(
    candidates: Mapping[str, Call],
    anchor: str,
    *,
    seconds: float = 0.2,
    min_rounds: int = 5,
    max_rounds: int = 200,
    synchronize: Call | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> Measurement:
    """Runs every candidate once a round, in a new order each round, for about `seconds` of wall time in all.

    A candidate must not depend on what another left behind: on a device that runs asynchronously `synchronize` waits
    for it. Raises MeasureError for times that are zero, negative or not finite.
    """
    if anchor not in candidates:
        raise MeasureError(f"anchor {anchor!r} is not measured; candidates: {', '.join(candidates) or 'none'}")
    wait = synchronize or _no_wait
    fastest = min(_warm_up(call, wait, clock) for call in candidates.values())
    calls = min(MAX_CALLS, max(1, math.ceil(SAMPLE_SECONDS / fastest))) if fastest > 0 else 1
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffler = list(candidates), random.Random(seed)
    begin = clock()
    for done in range(max_rounds):
        if done >= min_rounds and clock() - begin >= seconds:
            break
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(_sample(candidates[name], calls, wait, clock))
    for name, values in samples.items():
        bad = next((value for value in values if not (math.isfinite(value) and value > 0)), None)
        if bad is not None:
            raise MeasureError(f"{name}: the clock measured {bad} s for one call; times must be positive and finite")
    return Measurement(anchor, {name: tuple(values) for name, values in samples.items()})


def _no_wait() -> None:
    """A CPU call has ended when it returns."""


def _warm_up(call: Call, wait: Call, clock: Callable[[], float]) -> float:
    call()  # page faults, thread pool, instruction cache
    return _sample(call, 1, wait, clock)


def _sample(call: Call, calls: int, wait: Call, clock: Callable[[], float]) -> float:
    wait()
    begin = clock()
    for _ in range(calls):
        call()
    wait()
    return (clock() - begin) / calls


def geomean_of_medians(groups: Sequence[Sequence[float]], weights: Sequence[float], seed: int = 0) -> Interval:
    """Weighted geometric mean of each group's median, with its percentile bootstrap interval (Efron 1979).

    Groups are resampled one by one, as they were measured. All values must be positive.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(weights)
    estimate, resampled = 0.0, torch.zeros(RESAMPLES, dtype=torch.float64)
    for group, weight in zip(groups, weights, strict=True):
        values = torch.tensor(group, dtype=torch.float64).log()
        picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
        estimate += weight / total * float(values.quantile(0.5))
        resampled += weight / total * values[picks].quantile(0.5, dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = resampled.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(math.exp(estimate), math.exp(min(low, estimate)), math.exp(max(high, estimate)))
