"""`pagegen paper`: figures of the Orca and vLLM papers from this scheduler and these memory policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli import NO
from pagegen.cli._common import JsonOption, note, print_json, print_table, progress

if TYPE_CHECKING:
    from pagegen.runtime.simulation.figures import Row

EXAMPLE = "pagegen paper fig2"


def command(
    figure: Annotated[str, typer.Argument(metavar="FIG", help="fig2, fig12, fig13, fig15 or orca.")],
    scale: Annotated[
        float, typer.Option("--scale", help="Length of the traces; less than 1 is quicker and noisier.")
    ] = 1.0,
    json: JsonOption = False,
) -> None:
    """Reproduce a figure of the Orca or vLLM paper and compare it with the printed numbers; exit 1 if a bar is missed.

    Three seeds each. Reproduced rows hang on lengths and allocators alone and must be in the band. Modelled ones hang on
    the step time as well, whose constants are guesses: there the paper's ordering must hold.
    """
    from pagegen.errors import ConfigError
    from pagegen.runtime.simulation.figures import find_figure

    found = find_figure(figure)
    if not 0 < scale <= 10:
        raise ConfigError(f"--scale {scale} is not a length of traces; allowed: above 0, up to 10")
    done = 0
    with progress(figure, found.num_runs) as advance:

        def tick() -> None:
            nonlocal done
            done += 1
            advance(done, "")

        rows = list(found.rows(scale, tick))
    if json:
        print_json({"figure": figure, "title": found.title, "scale": scale, "rows": [_plain(row) for row in rows]})
    else:
        print_table(
            found.title, ("", "ours", "unit", "paper", "band", "kind", "in band", "ok"), [_cells(r) for r in rows]
        )
        if any(row.kind == "modelled" for row in rows):
            note("modelled: constants of the step time are guesses; ok says whether the paper's ordering holds")
    if not all(row.ok for row in rows):
        raise typer.Exit(NO)


def _plain(row: Row) -> dict[str, Any]:
    low, high = row.band
    return {**row.to_dict(), "band": [low, None if high == float("inf") else high], "seeds": list(row.seeds)}


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.band
    band = f"{low:.2f}..{high:.2f}" if high < float("inf") else f"> {low:.2f}"
    return (
        row.what,
        f"{row.ours:.2f}",
        row.unit,
        row.paper,
        band,
        row.kind,
        "yes" if row.in_band else "no",
        "yes" if row.ok else "no",
    )
