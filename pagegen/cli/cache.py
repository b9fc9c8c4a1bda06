"""`pagegen cache list|clear`: what pagegen keeps on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, format_size, note, print_json, print_table
from pagegen.paths import kernel_cache, package_cache, remove_entry

UNFINISHED_AFTER = 3600.0  # seconds; who began a folder that long ago, and has not named it, was killed

app = typer.Typer(rich_markup_mode=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A built kernel, a kernel package, or what a killed process left of one. Bytes; last use as a POSIX time.

    `content` is what its source says of itself in its first line.
    """

    kind: str
    path: Path
    size: int
    last_use: float
    content: str = ""


@app.command(
    "list", short_help="List kernels and packages, sizes, last use.", epilog="Example: pagegen cache list --json"
)
def list_entries(json: JsonOption = False) -> None:
    """List built kernels and kernel packages with their sizes and last use."""
    found = sorted(entries(), key=lambda entry: -entry.last_use)
    total = sum(entry.size for entry in found)
    if json:
        rows = [
            {"kind": e.kind, "content": e.content, "path": str(e.path), "bytes": e.size, "last_use": _when(e.last_use)}
            for e in found
        ]
        print_json({"rows": rows, "bytes": total})
        return
    table = [(e.kind, e.content or e.path.name, format_size(e.size), _when(e.last_use)) for e in found]
    columns = ("kind", "content", "size", "last use")
    print_table(f"{kernel_cache().parent}: {format_size(total)}", columns, table)


@app.command(
    "clear", short_help="Delete built kernels; packages if asked.", epilog="Example: pagegen cache clear --packages"
)
def clear(
    packages: Annotated[
        bool, typer.Option("--packages", help="Tuned packages too, which take minutes to make again.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete built kernels; they are built again when they are needed."""
    doomed = [entry for entry in entries() if packages or entry.kind != "package"]
    for entry in doomed:
        remove_entry(entry.path)
    freed = sum(entry.size for entry in doomed)
    if json:
        print_json({"removed": [str(entry.path) for entry in doomed], "bytes": freed})
        return
    note(f"removed {len(doomed)} entries, {format_size(freed)}")


def entries() -> list[Entry]:
    """Every entry of this user's cache. Raises ConfigError if the cache cannot be used."""
    found = []
    for kind, folder in (("kernel", kernel_cache()), ("package", package_cache())):
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                continue
            with contextlib.suppress(FileNotFoundError):  # another process removes it just now
                last_use = path.stat().st_mtime
                if not path.name.startswith("."):
                    found.append(Entry(kind, path, _size(path), last_use, _content(path)))
                elif time.time() - last_use > UNFINISHED_AFTER:
                    found.append(Entry("unfinished", path, _size(path), last_use))
    return found


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _content(folder: Path) -> str:
    """The first line of the source in a folder, without the marks of a comment; empty where there is none."""
    for source in (*folder.glob("kernel.*"), *folder.glob("driver.c"), *folder.glob("__init__.py")):
        if source.suffix in (".cpp", ".c", ".py"):
            with contextlib.suppress(OSError, UnicodeDecodeError), source.open(encoding="utf-8") as file:
                return file.readline().strip('/#" \n').partition(". ")[0]
    return ""


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
