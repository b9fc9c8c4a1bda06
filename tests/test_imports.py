"""Claims about who may import whom, read from the source with `ast`; a failure names the guilty line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pagegen.package import VENDORED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pagegen"

# Lowest first; a module may import from its own rank and from lower ones. kernel (the calling convention and its checks)
# stands below reference, which is written against it; nothing of it knows a template.
RANKS: tuple[tuple[str, ...], ...] = (
    ("errors", "paths", "memory", "plotting"),
    ("expression",),
    ("spec", "target"),
    ("space", "records", "kernel"),
    ("abi",),
    ("transfer", "torch_op"),
    ("reference", "offsets"),
    ("catalog",),
    ("render",),
    ("build", "resources"),
    ("check",),
    ("package", "loader", "explain"),
    ("tuning", "runtime"),
    ("cli", "__init__", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}

ALLOWED_PLACES = {
    "jinja2": {"render.py", "package.py", "tuning/report.py", "runtime/tokenizer.py"},
    "optuna": {
        f"tuning/{name}.py" for name in ("importance", "joining", "lease", "sampling", "storage", "study")
    },
    "triton": {"build/triton.py"},
    "httpx": {"runtime/load/client.py"},
    "matplotlib": {"runtime/simulation/plot.py", "tuning/plots.py"},
}


class Import(NamedTuple):
    """One imported module, by its absolute name, and where the line stands."""

    module: str
    file: Path
    line: int
    relative: bool
    typing_only: bool

    @property
    def room(self) -> str | None:
        """The part of pagegen that it names; None for anybody else's module."""
        parts = self.module.split(".")
        if parts[0] != "pagegen":
            return None
        return parts[1] if len(parts) > 1 else "__init__"

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def files() -> list[Path]:
    """Every module of pagegen, tuning and runtime by the names they are imported with."""
    folders = (PACKAGE, PACKAGE / "tuning", PACKAGE / "runtime")  # rglob does not follow the links
    found = {path for folder in folders for path in folder.rglob("*.py") if "templates" not in path.parts}
    return sorted(found)


def imports(file: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions included. `from package import module` names the module."""
    tree = ast.parse(file.read_text(), str(file))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    here = ["pagegen", *file.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, file, node.lineno, False, id(node) in guarded)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                whole = [*base, alias.name]
                path = PACKAGE.joinpath(*whole[1:]) if whole[0] == "pagegen" else None
                is_module = path is not None and (path.with_suffix(".py").exists() or path.is_dir())
                yield Import(".".join(whole if is_module else base), file, node.lineno, node.level > 0, id(node) in guarded)


FILES = files()
ALL = [found for file in FILES for found in imports(file)]


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def guilty(lines: list[Import]) -> str:
    return "\n".join(map(str, lines))


def test_every_room_has_a_rank() -> None:
    assert {room_of(file) for file in FILES} <= RANK.keys()
    assert len(FILES) > 40 and len(ALL) > 200  # the walk found the source


def test_imports_run_one_way() -> None:
    def upward(found: Import) -> bool:
        if found.room is None or found.room not in RANK or (found.room == "__init__" and room_of(found.file) != "__init__"):
            return False  # `from pagegen import __version__` costs nothing and is everybody's
        return RANK[found.room] > RANK[room_of(found.file)]

    lines = [found for found in ALL if upward(found) and not found.typing_only]
    assert not lines, guilty(lines)


def test_tuning_and_runtime_do_not_know_each_other() -> None:
    lines = [found for found in ALL if {room_of(found.file), found.room} == {"tuning", "runtime"}]
    assert not lines, guilty(lines)


def test_nobody_imports_the_linked_folders_by_their_bare_names() -> None:
    lines = [found for found in ALL if found.module.split(".")[0] in ("tuning", "runtime", "templates")]
    assert not lines, guilty(lines)


@pytest.mark.parametrize("library", ALLOWED_PLACES)
def test_a_library_is_imported_in_its_places_only(library: str) -> None:
    lines = [
        found
        for found in ALL
        if found.module.split(".")[0] == library
        and found.file.relative_to(PACKAGE).as_posix() not in ALLOWED_PLACES[library]
    ]
    assert not lines, guilty(lines)


def test_the_runtime_runs_without_the_tuners_libraries() -> None:
    lines = [found for found in ALL if room_of(found.file) == "runtime" and found.module.split(".")[0] in ("optuna", "triton")]
    assert not lines, guilty(lines)


def test_what_packages_carry_needs_nothing_but_itself_and_torch() -> None:
    carried = {"pagegen." + name.removesuffix(".py").replace("/", ".") for name in VENDORED}
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    lines = [
        found
        for name in VENDORED
        for found in imports(PACKAGE / name)
        if not found.typing_only
        and not (found.module in carried and found.relative)
        and not (found.room is None and found.module.split(".")[0] in allowed)
    ]
    assert not lines, guilty(lines)
