"""`pagegen package show|verify`: what is in a kernel package, and whether it still is what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, note, print_json

app = typer.Typer(rich_markup_mode=None)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The package's folder.", show_default=False)]


@app.command("show", epilog="Example: pagegen package show results/pagegen_bf16_d64_h9x3_b16_nhd_cpu_avx512")
def show(package: DirArgument, json: JsonOption = False) -> None:
    """Show spec, target, configs, dispatch table and evidence."""
    from pagegen.explain import explain
    from pagegen.loader import read_manifest

    manifest = read_manifest(package)
    if json:
        print_json(manifest)
    else:
        print(explain(manifest))


@app.command("verify", epilog="Example: pagegen package verify DIR && echo whole")
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
