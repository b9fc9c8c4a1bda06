"""The whole job: search a config for every bucket, prove the winners on fresh data, package them, write it down."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagegen import __version__
from pagegen.build.cpp import compile_library
from pagegen.catalog import template_for, variant
from pagegen.errors import ConfigError, SpecError
from pagegen.package import Packaged, install_package, write_package
from pagegen.paths import TEMPLATES
from pagegen.records import DispatchRow, DispatchTable, Status
from pagegen.render import render
from pagegen.space import Config
from pagegen.spec import KernelSpec, Op, Phase, parse_slug
from pagegen.target import Target, parse_target, require_present
from pagegen.tuning.contest import Conditions, Row, noise, overall, rows_of, typical
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Interval, Measurement
from pagegen.tuning.report import write_report
from pagegen.tuning.roofline import Roofline, measure_roofline
from pagegen.tuning.search import Progress, search, share_trials
from pagegen.tuning.storage import export_jsonl, open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workloads import Selection, select

FINALISTS = 3
FINAL_SECONDS = 0.3  # a batch, all finalists together
CONTEST_SECONDS = 0.5  # a batch, winner, default and baselines together
ROOFLINE_SECONDS = 1.0
TUNED, DEFAULT = "tuned", "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Winner:
    """What serves a bucket: the best config found, or the default if fresh data does not confirm a gain."""

    phase: Phase
    config: Config
    kernel: str  # its name in the package
    seconds: Interval  # of one call, weighted geometric mean over the bucket's batches
    speedup: Interval  # the default's time over the winner's, on data that did not choose the winner
    confirmed: bool  # whether the interval of the speed-up excludes no gain
    roofline: float | None = None  # share of what the machine allows, geometric mean over the batches; None: not known

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "phase": self.phase.value,
            "kernel": self.kernel,
            "config": self.config.to_dict(),
            "median": self.seconds.median,
            "interval": [self.seconds.low, self.seconds.high],
            "speedup": self.speedup.median,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "confirmed": self.confirmed,
            "roofline": self.roofline,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class TuneResult:
    """The outcome, and where it lies. `document` is the JSON record."""

    package: Path
    installed: Path
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
    trials: int = 40,
    budget: float | None = None,
    storage: str | None = None,
    study: str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    watch: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Tunes `attend` for a spec (or slug) on this machine and installs the package for `generate`, `chat` and `serve`.

    `workload` names a preset, or a file of batches; the phases that it has are tuned, or `phase` alone. A deterministic
    spec has one config for all batches: that of `phase`, or of mixed ones where the workload has any. `trials` counts
    configs evaluated over all of them and over all runs of the study: an interrupted run is continued. No trial begins
    after `budget` seconds. Results go to `out`/<target>/<spec>, `out` being `results` by default, and of a workload to a
    folder of its name in there. Raises ConfigError, SpecError, BuildError or CheckError for what stands in the way.
    """
    if isinstance(spec, str):
        spec, named = parse_slug(spec)
        phase = phase or named
    if spec.layout is None:
        raise SpecError("layout is `auto`, and one layout is tuned at a time; set --layout NHD, or another by its name")
    if budget is not None and not budget > 0:
        raise ConfigError(f"--budget {budget} is not a positive number of seconds")
    where = parse_target(target)
    require_present(where)
    selection = select(None if workload is None else str(workload), spec)
    if spec.deterministic:
        phase = phase or max(selection.workloads, key=list(Phase).index)
    if phase:
        selection = selection.only(phase)
    workloads, phases = selection.workloads, list(selection.workloads)
    shares = share_trials(trials, [each.value for each in phases])
    folder = _results_folder(out, where, spec, selection)
    with Evaluator(spec, where, workloads) as evaluator:
        with _studies(evaluator, folder, storage, study or spec.slug, shares, seed) as studies:
            evaluate = {each.value: functools.partial(evaluator.evaluate, each) for each in phases}
            new = search(studies, evaluate, budget=budget, watch=watch)
            records = {name: found.evaluations for name, found in studies.items()}
            finalists = {each: _finalists(studies[each.value], evaluator.default) for each in phases}
            tried = {
                "resumed": sum(found.resumed for found in studies.values()),
                "new": new,
                "lost": sum(found.lost for found in studies.values()),
            }
            names = {name: found.name for name, found in studies.items()}
        roofline = measure_roofline(where, seconds=ROOFLINE_SECONDS) if where.kind == "cpu" else None
        winners, rows, conditions = _decide(evaluator, finalists, roofline)
    counts = Counter(found.status for evaluations in records.values() for _, found in evaluations)
    gated = [found.gate_seconds for evaluations in records.values() for _, found in evaluations if found.gate_seconds]
    document: dict[str, Any] = {
        "format": 1,
        "spec": spec.to_dict(),
        "target": where.name,
        "environment": evaluator.environment,
        "workload": selection.to_dict(),
        "workloads": {each.value: batches.to_dict() for each, batches in workloads.items()},
        "studies": names,
        "seed": seed,
        "trials": tried,
        "counts": {status.value: counts[status] for status in Status},
        "gate": {"median": statistics.median(gated), "longest": max(gated)} if gated else None,  # seconds, after compilation
        "winner": [winner.to_dict() for winner in winners],
        "noise": noise(rows),
        "conditions": conditions.to_dict() if conditions else None,
        "roofline": roofline.to_dict() if roofline else None,
        "rows": [row.to_dict() for row in rows],
    }
    package = _write_package(folder / "package", spec, where, evaluator.default, winners, document)
    installed = install_package(package)
    document |= {"package": str(package), "installed": str(installed), "report": str(folder / "report.md")}
    report = write_report(folder, document, rows, conditions)
    return TuneResult(package, installed, report, winners, rows, conditions, document)


def _results_folder(out: Path | str | None, target: Target, spec: KernelSpec, selection: Selection) -> Path:
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


@contextmanager
def _studies(
    evaluator: Evaluator, folder: Path, url: str | None, name: str, shares: Mapping[str, int], seed: int
) -> Iterator[dict[str, BucketStudy]]:
    """Opens a study a bucket; on the way out, however that is, the trials are exported and claims given up."""
    spec, target = evaluator.spec, evaluator.target
    storage = open_storage(url, folder)
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    studies: dict[str, BucketStudy] = {}
    try:
        for bucket, total in shares.items():
            identity = {
                **evaluator.environment,
                "pagegen": __version__,
                "spec": spec.to_dict(),
                "target": target.name,
                "templates": _template_digest(template_for(Op.ATTEND, spec, target).language),
                "workload": evaluator.workloads[Phase(bucket)].digest,
            }
            studies[bucket] = BucketStudy(storage, f"{name}/{bucket}", space, identity, seed=seed, total=total)
        yield studies
    finally:
        rows = [(s.name, number, found) for s in studies.values() for number, found in s.evaluations]
        export_jsonl(folder / "trials.jsonl", rows)
        for found in studies.values():
            found.close()


def _template_digest(language: str) -> str:
    """Hash of every template file of a language: an included file changes a kernel as much as its own."""
    digest = hashlib.sha256()
    for path in sorted((TEMPLATES / language).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(TEMPLATES)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _finalists(study: BucketStudy, default: Config) -> dict[str, Config]:
    """The default and the best few others, by a name that says their place."""
    others = [config for config in (study.space.config(found.config) for found in study.ranked()) if config != default]
    return {DEFAULT: default} | {f"finalist {place}": config for place, config in enumerate(others[:FINALISTS], 1)}


def _decide(
    evaluator: Evaluator, finalists: Mapping[Phase, Mapping[str, Config]], roofline: Roofline | None
) -> tuple[tuple[Winner, ...], tuple[Row, ...], Conditions | None]:
    """The finalists' round chooses, the contest decides: its data did not choose, so its gain is not flattered."""
    winners: list[Winner] = []
    rows: list[Row] = []
    taken: list[Measurement] = []
    kernels: dict[Config, str] = {evaluator.default: "attend_0"}
    for phase, configs in finalists.items():
        best = DEFAULT
        if len(configs) > 1:
            measured = evaluator.compare(configs, DEFAULT, phase, FINAL_SECONDS)
            best = min(configs, key=lambda name: overall(measured, name).median)
        contest = evaluator.compare(
            {TUNED: configs[best], DEFAULT: evaluator.default}, TUNED, phase, CONTEST_SECONDS, with_sdpa=True
        )
        gain = overall(contest, DEFAULT)
        confirmed = best != DEFAULT and gain.low > 1
        if not confirmed:  # the default wins, and what the report calls tuned is the default's own time
            contest = {
                point: dataclasses.replace(m, seconds={**m.seconds, TUNED: m.seconds[DEFAULT]})
                for point, m in contest.items()
            }
        config = configs[best] if confirmed else evaluator.default
        kernel = kernels.setdefault(config, f"attend_{len(kernels)}")
        speedup = gain if confirmed else Interval(1.0, 1.0, 1.0)
        new = rows_of(evaluator.spec, phase, contest, roofline)
        shares = [row.roofline for row in new if row.name == TUNED and row.roofline is not None]
        reached = statistics.geometric_mean(shares) if shares else None
        winners.append(Winner(phase, config, kernel, typical(contest, TUNED), speedup, confirmed, reached))
        rows += new
        taken += contest.values()
    return tuple(winners), tuple(rows), Conditions.of(taken)


def _write_package(
    out: Path,
    spec: KernelSpec,
    target: Target,
    default: Config,
    winners: tuple[Winner, ...],
    document: Mapping[str, Any],
) -> Path:
    configs = {"attend_0": default} | {winner.kernel: winner.config for winner in winners}
    served = {each: winners[0].kernel for each in Phase} if spec.deterministic else {w.phase: w.kernel for w in winners}
    table = DispatchTable(tuple(DispatchRow(*each) for each in served.items()), fallback="attend_0")
    kernels = {name: _packaged(Op.ATTEND, spec, target, config) for name, config in configs.items()}
    dispatch = {Op.ATTEND: table}
    for op in (Op.WRITE_KV, Op.COPY_BLOCKS):
        kernels[op.value] = _packaged(op, spec, target, None)
        dispatch[op] = DispatchTable((), fallback=op.value)
    evidence = {key: document[key] for key in ("workload", "studies", "trials", "counts", "winner")}
    evidence["contest"] = [
        {
            **{key: row[key] for key in ("phase", "point", "name")},
            "seconds": row["seconds"]["median"],
            "ratio": row["ratio"]["median"],
        }
        for row in document["rows"]
    ]
    return write_package(out, spec=spec, target=target, kernels=kernels, dispatch=dispatch, evidence=evidence)


def _packaged(op: Op, spec: KernelSpec, target: Target, config: Config | None) -> Packaged:
    source = render(variant(op, spec, target, config))
    binary = compile_library(source.text, target) if source.variant.template.language == "cpp" else None
    return Packaged(source, binary)
