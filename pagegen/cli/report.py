"""`pagegen report`: the record of a tuning run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, print_json

EXAMPLE = "pagegen report results/cpu-avx512/bf16-d64-h9x3-b16-NHD"


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `pagegen tune` wrote: results/<target>/<spec>.")],
    json: JsonOption = False,
) -> None:
    """Write DIR/report.html: winners, roofline, history, what mattered, slices, the machine; it needs no other file.

    Nothing is measured, and the device need not be here.
    """
    from pagegen.tuning.html import write_html

    page = write_html(folder)
    if json:
        print_json({"report": str(page)})
    else:
        typer.echo(f"report: {page}")
