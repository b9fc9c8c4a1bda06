"""`pagegen tune --replay`: what a record leads to, without the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from pagegen.cli._common import is_folder, note, print_json, spec_from
from pagegen.errors import ConfigError


def run_replay(
    spec: str | None, model: str | None, overrides: Mapping[str, Any], target: str, workload: str | None, out: Path, json: bool
) -> None:
    """Prints the decision; exit status 1 if it is not the one recorded."""
    from pagegen.cli.tune import show_decision
    from pagegen.target import parse_target
    from pagegen.tuning.record import find_record
    from pagegen.tuning.replay import replay
    from pagegen.tuning.workloads import name_of

    if spec is not None and is_folder(spec):
        folder = Path(spec)
    else:
        found_spec = spec_from(spec, model, overrides)[0]
        if found_spec.layout is None:
            raise ConfigError("--replay is for one layout; name that of a pair, such as --layout NHD, or the folder of its record")
        slug = found_spec.slug
        folder = find_record(out, slug, None if target == "auto" else parse_target(target).slug, name_of(workload))
    found = replay(folder)
    if json:
        print_json({**found.document, "replay": {"same": not found.differences, "differences": list(found.differences)}})
    else:
        show_decision(found.document, found.rows)
        said = f"differs from the recorded one in {', '.join(found.differences)}" if found.differences else "is the recorded one"
        note(f"record: {folder}; the decision {said}")
    if found.differences:
        raise typer.Exit(1)
