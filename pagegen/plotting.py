"""What all that draws PNGs with matplotlib shares; pagegen does without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

from pagegen.errors import ConfigError


class Figure(Protocol):
    """What `save` needs of a matplotlib figure."""

    def savefig(self, path: Path, /) -> None: ...


def require_matplotlib() -> None:
    """Raises ConfigError if there is none: it is not among what pagegen needs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed; pip install 'pagegen[plots]'")


def save(figure: Figure, path: Path) -> None:
    """Writes a matplotlib figure; the folder is made. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"plot {path} cannot be written: {error.strerror or error}") from None
