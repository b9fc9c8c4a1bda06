"""How many trials the tuner needs to find a config within 2 % of the best, where the best is known by brute force.

    python benchmarks/regret.py [--seeds 20]              replays searches on the truth files of results/, timing nothing
    taskset -c 1 python benchmarks/regret.py --measure [SPEC ...]      makes truth files: a quarter of an hour a spec

A truth file has every config of one space on one bucket of weighted batches: the space that the template has for the spec
without some knobs and values (CASES), and without configs that do what another does (static model). It is measured the tuner's
own way: its study with `--sampler brute`, its evaluator, each config beside the default. All are built, then all are timed,
in kernels that share compiles (shared_compile.py). Then the best 30 are compiled as they are shipped, gated, and timed again
side by side. Of the others a sample is gated: that all are correct is shown elsewhere (docs/coverage.md). An interrupted
run is continued by the same command.

The replay runs the tuner's own search (study, sampler, pruning, static ranking, configs that do the same being one), the
default first, and looks up what each config, or its measured like, took. A search has found a good config once one whose
time, as measured again, is within 2 % of the best is among the finalists that `pagegen tune` would choose then. What counts
is how many configs were evaluated up to that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from pagegen.build.cpp import compile_library
from pagegen.catalog import template_for, variant
from pagegen.check import check_variant
from pagegen.errors import BuildError
from pagegen.paths import cache_dir, write_atomic
from pagegen.records import Evaluation, Status, Timing, ranked
from pagegen.render import render
from pagegen.space import Config, ConfigSpace, Constraint, Knob
from pagegen.spec import KernelSpec, Op, parse_slug
from pagegen.target import Target, best_cpu, parse_target
from pagegen.tuning import static_model
from pagegen.tuning.asked import BRUTE
from pagegen.tuning.contest import overall
from pagegen.tuning.decide import DEFAULT, choose_finalists
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.joining import identity
from pagegen.tuning.machine import working
from pagegen.tuning.measure import Measurement
from pagegen.tuning.pruning import Judge
from pagegen.tuning.search import Progress, search
from pagegen.tuning.static_same import signature_of
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workload import Point, Workload

RESULTS = Path(__file__).parents[1] / "results"
FORMAT = 1
GOOD = 0.02  # of the best config's time
AGAIN, AGAIN_SECONDS = 30, 8.0  # configs measured again, seconds a batch for all of them
FIRST = 5  # of the static model's order, tried after the default
GATED = 6  # configs gated beside those
TRIALS_SHARE, OF_RANDOM = 0.08, 0.5  # what is asked: at most so many of the configs, and of random search's trials

TUNER, RANDOM = "tpe + static model", "random"
WAYS = (TUNER, "tpe", RANDOM)

Knobs = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is measured of a spec: weighted batches, and the values of the knobs that they feel; others stay as they are."""

    points: Mapping[str, float]
    knobs: Knobs


MIXED = {
    "4x1@512+1x64@64": 1,
    "8x1@256+1x32@128": 1,
    "1x1@2048+1x96@96": 1,
    "2x1@1024+1x64@256": 1,
    "16x1@128+1x48@48": 1,
}
CASES: Mapping[str, Case] = {
    "mixed-fp32-d64-h9x3-b16-NHD": Case(  # SmolLM2-135M
        MIXED,
        {
            "tile_kv": (16, 64, 256),
            "tile_q": (4, 8, 16, 32, 64),
            "tile_few": (16, 32, 64, 128),
            "row_block": (1, 2, 3),
            "row_block_packed": (2, 4, 6, 12),
            "pack_rows": (16, 64),
            "prefetch": (0, 1),
        },
    ),
    "mixed-bf16-d64-h14x2-b16-NHD-kvint8": Case(  # Qwen2.5-0.5B, its cache quantised
        MIXED,
        {
            "tile_kv": (16, 64, 256),
            "tile_q": (4, 8, 16, 32, 64),
            "tile_few": (16, 32, 64, 128),
            "row_block": (1, 2, 3, 4, 6, 8),
            "row_block_packed": (2, 4, 6, 12),
            "pack_rows": (16, 64),
        },
    ),
    "mixed-bf16-d64-h32x8-b16-NHD": Case(  # Llama 3.2 1B
        MIXED,
        {
            "tile_kv": (16, 64, 256),
            "tile_q": (4, 8, 16, 64),
            "tile_few": (16, 32, 64, 128),
            "row_block": (1, 2, 4),
            "row_block_packed": (2, 6, 12),
            "prefetch": (0, 1),
        },
    ),
}


def space_of(case: Case, spec: KernelSpec, target: Target, workload: Workload) -> ConfigSpace:
    """The configs of a case: of those that do the same on its batches one, which is the default if it is among them."""
    whole = template_for(Op.ATTEND, spec, target).space(spec, target)
    knobs = tuple(dataclasses.replace(knob, values=case.knobs.get(knob.name, (knob.default,))) for knob in whole.knobs)
    space = ConfigSpace(knobs, whole.constraints)
    others = [config for config in space if config != space.default]
    judged = static_model.rank(spec, target, workload, [space.default, *others])
    return only({found.config for found in judged if not found.reason}, knobs)


def only(configs: set[Config], knobs: Sequence[Knob]) -> ConfigSpace:
    """The space of these configs."""
    rule = Constraint(lambda values: Config(tuple(values.items())) in configs, "does what another config does")
    return ConfigSpace(tuple(knobs), (rule,))


# --- measuring -------------------------------------------------------------------------------------------------------


class Ungated(Evaluator):
    """The tuner's evaluator without its gate."""

    def _gated(self, config: Config) -> tuple[Evaluation | None, float]:
        try:
            self.build(config)
        except BuildError as error:
            return Evaluation(Status.BUILD_ERROR, config.to_dict(), str(error)), 0.0
        return None, 0.0

    def build(self, config: Config) -> None:
        """Compiles a config, unless it is in the cache. Raises BuildError."""
        with working(say=self._say_once):
            compile_library(render(variant(Op.ATTEND, self.spec, self.target, config)).text, self.target)


class Heard(Judge):
    """Hears a config's batches to the end, and keeps their ratios to the default."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[float] = []

    def hear(self, step: int, ratio: float, weight: float) -> str:
        self.ratios.append(ratio)
        return ""


def in_order(workload: Workload) -> list[Point]:
    """The batches in the order in which the tuner times them."""
    return sorted(workload.points, key=lambda point: (-point.weight, point.name))


def measure(slug: str, out: Path) -> Path:
    """Measures a case by brute force, and writes its truth file."""
    case, (spec, phase), target = CASES[slug], parse_slug(slug), best_cpu()
    assert phase
    workload = Workload(phase, tuple(Point.parse(name, weight) for name, weight in case.points.items()))
    space = space_of(case, spec, target, workload)
    evaluated = _all_once(slug, spec, target, workload, space)
    best = [config_of(found) for found in ranked(evaluated)[:AGAIN]]
    contenders = {DEFAULT: space.default} | {str(place): config for place, config in enumerate(best)}
    sample = random.Random(0).sample([config_of(found) for found in evaluated], GATED)
    with Evaluator(spec, target, {phase: workload}) as evaluator:
        gated = list(dict.fromkeys([*contenders.values(), *sample]))
        for done, config in enumerate(gated):
            show(f"{slug}: {done} of {len(gated)} gated")
            with working(say=lambda _: None):
                report = check_variant(render(variant(Op.ATTEND, spec, target, config)))
            if not report.passed:
                sys.exit(f"{slug}: {report.status} at {config.slug}: {report.reason}")
        show(f"{slug}: the best {len(best)} again")
        again = evaluator.compare(contenders, DEFAULT, phase, AGAIN_SECONDS)
        document = {
            "format": FORMAT,
            "spec": spec.to_dict(),
            "target": target.name,
            "environment": evaluator.environment,
            "templates": identity(evaluator, phase)["templates"],
            "workload": workload.to_dict(),
            "knobs": {knob.name: list(knob.values) for knob in space.knobs},
            "default": space.default.to_dict(),
            "gated": len(gated),
            "noise": _noise(evaluated, again),
            "seconds": {point.name: again[point].timing(DEFAULT).median for point in workload.points},
            "columns": [*space.default.to_dict(), "status", "time over the default's, a batch", "the same again"],
        }
    found_again = {
        config: [again[point].ratio(name).median for point in in_order(workload)] for name, config in contenders.items()
    }
    rows = [_row(found, found_again.get(config_of(found))) for found in evaluated]
    path = out / target.slug / "regret" / f"{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(document, indent=1).rstrip("}\n")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    write_atomic(path, f'{head},\n "configs": [\n  {lines}\n ]\n}}\n')
    show(f"{path} written\n")
    return path


def _all_once(slug: str, spec: KernelSpec, target: Target, workload: Workload, space: ConfigSpace) -> list[Evaluation]:
    """Every config timed once, in kernels that share compiles (shared_compile.py); `conditions` hold the ratios."""
    work, phase = cache_dir() / "regret" / slug, workload.phase
    mine = {
        "PAGEGEN_CACHE": work,
        "PAGEGEN_CXX": Path(__file__).with_name("shared_compile.py"),
        "REGRET_SHARED": work / "shared",
    }
    with environment(mine), Ungated(spec, target, {phase: workload}) as evaluator:
        configs = list(space)
        for done, config in enumerate(configs):
            show(f"{slug}: {done} of {len(configs)} built")
            evaluator.build(config)

        def evaluate(config: Config, _: Judge) -> Evaluation:
            heard = Heard()
            found = evaluator.evaluate(phase, config, heard)
            return dataclasses.replace(found, conditions={**found.conditions, "ratios": heard.ratios})

        key, total = identity(evaluator, phase), len(configs)
        study = BucketStudy(open_storage(None, work), slug, space, key, total=total, sampler=BRUTE)
        try:
            watch = functools.partial(_show_timed, slug)
            search({slug: study}, {slug: evaluate}, rule=StopRule(patience=0), watch=watch)
            return study.by_trial()
        finally:
            study.close()


def _show_timed(slug: str, at: Progress) -> None:
    show(f"{slug}: {at.done} of {at.total} timed")


@contextlib.contextmanager
def environment(values: Mapping[str, Path]) -> Iterator[None]:
    """Environment variables that are set for a while, for this process and those that it starts."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def show(words: str) -> None:
    """Progress, on one line."""
    print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def config_of(found: Evaluation) -> Config:
    """The config that was evaluated."""
    return Config(tuple(found.config.items()))


def by_config(evaluated: Sequence[Evaluation]) -> dict[Config, Evaluation]:
    """Evaluations by their config."""
    return {config_of(found): found for found in evaluated}


def _noise(evaluated: Sequence[Evaluation], again: Mapping[Point, Measurement]) -> dict[str, float]:
    """Half-widths of the intervals of a score, over it, in both rounds: the median config's."""
    names = [name for name in next(iter(again.values())).seconds if name != DEFAULT]
    intervals = [overall(again, name) for name in names]
    return {
        "once": statistics.median(found.noise for found in evaluated if found.noise),
        "again": statistics.median((each.high - each.low) / 2 / each.median for each in intervals),
    }


def _row(found: Evaluation, again: Sequence[float] | None) -> list[Any]:
    ratios = [[round(ratio, 4) for ratio in each] for each in (found.conditions.get("ratios", ()), again or ())]
    return [*found.config.values(), found.status.value, *ratios]


# --- the truth -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Truth:
    """What a truth file says. Ratios are times over the default's, a batch, in the order in which the tuner times them."""

    name: str
    spec: KernelSpec
    target: Target
    workload: Workload
    threads: int
    space: ConfigSpace  # of each config of it one that does the same was measured
    seconds: Mapping[str, float]  # of the default, by batch
    once: Mapping[Config, Sequence[float]]  # what the search is told; nothing for a config that failed
    again: Mapping[Config, Sequence[float]]

    @classmethod
    def read(cls, path: Path) -> Truth:
        """Reads what `measure` wrote."""
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            sys.exit(f"{path} has format {values['format']}, this script reads {FORMAT}: measure it again")
        names = list(values["knobs"])
        knobs = [Knob(name, tuple(values["knobs"][name]), values["default"][name]) for name in names]
        rows = {Config(tuple(zip(names, row, strict=False))): row[len(names) :] for row in values["configs"]}
        spec, target = KernelSpec.from_dict(values["spec"]), parse_target(values["target"])
        return cls(
            path.stem,
            spec,
            target,
            Workload.from_dict(values["workload"]),
            values["environment"]["threads"],
            ConfigSpace(tuple(knobs), template_for(Op.ATTEND, spec, target).space(spec, target).constraints),
            values["seconds"],
            {config: once for config, (_, once, _) in rows.items()},
            {config: again for config, (*_, again) in rows.items() if again},
        )

    @functools.cached_property
    def signature(self) -> Callable[[Config], Hashable]:
        """What `pagegen tune` tells by which configs do the same."""
        return functools.cache(signature_of(self.spec, self.target, self.workload, self.threads))

    @functools.cached_property
    def _measured(self) -> dict[Hashable, Config]:
        return {self.signature(config): config for config in self.once}

    def like(self, config: Config) -> Config:
        """The measured config that does the same."""
        return self._measured[self.signature(config)]

    @functools.cached_property
    def scores(self) -> dict[Config, float]:
        """Weighted geometric mean over the batches of a config's time over the default's, as measured last."""
        return {config: self.score(self.again.get(config, once)) for config, once in self.once.items() if once}

    @functools.cached_property
    def good(self) -> set[Config]:
        """The configs within GOOD of the best of those that were measured again."""
        best = min(self.scores[config] for config in self.again)
        return {config for config, score in self.scores.items() if score <= (1 + GOOD) * best}

    def score(self, ratios: Sequence[float]) -> float:
        """Of one config's ratios."""
        weights = [point.weight for point in in_order(self.workload)]
        return math.exp(sum(w * math.log(ratio) for w, ratio in zip(weights, ratios, strict=True)) / sum(weights))

    def evaluate(self, config: Config, judge: Judge) -> Evaluation:
        """What the evaluator would say, from the file: pruned where the judge wants it so."""
        values, ratios, points = config.to_dict(), self.once[self.like(config)], in_order(self.workload)
        if not ratios:
            return Evaluation(Status.BUILD_ERROR, values, "it failed when it was measured")
        for step, (point, ratio) in enumerate(zip(points, ratios, strict=True)):
            why = judge.hear(step, ratio, point.weight)
            if why and step + 1 < len(points) and config != self.space.default:
                return Evaluation(Status.PRUNED, values, why)
        taken = {point.name: self.seconds[point.name] * ratio for point, ratio in zip(points, ratios, strict=True)}
        timings = {name: Timing(seconds, seconds, seconds, 1) for name, seconds in taken.items()}
        return Evaluation(Status.PASSED, values, score=self.score(ratios), timings=timings)


# --- the replay ------------------------------------------------------------------------------------------------------


class Found(Exception):
    """Ends a search: a good config is among its finalists."""


def trials_until_found(truth: Truth, sampler: str, seed: int, first: Sequence[Config] = (), most: int | None = None) -> int:
    """Configs that a search evaluates until a good one is among its finalists, or until it gives up after `most`; `first`
    are tried after the default."""
    storage, total = optuna.storages.InMemoryStorage(), min(len(truth.once), most or len(truth.once))
    study = BucketStudy(
        storage, truth.name, truth.space, {}, seed=seed, total=total, sampler=sampler, signature=truth.signature
    )
    study.enqueue(first)

    def watch(_: Progress) -> None:
        evaluations = study.by_trial()
        finalists = choose_finalists(evaluations, truth.space.default, truth.workload.points)
        known = {config_of(found) for found in evaluations}  # the default is a finalist before it was measured
        if any(truth.like(config) in truth.good for config in finalists.values() if config in known):
            raise Found

    try:
        with contextlib.suppress(Found):
            search({truth.name: study}, {truth.name: truth.evaluate}, watch=watch)
        return study.num_evaluated
    finally:
        study.close()


def ranking(truth: Truth) -> list[Config]:
    """The configs in the static model's order."""
    judged = static_model.rank(truth.spec, truth.target, truth.workload, truth.space, threads=truth.threads)
    return [found.config for found in judged if not found.reason]


def spearman(truth: Truth, order: Sequence[Config]) -> float:
    """Rank correlation of the static model's order with the measured one."""
    places = {config: place for place, config in enumerate(sorted(truth.scores, key=truth.scores.__getitem__))}
    both = [config for config in map(truth.like, order) if config in places]
    return statistics.correlation(range(len(both)), [places[config] for config in both])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What the replay says of one truth file."""

    spec: str
    configs: int
    good: int  # of these
    default: float  # its time over the best config's
    correlation: float  # of the static model's order with the measured one
    trials: Mapping[str, Sequence[int]]  # until a good config was found, by way of searching, a seed each

    def median(self, way: str) -> float:
        """Trials of a way of searching."""
        return statistics.median(self.trials[way])

    @property
    def ok(self) -> bool:
        """Whether the tuner needs at most TRIALS_SHARE of the configs, and OF_RANDOM of random search's trials."""
        ours = self.median(TUNER)
        return ours <= TRIALS_SHARE * self.configs and ours <= OF_RANDOM * self.median(RANDOM)


def replay(truth: Truth, seeds: Sequence[int], ways: Sequence[str] = WAYS, most: int | None = None) -> Row:
    """Searches by each way with each seed, to the end or up to `most` trials."""
    order = ranking(truth)
    found = {
        way: [
            trials_until_found(truth, RANDOM if way == RANDOM else "tpe", seed, order[:FIRST] if way == TUNER else (), most)
            for seed in seeds
        ]
        for way in ways
    }
    default = truth.scores[truth.space.default] / min(truth.scores[config] for config in truth.again)
    return Row(truth.name, len(truth.once), len(truth.good), default, spearman(truth, order), found)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        f"| spec | configs | within {GOOD:.0%} | default | static model | {' | '.join(WAYS)} | ok |",
        f"|---|{'---:|' * (4 + len(WAYS))}---|",
    ]
    for row in rows:
        trials = (f"{row.median(way):g} ({row.median(way) / row.configs:.1%})" for way in WAYS)
        cells = [
            row.spec,
            row.configs,
            f"{row.good} ({row.good / row.configs:.1%})",
            f"{row.default:.2f}",
            f"{row.correlation:.2f}",
            *trials,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} | {'yes' if row.ok else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, or replays and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="SPEC",
        choices=[*CASES, []],
        help="time instead of replaying; all specs by default",
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if options.measure is not None:
        for slug in options.measure or CASES:
            measure(slug, options.out)
        return
    truths = [Truth.read(path) for path in sorted(options.out.glob("*/regret/*.json"))]
    print(table([replay(truth, range(options.seeds)) for truth in truths]))


if __name__ == "__main__":
    main()
