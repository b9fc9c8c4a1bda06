"""Cases side by side in virtual time: for several seeds, and again with every constant of the step time a quarter off."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from pagegen.errors import ConfigError
from pagegen.runtime.simulate import simulate
from pagegen.runtime.simulation.costs import StepCosts
from pagegen.runtime.simulation.meter import Figures
from pagegen.runtime.simulation.setup import Setup
from pagegen.runtime.simulation.traces import synthesize
from pagegen.target import detect

SEEDS = (0, 1, 2)
VARIATION = 0.25  # of each constant, up and down


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A trace and for how long it is watched; `scale` shortens both, for a look or a test."""

    trace: str
    rate: float
    seconds: float
    n: int = 1
    prefix: int = 0
    beams: bool = False

    def run(self, setup: Setup, seed: int, scale: float, costs: StepCosts | None = None) -> Figures:
        """Averages leave out the first third, in which the queue fills."""
        costs, seconds = costs or StepCosts(), self.seconds * scale
        if setup.memory_policy != "paged":
            costs = dataclasses.replace(costs, per_kv_block=0.0)  # what lies in one piece is not looked up
        trace = synthesize(
            self.trace,
            rate=self.rate,
            num_requests=math.ceil(1.2 * self.rate * seconds) + 10,
            seed=seed,
            max_model_len=setup.max_model_len,
            n=self.n,
            prefix=self.prefix,
            beams=self.beams,
        )
        return simulate(trace, setup, costs, warmup=seconds / 3, horizon=seconds)


Case = tuple[Load, Setup]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of every case with one seed and these constants."""

    costs: StepCosts
    figures: Mapping[str, Figures]

    def __getitem__(self, case: str) -> Figures:
        return self.figures[case]


Value = Callable[[Outcome], float]
Ordering = Callable[[Outcome], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure. `seeds` has ours seed by seed, `band` what it may be around the printed one.

    A `reproduced` row hangs on lengths and allocators alone, and is `ok` in the band. A `modelled` one hangs on the step
    time too, and is `ok` where the paper's ordering holds for every seed and whichever constant is a quarter off;
    `varied` is the range that it then has, `decisive` the constant that moves it most. `note` says why a row is out that
    is known to be.
    """

    what: str
    ours: float
    paper: str
    band: tuple[float, float]
    in_band: bool
    ok: bool
    kind: str
    unit: str
    seeds: tuple[float, ...]
    varied: tuple[float, float] | None = None
    decisive: str | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """An outcome for each seed; with one constant off, by its name; and `unvaried`, as long as those and none off."""

    seeds: Sequence[Outcome]
    unvaried: Outcome | None = None
    varied: Sequence[tuple[str, Outcome]] = ()

    def row(
        self,
        what: str,
        value: Value,
        paper: float | str,
        band: tuple[float, float],
        unit: str,
        holds: Ordering | None = None,
        *,
        note: str = "",
    ) -> Row:
        """A reproduced row, or with an ordering a modelled one. Raises ConfigError if a value is a ratio to nothing."""
        try:
            row = self._row(what, value, paper, band, unit, holds)
        except ZeroDivisionError:
            raise ConfigError(f"{what}: nothing ended in so short a trace; raise --scale") from None
        return row if row.ok and row.in_band else dataclasses.replace(row, note=note)

    def _row(
        self,
        what: str,
        value: Value,
        paper: float | str,
        band: tuple[float, float],
        unit: str,
        holds: Ordering | None,
    ) -> Row:
        seeds = tuple(map(value, self.seeds))
        ours = statistics.fmean(seeds)
        inside = band[0] <= ours <= band[1]
        row = Row(what, ours, f"{paper}", band, inside, inside, "reproduced", unit, seeds)
        if holds is None or self.unvaried is None:
            return row
        middle = value(self.unvaried)
        moved = {ours * value(found) / middle: name for name, found in self.varied}  # the runs are shorter: as shares
        return dataclasses.replace(
            row,
            kind="modelled",
            ok=all(map(holds, (*self.seeds, self.unvaried, *(found for _, found in self.varied)))),
            varied=(min(ours, *moved), max(ours, *moved)),
            decisive=moved[max(moved, key=lambda there: abs(there - ours))],
        )

    def faster(self, better: str, worse: str, paper: float | str, band: tuple[float, float]) -> Row:
        """A modelled row: how many times as many tokens one case serves as another; more, if the ordering holds."""

        def ratio(found: Outcome) -> float:
            return found[better].output_tokens_per_second / found[worse].output_tokens_per_second

        return self.row(f"{better} over {worse}", ratio, paper, band, "x", lambda found: ratio(found) > 1)


def around(value: float, *, points: float = 0.0, share: float = 0.0) -> tuple[float, float]:
    """What may be around a printed value."""
    reach = points + share * value
    return (value - reach, value + reach)


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One case, once."""

    case: str
    load: Load
    setup: Setup
    seed: int
    scale: float
    costs: StepCosts

    def __call__(self) -> Figures:
        return self.load.run(self.setup, self.seed, self.scale, self.costs)


def experiment(
    cases: Mapping[str, Case],
    *,
    scale: float = 1.0,
    varied_scale: float = 0.0,
    watch: Callable[[int, int], None] | None = None,
) -> Results:
    """Runs all cases for all seeds; and for the first one at `varied_scale`, unless that is 0, with every constant that a
    case depends on up and down.

    In processes, one a core; `watch` is told how many runs are done, of how many.
    """
    costs = StepCosts()
    swaps = any(setup.num_host_blocks for _, setup in cases.values())
    varied = [(name, off) for name, off in costs.varied(VARIATION) if swaps or "swapped" not in name]
    plans = [(seed, scale, costs) for seed in SEEDS]
    if varied_scale:
        plans += [(SEEDS[0], varied_scale, off) for off in (costs, *(off for _, off in varied))]
    runs = [_Run(case, load, setup, *plan) for plan in plans for case, (load, setup) in cases.items()]
    figures = iter(_in_processes(runs, watch))
    outcomes = [Outcome(plan[-1], {case: next(figures) for case in cases}) for plan in plans]
    seeds, others = outcomes[: len(SEEDS)], outcomes[len(SEEDS) :]
    if not others:
        return Results(seeds)
    return Results(seeds, others[0], list(zip([name for name, _ in varied], others[1:], strict=True)))


def _in_processes(runs: Sequence[_Run], watch: Callable[[int, int], None] | None) -> list[Figures]:
    pool = ProcessPoolExecutor(detect().threads, multiprocessing.get_context("spawn"))
    try:
        futures = [pool.submit(run) for run in runs]
        for done, _ in enumerate(as_completed(futures), 1):
            if watch:
                watch(done, len(runs))
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
