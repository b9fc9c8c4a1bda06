"""The whole job: search a config for every bucket, prove the winners on fresh data, package them, write it down."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.build.cpp import compile_library
from pagegen.catalog import variant
from pagegen.errors import ConfigError, GateError
from pagegen.loader import toolchain
from pagegen.package import Packaged, install_package, installed_for, write_package
from pagegen.paths import lock_of, locked
from pagegen.records import DispatchTable, Evaluation, Status
from pagegen.render import render
from pagegen.space import Config, Value
from pagegen.spec import KernelSpec, Op, Phase, parse_slug
from pagegen.target import Target, parse_target, require_present
from pagegen.tuning.asked import TRIALS, require_search, require_words
from pagegen.tuning.carry import keep
from pagegen.tuning.contest import Conditions, Row
from pagegen.tuning.crew import crew
from pagegen.tuning.decide import DEFAULT, Decision, Winner, choose_finalists, decide, propose
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.inherit import explained, inherit
from pagegen.tuning.joining import Job, studies, tally, tell_waiting
from pagegen.tuning.measure import Measurement
from pagegen.tuning.record import FORMAT, TUNE, Record, Rounds, to_keep, write_record, write_trials, write_unevaluated
from pagegen.tuning.report import write_report
from pagegen.tuning.roofline import measure_roofline
from pagegen.tuning.search import Progress, search, share_trials
from pagegen.tuning.shortlist import Shortlist
from pagegen.tuning.stopping import PATIENCE, StopRule
from pagegen.tuning.storage import in_reach, open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.warm_start import Suggestion, suggestions
from pagegen.tuning.workload import Point
from pagegen.tuning.workloads import Selection, select, select_phases

FINAL_SECONDS = 0.3  # a batch, all finalists together
CONTEST_SECONDS = 0.5  # a batch, winner, default and baselines together
ROOFLINE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class TuneResult:
    """The outcome, and where it lies. `document` is the JSON record."""

    package: Path
    installed: Path | None
    report: Path
    winners: tuple[Winner, ...]
    rows: tuple[Row, ...]
    conditions: Conditions | None
    document: Mapping[str, Any]


def tune(
    spec: KernelSpec | str,
    *,
    target: str = "auto",
    phase: Phase | None = None,
    workload: Path | str | None = None,
    max_context: int | None = None,
    trials: int = TRIALS,
    budget: float | None = None,
    sampler: str = "tpe",
    roofline_share: float | None = None,
    patience: int = PATIENCE,
    warm_start: bool = True,
    storage: str | None = None,
    study: str | None = None,
    workers: int = 1,
    out: Path | str | None = None,
    seed: int = 0,
    shortlist: Path | str | None = None,
    install: bool = True,
    watch: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> TuneResult:
    """Tunes `attend` for a spec (or slug) on this machine and, if told to `install` it, puts the package where `generate`,
    `chat` and `serve` find it. A layout of `auto` is for `cotune`.

    `workload` names a preset, or a file of batches; the phases that it has are tuned, or `phase` alone, with contexts
    of at most `max_context` tokens, which is what the model takes. A deterministic
    spec has one config for all batches: that of `phase`, or of mixed ones where the workload has any. `trials` counts
    configs evaluated over all of them and over all runs of the study: an interrupted run is continued. No trial begins
    after `budget` seconds; see `StopRule` for `roofline_share` and `patience`. With `warm_start`, winners among the records
    in `out` are tried first. `workers` processes of this machine evaluate side by side, and others may `join` the study over
    `storage`; one times at a time. `say` is told, line by line, why a study is a new one, and what is waited for. Results go
    to `out`/<target>/<spec>, `out` being `results` by default, and of a workload to a folder of its name in there. What
    `shortlist`, a file as `tune_static` writes it, has for a phase is tried first, after the default. Of phases that are not
    tuned, record and package keep what the record in that folder has, if it holds here (`carry`). Raises ConfigError,
    SpecError, BuildError or CheckError for what stands in the way: GateError if the default does not pass the gate.
    """
    if isinstance(spec, str):
        spec, named = parse_slug(spec)
        phase = phase or named
    require_words({"--storage": storage, "--study": study})
    word = None if workload is None else str(workload)
    require_search(target=target, workload=word, budget=budget, sampler=sampler, workers=workers)
    rule = StopRule(roofline_share, patience)
    where = parse_target(target)
    if roofline_share is not None and where.kind != "cpu":
        raise ConfigError(f"--roofline-share {roofline_share}: the limits of {where.name} are not measured, only a CPU's; leave it out")
    selection = select_phases(word, spec, phase, where, max_context=max_context)
    require_present(where)
    listed = None if shortlist is None else Shortlist.read(Path(shortlist))
    first = {} if listed is None else listed.configs_for(spec, where)
    workloads, phases = selection.workloads, list(selection.workloads)
    shares = share_trials(trials, [each.value for each in phases])
    folder = results_folder(out, where, spec, selection)
    totals = dict(zip(phases, shares.values(), strict=True))
    backend, url = open_storage(storage, folder), storage or str(folder / "journal.log")
    roofline = measure_roofline(where, seconds=ROOFLINE_SECONDS) if where.kind == "cpu" else None
    job = Job(study or spec.slug, spec, where.name, workloads, totals, sampler, seed, rule, roofline)
    with Evaluator(spec, where, workloads, roofline) as evaluator:
        with in_reach(url), studies(backend, evaluator, job) as found:
            ancestors = {bucket: inherit(each, evaluator.source_of) for bucket, each in found.items()}
            identity = next(iter(found.values())).identity
            others = functools.partial(keep, folder, identity, phases, select(word, spec, where, max_context=max_context).workloads)
            kept = others()
            _tell(say, [*explained(ancestors), *kept.lines])
            for each in phases:
                found[each].enqueue(first.get(each, []))
            suggested = _suggest(found, evaluator, Path(out or "results")) if warm_start else []
            try:
                evaluate = {each.value: functools.partial(evaluator.evaluate, each) for each in phases}
                with crew(workers - 1, job.name, url, budget, say):
                    search(
                        found,
                        evaluate,
                        budget=budget,
                        rule=rule,
                        watch=watch,
                        waits=lambda who: tell_waiting(who, say),
                        busy=evaluator.busy,
                    )
            finally:  # however it ends; a record that was finished stays whole until another one is
                if not (folder / TUNE).exists():
                    evaluated = [(each.name, *row) for each in found.values() for row in each.evaluations]
                    others_ended = [(each.name, row) for each in found.values() for row in each.unevaluated]
                    with _writable(folder):
                        write_trials(folder, evaluated)
                        write_unevaluated(folder, others_ended)
            trials_of = {each: found[each].evaluations for each in phases}
            unevaluated = {each: found[each].unevaluated for each in phases}
            facts = {
                "studies": {bucket: each.name for bucket, each in found.items()},
                "ancestors": {bucket: [each.to_dict() for each in older] for bucket, older in ancestors.items()},
                "sampler": sampler,
                "warm_start": [each.to_dict() for each in suggested],
                "stopped": {bucket: each.stopped for bucket, each in found.items() if each.stopped},
                "trials": tally(found),
            }
        _require_gated(evaluator, trials_of)
        finalists, finals, contest = _last_rounds(evaluator, trials_of)
        facts = {
            "format": FORMAT,
            "spec": spec.to_dict(),
            "target": where.name,
            "environment": evaluator.environment,
            "workload": selection.to_dict(),
            "workloads": {each.value: batches.to_dict() for each, batches in workloads.items()},
            **facts,
            "seed": seed,
            "shortlist": listed.described(toolchain(where)) if listed else None,
            "finalists": finalists,
            "roofline": roofline.to_dict() if roofline else None,
            "carried": {},
            "rooflines": {},
        }
    with locked(lock_of(folder / "record")):  # who tunes another phase meanwhile reads this record, or this run reads theirs
        before, kept = kept, others()
        _tell(say, [line for line in kept.lines if line not in before.lines])
        record = kept.joined(Record(facts, trials_of, finals, contest, unevaluated))
        decided = decide(record)
        document = {**record.facts, **decided.document}
        with evaluator.busy():  # it compiles what the cache has lost, write_kv and copy_blocks
            package = _write_package(folder / "package", spec, where, evaluator.default, decided, document)
        _tell(say, _redecided(folder, document))
        installed = _install(package, spec, where, decided, document["workload"]["name"], say) if install else None
        places = {"package": str(package), "installed": str(installed) if installed else None, "report": str(folder / "report.md")}
        document = write_record(folder, record, {**decided.document, **places})
        report = write_report(folder, document, decided.rows, decided.conditions)
    return TuneResult(package, installed, report, decided.winners, decided.rows, decided.conditions, document)


def _redecided(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """That a run without a new trial replaces the decision before it, and how its tables changed."""
    if document["trials"]["new"]:
        return []
    try:
        before = {phase: table["rows"] for phase, table in json.loads((folder / TUNE).read_text())["dispatch"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # there is none, or a damaged one
        return []
    now = {phase: table["rows"] for phase, table in document["dispatch"].items()}
    changed = [f"; {phase} {before.get(phase, 0)} rows before, {rows} now" for phase, rows in now.items() if rows != before.get(phase, 0)]
    return [f"no new trial: the finals were timed again, and decide anew{''.join(changed)}"]


def _require_gated(evaluator: Evaluator, trials: Mapping[Phase, Sequence[tuple[int, Evaluation]]]) -> None:
    """Sees to it that the default has passed the gate, as it is packaged whatever wins: it is evaluated now if no trial of it
    began within the budget. Raises GateError if it failed.
    """
    default = evaluator.default
    found = [each for rows in trials.values() for _, each in rows if each.config == default.to_dict()]
    for each in found:
        if each.status is not Status.PASSED:
            raise GateError(
                f"the default config of attend for {evaluator.spec.slug} on {evaluator.target.name} is recorded with {each.status} "
                f"({each.reason}), so nothing is packaged; once that is cured, start afresh under another name: --study again"
            )
    if not found:
        evaluator.evaluate(next(iter(trials)), default)


def _last_rounds(
    evaluator: Evaluator, trials: Mapping[Phase, Sequence[tuple[int, Evaluation]]]
) -> tuple[dict[str, dict[str, dict[str, Value]]], Rounds, Rounds]:
    """(finalists of each phase, their round side by side, the contest of what it proposes): the contest's data are fresh,
    so the gain that they show is not flattered by having been chosen for it.
    """
    default, uniform = evaluator.default, evaluator.spec.deterministic
    finalists: dict[str, dict[str, dict[str, Value]]] = {}
    finals: dict[Phase, dict[Point, Measurement]] = {}
    contest: dict[Phase, dict[Point, Measurement]] = {}
    for phase, evaluated in trials.items():
        points = evaluator.workloads[phase].points
        configs = choose_finalists([found for _, found in evaluated], default, points)
        finalists[phase.value] = {name: config.to_dict() for name, config in configs.items()}
        if len(configs) > 1:
            finals[phase] = _compare(evaluator, configs, phase, FINAL_SECONDS)
        proposed = propose(phase, points, finals.get(phase, {}), uniform=uniform)
        serving = {name: configs[name] for name in configs if name == DEFAULT or name in proposed.assigned.values()}
        contest[phase] = _compare(evaluator, serving, phase, CONTEST_SECONDS, with_sdpa=True)
    return finalists, finals, contest


def _compare(
    evaluator: Evaluator, configs: Mapping[str, Config], phase: Phase, seconds: float, with_sdpa: bool = False
) -> dict[Point, Measurement]:
    measured = evaluator.compare(configs, DEFAULT, phase, seconds, with_sdpa)
    return {point: to_keep(found) for point, found in measured.items()}


def results_folder(out: Path | str | None, target: Target, spec: KernelSpec, selection: Selection) -> Path:
    """Where the results of a tuning run lie; made. Raises ConfigError."""
    folder = Path(out or "results") / target.slug / spec.slug
    if selection.name != "default":
        folder /= selection.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"results folder {folder} cannot be made ({error.strerror}); name another with --out"
        ) from None
    return folder


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turns a disk that is full, or a folder that is gone, into one line. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"results folder {folder} cannot be written ({error.strerror}); cure that, and run the same command again: it goes on "
            "from what is in its storage"
        ) from None


def _suggest(found: Mapping[str, BucketStudy], evaluator: Evaluator, root: Path) -> list[Suggestion]:
    """Queues what won in earlier runs, bucket by bucket, behind the default."""
    spec, target = evaluator.spec, evaluator.target
    chosen = [
        each for bucket, study in found.items() for each in suggestions(root, spec, target, study.space, Phase(bucket))
    ]
    for each in chosen:
        found[each.phase].suggest(each.config, each.source)
    return chosen


def _write_package(
    out: Path,
    spec: KernelSpec,
    target: Target,
    default: Config,
    decided: Decision,
    document: Mapping[str, Any],
) -> Path:
    configs = {"attend_0": default, **decided.configs}
    kernels = {name: _packaged(Op.ATTEND, spec, target, config) for name, config in configs.items()}
    dispatch = {Op.ATTEND: decided.table(uniform=spec.deterministic)}
    for op in (Op.WRITE_KV, Op.COPY_BLOCKS):
        kernels[op.value] = _packaged(op, spec, target, None)
        dispatch[op] = DispatchTable((), fallback=op.value)
    evidence = {key: document[key] for key in ("workload", "studies", "trials", "counts", "dispatch")}
    if document["carried"]:
        evidence["carried"] = document["carried"]
    evidence["winner"] = [{k: v for k, v in winner.items() if k not in ("bounds", "points")} for winner in document["winner"]]
    evidence["contest"] = [
        {
            **{key: row[key] for key in ("phase", "point", "name")},
            "seconds": row["seconds"]["median"],
            "ratio": row["ratio"]["median"],
        }
        for row in document["rows"]
    ]
    return write_package(out, spec=spec, target=target, kernels=kernels, dispatch=dispatch, evidence=evidence)


def _install(
    package: Path, spec: KernelSpec, target: Target, decided: Decision, workload: str, say: Callable[[str], None] | None
) -> Path:
    """Installs the package; says which phases, or which workload, the one that it replaces was tuned for and it is not."""
    phases, before = installed_for(spec, target)
    if before not in ("", workload):
        _tell(say, [f"workload {before}: the package installed for it is replaced by this one, for {workload}; the same `tune` again brings it back"])
    lost = phases - {row.phase for row in decided.table(uniform=spec.deterministic).rows}
    if lost:
        words = " and ".join(phase for phase in Phase if phase in lost)
        _tell(say, [f"{words}: untuned in the package that is installed now, not in the one before, whose results lie elsewhere"])
    return install_package(package)


def _tell(say: Callable[[str], None] | None, lines: Sequence[str]) -> None:
    if say:
        for line in lines:
            say(line)


def _packaged(op: Op, spec: KernelSpec, target: Target, config: Config | None) -> Packaged:
    source = render(variant(op, spec, target, config))
    binary = compile_library(source.text, target) if source.variant.template.language == "cpp" else None
    return Packaged(source, binary)
