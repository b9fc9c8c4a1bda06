"""Fifty times killed at a random moment, a tuner loses no more than the trial in flight each time."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy

from .fake_tune import SPACE, score
from .test_search import DEAD_BEAT, ended, start_tuner

KILLS = 50


def recorded(storage: str) -> set[str]:
    """The configs whose evaluation the storage holds, each checked to be the right one."""
    study = BucketStudy(open_storage(storage, Path.cwd()), "fake", SPACE, {}, total=10_000)
    found = {SPACE.config(each.config): each for _, each in study.evaluations}
    study.close()
    assert all(each.score == score(config).score for config, each in found.items() if "died" not in each.reason)
    return {config.slug for config in found}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_what_was_finished_survives_fifty_kills(tmp_path: Path, kind: str) -> None:
    storage = f"sqlite:///{tmp_path}/trials.db" if kind == "sqlite" else str(tmp_path / "journal.log")
    dice, known = random.Random(0), set[str]()
    for _ in range(KILLS):
        tuner = start_tuner(storage, 10_000, 0.2, beat=DEAD_BEAT)
        assert tuner.stdout
        line = tuner.stdout.readline()  # it is at work, or everything has been evaluated
        if line.startswith("begin"):
            threading.Event().wait(dice.uniform(0, 0.3))
        os.kill(tuner.pid, signal.SIGKILL)
        lines = [line.strip(), *tuner.communicate()[0].splitlines()]
        whole = ended(lines)[:-1]  # of the last one only its last words are known: it may not have been written yet
        now = recorded(storage)
        assert known | set(whole) <= now
        known = now
    tuner = start_tuner(storage, 10_000, 0.0, beat=DEAD_BEAT)
    tuner.communicate(timeout=300)
    assert tuner.returncode == 0 and recorded(storage) == {config.slug for config in SPACE}
