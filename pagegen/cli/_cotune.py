"""`pagegen tune` where the layout is `auto`: how the pairs of block size and layout are named and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagegen.cli._common import note, note_workload, print_table, progress
from pagegen.errors import ConfigError
from pagegen.spec import KernelSpec, KVLayout


def run_cotune(spec: KernelSpec, workload: str | None, block_sizes: str | None, layouts: str | None, **options: Any) -> dict[str, Any]:
    """Tunes the pairs and chooses one; answers the JSON record."""
    sizes = None
    if block_sizes is not None:
        words = [word.strip() for word in block_sizes.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise ConfigError(f"--block-sizes {block_sizes!r} are no numbers joined by commas; write for example 16,32,64")
        sizes = [int(word) for word in words]
    named = [word.strip() for word in layouts.split(",")] if layouts is not None else None
    for word in named or ():
        KVLayout.parse(word)
    from pagegen.tuning.cotune import cotune  # after what is refused without it: it loads torch

    with progress(f"tuning {spec.slug}", 100) as advance:

        def watch(share: float, pair: str) -> None:
            advance(int(100 * share), pair)

        return cotune(spec, workload, block_sizes=sizes, layouts=named, watch=watch, say=note, **options)


def show_cotune(document: dict[str, Any], report: Path) -> None:
    """The outcome for people."""
    from pagegen.tuning.machine import Disturbance

    conditions = document["conditions"]
    least = document["pairs"][0]["cost"]
    columns = ("pair", "step us", "[95 %]", "write_kv us", "wasted", "cost", "Pareto front")
    print_table(
        "block size and layout: a step of one layer, memory that holds no token, and the product over the least",
        columns,
        [
            (
                pair["name"] + " *" * (pair["name"] == document["chosen"]),
                f"{1e6 * pair['step']['median']:.1f}",
                f"[{1e6 * pair['step']['low']:.1f}, {1e6 * pair['step']['high']:.1f}]",
                f"{1e6 * pair['write_kv']:.1f}",
                f"{pair['wasted']:.1%}",
                f"{pair['cost'] / least:.3f}",
                "yes" if pair["front"] else "",
            )
            for pair in document["pairs"]
        ],
    )
    for name, why in document["refused"].items():
        note(f"{name} is not served: {why}")
    note_workload(document["workload"])
    if conditions and Disturbance(**conditions["disturbance"]).line:
        note(Disturbance(**conditions["disturbance"]).line)
    note(f"chosen: {document['chosen']}, by the rule: {document['rule']}")
    note(f"package: {document['package']} (installed: generate, chat and serve find it)\nreport:  {report}")
