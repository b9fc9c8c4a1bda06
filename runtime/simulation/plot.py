"""A figure's rows as a picture: ours with its spread beside what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagegen.plotting import save
from pagegen.runtime.simulation.experiment import Row

WIDE = 20.0  # from this ratio of the largest to the smallest value on, the axis is logarithmic

_LABELS = {
    (True, True): "ours",
    (False, True): "ours, out of the band, but in the paper's order",
    (True, False): "ours, not in the paper's order",
    (False, False): "ours, the bar is missed",
}


def draw_rows(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Writes a PNG: a line a row with our mean and seeds, the range of a modelled one, and the band. Raises ConfigError."""
    from matplotlib.figure import Figure

    values = [value for row in rows for value in (row.ours, *row.seeds, *(row.varied or ()))]
    values += [edge for row in rows for edge in row.band if 0 < edge < float("inf")]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > WIDE
    margin = 0.05 * (high - low or 1.0)
    left, right = (low / 1.3, high * 1.3) if logarithmic else (min(low - margin, 0.0), high + margin)
    figure = Figure(figsize=(9, 1.4 + 0.32 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        begin, end = max(row.band[0], left), min(row.band[1], right)
        axes.barh(place, end - begin, left=begin, height=0.7, color="#d9d9d9", label="band around the paper's")
        if row.varied:
            axes.plot(row.varied, (place, place), color="#1f77b4", linewidth=3, alpha=0.4, label="constants +-25 %")
        axes.plot(row.seeds, [place] * len(row.seeds), "|", color="#1f77b4", markersize=9, label="ours, seed by seed")
        marker, color = "o" if row.ok else "x", "#1f77b4" if row.in_band else "#d62728"
        axes.plot([row.ours], [place], marker, color=color, label=_LABELS[row.in_band, row.ok])
    axes.set_yticks(range(len(rows)), [f"{row.what} ({row.paper}), {row.kind}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left, right)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(rows[0].unit)
    axes.set_title(title)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)
