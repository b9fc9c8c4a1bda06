"""`pagegen tune`: search, gate, measure, and a kernel package at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli._common import (
    JsonOption,
    ModelOption,
    SpecArgument,
    TargetOption,
    as_path,
    given_flags,
    is_folder,
    max_context,
    note,
    note_workload,
    print_json,
    print_table,
    progress,
    spec_from,
    spec_options,
)
from pagegen.errors import ConfigError
from pagegen.spec import KernelSpec

if TYPE_CHECKING:
    from pagegen.tuning.contest import Row
    from pagegen.tuning.job import TuneResult
    from pagegen.tuning.search import Progress

NOISY = 0.1  # above this share of the time, intervals hide what a config can gain

_SPEC = frozenset({"spec", "model", *(field.name for field in dataclasses.fields(KernelSpec))})
_SEARCH = _SPEC | {
    *("target", "workload", "trials", "budget", "sampler", "roofline_share", "patience", "warm_start", "workers", "out", "seed"),
}
TAKES: Mapping[str, frozenset[str]] = {  # what counts in each way to call the command, beside --json
    "--replay of a folder": frozenset({"replay", "spec"}),
    "--replay": _SPEC | {"replay", "target", "workload", "out"},
    "--join": frozenset({"join", "storage", "budget", "workers"}),
    "--static": _SPEC | {"static", "target", "workload", "trials", "budget", "workers", "top", "out", "seed"},
    "a layout of auto": _SEARCH | {"block_sizes", "layouts"},
    "the tuning of one layout": _SEARCH | {"storage", "study", "shortlist"},
}

EXAMPLE = "pagegen tune --model smollm2-135m --trials 40"


@spec_options
def command(
    context: typer.Context,
    overrides: dict[str, Any],
    spec: SpecArgument = None,
    model: ModelOption = None,
    target: TargetOption = "auto",
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="NAME|FILE",
            help="Batches to tune for: chat, code, long-context, batch-offline, speculative, or a file as `pagegen simulate "
            "--emit-workload` writes it; default: some of everything, of which decode, prefill and mixed are parts.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            help="Configs to evaluate in all, earlier runs included; default: 40; with --static all, at most 10000.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help="Begin no trial after this time, in which waiting for other timings on the machine counts; the last rounds come on top.", show_default=False),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option("--sampler", metavar="NAME", help="Who proposes configs: tpe, gp (needs scipy), random, or brute: each in turn, --trials of them."),
    ] = "tpe",
    roofline_share: Annotated[
        float | None,
        typer.Option(
            "--roofline-share",
            metavar="SHARE",
            help="End a bucket's search once its best config reaches this share of what the machine's measured limits allow.",
            show_default=False,
        ),
    ] = None,
    patience: Annotated[
        int,
        typer.Option(
            "--patience",
            metavar="N",
            help="End a bucket's search before its total when N trials in a row gained nothing beyond the noise, and by the spread "
            "of the best scores the trials left gain 2 % with a chance of 2 % at most. Both must hold, so that it often makes "
            "more than N; 0: never.",
        ),
    ] = 20,
    warm_start: Annotated[
        bool,
        typer.Option(
            "--warm-start/--cold-start", help="Try first what won in earlier runs of the same template, among the results."
        ),
    ] = True,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Where the trials live: a journal file, sqlite:///FILE or postgresql://USER@HOST/DATABASE; other databases "
            "that SQLAlchemy has a driver for are accepted, untested. Default: journal.log among the results.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="NAME", help="Name of the study; default: the spec's slug.", show_default=False),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Processes that evaluate, or compile for --static, side by side; one times at a time.")
    ] = 1,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="STUDY",
            help="Evaluate configs of a study that another machine of this kind has opened in --storage; SPEC is the study's.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", parser=as_path, help="Results go to DIR/<target>/<spec>; default: results.", show_default=False
        ),
    ] = Path("results"),
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the search.")] = 0,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Measure nothing: decide again from the record of SPEC under --out, or from that in the folder that stands "
            "for SPEC. Exit status 1 if the decision is another one.",
        ),
    ] = False,
    static: Annotated[
        bool,
        typer.Option(
            "--static", help="Measure nothing: compile the candidates for a target that may be absent, write a shortlist."
        ),
    ] = False,
    top: Annotated[int, typer.Option("--top", metavar="K", help="Configs of a phase in the shortlist of --static.")] = 20,
    shortlist: Annotated[
        Path | None,
        typer.Option("--shortlist", metavar="FILE", parser=as_path, help="Try first what --static wrote here.", show_default=False),
    ] = None,
    block_sizes: Annotated[
        str | None,
        typer.Option(
            "--block-sizes",
            metavar="N,N",
            help="Block sizes to choose from, where the layout is auto; default: 16,32,64 and the spec's.",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            metavar="L,L",
            help="Layouts to choose from, where the layout is auto; default: NHD,HND and dim-major K: HDN8, on CPUs HDN2 or HDN.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest correct config for this machine and package it.

    Every candidate passes the correctness gate before it is timed. A run that was interrupted or killed is continued by
    the same command. Without a phase in SPEC, decode, prefill and mixed batches are tuned apart, those of them that the
    workload has; with one, record and package keep what was tuned before of the others. With --model, contexts longer than it
    takes are cut to that. Trials on other batches are another study: they never mix. A deterministic
    spec has one config for all batches: that of the phase in SPEC, or of mixed batches.

    With --static nothing is measured: candidates are compiled for the target, present or not, those of no use are left
    out, and a model ranks the others into a shortlist, which --shortlist has tried first where the target is.

    With a layout of auto and a --workload, made from a trace, every pair of --block-sizes and --layouts is tuned by itself
    (--trials each), and all are timed side by side: the pair is chosen whose step times memory a token is least.

    Several processes, on any number of machines of one kind, share a study over --storage: this command opens it, and
    `pagegen tune --join STUDY --storage URL` takes part. A trial of one that died is tried again by another.
    """
    from pagegen.tuning.asked import (
        TRIALS,
        require_budget,
        require_counts,
        require_search,
        require_storage,
        require_words,
    )
    from pagegen.tuning.stopping import StopRule

    require_words({"--storage": storage, "--study": study, "--join": join})
    if replay:
        from pagegen.cli._replay import run_replay

        _require_fitting(context, "--replay of a folder" if spec is not None and is_folder(spec) else "--replay")
        return run_replay(spec, model, overrides, target, workload, out, json)
    if join is not None:
        _require_fitting(context, "--join")
        if storage is None:
            raise ConfigError("--join STUDY takes part in a study that another process opened: name --storage, where it lies")
        require_storage(storage)
        require_budget(budget)
        require_counts({"--workers": workers})
        return _join(join, storage, budget, workers, json)
    if static:
        _require_fitting(context, "--static")
        require_counts({"--trials": trials, "--top": top})
    require_search(target=target, workload=workload, budget=budget, sampler=sampler, workers=workers)
    StopRule(roofline_share, patience)
    found, phase = spec_from(spec, model, overrides)
    longest = max_context(model)
    if static:
        from pagegen.cli._static import run_static, show_static

        options = {"trials": trials, "budget": budget, "workers": workers, "top": top, "seed": seed}
        document = run_static(found, phase, target, workload, out, longest, **options)
        return print_json(document) if json else show_static(document)
    if found.layout is None:
        from pagegen.cli._cotune import run_cotune, show_cotune

        _require_fitting(context, "a layout of auto")
        each = {"trials": TRIALS if trials is None else trials, "sampler": sampler, "roofline_share": roofline_share, "patience": patience}
        where = {"target": target, "phase": phase, "max_context": longest, "budget": budget, "out": out, "seed": seed}
        document = run_cotune(found, workload, block_sizes, layouts, **each, **where, warm_start=warm_start, workers=workers)
        return print_json(document) if json else show_cotune(document, Path(document["report"]))
    _require_fitting(context, "the tuning of one layout")
    from pagegen.tuning.job import tune

    trials = TRIALS if trials is None else trials
    with progress(f"tuning {found.slug}", trials) as advance:
        try:
            result = tune(
                found,
                target=target,
                phase=phase,
                workload=workload,
                max_context=longest,
                trials=trials,
                budget=budget,
                sampler=sampler,
                roofline_share=roofline_share,
                patience=patience,
                warm_start=warm_start,
                storage=storage,
                study=study,
                workers=workers,
                out=out,
                seed=seed,
                shortlist=shortlist,
                watch=_watcher(advance, trials),
                say=note,
            )
        except KeyboardInterrupt:
            note("interrupted; the same command goes on from here")
            raise
    if json:
        print_json(result.document)
    else:
        show(result)


def _require_fitting(context: typer.Context, way: str) -> None:
    """Raises ConfigError for flags that would do nothing."""
    takes = TAKES[way] | {"json"}
    idle = [flag for name, flag in given_flags(context).items() if name not in takes]
    if idle:
        flags = {name: f"--{name.replace('_', '-')}" for name in sorted(takes - _SPEC)}
        spec = ["SPEC"] if "spec" in takes else []
        otherwise = "" if {"--layouts", "--block-sizes"}.isdisjoint(idle) else ", or set --layout auto"
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing with {way}, which takes {', '.join([*spec, *flags.values()])}; leave it out{otherwise}"
        )


def _watcher(advance: Callable[[int, str], None], whole: int) -> Callable[[Progress], None]:
    """Moves a bar that is full at `whole`, and has it say the best of each bucket."""
    best: dict[str, float] = {}

    def watch(state: Progress) -> None:
        if state.best and state.best.score:
            best[state.bucket] = 1 / state.best.score
        remark = ", ".join(f"{bucket} {speedup:.2f}x" for bucket, speedup in best.items())
        advance(whole * state.done // state.total, f"best so far: {remark}" if remark else "")

    return watch


def _join(study: str, storage: str, budget: float | None, workers: int, json: bool) -> None:
    from pagegen.tuning.joining import join

    with progress(f"study {study}", 100) as advance:
        document = join(study, storage, budget=budget, workers=workers, watch=_watcher(advance, 100), say=note)
    if json:
        print_json(document)
    else:
        trials = ", ".join(f"{count} {name}" for name, count in document["trials"].items())
        note(f"study {study}: {document['made']} configs evaluated here; trials: {trials}; {_statuses(document['counts'])}")


def show_decision(document: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Winners, contest and dispatch table for people."""
    from pagegen.tuning.contest import table

    print_table(
        "winners",
        ("bucket", "kernel", "speed-up [95 %]", "config"),
        [_winner_row(row) for row in document["winner"]],
    )
    typer.echo()
    print_table("time of default and torch over the winner's; a batch is SEQUENCESxQUERIES@CONTEXT", *table(rows))
    parts = [f"{phase} {found['rows']} rows, {found['regret']:+.1%}" for phase, found in document["dispatch"].items()]
    note(f"dispatch table, and its time over that of the best finalist at each batch: {'; '.join(parts)}")


def show(result: TuneResult) -> None:
    """The outcome for people."""
    from pagegen.tuning.contest import limit_notes
    from pagegen.tuning.record import by_limits

    show_decision(result.document, result.rows)
    note_workload(result.document["workload"])
    trials, counts = result.document["trials"], result.document["counts"]
    note(f"trials: {', '.join(f'{count} {name}' for name, count in trials.items())}; " + _statuses(counts))
    if result.document.get("shortlist"):
        note(_shortlist(result.document["shortlist"]))
    for bucket, why in result.document["stopped"].items():
        note(f"{bucket} ended early: {why}")
    if result.document["noise"] > NOISY:
        note(
            f"the machine was busy: times are known to within {result.document['noise']:.0%} only, and small gains were not "
            "believed; when it is quiet, start afresh under another name: --study quiet"
        )
    for line in limit_notes(result.rows, [limits for limits, _ in by_limits(result.document)]):
        note(line)
    if result.conditions and result.conditions.disturbance.line:
        note(result.conditions.disturbance.line)
    note(f"package: {result.package} (installed: generate, chat and serve find it)\nreport:  {result.report}")


def _shortlist(listed: dict[str, Any]) -> str:
    """Which shortlist was tried first, and that it was compiled anew where another toolchain made it."""
    differing = ", ".join(f"{name} {here} here, {there} there" for name, (there, here) in listed["toolchain"].items())
    anew = f"; compiled anew here: {differing}" if differing else ""
    return f"shortlist: {sum(listed['configs'].values())} configs of {listed['file']}, tried first{anew}"


def _winner_row(winner: dict[str, Any]) -> Sequence[str]:
    low, high = winner["speedup_interval"]
    gain = f"{winner['speedup']:.2f} [{low:.2f}, {high:.2f}]" if winner["confirmed"] else "default stays"
    return (
        winner["bucket"],
        winner["kernel"],
        gain,
        " ".join(f"{name}={value}" for name, value in winner["config"].items()),
    )


def _statuses(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
