"""What a tuning run leaves for people and programs: report.md and tune.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.paths import write_atomic
from pagegen.render import environment
from pagegen.tuning.contest import Row, table


def write_report(folder: Path, document: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """Writes `folder`/tune.json and `folder`/report.md; returns the latter."""
    write_atomic(folder / "tune.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    columns, lines = table(rows, intervals=True)
    text = environment().get_template("report/tune.md.jinja").render(document=document, columns=columns, lines=lines)
    write_atomic(folder / "report.md", text)
    return folder / "report.md"
