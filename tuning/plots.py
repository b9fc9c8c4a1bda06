"""The record of a tuning run as PNGs, for pages that show no SVG: the roofline and the history. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagegen.plotting import save
from pagegen.records import Evaluation, Status
from pagegen.tuning.cotune import RECORD as COTUNED
from pagegen.tuning.cotune import read_cotuned
from pagegen.tuning.record import Record, by_limits, read_record
from pagegen.tuning.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOFLINE, HISTORY, FRONT = "roofline.png", "history.png", "front.png"
MARKERS = "osD^vP"


def write_plots(folder: Path) -> list[Path]:
    """Writes `folder`/history.png, and roofline.png where the machine's limits were measured; or front.png, where block size
    and layout were chosen. Raises ConfigError.
    """
    from matplotlib.figure import Figure

    if (folder / COTUNED).is_file():
        figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
        _front(figure.subplots(), read_cotuned(folder))
        save(figure, folder / FRONT)
        return [folder / FRONT]
    record, document = read_record(folder)
    figure = Figure(figsize=(8, 1 + 2.2 * len(record.trials)), dpi=120, layout="constrained")
    for axes, (phase, trials) in zip(figure.subplots(len(record.trials), squeeze=False)[:, 0], record.trials.items(), strict=True):
        _history(axes, phase.value, trials)
    save(figure, folder / HISTORY)
    written = [folder / HISTORY]
    if measured := by_limits(record.facts):
        figure = Figure(figsize=(8, 5 * len(measured)), dpi=120, layout="constrained")
        for axes, (limits, phases) in zip(figure.subplots(len(measured), squeeze=False)[:, 0], measured, strict=True):
            _roofline(axes, record, Roofline.from_dict(limits), phases, document)
        save(figure, folder / ROOFLINE)
        written.insert(0, folder / ROOFLINE)
    return written


def _history(axes: Axes, phase: str, trials: Sequence[tuple[int, Evaluation]]) -> None:
    """Scores in the order of the trials, the best so far, and at the top whatever has no score."""
    from matplotlib.ticker import MaxNLocator

    passed = [(number, found.score) for number, found in trials if found.score is not None]
    best, line = math.inf, list[float]()
    for _, score in passed:
        best = min(best, score)
        line.append(best)
    axes.plot([number for number, _ in passed], [score for _, score in passed], "o", color="#1f77b4", alpha=0.6, label="trial")
    axes.step([number for number, _ in passed], line, where="post", color="#d62728", label="best so far")
    axes.axhline(1.0, color="#888", linewidth=0.8, label="default")
    for place, status in enumerate(status for status in Status if status is not Status.PASSED):
        numbers = [number for number, found in trials if found.status is status]
        if numbers:
            top = [0.97] * len(numbers)
            axes.plot(numbers, top, "|", color=f"C{place + 2}", transform=axes.get_xaxis_transform(), label=status.value.lower())
    axes.set_ylabel("time over the default's")
    axes.set_title(f"{phase}: {len(trials)} trials", fontsize="medium")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_xlabel("trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _front(axes: Axes, document: dict[str, Any]) -> None:
    """Every pair of block size and layout by what it wastes and what a step takes; a line along the Pareto front."""
    pairs = sorted(document["pairs"], key=lambda pair: (pair["wasted"], pair["step"]["median"]))
    for pair in pairs:
        x, step = 100 * pair["wasted"], {name: 1e6 * value for name, value in pair["step"].items()}
        spread = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        axes.errorbar([x], [step["median"]], yerr=spread, fmt="s" if pair["name"] == document["chosen"] else "o", color="#1f77b4")
        axes.annotate(pair["name"], (x, step["median"]), textcoords="offset points", xytext=(6, 4), fontsize="small")
    front = [(100 * pair["wasted"], 1e6 * pair["step"]["median"]) for pair in pairs if pair["front"]]
    axes.plot(*zip(*front, strict=True), color="#d62728", linewidth=1, label="Pareto front")
    axes.set(xlabel="memory of blocks that holds no token, %", ylabel="expected step of a layer, us")
    axes.set_title(f"chosen: {document['chosen']} (square)", fontsize="medium")
    axes.legend(fontsize="small", frameon=False)


def _roofline(axes: Axes, record: Record, limits: Roofline, phases: Sequence[str], document: dict[str, Any]) -> None:
    """The machine's limits, and each contender on each batch of `phases`: bytes and operations that the mathematics needs."""
    threads = int(document["environment"]["threads"])
    peaks = {"fp32 FMA": limits.fp32, "bf16 products": limits.bf16}
    tops = {name: found[threads].median for name, found in peaks.items() if found}
    bands = {level: found[threads].median for level, found in limits.bandwidth.items()}
    dots: dict[str, list[tuple[float, float]]] = {}
    for row in (row for row in document["rows"] if row["phase"] in phases):
        dots.setdefault(row["name"], []).append((row["gflops"] / row["gbs"], row["gflops"]))
    reached = [x for series in dots.values() for x, _ in series]
    low = min([0.5, *reached]) / 1.3
    high = 1.3 * max([max(tops.values()) / min(bands.values()), *reached])
    for place, (level, rate) in enumerate(bands.items()):
        knee = max(tops.values()) / rate
        ends = [low, min(high, knee)]
        shade = str(0.75 * place / max(1, len(bands)))
        axes.plot(ends, [x * rate / 1e9 for x in ends], color=shade, linewidth=1, label=f"{level}: {rate / 1e9:.0f} GB/s")
    for name, top in tops.items():
        axes.plot([top / max(bands.values()), high], [top / 1e9] * 2, color="0.3", linestyle="--", linewidth=1, label=f"{name}: {top / 1e9:.0f} GFLOP/s")
    for place, (name, series) in enumerate(dots.items()):
        axes.plot(*zip(*series, strict=True), MARKERS[place % len(MARKERS)], color=f"C{place}", alpha=0.75, label=name.replace("_", " "))
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of KV", ylabel="GFLOP/s")
    whose = f": {', '.join(phases)}" if len(phases) < len(record.workloads) else ""
    axes.set_title(f"{record.spec.slug} on {record.facts['target']}, {threads} threads{whose}", fontsize="medium")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
