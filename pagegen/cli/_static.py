"""`pagegen tune --static`: how the candidates for an absent device are chosen and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pagegen.cli._common import note, note_workload, print_table, progress
from pagegen.spec import KernelSpec, Phase

SHOWN = 10  # configs of a phase; the file has them all


def run_static(
    spec: KernelSpec,
    phase: Phase | None,
    target: str,
    workload: str | None,
    out: Path,
    max_context: int | None,
    **options: Any,
) -> dict[str, Any]:
    """Judges the candidates with a bar on stderr; answers the JSON record."""
    from pagegen.target import parse_target
    from pagegen.tuning.job import results_folder
    from pagegen.tuning.static import tune_static
    from pagegen.tuning.workloads import select_phases

    where = parse_target(target)
    selection = select_phases(workload, spec, phase, where, max_context=max_context)
    folder = results_folder(out, where, spec, selection) / "static"
    with progress(f"judging {spec.slug}", 100) as advance:

        def watch(done: int, total: int) -> None:
            advance(100 * done // total, f"{done} of {total} compiled")

        return tune_static(spec, where, selection, folder, **options, watch=watch)


def show_static(document: dict[str, Any]) -> None:
    """The outcome for people."""
    for phase, found in document["phases"].items():
        columns = ("config", "estimate us", "registers", "spills", "shared bytes", "occupancy")
        title = f"{phase}: best of {document['candidates']} configs, {document['label']}"
        print_table(title, columns, [_cells(row) for row in found["rows"][:SHOWN]])
        why = ", ".join(f"{count} {kind}" for kind, count in found["pruned"].items())
        typer.echo(f"pruned: {why or 'none'}\n")
    note_workload(document["workload"])
    note(f"shortlist: {document['shortlist']} (`pagegen tune SPEC --shortlist FILE` measures it)")
    note(f"report:    {document['report']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    knobs = " ".join(f"{name}={value}" for name, value in row["config"].items())
    used = row["kernels"].values()
    most = [str(max((each[name] for each in used), default="")) for name in ("registers", "spills", "shared_memory")]
    occupancy = f"{min(each['occupancy'] for each in used):.0%}" if used else ""
    return knobs, f"{row['score'] * 1e6:.1f}", *most, occupancy
