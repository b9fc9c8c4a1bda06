"""Records of runs that never were: what each config takes is said, and noise is added with a seed.

`python -m tests.tuning.fake_record FOLDER` writes the one of tests/fixtures/tune-record-format-2.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path

from pagegen.records import Evaluation, Status
from pagegen.space import Config
from pagegen.spec import Phase, parse_slug
from pagegen.tuning.decide import DEFAULT, choose_finalists, decide, propose
from pagegen.tuning.measure import Measurement, geomean_of_medians
from pagegen.tuning.record import FORMAT, Record, write_record
from pagegen.tuning.report import write_report
from pagegen.tuning.workload import Point, Workload

Truth = Mapping[str, Mapping[int, float]]  # batch -> tile -> microseconds; tile 0 is the default

TILES = {
    Phase.DECODE: {
        "1x1@16": {0: 5.0, 1: 5.0, 2: 8.0, 3: 5.1},
        "1x1@2048": {0: 90.0, 1: 60.0, 2: 85.0, 3: 89.0},
        "32x1@512": {0: 700.0, 1: 760.0, 2: 460.0, 3: 690.0},
    },
    Phase.PREFILL: {"1x512@512": {0: 900.0, 1: 905.0, 2: 1500.0, 3: 898.0}},
}


def config_of(tile: int) -> Config:
    return Config((("tile", tile),))


def make_record(
    truth: Mapping[Phase, Truth] = TILES,
    slug: str = "fp32-d8-h2x1-b4-NHD",
    seed: int = 0,
    noise: float = 0.02,
    tail: float = 0.0,
    rounds: int = 15,
) -> Record:
    """What a run on such a machine leaves; every config is evaluated once, and tile 9 failed to build.

    Times come out up to `noise` longer, and a share of `tail` of them up to four times as long.
    """
    dice = random.Random(seed)

    def disturbed(seconds: float) -> float:
        late = 4.0 if tail and dice.random() < tail else 1 + noise
        return round(seconds * dice.uniform(1, late), 12)

    spec = parse_slug(slug)[0]
    default = config_of(0)
    workloads = {phase: Workload(phase, tuple(map(Point.parse, batches))) for phase, batches in truth.items()}
    trials, finals, contest, finalists = {}, {}, {}, {}

    def time(batches: Truth, point: Point, configs: Mapping[str, Config]) -> Measurement:
        seconds = {
            name: tuple(disturbed(batches[point.name][int(config.to_dict()["tile"])] * 1e-6) for _ in range(rounds))
            for name, config in configs.items()
        }
        return Measurement(DEFAULT, seconds, dice.getrandbits(32))

    for phase, batches in truth.items():
        points, found = workloads[phase].points, list[Evaluation]()
        for tile in next(iter(batches.values())):
            measured = {point: time(batches, point, {DEFAULT: default, "candidate": config_of(tile)}) for point in points}
            score = geomean_of_medians([m.ratios("candidate") for m in measured.values()], [point.weight for point in points])
            timings = {point.name: m.timing("candidate") for point, m in measured.items()}
            found.append(Evaluation(Status.PASSED, {"tile": tile}, score=score.median, timings=timings))
        found.append(Evaluation(Status.BUILD_ERROR, {"tile": 9}, "no such tile"))
        trials[phase] = list(enumerate(found))
        configs = choose_finalists(found, default, points)
        finalists[phase.value] = {name: config.to_dict() for name, config in configs.items()}
        finals[phase] = {point: time(batches, point, configs) for point in points}
        served = propose(phase, points, finals[phase], uniform=spec.deterministic).assigned.values()
        serving = {name: config for name, config in configs.items() if name == DEFAULT or name in served}
        contest[phase] = {point: time(batches, point, serving) for point in points}
    facts = {
        "format": FORMAT,
        "spec": spec.to_dict(),
        "target": "cpu:scalar",
        "environment": {"hardware": {"device": "no machine, but a fixture"}, "toolchain": {"compiler": "none"}, "threads": 2},
        "workload": {"name": "default", "points": 4, "timed": 4, "digests": {phase.value: w.digest for phase, w in workloads.items()}},
        "workloads": {phase.value: workload.to_dict() for phase, workload in workloads.items()},
        "studies": {phase.value: f"{slug}/{phase.value}/0" for phase in truth},
        "ancestors": {},
        "trials": {"resumed": 0, "new": sum(map(len, trials.values())), "lost": 0},
        "seed": seed,
        "finalists": finalists,
        "roofline": None,
    }
    return Record(facts, trials, finals, contest)


def write(folder: Path, record: Record) -> None:
    """The record with its decision, as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    decided = decide(record)
    places = {"package": "package", "installed": "package", "report": "report.md"}
    write_record(folder, record, {**decided.document, **places})
    write_report(folder, {**record.facts, **decided.document, **places}, decided.rows, decided.conditions)


if __name__ == "__main__":
    write(Path(sys.argv[1]), make_record())
