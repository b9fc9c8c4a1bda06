"""`pagegen report`: the record of a tuning run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, as_path, print_json

EXAMPLE = "pagegen report DIR"


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=as_path, help="What `pagegen tune` wrote: results/<target>/<spec>.")],
    png: Annotated[
        bool, typer.Option("--png", help="Also draw DIR/roofline.png and DIR/history.png; needs matplotlib.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write DIR/report.html: winners, roofline, history, what mattered, slices, the machine; it needs no other file.

    Nothing is measured, and the device need not be here. There is no roofline where the machine's limits were not measured.
    """
    from pagegen.tuning.html import write_html

    if png:
        from pagegen.plotting import require_matplotlib

        require_matplotlib()
    page, plots = write_html(folder), list[Path]()
    if png:
        from pagegen.tuning.plots import write_plots

        plots = write_plots(folder)
    if json:
        print_json({"report": str(page), "plots": list(map(str, plots))})
    else:
        typer.echo("\n".join([f"report: {page}", *(f"plot:   {path}" for path in plots)]))
