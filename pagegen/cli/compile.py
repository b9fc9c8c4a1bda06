"""`pagegen compile`: compiles a spec's kernels for targets that may be absent, and reports what the binaries use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli._common import (
    JsonOption,
    ModelOption,
    SpecArgument,
    print_json,
    print_table,
    progress,
    spec_from,
    spec_options,
)
from pagegen.cli.render import SetOption, parse_settings
from pagegen.errors import BuildError, SpecError
from pagegen.spec import PAGED_OPS, KernelSpec, Op, parse_slug
from pagegen.target import TARGETS, Target, detect, parse_target

if TYPE_CHECKING:
    from pagegen.render import Source
    from pagegen.resources import Resources

EXAMPLE = "pagegen compile bf16-d128-h32x8-b16-NHD --target cuda:sm_80,cuda:sm_90,hip:gfx942"

# What --all compiles. Of the first, nothing spills and every binary can be launched, on any target: both 16-bit dtypes, the
# usual widths of a head, three ratios of query to KV heads, the orders of a cache. Of the others --all reports what they use.
PROMISED = tuple(
    parse_slug(slug)[0]
    for slug in (
        "fp16-d64-h9x3-b16-HND-lse",
        "bf16-d64-h32x8-b16-NHD",
        "fp16-d96-h32x32-b16-NHD",
        "bf16-d96-h24x8-b16-HDN",
        "bf16-d128-h32x8-b16-NHD",
        "fp16-d128-h32x32-b16-HDN8_HDN",
    )
)
REPORTED = (
    *(parse_slug(slug)[0] for slug in ("bf16-d40-h5x1-b3-HDN2", "bf16-d256-h16x8-b32-NHD", "fp32-d64v32-h14x2-b1-NHD-lse")),
    KernelSpec(16, 1, 576, head_dim_v=512, block_size=64, v_in_k=True),
)
POOLED = 12  # kernels above which processes take turns: each has triton to import first


@spec_options
def command(
    overrides: dict[str, Any],
    spec: SpecArgument = None,
    model: ModelOption = None,
    all: Annotated[bool, typer.Option("--all", help="Compile a set of specs that covers every template.")] = False,
    target: Annotated[
        str, typer.Option("--target", metavar="T[,T...]|all", help="Targets; they need not be present.")
    ] = "auto",
    op: Annotated[list[Op] | None, typer.Option("--op", help="Only this operation; repeatable.")] = None,
    set: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Compile, for absent targets too, and report registers, spills, shared memory, instructions and occupancy."""
    if all and (spec or model):
        raise SpecError("--all compiles a set of specs of its own; leave out SPEC and --model")
    specs = [*PROMISED, *REPORTED] if all else [spec_from(spec, model, overrides)[0]]
    targets = TARGETS if target == "all" else tuple(dict.fromkeys(parse_target(word) for word in target.split(",")))
    rows = compile_rows(specs, targets, op or PAGED_OPS, parse_settings(set or []))
    if json:
        print_json({"rows": rows})
    else:
        for number, ((name, where), group) in enumerate(
            itertools.groupby(rows, lambda row: (row["spec"], row["target"]))
        ):
            if number:
                typer.echo()
            columns = ("kernel", "registers", "spills", "shared bytes", "occupancy", "instructions (static count)")
            print_table(f"{name} on {where}", columns, [_cells(row) for row in group])
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


def compile_rows(
    specs: Sequence[KernelSpec], targets: Sequence[Target], ops: Sequence[Op], settings: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row a binary; what does not compile becomes a row with `error`. `settings` go to the ops that have knobs."""
    jobs = [(spec, target, op, settings) for spec in specs for target in targets for op in ops]
    with progress("compiling", len(jobs)) as advance, contextlib.ExitStack() as stack:
        found: Iterable[list[dict[str, Any]]] = map(_compile, jobs)
        if len(jobs) > POOLED:
            pool = concurrent.futures.ProcessPoolExecutor(detect().threads, multiprocessing.get_context("spawn"))
            found = stack.enter_context(pool).map(_compile, jobs)
        rows: list[dict[str, Any]] = []
        advance(0, "")
        for done, ((_, target, op, _), made) in enumerate(zip(jobs, found, strict=True), 1):
            rows.extend(made)
            advance(done, f"{op.value} {target.name}")
        return rows


def _compile(job: tuple[KernelSpec, Target, Op, Mapping[str, str]]) -> list[dict[str, Any]]:
    from pagegen.catalog import Variant, template_for
    from pagegen.render import render

    spec, target, op, settings = job
    template = template_for(op, spec, target)
    space = template.space(spec, target)
    config = space.parse(settings) if space.knobs else space.default
    source = render(Variant(spec, target, template, config))
    row = {"spec": spec.slug, "target": target.name, "op": op.value, "config": config.to_dict(), "key": source.key}
    begin = time.monotonic()
    try:
        found = _cpu(source) if target.kind == "cpu" else _gpu(source)
    except BuildError as error:
        return [{**row, "kernel": op.value, "error": str(error), "seconds": round(time.monotonic() - begin, 3)}]
    seconds = round((time.monotonic() - begin) / len(found), 3)
    return [{**row, "kernel": name, **resources.to_dict(), "seconds": seconds, "error": None} for name, resources in found.items()]


def _cpu(source: Source) -> dict[str, Resources]:
    from pagegen.build.cpp import compile_library
    from pagegen.resources import cpu_resources

    variant = source.variant
    return {variant.template.op.value: cpu_resources(compile_library(source.text, variant.target), variant.target)}


def _gpu(source: Source) -> dict[str, Resources]:
    from pagegen.build.triton import compile_for, toolchain
    from pagegen.resources import KeptResources, gpu_resources

    kept = KeptResources("compiled", source.key, toolchain())
    if not (found := kept.read()):
        found = {
            made.name: gpu_resources(made.target, made.binary, made.assembly, made.num_warps, made.shared_memory)
            for made in compile_for(source)
        }
        kept.write(found)
    return found


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = row["kernel"] if row["kernel"] == row["op"] else f"{row['op']} {row['kernel']}"
    if row["error"]:
        return name, "", "", "", "", row["error"]
    numbers = ("" if row[field] is None else str(row[field]) for field in ("registers", "spills", "shared_memory"))
    occupancy = "" if row["occupancy"] is None else f"{row['occupancy']:.0%}"
    mix = ", ".join(f"{count} {word}" for word, count in row["instructions"].items() if count)
    return name, *numbers, occupancy, mix
