"""Tuning without the device: every candidate compiled and judged, the best written as a shortlist to be measured."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.catalog import template_for
from pagegen.errors import BuildError
from pagegen.loader import toolchain
from pagegen.paths import write_atomic
from pagegen.records import Evaluation, Status
from pagegen.render import environment
from pagegen.space import Config, ConfigSpace
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import Target, detect
from pagegen.tuning.asked import require_budget, require_counts
from pagegen.tuning.record import write_trials
from pagegen.tuning.shortlist import LABEL, Shortlist
from pagegen.tuning.static_compile import Job, compile_candidate
from pagegen.tuning.static_gpu import DEVICES
from pagegen.tuning.static_model import DUPLICATE, Judgement, Launches, kind_of, rank
from pagegen.tuning.workers import Died, run_jobs
from pagegen.tuning.workload import Workload
from pagegen.tuning.workloads import Selection

TOP = 20  # configs of a phase in the shortlist
MOST = 10_000  # configs that are judged unless more are asked for
COMPILE_TIMEOUT = 1800.0  # seconds of one candidate, all its kernels, on a machine that may be busy


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """What was tried: the configs in order, what each launches by batch (GPU), and why some do not compile."""

    configs: tuple[Config, ...]
    launches: Mapping[Config, Launches]
    failures: Mapping[Config, str]


def tune_static(
    spec: KernelSpec,
    target: Target,
    selection: Selection,
    folder: Path,
    *,
    trials: int | None = None,
    budget: float | None = None,
    workers: int = 1,
    top: int = TOP,
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Judges configs of `attend` for a target that need not be here, and writes `folder`/shortlist.json, trials.jsonl and
    report.md; answers the JSON record.

    `trials` configs are drawn, the default among them; by default all, or MOST. For a GPU each is compiled, in `workers` processes;
    none begins after `budget` seconds, and what is not compiled is not judged. `watch` is told how many are done, of how
    many. Raises ConfigError for numbers out of range, BuildError if the default does not compile.
    """
    require_budget(budget)
    require_counts({"--trials": trials, "--workers": workers, "--top": top})
    begin = time.monotonic()
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    configs = _drawn(space, trials or MOST, seed)
    if target.kind == "cpu":
        made_with: Mapping[str, Any] = {}  # nothing is compiled: a CPU's binary tells nothing that its config does not
        candidates = Candidates(tuple(configs), {}, {})
    else:
        made_with = toolchain(target)
        candidates = _compile(spec, target, selection, configs, workers, budget, watch)
    judged = {phase: _judge(spec, target, each, candidates) for phase, each in selection.workloads.items()}
    records = {
        phase: [*(_evaluation(found, candidates, made_with) for found in each), *_failed(candidates, made_with)]
        for phase, each in judged.items()
    }
    rows = {
        phase.value: [
            {"config": found.config.to_dict(), "score": found.score, "seconds": dict(found.seconds), "kernels": record.kernels}
            for found, record in zip(each[:top], records[phase], strict=False)
            if not found.reason
        ]
        for phase, each in judged.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    shortlist = Shortlist.of(folder / "shortlist.json", spec, target, made_with, rows)
    shortlist.write()
    write_trials(folder, list(_listed(target, records)))
    every = [found for each in records.values() for found in each]
    document = {
        "format": 1,
        "label": LABEL,
        "spec": spec.to_dict(),
        "target": target.name,
        "device": dataclasses.asdict(DEVICES[target.arch]) if target.arch in DEVICES else None,
        "toolchain": dict(made_with),
        "workload": selection.to_dict(),
        "combinations": math.prod(len(knob.values) for knob in space.knobs),  # of knobs, constraints aside
        "candidates": len(candidates.configs),
        "seed": seed,
        "seconds": round(time.monotonic() - begin, 1),
        "trials": {"resumed": 0, "new": len(candidates.configs), "lost": 0},
        "counts": _counts(every),
        "phases": {
            phase.value: {"counts": _counts(each), "pruned": _kinds(each), "rows": rows[phase.value]}
            for phase, each in records.items()
        },
        "winner": [],
        "package": None,
        "shortlist": str(shortlist.path),
        "report": str(folder / "report.md"),
    }
    write_atomic(folder / "report.md", environment().get_template("report/static.md.jinja").render(document=document))
    return document


def _drawn(space: ConfigSpace, count: int, seed: int) -> list[Config]:
    """The default, then others: all there are, or so many in all drawn at random without listing a large space."""
    combinations = math.prod(len(knob.values) for knob in space.knobs)
    if 2 * count >= combinations:
        others = [config for config in space if config != space.default]
        chosen = random.Random(seed).sample(others, min(len(others), count - 1))
        return [space.default, *chosen]
    generator, drawn = random.Random(seed), {space.default: None}
    while len(drawn) < count:
        values = {knob.name: generator.choice(knob.values) for knob in space.knobs}
        if not space.broken(values):
            drawn[Config(tuple(values.items()))] = None
    return list(drawn)


def _compile(
    spec: KernelSpec,
    target: Target,
    selection: Selection,
    configs: Sequence[Config],
    workers: int,
    budget: float | None,
    watch: Callable[[int, int], None] | None,
) -> Candidates:
    points = tuple({point.name: point for each in selection.workloads.values() for point in each.points}.values())
    jobs = [Job(spec, target.name, config, points) for config in configs]
    launches: dict[Config, Launches] = {}
    failures: dict[Config, str] = {}
    begin = time.monotonic()
    for done, (place, found) in enumerate(run_jobs(compile_candidate, jobs, workers, COMPILE_TIMEOUT), 1):
        if isinstance(found, Died):
            failures[configs[place]] = f"the compiler failed: {found.how}"
        elif isinstance(found, str):
            failures[configs[place]] = found
        else:
            launches[configs[place]] = found
        if watch:
            watch(done, len(jobs))
        if budget is not None and time.monotonic() - begin > budget:
            break
    if configs[0] in failures:
        raise BuildError(f"the default config does not compile for {target.name}: {failures[configs[0]]}")
    tried = tuple(config for config in configs if config in launches or config in failures)
    return Candidates(tried, launches, failures)


def _judge(spec: KernelSpec, target: Target, workload: Workload, candidates: Candidates) -> list[Judgement]:
    configs = [config for config in candidates.configs if config not in candidates.failures]
    launches = None if target.kind == "cpu" else candidates.launches
    return rank(spec, target, workload, configs, threads=detect().threads, launches=launches)


def _evaluation(found: Judgement, candidates: Candidates, made_with: Mapping[str, Any]) -> Evaluation:
    launched = candidates.launches.get(found.config, {})
    kernels = {launch.kernel: launch.resources.to_dict() for name in found.seconds for launch in launched.get(name, ())}
    return Evaluation(
        Status.PRUNED if found.reason else Status.NOT_MEASURED,
        found.config.to_dict(),
        found.reason or LABEL,
        environment={"toolchain": dict(made_with)},
        kernels=kernels,
        estimate=found.seconds,
    )


def _failed(candidates: Candidates, made_with: Mapping[str, Any]) -> Iterator[Evaluation]:
    for config, why in candidates.failures.items():
        yield Evaluation(Status.BUILD_ERROR, config.to_dict(), why, environment={"toolchain": dict(made_with)})


def _listed(target: Target, records: Mapping[Phase, Sequence[Evaluation]]) -> Iterator[tuple[str, int, Evaluation]]:
    """(phase, place, record) of every candidate; on a CPU, which has tens of thousands, of those that are no duplicates."""
    for phase, each in records.items():
        for place, found in enumerate(each):
            if target.kind != "cpu" or kind_of(found.reason) != DUPLICATE:
                yield phase.value, place, found


def _counts(records: Sequence[Evaluation]) -> dict[str, int]:
    counts = Counter(found.status for found in records)
    return {status.value: counts[status] for status in Status}


def _kinds(records: Sequence[Evaluation]) -> dict[str, int]:
    """Why so many were pruned, the most frequent reason first."""
    return dict(Counter(kind_of(found.reason) for found in records if found.status is Status.PRUNED).most_common())
