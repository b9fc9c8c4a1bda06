"""`pagegen paper`: figures of the Orca and vLLM papers from this scheduler and these memory policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli import NO
from pagegen.cli._common import JsonOption, as_path, note, print_json, print_table, progress, require_folder

if TYPE_CHECKING:
    from pagegen.runtime.simulation.experiment import Row
    from pagegen.runtime.simulation.figures import Figure

EXAMPLE = "pagegen paper fig2"
MIN_SCALE, MAX_SCALE = 0.01, 10


def command(
    figure: Annotated[
        str, typer.Argument(metavar="FIG", help="fig2, fig12, fig13, fig15, fig16, fig18, fig19, orca, or all of them.")
    ],
    scale: Annotated[
        float, typer.Option("--scale", help="Length of the traces; less than 1 is quicker and noisier.")
    ] = 1.0,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", metavar="DIR", parser=as_path, help="Also draw each figure as DIR/FIG.png; needs matplotlib."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Reproduce a figure of the Orca or vLLM paper and compare it with the printed numbers; exit 1 if a bar is missed.

    Three seeds each. Reproduced rows hang on lengths and allocators alone and must be in the band. Modelled ones hang on
    the step time as well, whose constants come from data sheets: there the paper's ordering must hold for every seed,
    and with each constant 25 % up or down.
    """
    from pagegen.errors import ConfigError
    from pagegen.plotting import require_matplotlib
    from pagegen.runtime.simulation.figures import FIGURES, find_figure
    from pagegen.runtime.simulation.plot import draw_rows

    found = dict(FIGURES) if figure == "all" else {figure: find_figure(figure)}
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ConfigError(f"--scale {scale} gives traces that say nothing; allowed: {MIN_SCALE} to {MAX_SCALE}")
    if plots:
        require_matplotlib()
        require_folder(plots, "--plots")
    rows: dict[str, list[Row]] = {}
    for name, each in found.items():
        with progress(name, 100) as advance:
            rows[name] = each.rows(scale, lambda done, total: advance(100 * done // total, ""))
        if plots:
            draw_rows(plots / f"{name}.png", each.title, rows[name])
        if not json:
            _print(each, rows[name])
    if json:
        documents = [
            {"figure": name, "title": each.title, "scale": scale, "rows": [_plain(row) for row in rows[name]]}
            for name, each in found.items()
        ]
        print_json({"figures": documents} if figure == "all" else documents[0])
    elif any(each.varied for each in found.values()):
        note("modelled: constants of the step time are guesses; ok says whether the paper's ordering holds at +-25 %")
    if not all(row.ok for each in rows.values() for row in each):
        raise typer.Exit(NO)


def _print(figure: Figure, rows: list[Row]) -> None:
    columns = ("", "ours", "unit", "paper", "band", "seeds", "kind", "constants +-25 %", "in band", "ok")
    print_table(figure.title, columns, [_cells(row) for row in rows])
    for row in rows:
        if row.note:
            typer.echo(f"{row.what}: {row.note}")
    typer.echo()


def _plain(row: Row) -> dict[str, Any]:
    low, high = row.band
    return {**row.to_dict(), "band": [low, None if high == float("inf") else high]}


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.band
    return (
        row.what,
        f"{row.ours:.2f}",
        row.unit,
        row.paper,
        f"{low:.2f}..{high:.2f}" if high < float("inf") else f"> {low:.2f}",
        " ".join(f"{value:.2f}" for value in row.seeds),
        row.kind,
        f"{row.varied[0]:.2f}..{row.varied[1]:.2f} {row.decisive}" if row.varied else "",
        "yes" if row.in_band else "no",
        "yes" if row.ok else "no",
    )
