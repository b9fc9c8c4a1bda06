"""A tuner with a fake evaluator, run as a process of its own so that tests can kill it.

`python -m tests.tuning.fake_tune STORAGE TOTAL SECONDS` prints `begin CONFIG` and `end CONFIG` as it goes.
"""

import sys
import time
from pathlib import Path

from pagegen.records import Evaluation, Status
from pagegen.space import Config, ConfigSpace, Knob, power_of_two
from pagegen.tuning.search import BucketStudy, search
from pagegen.tuning.storage import open_storage

SPACE = ConfigSpace(
    (power_of_two("tile", 16, 256, 64), Knob("unroll", (1, 2, 3, 4), 1), Knob("order", ("rows", "columns"), "rows"))
)


def score(config: Config) -> Evaluation:
    """A quarter of the space is wrong; elsewhere a bowl with its bottom at tile=128 unroll=2 order=columns."""
    values = config.to_dict()
    if values["unroll"] == 3:
        return Evaluation(Status.INCORRECT, values, "unroll 3 drops a row")
    away = abs(int(values["tile"]) - 128) / 128 + abs(int(values["unroll"]) - 2) / 4 + (values["order"] == "rows") / 8
    return Evaluation(Status.PASSED, values, score=1.0 + away)


def main(storage: str, total: int, seconds: float) -> None:
    """Runs `total` trials of `seconds` each."""

    def evaluate(config: Config) -> Evaluation:
        print(f"begin {config.slug}", flush=True)
        time.sleep(seconds)
        print(f"end {config.slug}", flush=True)
        return score(config)

    study = BucketStudy(open_storage(storage, Path.cwd()), "fake", SPACE, {}, total=total)
    search({"only": study}, {"only": evaluate})
    study.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
