"""The record of a tuning run as one HTML page that needs nothing else: tables, and plots as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.paths import write_atomic
from pagegen.records import Evaluation, Status
from pagegen.render import environment
from pagegen.tuning.cotune import RECORD as COTUNED
from pagegen.tuning.cotune import read_cotuned
from pagegen.tuning.importance import importances
from pagegen.tuning.record import Record, by_limits, read_record
from pagegen.tuning.report import roofline_svg
from pagegen.tuning.roofline import Roofline

NAME = "report.html"
WIDTH, HEIGHT, SLICE = 640, 240, 200  # of the history; the side of a slice
Trials = Sequence[tuple[int, Evaluation]]


def write_html(folder: Path) -> Path:
    """Writes `folder`/report.html from tune.json and the trials, or from cotune.json, and returns it.

    Raises ConfigError for a bad record.
    """
    if (folder / COTUNED).is_file():
        return _write_cotuned(folder)
    record, document = read_record(folder)
    phases = {
        phase.value: {
            "history": _history(trials),
            "importance": importances([found for _, found in trials]),
            "slices": _slices(trials),
            "counts": _counts(trials),
        }
        for phase, trials in record.trials.items()
    }
    facts = {**document["environment"], "conditions": document.get("conditions") or {}}
    text = environment().overlay(autoescape=True).get_template("report/report.html.jinja").render(
        document=document, phases=phases, roofline=_roofline(record, document), facts=_facts(facts)
    )
    write_atomic(folder / NAME, text)
    return folder / NAME


def _write_cotuned(folder: Path) -> Path:
    document = read_cotuned(folder)
    pairs, fastest = document["pairs"], min(pair["step"]["median"] for pair in document["pairs"])
    dots = [(100 * pair["wasted"], pair["step"]["median"] / fastest, pair["name"]) for pair in pairs]
    line = sorted((x, y) for (x, y, _), pair in zip(dots, pairs, strict=True) if pair["front"])
    front = _plot(dots, line, WIDTH, HEIGHT, "memory wasted, %", {})
    facts = _facts({**document["environment"], "conditions": document.get("conditions") or {}})
    template = environment().overlay(autoescape=True).get_template("report/cotune.html.jinja")
    write_atomic(folder / NAME, template.render(document=document, front=front, facts=facts))
    return folder / NAME


def _roofline(record: Record, document: Mapping[str, Any]) -> str:
    """A plot for each measuring of the limits, with a dot a batch and contender; nothing where they were not measured."""
    plots = []
    for limits, phases in by_limits(record.facts):
        dots = [
            (row["name"], row["gflops"] / row["gbs"], row["gflops"] * 1e9, f"{row['name']} {row['point']}")
            for row in document["rows"]
            if row["phase"] in phases
        ]
        whose = ", ".join(phases) if len(phases) < len(record.workloads) else ""
        plots.append(roofline_svg(Roofline.from_dict(limits), int(document["environment"]["threads"]), dots, whose))
    return "\n".join(plots)


def _passed(trials: Trials) -> list[tuple[int, float, Evaluation]]:
    return [(number, found.score, found) for number, found in trials if found.score is not None]


def _history(trials: Trials) -> str:
    """Scores in the order of the trials, and the best so far."""
    dots, best, line = [], math.inf, list[tuple[float, float]]()
    for number, score, found in _passed(trials):
        best = min(best, score)
        dots.append((float(number), score, f"trial {number}: {score:.3f}, {_knobs(found)}"))
        line.append((float(number), best))
    return _plot(dots, line, WIDTH, HEIGHT, "trial", {}) if dots else ""


def _slices(trials: Trials) -> dict[str, str]:
    """For each knob that was varied: every score by the knob's value."""
    passed = _passed(trials)
    plots = {}
    for name in passed[0][2].config if passed else ():
        values = sorted({found.config[name] for _, _, found in passed}, key=lambda value: (str(type(value)), value))
        if len(values) > 1:
            places = {value: float(place) for place, value in enumerate(values)}
            dots = [(places[found.config[name]], score, f"{score:.3f}, {_knobs(found)}") for _, score, found in passed]
            plots[name] = _plot(dots, [], SLICE, SLICE, name, {place: str(value) for value, place in places.items()})
    return plots


def _plot(
    dots: Sequence[tuple[float, float, str]],
    line: Sequence[tuple[float, float]],
    width: int,
    height: int,
    label: str,
    ticks: Mapping[float, str],
) -> str:
    xs, ys = [x for x, _, _ in dots], [y for _, y, _ in dots]
    low, high = min(*ys, 1.0), max(*ys, 1.0)
    left, right, top, bottom = 44, width - 12, 10, height - 34
    span_x, span_y = max(max(xs) - min(xs), 1.0), max(high - low, 1e-3)

    def across(x: float) -> float:
        return round(left + 8 + (right - left - 16) * (x - min(xs)) / span_x, 1)

    def up(y: float) -> float:
        return round(bottom - 8 - (bottom - top - 16) * (y - low) / span_y, 1)

    return environment().overlay(autoescape=True).get_template("report/plot.svg.jinja").render(
        dots=[(across(x), up(y), said) for x, y, said in dots],
        line=" ".join(f"{across(x)},{up(y)}" for x, y in line),
        x_ticks=[(across(x), text) for x, text in (ticks or {min(xs): f"{min(xs):g}", max(xs): f"{max(xs):g}"}).items()],
        y_ticks=[(up(y), f"{y:.2f}") for y in sorted({low, 1.0, high})],
        label=label,
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
    )


def _knobs(found: Evaluation) -> str:
    return " ".join(f"{name}={value}" for name, value in found.config.items())


def _counts(trials: Trials) -> dict[str, int]:
    statuses = [found.status for _, found in trials]
    return {status.value: statuses.count(status) for status in Status if status in statuses}


def _facts(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what a run was made on; what lies deeper is named by its path."""
    facts: list[tuple[str, str]] = []
    for name, value in known.items():
        if isinstance(value, Mapping):
            facts += [(f"{name}.{inner}", said) for inner, said in _facts(value)]
        else:
            facts.append((name, value if isinstance(value, str) else json.dumps(value)))
    return facts
