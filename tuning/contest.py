"""Contenders side by side on every batch of a phase, in rows that people and programs read."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagegen.kernel import PagedKernels
from pagegen.spec import KernelSpec, Phase
from pagegen.target import Target
from pagegen.tuning.baselines import SdpaBaselines
from pagegen.tuning.machine import Disturbance
from pagegen.tuning.measure import Interval, Measurement, geomean_of_medians, measure, stopwatch_for
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.workload import Inputs, Point, Pool, Workload, cold_bytes_on


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contender on one batch. `ratio` is its time over the anchor's, so above 1 the anchor is faster.

    `roofline` is the least time that this machine's measured limits allow, over the time taken; None if they are not known.
    """

    phase: Phase
    point: str
    name: str
    seconds: Interval
    ratio: Interval
    gbs: float  # 1e9 bytes of K and V a second, each counted once however often a kernel reads it
    gflops: float  # 1e9 operations a second of those the mathematics needs
    rounds: int
    roofline: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"phase": self.phase.value}


def rows_of(
    spec: KernelSpec, phase: Phase, measured: Mapping[Point, Measurement], roofline: Roofline | None = None
) -> list[Row]:
    """A row for every batch and contender, the anchor first."""
    rows = []
    for point, measurement in measured.items():
        setting, floor = measurement.setting, None
        if roofline and setting:
            floor = roofline.floor(spec, point, setting.threads, setting.rotated_bytes)
        for name in sorted(measurement.seconds, key=lambda name: name != measurement.anchor):
            taken = measurement.timing(name)
            rows.append(
                Row(
                    phase,
                    point.name,
                    name,
                    Interval(taken.median, taken.low, taken.high),
                    measurement.ratio(name),
                    point.kv_bytes(spec) / taken.median / 1e9,
                    point.flops(spec) / taken.median / 1e9,
                    taken.rounds,
                    floor / taken.median if floor else None,
                )
            )
    return rows


def overall(measured: Mapping[Point, Measurement], name: str) -> Interval:
    """Weighted geometric mean over the batches of `name`'s time over the anchor's."""
    return geomean_of_medians([m.ratios(name) for m in measured.values()], [point.weight for point in measured])


def typical(measured: Mapping[Point, Measurement], name: str) -> Interval:
    """Weighted geometric mean over the batches of `name`'s seconds."""
    return geomean_of_medians([m.seconds[name] for m in measured.values()], [point.weight for point in measured])


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """What the timings of a contest ran under."""

    warm: bool
    rotated_bytes: tuple[int, int]  # of the batch with the least, with the most
    threads: int
    pinned: bool
    huge_pages: float | None
    disturbance: Disturbance

    @classmethod
    def of(cls, measured: Sequence[Measurement]) -> Conditions | None:
        """Those of some measurements; None if they do not say."""
        settings = [m.setting for m in measured if m.setting]
        if not settings:
            return None
        rotated = [setting.rotated_bytes for setting in settings]
        shares = [setting.huge_pages for setting in settings if setting.huge_pages is not None]
        return cls(
            warm=settings[0].warm,
            rotated_bytes=(min(rotated), max(rotated)),
            threads=settings[0].threads,
            pinned=all(setting.pinned for setting in settings),
            huge_pages=min(shares, default=None),
            disturbance=Disturbance.over([m.disturbance for m in measured]),
        )

    @property
    def line(self) -> str:
        """One line for people."""
        least, most = (size >> 20 for size in self.rotated_bytes)
        kv = "warm KV" if self.warm else f"calls in turn over {least} MiB of KV" + (f" to {most} MiB" if most > least else "")
        pages = "" if self.huge_pages is None else f", {self.huge_pages:.0%} of it in 2 MiB pages"
        pinned = "each pinned to a core" if self.pinned else "not pinned"
        return f"{kv}{pages}; threads: {self.threads}, {pinned}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def bench(
    contenders: Mapping[str, PagedKernels],
    target: Target,
    workloads: Sequence[Workload],
    *,
    with_sdpa: bool,
    seconds: float,
    roofline: Roofline | None = None,
    watch: Callable[[str], None] | None = None,
) -> tuple[list[Row], Conditions | None]:
    """Times loaded kernels of one spec in this process, the first contender being the anchor; `seconds` a batch."""
    anchor, first = next(iter(contenders.items()))
    device = "cpu" if target.kind == "cpu" else "cuda"
    points = tuple(point for workload in workloads for point in workload.points)
    pool = Pool.for_points(first.spec, points, cold_bytes_on(device), device)
    rows: list[Row] = []
    taken: list[Measurement] = []
    for workload in workloads:
        for point in workload.points:
            inputs = Inputs(pool, point, warm=workload.warm)
            calls = {name: inputs.bind(kernels.attend) for name, kernels in contenders.items()}
            if with_sdpa:
                calls |= SdpaBaselines(inputs).calls()
            calls[anchor]()  # starts the threads that the setting speaks of
            timed = stopwatch_for(device)
            measured = measure(calls, anchor, seconds=seconds, stopwatch=timed, setting=inputs.setting())
            taken.append(measured)
            rows += rows_of(first.spec, workload.phase, {point: measured}, roofline)
            if watch:
                watch(point.name)
    return rows, Conditions.of(taken)


def limit_notes(rows: Sequence[Row], limits: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is amiss with the shares of rooflines (`Roofline.to_dict()`), a line each; none if nothing is."""
    notes = []
    if raised := dict.fromkeys(name for each in limits for name in each.get("raised", ())):
        names = ", ".join("{} with {} threads".format(*name.rsplit(" ", 1)) for name in raised)
        notes.append(f"limits measured below those of 1 thread, twice, so that 1 thread's are taken: {names}")
    if any((row.roofline or 0) > 1 for row in rows):
        notes.append("shares of the roofline above 100 %: others used the machine while its limits were measured, so they are too low")
    return notes


def noise(rows: Sequence[Row]) -> float:
    """How wide the intervals of the rows' times are, relative to the times: half-widths, the median row."""
    return statistics.median((row.seconds.high - row.seconds.low) / 2 / row.seconds.median for row in rows)


def table(rows: Sequence[Row], *, intervals: bool = False) -> tuple[list[str], list[list[str]]]:
    """(columns, cells): a line a batch, the anchor's time and rates, then every other contender's ratio to it.

    Words are parted by spaces, where a narrow terminal may break the line.
    """
    names = list(dict.fromkeys(row.name for row in rows))
    limited = any(row.roofline is not None for row in rows)
    others = [name.replace("_", " ") for name in names[1:]]
    columns = ["batch", f"{names[0]} us", "GB/s", "GFLOP/s", *(["of roofline"] if limited else []), *others]
    lines: dict[tuple[Phase, str], list[str]] = {}
    for row in rows:
        if row.name == names[0]:
            micro = row.seconds.median * 1e6
            cells = [row.point.replace("+", " + "), f"{micro:.{0 if micro >= 100 else 1}f}", f"{row.gbs:.1f}", f"{row.gflops:.1f}"]
            if limited:
                cells.append("" if row.roofline is None else f"{row.roofline:.0%}")
            lines[row.phase, row.point] = cells
        else:
            interval = f" [{row.ratio.low:.2f}, {row.ratio.high:.2f}]" if intervals else ""
            lines[row.phase, row.point].append(f"{row.ratio.median:.2f}{interval}")
    return columns, list(lines.values())
