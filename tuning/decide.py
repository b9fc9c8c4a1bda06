"""From measurements to a dispatch table: who is a finalist, what the finalists' round proposes, what the contest confirms.

Nothing here measures: `pagegen tune` decides as soon as it has measured, `pagegen tune --replay` from the record.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pagegen.explain import bucket_words
from pagegen.records import BatchShape, DispatchRow, DispatchTable, Evaluation, Status, ranked
from pagegen.space import Config
from pagegen.spec import Phase
from pagegen.tuning.contest import Conditions, Row, noise, overall, rows_of, typical
from pagegen.tuning.dispatch import MAX_REGRET, Fit, encode, fit, portfolio, regret
from pagegen.tuning.measure import Interval, Measurement
from pagegen.tuning.record import Record
from pagegen.tuning.workload import Point

FINALISTS = 3  # of a phase, beside the default
TUNED, DEFAULT = "tuned", "default"

Measured = Mapping[Point, Measurement]


@dataclasses.dataclass(frozen=True, slots=True)
class Winner:
    """What serves a bucket: the config proposed for it, or the default if fresh data does not confirm a gain."""

    bucket: DispatchRow  # with the kernel's name in the package
    points: tuple[str, ...]  # the measured batches in it
    config: Config
    seconds: Interval  # of one call, weighted geometric mean over the points
    speedup: Interval  # the default's time over the winner's, on data that did not choose the winner
    confirmed: bool  # whether the interval of the speed-up excludes no gain
    roofline: float | None = None  # share of what the machine allows, geometric mean over the points; None: not known

    @property
    def phase(self) -> Phase:
        """The bucket's phase."""
        return self.bucket.phase

    @property
    def kernel(self) -> str:
        """The name in the package."""
        return self.bucket.kernel

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        bounds = {k: v for k, v in dataclasses.asdict(self.bucket).items() if k not in ("phase", "kernel") and v is not None}
        return {
            "phase": self.phase.value,
            "bucket": bucket_words(self.bucket),
            "kernel": self.kernel,
            "config": self.config.to_dict(),
            "bounds": bounds,
            "points": list(self.points),
            "median": self.seconds.median,
            "interval": [self.seconds.low, self.seconds.high],
            "speedup": self.speedup.median,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "confirmed": self.confirmed,
            "roofline": self.roofline,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a record."""

    winners: tuple[Winner, ...]
    rows: tuple[Row, ...]  # of the contest
    conditions: Conditions | None
    document: Mapping[str, Any]  # the decided fields of tune.json

    @property
    def configs(self) -> dict[str, Config]:
        """The package's kernels of `attend` by name, but for the default where it wins nothing."""
        return {winner.kernel: winner.config for winner in self.winners}

    def table(self, *, uniform: bool) -> DispatchTable:
        """The package's dispatch table: one kernel for all batches if `uniform`, which a deterministic spec needs."""
        rows = tuple(winner.bucket for winner in self.winners)
        if uniform:
            rows = tuple(DispatchRow(phase, rows[0].kernel) for phase in Phase)
        return DispatchTable(rows, fallback="attend_0")


def choose_finalists(evaluations: Sequence[Evaluation], default: Config, points: Sequence[Point]) -> dict[str, Config]:
    """The default and the few others that make the fastest tables, by a name that says their place."""
    others = portfolio(ranked(evaluations), default, points, FINALISTS)
    configs = [Config(tuple(found.config.items())) for found in others]
    return {DEFAULT: default} | {f"finalist {place}": config for place, config in enumerate(configs, 1)}


def propose(phase: Phase, points: Sequence[Point], finals: Measured, *, uniform: bool) -> Fit:
    """The table that the finalists' round speaks for; all default if it was not held.

    A config serves nothing where it is for sure slower than the default (by more than MAX_REGRET). If there is one config
    for all batches, it is the one with the best typical batch.
    """
    if finals and not uniform:
        return fit(phase, {point: taken | _barred(finals[point]) for point, taken in _seconds(finals).items()})
    names = list(next(iter(finals.values())).seconds) if finals else [DEFAULT]
    best = min(names, key=lambda name: overall(finals, name).median) if finals else DEFAULT
    assigned = dict.fromkeys(points, best)
    return Fit(encode(phase, assigned), regret(_seconds(finals), assigned) if finals else 0.0, assigned)


def settle(phase: Phase, proposed: Fit, contest: Measured, *, uniform: bool) -> dict[Point, str]:
    """What serves each point in the end: a row that the contest's interval does not confirm goes back to the default, and
    so does, from a row that it does, a batch on which the config is for sure slower (by more than MAX_REGRET).
    """
    # a contender that the contest did not meet (a record of other rules, decided again) is not confirmed
    assigned = {point: name if name in contest[point].seconds else DEFAULT for point, name in proposed.assigned.items()}
    views = {point: view(measurement, assigned[point]) for point, measurement in contest.items()}
    slower = {point.shape for point, found in views.items() if found.ratio(DEFAULT).high < 1 / (1 + MAX_REGRET)}
    if not uniform:
        assigned |= {point: DEFAULT for point in assigned if point.shape in slower}
    while True:
        buckets = points_of_rows(phase, encode(phase, assigned), assigned)
        lost = [
            point
            for row, points in buckets.items()
            if row.kernel != DEFAULT and overall({p: views[p] for p in points}, DEFAULT).low <= 1
            for point in points
        ]
        if not lost:
            return assigned
        assigned |= dict.fromkeys(lost, DEFAULT)


def decide(record: Record) -> Decision:
    """Everything that tune.json says beside the facts."""
    uniform = record.spec.deterministic
    default = next(iter(record.finalists.values()))[DEFAULT]
    kernels = {default: "attend_0"}
    winners: list[Winner] = []
    rows: list[Row] = []
    tables: dict[str, Any] = {}
    for phase, workload in record.workloads.items():
        finals, contest, configs = record.finals.get(phase, {}), record.contest[phase], record.finalists[phase]
        assigned = settle(phase, propose(phase, workload.points, finals, uniform=uniform), contest, uniform=uniform)
        views = {point: view(contest[point], assigned[point]) for point in workload.points}
        found = rows_of(record.spec, phase, views, record.rooflines[phase])
        span = record.facts["workload"].get("spans", {}).get(phase.value)  # older records have none
        buckets = points_of_rows(phase, encode(phase, assigned, span), assigned)
        for row, points in buckets.items():
            config = configs[row.kernel]
            bucket = dataclasses.replace(row, kernel=kernels.setdefault(config, f"attend_{len(kernels)}"))
            winners.append(_winner(bucket, config, {point: views[point] for point in points}, found))
        rows += found
        tables[phase.value] = {
            "rows": len(buckets),
            "kernels": len({row.kernel for row in buckets}),
            "regret": regret(_seconds(finals), assigned) if finals else 0.0,
            "bound": MAX_REGRET,
        }
    conditions = Conditions.of([measurement for measured in record.contest.values() for measurement in measured.values()])
    evaluations = [found for trials in record.trials.values() for _, found in trials]
    counts = Counter(found.status for found in evaluations)
    gated = [found.gate_seconds for found in evaluations if found.gate_seconds]
    document = {
        "counts": {status.value: counts[status] for status in Status if status is not Status.NOT_MEASURED},
        "gate": {"median": statistics.median(gated), "longest": max(gated)} if gated else None,  # seconds, after compilation
        "winner": [winner.to_dict() for winner in winners],
        "dispatch": tables,
        "noise": noise(rows),
        "conditions": conditions.to_dict() if conditions else None,
        "rows": [row.to_dict() for row in rows],
    }
    return Decision(tuple(winners), tuple(rows), conditions, document)


def view(measurement: Measurement, serving: str) -> Measurement:
    """A contest's measurement with what serves the batch as the anchor, called tuned, and without other finalists."""
    others = {name: values for name, values in measurement.seconds.items() if not name.startswith("finalist")}
    return dataclasses.replace(measurement, anchor=TUNED, seconds={TUNED: measurement.seconds[serving], **others})


def points_of_rows(
    phase: Phase, rows: Sequence[DispatchRow], points: Mapping[Point, str]
) -> dict[DispatchRow, tuple[Point, ...]]:
    """The measured batches that each row serves."""
    table = DispatchTable(tuple(rows), fallback="")
    served = {point: table.find(BatchShape(phase, *point.shape)) for point in points}
    return {row: tuple(point for point, its in served.items() if its == row) for row in rows}


def _seconds(finals: Measured) -> dict[Point, dict[str, float]]:
    """Median seconds of each contender."""
    return {point: {name: statistics.median(taken) for name, taken in found.seconds.items()} for point, found in finals.items()}


def _barred(found: Measurement) -> dict[str, float]:
    """Infinite seconds for each contender that is for sure slower than the default."""
    return {name: math.inf for name in found.seconds if found.ratio(name).low > 1 + MAX_REGRET}


def _winner(bucket: DispatchRow, config: Config, views: Measured, rows: Sequence[Row]) -> Winner:
    names = tuple(point.name for point in views)
    confirmed = bucket.kernel != "attend_0"
    shares = [row.roofline for row in rows if row.name == TUNED and row.point in names and row.roofline is not None]
    return Winner(
        bucket,
        names,
        config,
        typical(views, TUNED),
        overall(views, DEFAULT) if confirmed else Interval(1.0, 1.0, 1.0),
        confirmed,
        statistics.geometric_mean(shares) if shares else None,
    )
