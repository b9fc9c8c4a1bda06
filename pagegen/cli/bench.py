"""`pagegen bench`: a kernel package against its own default and torch, interleaved in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli._common import JsonOption, as_path, note, print_json, print_table, progress
from pagegen.errors import ConfigError
from pagegen.spec import Phase

PEERS = ("default", "sdpa")

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Time what was built."""


@app.command(
    "kernel",
    short_help="Time attend against the default and torch SDPA.",
    epilog="Example: pagegen bench kernel PACKAGE --against default,sdpa",
)
def kernel(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", parser=as_path, help="The package's folder.", show_default=False)],
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="PEERS", help="default (untuned), sdpa (torch, three forms), or both by a comma."
        ),
    ] = ",".join(PEERS),
    phase: Annotated[
        Phase | None, typer.Option("--phase", help="Only batches of this phase.", show_default=False)
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, help="Time for one batch, all contenders together.")
    ] = 0.5,
    json: JsonOption = False,
) -> None:
    """Time a package's attend on ragged batches, with cold KV in scattered blocks.

    The roofline is measured first; a share of it is the least time that it allows over the time taken. A ratio is a
    contender's time over the package's: above 1 the package is faster. sdpa_gather makes the paged KV contiguous in every
    call; sdpa_gqa and sdpa_folded are given contiguous KV for nothing.
    """
    import torch

    from pagegen.package import load_package
    from pagegen.target import detect
    from pagegen.tuning.contest import bench, table
    from pagegen.tuning.evaluate import preset
    from pagegen.tuning.roofline import measure_roofline

    peers = [word for word in against.split(",") if word]
    unknown = next((word for word in peers if word not in PEERS), None)
    if unknown is not None:
        raise ConfigError(f"--against {unknown!r} is not known; allowed: {', '.join(PEERS)}, joined by commas")
    loaded = load_package(package)
    torch.set_num_threads(detect().threads)
    workloads = [preset(each, loaded.spec) for each in ([phase] if phase else Phase)]
    contenders = {"package": loaded, "default": loaded.default_kernels()}
    if "default" not in peers:
        del contenders["default"]
    done = 0
    with progress("timing", sum(len(workload.points) for workload in workloads)) as advance:

        def watch(point: str) -> None:
            nonlocal done
            done += 1
            advance(done, point)

        roofline = measure_roofline(loaded.target) if loaded.target.kind == "cpu" else None
        with_sdpa = "sdpa" in peers
        rows, conditions = bench(
            contenders, loaded.target, workloads, with_sdpa=with_sdpa, seconds=seconds, roofline=roofline, watch=watch
        )
    if json:
        shape = {"package": loaded.name, "spec": loaded.spec.to_dict(), "target": loaded.target.name}
        limits = {"roofline": roofline.to_dict() if roofline else None}
        plain = {"conditions": conditions.to_dict() if conditions else None, "rows": [row.to_dict() for row in rows]}
        print_json({**shape, "threads": torch.get_num_threads(), **limits, **plain})
        return
    note(f"{loaded.spec.slug} on {loaded.target.name}; a batch is SEQUENCESxQUERIES@CONTEXT")
    if conditions:
        note(conditions.line)
        if conditions.disturbance.line:
            note(conditions.disturbance.line)
    print_table(f"{loaded.name}: time of the others over the package's", *table(rows))
