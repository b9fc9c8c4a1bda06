"""`pagegen package show|verify`: what is in a kernel package, and whether it still is what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, as_path, note, print_json

app = typer.Typer(rich_markup_mode=None)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", parser=as_path, help="The package's folder.", show_default=False)]


@app.command(
    "show", short_help="Show spec, target, configs, dispatch, evidence.", epilog="Example: pagegen package show DIR"
)
def show(package: DirArgument, json: JsonOption = False) -> None:
    """Show spec, target, configs, dispatch table and evidence."""
    from pagegen.explain import explain
    from pagegen.loader import read_manifest

    manifest = read_manifest(package)
    if json:
        print_json(manifest)
    else:
        print(explain(manifest))


@app.command(
    "verify",
    short_help="Compare files with hashes, sources with specs.",
    epilog="Example: pagegen package verify DIR && echo whole",
)
def verify(package: DirArgument, json: JsonOption = False) -> None:
    """Compare every file with its hash, and every source with what its spec and config render to; runs no code of it.

    Exit status 1 if anything differs.
    """
    from pagegen.package import verify_package

    problems = verify_package(package)
    if json:
        print_json({"ok": not problems, "problems": problems})
    elif problems:
        print("\n".join(problems))
    else:
        note(f"{package}: every file and every source is as written")
    if problems:
        raise typer.Exit(1)
