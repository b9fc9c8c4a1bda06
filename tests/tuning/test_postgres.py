"""Tuners that share a study over a server: as over a journal, but the processes need no common file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optuna.trial import TrialState

from pagegen.catalog import template_for
from pagegen.errors import ConfigError
from pagegen.package import verify_package
from pagegen.space import Config
from pagegen.spec import Op, Phase, parse_slug
from pagegen.target import best_cpu
from pagegen.tuning.lease import holder
from pagegen.tuning.record import read_record
from pagegen.tuning.sampling import Coding
from pagegen.tuning.search import search
from pagegen.tuning.storage import in_reach, open_storage
from pagegen.tuning.study import BucketStudy

from . import postgres
from .fake_tune import SPACE, score
from .test_search import DEAD_BEAT, ended, kill, start_tuner, until_it_hangs

ROOT = Path(__file__).parents[2]
SMALL, SMALL_ON = parse_slug("fp32-d8-h2x1-b4-NHD")[0], best_cpu()
SMALL_SPACE = template_for(Op.ATTEND, SMALL, SMALL_ON).space(SMALL, SMALL_ON)
TRIALS = 12

pytestmark = pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres.server() as found:
        yield found


def test_two_workers_share_a_study_and_one_that_is_killed_loses_the_trial_in_flight_only(url: str, tmp_path: Path) -> None:
    doomed = start_tuner(url, 12, hangs=3)
    done, in_flight = until_it_hangs(doomed, 3)
    living = start_tuner(url, 12)
    done += until_it_hangs(living, 2)[0]  # it is at work beside the other
    kill(doomed)
    lines = living.communicate(timeout=120)[0].splitlines()
    assert living.returncode == 0 and lines[-1] == "resumed 2 lost 1"
    assert in_flight in ended(lines)
    done += ended(lines)
    assert len(done) == len(set(done)) == 12
    study = BucketStudy(open_storage(url, tmp_path), "fake", SPACE, {}, total=12)
    assert (study.resumed, study.lost, study.holders, study.claim()) == (12, 0, [], None)
    study.close()


def in_flight(url: str, process: int) -> Config | None:
    """What a process of this machine evaluates of the one study that a database holds."""
    storage = open_storage(url, Path.cwd())
    for study in storage.get_all_studies():
        for trial in storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.RUNNING,)):
            if holder(trial).split(":")[1:2] == [str(process)]:
                return Coding(SMALL_SPACE).decode(trial.params or trial.system_attrs["fixed_params"])
    return None


def until(found: Callable[[], Config | None], *alive: subprocess.Popen[str]) -> Config:
    """What is found at last, while processes run that have nothing to say if all is well."""
    while not (answer := found()):
        for process in alive:
            assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return answer


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_of_two_pagegen_tune_over_a_server_the_one_that_goes_on_ends_what_the_other_had_begun(url: str, tmp_path: Path) -> None:
    """The commands themselves, with real kernels; who joined is killed in the middle of its second trial."""
    (tmp_path / "small.yaml").write_text("format: 1\nphase: decode\npoints: {2x1@37: 1, 3x1@80: 2}\n")
    own = {"PAGEGEN_TIMING_LOCK": str(tmp_path / "lock"), "PAGEGEN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pagegen", "tune", *words, "--storage", url, "--json"]
        return subprocess.Popen(
            command, env={**os.environ, **own}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    opener = start(SMALL.slug, "--target", SMALL_ON.name, "--workload", "small.yaml", "--trials", str(TRIALS), "--study", "s")
    joiner = None
    try:
        until(lambda: in_flight(url, opener.pid), opener)
        joiner = start("--join", "s")
        first = until(lambda: in_flight(url, joiner.pid), opener, joiner)
        doomed = until(lambda: None if (now := in_flight(url, joiner.pid)) == first else now, opener, joiner)
        joiner.kill()
        said = opener.communicate(timeout=1500)
    finally:
        for process in [opener, *([joiner] if joiner else [])]:
            process.kill()
    assert opener.returncode == 0, said
    document = json.loads(said[0])
    assert document["trials"] == {"resumed": 0, "new": TRIALS, "lost": 1} and sum(document["counts"].values()) == TRIALS
    record, _ = read_record(tmp_path / Path(document["report"]).parent)
    tried = [Config(tuple(found.config.items())) for _, found in record.trials[Phase.DECODE]]
    assert len(set(tried)) == len(tried) == TRIALS and doomed in tried and first in tried
    assert verify_package(tmp_path / document["package"]) == verify_package(Path(document["installed"])) == []


@pytest.mark.long
def test_eight_processes_fill_a_new_database_at_once(tmp_path: Path) -> None:
    with postgres.server() as url:
        tuners = [start_tuner(url, 30, 0.005, beat=3.0) for _ in range(8)]  # none is taken for dead on busy cores
        lines = [line for tuner in tuners for line in tuner.communicate(timeout=280)[0].splitlines()]
        assert {tuner.returncode for tuner in tuners} == {0}
        begun = [line for line in lines if line.startswith("begin")]
        assert len(begun) == len(set(begun)) == 30


def test_a_server_that_goes_away_is_one_line(tmp_path: Path) -> None:
    with postgres.server() as url:
        study = BucketStudy(open_storage(url, tmp_path), "s", SPACE, {}, total=9, beat=DEAD_BEAT)
        assert study.claim()
    with pytest.raises(ConfigError, match=r"was lost.*run the same command again") as caught, in_reach(url):
        search({"only": study}, {"only": score})
    assert "\n" not in str(caught.value)
    study.close()


def test_a_server_that_is_not_there_is_one_line_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened.*--storage") as caught:
        open_storage("postgresql://tuner:secret@127.0.0.1:9/postgres", tmp_path)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
