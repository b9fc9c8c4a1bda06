"""The storage survives kills: locks die with their holders, half-written lines are cut, damage is named."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest

from pagegen.errors import ConfigError
from pagegen.tuning.search import search
from pagegen.tuning.storage import KernelLock, in_reach, open_storage
from pagegen.tuning.study import BucketStudy

from .fake_tune import SPACE, score

HOLD = """
import sys, time
from pathlib import Path
from pagegen.tuning.storage import KernelLock
KernelLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    journal.touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(journal)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    begin = time.monotonic()
    lock = KernelLock(journal)
    assert lock.acquire()
    lock.release()
    assert time.monotonic() - begin < 10  # Optuna's own locks wait for 30 s


@pytest.mark.parametrize("torn", [b"{", b'{"op_code":4,"worker_id":"x","study_id":0', b"\x00\xff"])
def test_a_line_that_was_torn_by_a_kill_is_cut_and_nothing_else(tmp_path: Path, torn: bytes) -> None:
    first = optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")
    first.add_trial(optuna.trial.create_trial(value=1.0))
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(torn)
    second = optuna.load_study(storage=open_storage(None, tmp_path), study_name="s")
    second.add_trial(optuna.trial.create_trial(value=2.0))
    third = optuna.load_study(storage=open_storage(None, tmp_path), study_name="s")
    assert [trial.value for trial in third.trials] == [1.0, 2.0]
    assert [trial.value for trial in first.trials] == [1.0, 2.0]  # who had it open all along reads on


def test_damage_in_the_middle_is_refused_with_a_remedy(tmp_path: Path) -> None:
    study = optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    journal = tmp_path / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"garbage\n" + b"".join(lines))
    with pytest.raises(ConfigError, match=r"damaged.*--storage"):
        open_storage(None, tmp_path)


@pytest.mark.parametrize("text", ["my notes", "my notes\n", "[]\n5\n", '{"op_code":5}\n[]\n', '{"op_code":[]}\n', "5"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(text)
    with pytest.raises(ConfigError, match=r"damaged.*--storage"):
        open_storage(str(tmp_path / "notes"), tmp_path)
    assert (tmp_path / "notes").read_text() == text and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("torn", ["", '{"op', '{"op_code":0,"worker_id":"x"'])
def test_a_journal_whose_first_line_is_torn_is_one(torn: str, tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text(torn)
    optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")
    assert (tmp_path / "journal.log").read_bytes().startswith(b'{"op_code":0,') and b'"s"' in (tmp_path / "journal.log").read_bytes()


@pytest.mark.parametrize("url", ["missing/folder/journal.log", "nosuch://host/x", "sqlite:////proc/nowhere/x.db", "://"])
def test_a_storage_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="--storage") as caught:
        open_storage(url if "://" in url else str(tmp_path / url), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [("missing/journal.log", "there is no folder"), ("/dev/null", "no regular file"), (".", "no regular file"), ("sqlite://", "names no file")],
)
def test_what_is_wrong_with_a_storage_is_said_and_nothing_left(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*--storage"):
        open_storage(url if "://" in url else str(tmp_path / url), tmp_path)
    assert not list(tmp_path.iterdir()) and not Path("/dev/null.lock").exists()


@pytest.mark.parametrize("lost", ["folder", "journal", "disk"])
def test_a_journal_that_is_lost_is_named_with_what_to_do(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: the lock that was held as it failed is given back."""
    folder = tmp_path / "results"
    folder.mkdir()
    study = optuna.create_study(storage=open_storage(None, folder), study_name="s")
    if lost == "disk":
        monkeypatch.setattr(os, "fsync", full)
    else:
        (folder / "journal.log").unlink()
        if lost == "folder":
            shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"storage here.*lost \(.*No .*run the same command again") as caught, in_reach("here"):
            study.add_trial(optuna.trial.create_trial(value=1.0))
        assert "\n" not in str(caught.value)


def full(_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_sqlite_is_a_storage_too(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/trials.db", tmp_path / "elsewhere")
    study = optuna.create_study(storage=storage)
    study.add_trial(optuna.trial.create_trial(value=1.0))
    assert study.best_value == 1.0 and [path.name for path in tmp_path.iterdir()] == ["trials.db"]


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_optuna_dashboard_shows_what_a_storage_holds(tmp_path: Path, kind: str) -> None:
    """The very server of `optuna-dashboard STORAGE`, asked as a browser asks it."""
    dashboard = pytest.importorskip("optuna_dashboard")
    storage = open_storage(f"sqlite:///{tmp_path}/trials.db" if kind == "sqlite" else None, tmp_path)
    study = BucketStudy(storage, "s/decode", SPACE, {}, total=4)
    search({"only": study}, {"only": score})
    study.close()
    answers: list[str] = []
    application = dashboard.wsgi(storage)

    def get(path: str) -> Any:
        asked: dict[str, Any] = {"PATH_INFO": path}
        setup_testing_defaults(asked)
        body = b"".join(application(asked, lambda status, headers, error=None: answers.append(status)))
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    assert summary["study_name"] == study.name
    shown = get(f"/api/studies/{summary['study_id']}")["trials"]
    assert answers == ["200 OK"] * 2
    values = [trial["values"] for trial in shown if trial["state"] == "Complete"]
    assert values == [[found.score] for _, found in study.evaluations if found.score is not None]
