"""What a tuning run leaves for people: report.md; and the roofline plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.paths import write_atomic
from pagegen.render import environment
from pagegen.tuning.contest import Conditions, Row, limit_notes, table
from pagegen.tuning.record import by_limits
from pagegen.tuning.roofline import Roofline

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 520, 70, 640, 50, 460  # of the roofline plot and its frame


def write_report(
    folder: Path, document: Mapping[str, Any], rows: Sequence[Row], conditions: Conditions | None = None
) -> Path:
    """Writes `folder`/report.md and returns it."""
    columns, lines = table(rows, intervals=True)
    limits = by_limits(document)
    notes = limit_notes(rows, [each for each, _ in limits])
    text = environment().get_template("report/tune.md.jinja").render(
        document=document, columns=columns, lines=lines, conditions=conditions, limits=limits, notes=notes
    )
    write_atomic(folder / "report.md", text)
    return folder / "report.md"


def roofline_svg(roofline: Roofline, threads: int, dots: Sequence[tuple[str, float, float, str]], whose: str = "") -> str:
    """A roofline plot as SVG. A dot is (series, operations a byte, operations a second, what a pointer over it shows).

    `whose` names the phases, if they are not all.
    """
    peaks = {"fp32 FMA": roofline.fp32, "bf16 products": roofline.bf16}
    tops = {name: found[threads].median for name, found in peaks.items() if found}
    bands = {level: found[threads].median for level, found in roofline.bandwidth.items()}
    low = min([0.5, *(x for _, x, _, _ in dots)])
    high = max([1.2 * max(tops.values()) / min(bands.values()), *(x for _, x, _, _ in dots)])
    floor = min([low * min(bands.values()), *(y for _, _, y, _ in dots)])
    across, up = _log_scale(low, high, LEFT, RIGHT), _log_scale(floor, 1.5 * max(tops.values()), BOTTOM, TOP)

    def roof(bandwidth: float, top: float) -> str:
        corners = [(low, low * bandwidth), (top / bandwidth, top), (high, top)]
        return " ".join(f"{across(max(low, x))},{up(min(top, y))}" for x, y in corners)

    highest = max(tops.values())
    roofs = [(f"{level}: {rate / 1e9:.0f} GB/s", roof(rate, highest)) for level, rate in reversed(bands.items())]
    roofs += [(f"{name}: {top / 1e9:.0f} GFLOP/s", roof(max(bands.values()), top)) for name, top in tops.items()]
    series = list(dict.fromkeys(name for name, _, _, _ in dots))
    return environment().get_template("report/roofline.svg.jinja").render(
        title=f"Roofline of this machine, {threads} threads, and what was reached{f': {whose}' if whose else ''}",
        roofs=roofs,
        dots=[(across(x), up(y), series.index(name), label) for name, x, y, label in dots],
        series=series,
        x_ticks=[(across(x), f"{x:g}") for x in _decades(low, high)],
        y_ticks=[(up(y), f"{y / 1e9:g}") for y in _decades(floor, 1.5 * highest)],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=BOTTOM,
    )


def _log_scale(low: float, high: float, begin: int, end: int) -> Callable[[float], float]:
    return lambda value: round(begin + (end - begin) * math.log(value / low) / math.log(high / low), 1)


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
