"""Compiles candidates for GPUs that are not here and writes docs/static-tuning.md: how many are pruned, and why.

    python scripts/static_table.py [CONFIGS [WORKERS]]     by default 300 configs a row and one process: an hour

What was compiled stays in the kernel cache, so that a second run takes seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagegen.spec import parse_slug
from pagegen.target import parse_target
from pagegen.tuning.static import tune_static
from pagegen.tuning.workloads import select_phases

PAGE = Path(__file__).parents[1] / "docs" / "static-tuning.md"
SPECS = (
    "decode-bf16-d128-h32x8-b16-NHD",
    "prefill-bf16-d128-h32x8-b16-NHD",
    "decode-bf16-d64-h14x2-b16-NHD-kvfp8_e4m3",
)
TARGETS = ("cuda:sm_90", "hip:gfx942")

HEAD = """# Tuning without the device

Written by `python scripts/static_table.py`. Each row: configs drawn from the space, the default among them, compiled for
a GPU that was not there (`pagegen tune SPEC --target TARGET --static --trials N`), and judged by what their kernels use
on the batches of the phase. Nothing is measured; what is left is ranked by a model (`tuning/static_gpu.py`).

- *knobs*: combinations of their values.
- *does not compile*: the compiler refuses it, as where its tiles exceed shared memory after all.
- *shared memory*, *registers*: a program takes more than there is, and cannot be launched.
- *occupancy*: so little fits on a multiprocessor that one of its schedulers has no warp.
- *spills*: a kernel spills registers, where others of the row do not.
- *duplicate*: on these batches the same kernels are launched on the same grids as by another config of the row.

Where the device is, `pagegen tune` tells duplicates, too, before it builds them, and answers them from the trial of their like
without counting them: on a GPU those for which the launcher would launch the same programs on the same grids. Different programs
that compile to the same binary, and what is of no use by its registers or its shared memory, take a compile to tell: they
are left out here alone. For a CPU a config alone says what is done on these batches, and nothing is refused by it but by
the space's constraints. The model's estimates refuse nothing anywhere.
"""
KINDS = ("does not compile", "shared memory", "registers", "occupancy", "spills", "duplicate")


def judged(slug: str, target: str, configs: int, workers: int) -> dict[str, Any]:
    """The record of one row."""
    spec, phase = parse_slug(slug)
    with tempfile.TemporaryDirectory() as folder:
        selection = select_phases(None, spec, phase, parse_target(target))
        return tune_static(spec, parse_target(target), selection, Path(folder), trials=configs, workers=workers, watch=show)


def show(done: int, total: int) -> None:
    """Progress, on one line."""
    print(f"\r{done} of {total} compiled", end="" if done < total else "\n", file=sys.stderr, flush=True)


def page(records: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """The page's lines."""
    yield HEAD
    yield f"| spec | target | knobs | configs | {' | '.join(KINDS)} | left |"
    yield f"|---|---|{'---:|' * (len(KINDS) + 3)}"
    for (slug, target), record in records.items():
        (found,) = record["phases"].values()
        counts = found["pruned"] | {KINDS[0]: found["counts"]["BUILD_ERROR"]}
        cells = [slug, target, record["combinations"], record["candidates"], *(counts.get(kind, 0) for kind in KINDS)]
        yield f"| {' | '.join(map(str, cells))} | {found['counts']['NOT_MEASURED']} |"
    yield "\nThe three that the model ranks first, and its estimate for a call (weighted geometric mean over the batches):\n"
    yield "| spec | target | config | us | registers | shared bytes | occupancy |\n|---|---|---|---:|---:|---:|---:|"
    for (slug, target), record in records.items():
        (found,) = record["phases"].values()
        for row in found["rows"][:3]:
            used = row["kernels"].values()
            knobs = " ".join(f"{name}={value}" for name, value in row["config"].items())
            most = [max(each[name] for each in used) for name in ("registers", "shared_memory")]
            least = f"{min(each['occupancy'] for each in used):.0%}"
            yield f"| {slug} | {target} | {knobs} | {row['score'] * 1e6:.1f} | {most[0]} | {most[1]} | {least} |"
    toolchain = next(iter(records.values()))["toolchain"]
    yield f"\nCompiled by triton {toolchain['triton']}."


def main(words: list[str]) -> None:
    """Writes the page."""
    configs, workers = (int(word) for word in (words + ["300", "1"][len(words) :]))
    records = {(slug, target): judged(slug, target, configs, workers) for target in TARGETS for slug in SPECS}
    PAGE.write_text("\n".join(page(records)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
