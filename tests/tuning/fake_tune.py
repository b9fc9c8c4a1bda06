"""A tuner with a fake evaluator, run as a process of its own so that tests can kill it.

`python -m tests.tuning.fake_tune STORAGE TOTAL SECONDS BEAT HANGS [wide]` prints `begin CONFIG` and `end CONFIG` as it goes, and
last how many trials it `resumed` and how many were `lost`. Its evaluation number HANGS never ends. With `wide` its space has
160 configs, not 40.
"""

import itertools
import sys
import time
from pathlib import Path

from pagegen.records import Evaluation, Status
from pagegen.space import Config, ConfigSpace, Knob, power_of_two
from pagegen.tuning.search import search
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy

SPACE = ConfigSpace(
    (power_of_two("tile", 16, 256, 64), Knob("unroll", (1, 2, 3, 4), 1), Knob("order", ("rows", "columns"), "rows"))
)

WIDE = ConfigSpace((*SPACE.knobs, Knob("prefetch", (0, 1, 2, 3), 0)))


def score(config: Config, judge: object = None) -> Evaluation:
    """A quarter of the space is wrong; elsewhere a bowl with its bottom at tile=128 unroll=2 order=columns."""
    values = config.to_dict()
    if values["unroll"] == 3:
        return Evaluation(Status.INCORRECT, values, "unroll 3 drops a row")
    away = abs(int(values["tile"]) - 128) / 128 + abs(int(values["unroll"]) - 2) / 4 + (values["order"] == "rows") / 8
    return Evaluation(Status.PASSED, values, score=1.0 + away)


def main(storage: str, total: int, seconds: float, beat: float, hangs: int, space: ConfigSpace) -> None:
    """Runs `total` trials of `seconds` each, with a sign of life every `beat` seconds."""
    numbers = itertools.count(1)

    def evaluate(config: Config, judge: object) -> Evaluation:
        print(f"begin {config.slug}", flush=True)
        time.sleep(600 if next(numbers) == hangs else seconds)
        print(f"end {config.slug}", flush=True)
        return score(config)

    study = BucketStudy(open_storage(storage, Path.cwd()), "fake", space, {}, total=total, beat=beat)
    search({"only": study}, {"only": evaluate})
    print(f"resumed {study.resumed} lost {study.lost}", flush=True)
    study.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), WIDE if sys.argv[6:] else SPACE)
