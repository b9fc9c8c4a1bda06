"""`pagegen check`: the correctness gate on a spec's default kernels, or on every kernel of a package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pagegen.cli._common import (
    JsonOption,
    ModelOption,
    TargetOption,
    is_folder,
    note,
    print_json,
    print_table,
    progress,
    spec_from,
    spec_options,
)
from pagegen.errors import ConfigError
from pagegen.spec import PAGED_OPS, KernelSpec, Op, Phase
from pagegen.target import Target, parse_target

if TYPE_CHECKING:
    from pagegen.catalog import Variant
    from pagegen.check import CheckReport

EXAMPLE = "pagegen check decode-bf16-d64-h9x3-b16-NHD --suite full --seed 7"

SubjectArgument = Annotated[
    str | None, typer.Argument(metavar="SPEC|PACKAGE", help="A spec file or slug, or a kernel package's folder.")
]
SuiteOption = Annotated[Literal["quick", "full"], typer.Option("--suite", help="full: more seeds, shapes and threads.")]


@spec_options
def command(
    overrides: dict[str, Any],
    subject: SubjectArgument = None,
    model: ModelOption = None,
    target: TargetOption = "auto",
    suite: SuiteOption = "quick",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Draws other numbers for the same cases.")] = 0,
    json: JsonOption = False,
) -> None:
    """Prove kernels against the reference: the correctness gate."""
    if subject is not None and is_folder(subject):
        if overrides or model or target != "auto":
            raise ConfigError(f"{subject} is a package and states its spec and target; leave out --model, --target and spec options")
        spec, where, reports, variants = check_package(Path(subject), suite, seed)
    else:
        spec, phase = spec_from(subject, model, overrides)
        where = parse_target(target)
        reports, variants = check_spec(spec, phase, where, suite, seed)
    _print(spec, where, suite, seed, reports, variants, json)
    if not all(report.passed for report in reports.values()):
        raise typer.Exit(1)


def check_spec(
    spec: KernelSpec, phase: Phase | None, target: Target, suite: str, seed: int
) -> tuple[dict[str, CheckReport], dict[str, Variant]]:
    """The reports of the default kernels of a spec, by op, and those kernels."""
    from pagegen.catalog import variant
    from pagegen.check import check_variant
    from pagegen.render import render

    reports, variants = {}, {}
    with progress("checking", len(PAGED_OPS)) as advance:
        for done, op in enumerate(PAGED_OPS):
            advance(done, op.value)
            variants[op.value] = variant(op, spec, target)
            reports[op.value] = check_variant(render(variants[op.value]), suite, seed, phase=phase, smallest=True)
    return reports, variants


def check_package(
    path: Path, suite: str, seed: int
) -> tuple[KernelSpec, Target, dict[str, CheckReport], dict[str, Variant]]:
    """Spec, target, the reports and the kernels of a package: its libraries one by one, each in a process of its own, and
    then, if they pass, the package as it is called, dispatch and all."""
    from pagegen.build.cpp import compile_library
    from pagegen.catalog import Variant, template_for
    from pagegen.check import check_kernels, check_library
    from pagegen.check.suite import suite_named
    from pagegen.package import load_package

    package = load_package(path)
    spec, target = package.spec, package.target
    cases = suite_named(suite)(spec, None, seed)
    reports: dict[str, CheckReport] = {}
    variants: dict[str, Variant] = {}
    kernels: Mapping[str, Mapping[str, Any]] = package.manifest["kernels"]
    with progress("checking", len(kernels) + 1) as advance:
        for name, entry in kernels.items():
            if entry["language"] != "cpp":
                continue
            advance(len(reports), name)
            binary = package.path / (entry["binary"] or "missing")
            library = binary if binary.is_file() else compile_library((package.path / entry["source"]).read_text(), target)
            op = Op(entry["op"])
            reports[name] = check_library(library, op, target, cases, smallest=True)
            template = template_for(op, spec, target)
            variants[name] = Variant(spec, target, template, template.space(spec, target).config(entry["config"]))
        if all(report.passed for report in reports.values()):
            device = "cpu" if target.kind == "cpu" else "cuda"
            reports["package"] = check_kernels(package, suite, seed=seed, device=device)
    return spec, target, reports, variants


def _print(
    spec: KernelSpec,
    target: Target,
    suite: str,
    seed: int,
    reports: Mapping[str, CheckReport],
    variants: Mapping[str, Variant],
    json: bool,
) -> None:
    from pagegen.check import snippet

    failures = [{"kernel": name, **failure.to_dict()} for name, report in reports.items() for failure in report.failures]
    snippets = {
        name: snippet(report.failures[0].case, variants[name])
        for name, report in reports.items()
        if report.failures and name in variants
    }
    if json:
        print_json(
            {
                "passed": not failures,
                "cases": sum(report.cases for report in reports.values()),
                "failures": failures,
                "snippets": snippets,
                "kernels": {name: report.status.value for name, report in reports.items()},
                "seconds": {name: report.seconds for name, report in reports.items()},
                "spec": spec.to_dict(),
                "target": target.name,
                "suite": suite,
                "seed": seed,
            }
        )
        return
    rows = [[name, report.status.value, str(report.cases), f"{report.seconds:.2f}"] for name, report in reports.items()]
    print_table(f"{spec.slug} on {target.name}, {suite} suite, seed {seed}", ["kernel", "status", "cases", "seconds"], rows)
    for failure in failures:
        shape = f"query_lens={failure['query_lens']} context_lens={failure['context_lens']}"
        note(f"{failure['kernel']}, {failure['name']}: {failure['message']} ({shape} seed={failure['seed']})")
    for name, text in snippets.items():
        note(f"\nThe smallest input on which {name} fails, as a program:\n\n{text}")
