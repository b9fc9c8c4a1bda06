"""How often noise makes the tuner choose a bad config: simulated studies on a clock with heavy tails, beside min-of-3.

    python benchmarks/tuner_noise.py [--studies 200] [--noise 0.1] [--out record.json]

Every study has a space of its own, whose true times are drawn, and a machine whose every call takes the true time times
1 + noise * |t|, t from Student's distribution with 2 degrees of freedom, and times a drift of +-noise over seconds. The whole
way of `pagegen tune` is gone: search with pruning and the stop rule, interleaved rounds, finalists, contest; only kernels and
clock are not real. A choice is bad if its true time is more than 2 % above that of the best config of the space.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import optuna

from pagegen.paths import write_atomic
from pagegen.records import Evaluation, Status
from pagegen.space import Config, ConfigSpace, Knob, power_of_two
from pagegen.spec import Phase
from pagegen.tuning.decide import DEFAULT, choose_finalists, propose, settle
from pagegen.tuning.evaluate import CANDIDATE, POINT_SECONDS, partial_score
from pagegen.tuning.job import CONTEST_SECONDS, FINAL_SECONDS
from pagegen.tuning.measure import Measurement, geomean_of_medians, measure
from pagegen.tuning.pruning import Judge
from pagegen.tuning.search import search
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workload import Point

SPACE = ConfigSpace((power_of_two("tile", 8, 256, 32), Knob("unroll", (1, 2, 3, 4), 1), Knob("order", ("rows", "columns"), "rows")))
WEIGHTS = {"1x1@512": 3.0, "8x1@2048": 2.0, "1x1@2048": 1.5, "8x1@512": 1.0, "32x1@512": 1.0}
POINTS = tuple(Point.parse(name, weight) for name, weight in WEIGHTS.items())
BAD = 0.02
DRIFT_SECONDS = 3.0  # of one swing


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """By what share of the best config's true time each chooser's is longer; and the trials that were made."""

    ours: float
    naive: float
    trials: int
    pruned: int


class Machine:
    """A clock that only calls move, and what each config takes on each batch, in seconds."""

    def __init__(self, seed: int, noise: float) -> None:
        self._dice, self._noise, self.now = random.Random(seed), noise, 0.0
        draw = random.Random(f"times {seed}")
        by_value = {(knob.name, value): draw.gauss(0, 0.05) for knob in SPACE.knobs for value in knob.values}
        self.seconds: dict[Config, dict[Point, float]] = {}
        for config in SPACE:
            common = sum(by_value[item] for item in config.items) + draw.gauss(0, 0.03)
            self.seconds[config] = {point: 400e-6 * math.exp(common + draw.gauss(0, 0.01)) for point in POINTS}

    def true(self, config: Config) -> float:
        """Weighted geometric mean over the batches of what a config really takes."""
        times = self.seconds[config]
        return math.exp(sum(p.weight * math.log(times[p]) for p in POINTS) / sum(p.weight for p in POINTS))

    def call(self, config: Config, point: Point) -> Callable[[], None]:
        """One noisy run of a config on a batch."""

        def run() -> None:
            dice = self._dice
            heavy = abs(dice.gauss(0, 1)) / math.sqrt(dice.gammavariate(1, 1))  # |t|, 2 degrees of freedom
            drift = 1 + self._noise * math.sin(2 * math.pi * self.now / DRIFT_SECONDS)
            self.now += self.seconds[config][point] * drift * (1 + self._noise * heavy)

        return run

    def measure(self, configs: Mapping[str, Config], point: Point, seconds: float) -> Measurement:
        """The tuner's own measurement, on this machine's clock."""
        calls = {name: self.call(config, point) for name, config in configs.items()}
        seed, lock = self._dice.getrandbits(32), contextlib.nullcontext()
        return measure(calls, DEFAULT, seconds=seconds, clock=lambda: self.now, seed=seed, lock=lock, watch=Quiet())


class Quiet:
    """A watch of a machine on which nothing else runs."""

    retaken = 0

    def tick(self) -> None: ...

    def switches(self) -> int:
        return 0

    def disturbance(self) -> None: ...


def study(seed: int, noise: float = 0.1, total: int = 48) -> Choice:
    """One study: what the tuner serves, and what the least of three calls in a row would have chosen."""
    machine, default = Machine(seed, noise), SPACE.default

    def evaluate(config: Config, judge: Judge) -> Evaluation:
        configs = {DEFAULT: default} if config == default else {DEFAULT: default, CANDIDATE: config}
        name, found = next(reversed(configs)), dict[Point, Measurement]()
        for step, point in enumerate(POINTS):
            found[point] = machine.measure(configs, point, POINT_SECONDS)
            why = judge.hear(step, found[point].middle_ratio(name), point.weight)
            if why:
                return Evaluation(Status.PRUNED, config.to_dict(), why, partial=partial_score(found, name))
        score = geomean_of_medians([m.ratios(name) for m in found.values()], [point.weight for point in POINTS])
        timings = {point.name: m.timing(name) for point, m in found.items()}
        width = (score.high - score.low) / 2 / score.median
        return Evaluation(Status.PASSED, config.to_dict(), score=score.median, timings=timings, noise=width)

    bucket = BucketStudy(optuna.storages.InMemoryStorage(), "simulated", SPACE, {}, seed=seed, total=total)
    search({"decode": bucket}, {"decode": evaluate}, rule=StopRule())
    bucket.close()
    found = bucket.by_trial()
    configs = choose_finalists(found, default, POINTS)
    finals = {point: machine.measure(configs, point, FINAL_SECONDS) for point in POINTS}
    fit = propose(Phase.DECODE, POINTS, finals, uniform=True)
    serving = {name: config for name, config in configs.items() if name == DEFAULT or name in fit.assigned.values()}
    contest = {point: machine.measure(serving, point, CONTEST_SECONDS) for point in POINTS}
    chosen = configs[settle(Phase.DECODE, fit, contest, uniform=True)[POINTS[0]]]
    best = min(map(machine.true, SPACE))
    naive = min(SPACE, key=lambda config: _least_of_three(machine, config))
    pruned = sum(each.status is Status.PRUNED for each in found)
    return Choice(machine.true(chosen) / best - 1, machine.true(naive) / best - 1, len(found), pruned)


def _least_of_three(machine: Machine, config: Config) -> float:
    total = 0.0
    for point in POINTS:
        call, times = machine.call(config, point), []
        for _ in range(3):
            begin = machine.now
            call()
            times.append(machine.now - begin)
        total += point.weight * math.log(min(times))
    return total


def main() -> None:
    """Runs the studies and prints the shares of bad choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices = [study(seed, options.noise) for seed in range(options.studies)]
    record = {"studies": len(choices), "noise": options.noise, "trials": statistics.mean(each.trials for each in choices)}
    for name in ("ours", "naive"):
        losses = [getattr(each, name) for each in choices]
        record[f"bad_{name}"] = sum(loss > BAD for loss in losses) / len(losses)
        print(f"{name}: {record[f'bad_{name}']:.1%} more than {BAD:.0%} above the best; at the worst {max(losses):.1%}")
    if options.out:
        write_atomic(options.out, json.dumps({**record, "choices": [dataclasses.asdict(each) for each in choices]}) + "\n")


if __name__ == "__main__":
    main()
