"""Tuners that share a study over a server: as over a journal, but the processes need no common file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagegen.errors import ConfigError
from pagegen.tuning.search import search
from pagegen.tuning.storage import in_reach, open_storage
from pagegen.tuning.study import BucketStudy

from . import postgres
from .fake_tune import SPACE, score
from .test_search import DEAD_BEAT, ended, kill, start_tuner, until_it_hangs

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
