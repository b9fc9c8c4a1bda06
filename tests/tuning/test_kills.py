"""Killed at random moments, again and again, a tuner loses no more than the trial in flight each time, and leaves nothing that is
broken."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagegen.package import load_package, verify_package
from pagegen.tuning.record import TIMINGS, TRIALS, TUNE, read_record
from pagegen.tuning.replay import replay
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy

from .fake_tune import SPACE, score
from .test_search import DEAD_BEAT, ended, start_tuner

ROOT = Path(__file__).parents[2]
KILLS = 50
TUNE_KILLS = 10
SLUG = "decode-fp32-d8-h2x1-b4-NHD"


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


# --- the command itself, to its last file ----------------------------------------------------------------------------


def tune(folder: Path, moment: int = 0) -> tuple[int, str]:
    """(exit status, what it printed) of `pagegen tune` with its results and caches in `folder`, killed at a moment; 0: never."""
    (folder / "small.yaml").write_text("format: 1\nphase: decode\npoints: {2x1@37: 1, 3x1@80: 2}\n")
    words = [SLUG, "--target", "cpu:scalar", "--trials", "4", "--workload", str(folder / "small.yaml"), "--out", str(folder / "results")]
    own = {"PAGEGEN_CACHE": str(folder / "cache"), "PAGEGEN_TIMING_LOCK": str(folder.parent / "lock"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.tuning.doomed_tune", str(folder), str(moment), "tune", *words]
    done = subprocess.run(command, env={**os.environ, **own}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout


def left_by(folder: Path) -> set[str]:
    """The files of the record that a killed run left; they, its package and what is installed are checked to be whole."""
    packages = [*folder.glob("cache/packages/[!.]*"), *folder.glob("results/*/*/small/package/[!.]*")]
    for package in filter(Path.is_dir, packages):
        assert verify_package(package) == [] and load_package(package)
    files = {path.name: path for path in folder.glob("results/*/*/small/*") if path.name in (TRIALS, TIMINGS, TUNE)}
    assert all(json.loads(line) for name in files.keys() - {TUNE} for line in files[name].read_text().splitlines())
    if TUNE in files:
        read_record(files[TUNE].parent)
    return set(files)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_tune_that_is_killed_while_it_writes_leaves_what_is_whole_or_nothing_and_ends_well_when_it_is_left_alone(tmp_path: Path) -> None:
    """Also in the finals, and between the files of package and record: that is where a run spends its last writes."""
    whole, doomed = tmp_path / "whole", tmp_path / "doomed"
    for folder in (whole, doomed):
        folder.mkdir()
    fresh, resumed = (int(tune(whole)[1].splitlines()[-1]) for _ in range(2))
    dice, kills, seen = random.Random(0), 0, set[str]()
    while kills < TUNE_KILLS:  # the first from the beginning on, the others when everything has been tried
        status, _ = tune(doomed, dice.randrange(1, fresh) if kills < TUNE_KILLS // 3 else dice.randrange(resumed // 4, resumed))
        kills += status != 0
        now = left_by(doomed)
        assert seen <= now
        seen = now
    assert tune(doomed)[0] == 0 and left_by(doomed) == {TUNE, TRIALS, TIMINGS}
    (results,) = doomed.glob("results/*/*/small")
    record, document = read_record(results)
    tried = [json.dumps(dict(found.config)) for trials in record.trials.values() for _, found in trials]
    assert len(tried) == len(set(tried)) == 4 and document["trials"]["lost"] <= kills
    assert replay(results).differences == ()
