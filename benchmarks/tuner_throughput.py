"""Trials per minute of the tuner beside a serial loop, what is idle meanwhile, and what runs beside a timing.

    python benchmarks/tuner_throughput.py [--trials 24] [--out results]

Three runs, one after the other, each with an empty kernel cache: `pagegen tune` with one worker, with two, and a plain loop
in one process that builds, gates and times the configs that the one worker had tried. Every process of a run notes what it
does on the machine's monotonic clock. Counted is the search, with the start of the processes that it needs.

The record has, of each run:
- trials_per_minute;
- idle: share of the search in which no process is at work: starts, chooses, builds, gates, times or tells;
- waiting: share of the processes' time in which they wait until they may build or time;
- beside_timing: share of the timings' time in which another process of the run compiles, or is at work at all;
- half_width: of the interval of a score, the median over the trials;
- others: share of the machine's CPU time that went to other processes during the timing, the mean over the trials.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from pagegen.paths import write_atomic
from pagegen.tuning import crew, machine  # light: what a worker's start takes is to stay as it is

STEM = Path(__file__).stem
SLUG = "decode-bf16-d64-h9x3-b16-NHD"
WORKLOAD = "format: 1\nphase: decode\npoints: {4x1@256: 1, 16x1@128: 1}\n"  # two batches: too few to prune by
START, CHOOSE, TRIAL, TELL = "start", "choose", "trial", "tell"  # what there is to do, one after the other
WAIT, TIMING, COMPILE = "wait", "timing", "compile"  # within a trial
SEARCH = "search"
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Noted:
    """What a process did from `begin` to `end`, in seconds of the monotonic clock."""

    process: int
    what: str
    begin: float
    end: float
    facts: Mapping[str, Any]


# --- what a run was like ---------------------------------------------------------------------------------------------


def union(spans: Sequence[Span]) -> list[Span]:
    """The same time in spans that neither touch nor overlap, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The time of `spans` that is in none of `holes`."""
    left = union(spans)
    for begin, end in union(holes):
        left = [part for a, b in left for part in ((a, min(b, begin)), (max(a, end), b)) if part[0] < part[1]]
    return left


def length(spans: Sequence[Span]) -> float:
    """Seconds that any of them covers."""
    return sum(end - begin for begin, end in union(spans))


def common(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Seconds that both cover."""
    return length(one) - length(without(one, other))


def figures(noted: Sequence[Noted]) -> dict[str, Any]:
    """What the record says of a run."""
    ((begin, end),) = ((each.begin, each.end) for each in noted if each.what == SEARCH)
    seconds, processes = end - begin, sorted({each.process for each in noted})

    def spans(process: int, *kinds: str) -> list[Span]:
        clipped = ((max(each.begin, begin), min(each.end, end)) for each in noted if each.process == process and each.what in kinds)
        return [span for span in clipped if span[0] < span[1]]

    waits = {process: spans(process, WAIT) for process in processes}
    at_work = {process: without(spans(process, START, CHOOSE, TRIAL, TELL), waits[process]) for process in processes}
    timings = {process: spans(process, TIMING) for process in processes}
    timed = sum(map(length, timings.values()))

    def beside(done: Mapping[int, Sequence[Span]]) -> float:
        pairs = ((mine, done[its]) for own, mine in timings.items() for its in processes if its != own)
        return sum(common(mine, its) for mine, its in pairs) / timed

    trials = [each for each in noted if each.what == TRIAL]
    return {
        "processes": len(processes),
        "trials": len(trials),
        "seconds": seconds,
        "trials_per_minute": 60 * len(trials) / seconds,
        "idle": 1 - length([span for done in at_work.values() for span in done]) / seconds,
        "waiting": sum(map(length, waits.values())) / seconds / len(processes),
        "seconds_of": {
            kind: sum(length(spans(process, kind)) for process in processes) for kind in (START, CHOOSE, COMPILE, TIMING, TELL)
        },
        "beside_timing": {"compile": beside({p: spans(p, COMPILE) for p in processes}), "any": beside(at_work)},
        "half_width": statistics.median(each.facts["noise"] for each in trials if each.facts.get("noise")),
        "others": statistics.mean(each.facts["others"] for each in trials if "others" in each.facts),
    }


# --- noting ----------------------------------------------------------------------------------------------------------


class Notes:
    """Appends what this process does to a file that all processes of a run share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str, begin: float, **facts: Any) -> None:
        """What was begun ends now."""
        line = json.dumps([os.getpid(), what, begin, time.monotonic(), facts]) + "\n"
        with self.path.open("a") as file:
            file.write(line)

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Notes the block."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.note(what, begin)

    def noted(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of which is noted, with what an evaluation says of its noise."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            begin, answer = time.monotonic(), None
            try:
                answer = function(*arguments, **options)
                return answer
            finally:
                self.note(what, begin, **(_facts(answer) if what == TRIAL else {}))

        return call

    def read(self) -> list[Noted]:
        """What all processes have noted."""
        return [Noted(*json.loads(line)) for line in self.path.read_text().splitlines()]


def _facts(evaluation: Any) -> dict[str, Any]:
    if evaluation is None:
        return {}
    disturbance = evaluation.conditions.get("disturbance")
    others = {"others": disturbance["others"]} if disturbance else {}
    return {"config": dict(evaluation.config), "status": evaluation.status.value, "noise": evaluation.noise, **others}


def plant(path: str) -> None:
    """Has this process, and the workers that it starts, note what the tuner does in them.

    What takes long to import is not imported here, but changed once the tuner itself has: at the first lock it takes.
    """
    notes, begin, planted = Notes(Path(path)), time.monotonic(), list[bool]()

    def held(lock: Callable[..., contextlib.AbstractContextManager[None]], what: str) -> Callable[..., Any]:
        @contextlib.contextmanager
        def hold(*arguments: Any, **options: Any) -> Iterator[None]:
            asked = time.monotonic()
            if "pagegen.tuning.joining" in sys.modules and not planted:
                notes.note(START, begin)
                _plant_search(notes)
                planted.append(True)
            with lock(*arguments, **options):
                notes.note(WAIT, asked)
                with notes.noting(what):
                    yield

        return hold

    def worker(words: list[str], **options: Any) -> Any:
        here = f"import sys; sys.path.append({str(Path(__file__).parent)!r})"
        return subprocess.Popen([*words[:-1], f"{here}; import {STEM}; {STEM}.plant({path!r}); {words[-1]}"], **options)

    patch: Any = setattr
    patch(machine, "exclusive", held(machine.exclusive, TIMING))
    patch(machine, "working", held(machine.working, "work"))
    patch(crew, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": worker}))


def _plant_search(notes: Notes) -> None:
    from pagegen.build import cpp
    from pagegen.tuning import evaluate, study

    for where, name, what in (
        (cpp, "run_compiler", COMPILE),
        (study.BucketStudy, "claim", CHOOSE),
        (study.BucketStudy, "finish", TELL),
        (evaluate.Evaluator, "evaluate", TRIAL),
    ):
        setattr(where, name, notes.noted(what, getattr(where, name)))


# --- the runs --------------------------------------------------------------------------------------------------------


def tuner(workers: int, trials: int, notes: Notes, folder: Path) -> None:
    """`pagegen tune`, whose search is noted."""
    plant(str(notes.path))
    from pagegen.tuning import job

    search: Any = notes.noted(SEARCH, job.search)
    setattr(job, "search", search)  # noqa: B010 - mypy holds that a module's names stay
    (folder / "workload.yaml").write_text(WORKLOAD)
    job.tune(
        SLUG, workload=folder / "workload.yaml", trials=trials, patience=0, warm_start=False, workers=workers, out=folder, install=False
    )


def serial(configs: Sequence[Mapping[str, Any]], notes: Notes) -> None:
    """Nothing but what must be done: builds, gates and times each config beside the default."""
    from pagegen.build import build
    from pagegen.catalog import template_for, variant
    from pagegen.check import check_variant
    from pagegen.render import render
    from pagegen.spec import Op, parse_slug
    from pagegen.target import parse_target
    from pagegen.tuning.evaluate import POINT_SECONDS
    from pagegen.tuning.measure import geomean_of_medians, measure
    from pagegen.tuning.workload import Inputs, Pool, Workload, cold_bytes_on

    _plant_search(notes)
    spec, target = parse_slug(SLUG)[0], parse_target("auto")
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    workload = Workload.from_dict(yaml.safe_load(WORKLOAD))
    with notes.noting(SEARCH):
        with notes.noting(START):
            pool, kernels = Pool.for_points(spec, workload.points, cold_bytes_on("cpu")), {}
        for values in configs:
            begin, config = time.monotonic(), space.config(values)
            source = render(variant(Op.ATTEND, spec, target, config))
            if check_variant(source).passed:
                kernels[config] = build(source)
            found = {}
            for point in workload.points:
                inputs = Inputs(pool, point)
                calls = {name: inputs.bind(kernels[each]) for name, each in (("default", space.default), ("candidate", config))}
                with notes.noting(TIMING):
                    found[point] = measure(calls, "default", seconds=POINT_SECONDS)
            score = geomean_of_medians([each.ratios("candidate") for each in found.values()], [point.weight for point in found])
            others = statistics.mean(each.disturbance.others for each in found.values())
            notes.note(TRIAL, begin, noise=(score.high - score.low) / 2 / score.median, others=others)


def run(mode: str, trials: int, folder: Path, configs: Sequence[Mapping[str, Any]] = ()) -> list[Noted]:
    """One run in a process of its own, with a kernel cache of its own."""
    folder.mkdir()
    log = folder / "log"
    (folder / "configs.json").write_text(json.dumps(list(configs)))
    words = [sys.executable, __file__, "--run", mode, "--trials", str(trials), "--folder", str(folder)]
    subprocess.run(words, env={**os.environ, "PAGEGEN_CACHE": str(folder / "cache")}, stdout=sys.stderr, check=True)
    return Notes(log).read()


def main() -> None:
    """Makes the three runs, prints a row each, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--out", type=Path, help="write DIR/<target>/tuner_throughput.json", metavar="DIR")
    parser.add_argument("--run", choices=["serial", "1", "2"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        notes = Notes(options.folder / "log")
        if options.run == "serial":
            serial(json.loads((options.folder / "configs.json").read_text()), notes)
        else:
            tuner(int(options.run), options.trials, notes, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = run("1", options.trials, folder / "one")
        tried = [each.facts["config"] for each in one if each.what == TRIAL]
        loop = run("serial", options.trials, folder / "serial", tried)
        two = run("2", options.trials, folder / "two")
    rows = {"serial loop": figures(loop), "tune --workers 1": figures(one), "tune --workers 2": figures(two)}
    for label, row in rows.items():
        print(
            f"{label}: {row['trials_per_minute']:.1f} trials a minute; idle {row['idle']:.1%}, waiting {row['waiting']:.1%}; beside a timing: "
            f"compiling {row['beside_timing']['compile']:.1%}, anything {row['beside_timing']['any']:.1%}; half-width {row['half_width']:.2%}, "
            f"others {row['others']:.1%}"
        )
    if options.out:
        from pagegen.loader import fingerprint
        from pagegen.target import parse_target

        target = parse_target("auto")
        made_on = fingerprint(target)
        environment = {"hardware": dict(made_on.hardware), "toolchain": dict(made_on.toolchain)}
        record = {"format": 1, "spec": SLUG, "workload": yaml.safe_load(WORKLOAD), "environment": environment, "runs": rows}
        path = options.out / target.slug / f"{STEM}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
