"""Where trials live: an Optuna storage that survives kills, and the proof of life of the processes that use it.

The storage is the one source of truth; `export_jsonl` writes a copy of it for people.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pagegen.errors import ConfigError
from pagegen.paths import locked, write_atomic
from pagegen.records import Evaluation

SQLITE = "sqlite:///"
BUSY_SECONDS = 60  # SQLite waits this long for another writer before it gives up
JOURNAL_BEGIN = b'{"op_code":'  # of every line that Optuna writes


class KernelLock(JournalFileOpenLock):
    """A journal's lock that the operating system releases when its holder dies, however it dies.

    Optuna's own locks are files that outlive a killed holder until a grace period of 30 s has passed. A holder that died
    while writing left half a line, which would spoil the next one: taking the lock cuts it off.
    """

    def __init__(self, journal: Path) -> None:  # nothing of the base is used: Optuna does not export its interface
        self._journal, self._path = journal, journal.with_name(journal.name + ".lock")
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Waits for the lock. Always True."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        self._handle = handle
        _cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        """Gives the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _cut_torn_line(journal: Path) -> None:
    with journal.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """An open Optuna storage, and the folder where those who use it keep their locks."""

    backend: BaseStorage
    folder: Path


def open_storage(url: str | None, folder: Path) -> Storage:
    """Opens `folder`/journal.log, the journal file named, or any SQLAlchemy URL.

    Raises ConfigError if it cannot be opened, read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # progress is ours to show
    if url is None or "://" not in url:
        return _open_journal(Path(url) if url else folder / "journal.log")
    beside = Path(url.removeprefix(SQLITE)).absolute().parent if url.startswith(SQLITE) else folder
    import sqlalchemy

    options = {"connect_args": {"timeout": BUSY_SECONDS}} if url.startswith(SQLITE) else {}
    try:
        with locked(beside / ".create.lock"):  # tables are made by one process, not by all at once
            return Storage(RDBStorage(url, engine_kwargs=options), beside)
    except (OSError, ImportError, ValueError, RuntimeError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise ConfigError(f"storage {url} cannot be opened ({_first_line(error)}); change --storage") from None


def _open_journal(path: Path) -> Storage:
    try:
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("no permission to write it")
        _require_journal(path)
        return Storage(JournalStorage(JournalFileBackend(str(path), KernelLock(path))), path.parent)
    except OSError as error:
        raise ConfigError(f"journal {path} cannot be opened ({_first_line(error)}); change --storage or --out") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:  # what Optuna meets in lines not its own
        raise ConfigError(
            f"journal {path} is damaged ({_first_line(error)}); move it away, or name another with --storage"
        ) from None


def _require_journal(path: Path) -> None:
    """Raises ValueError for a file of another kind: opening it as a journal would cut its last line and write to it."""
    if path.exists():
        with path.open("rb") as file:
            begin = file.read(len(JOURNAL_BEGIN))
        if not JOURNAL_BEGIN.startswith(begin):
            raise ValueError("it is another kind of file")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class Owner:
    """This process's proof of life: a file whose lock is held until the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex[:12]
        self._path = _owner_file(folder, self.token)
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Ends it and removes the file."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def is_alive(folder: Path, token: str) -> bool:
    """Whether the process with this token still holds its lock. Removes what a dead one left."""
    path = _owner_file(folder, token)
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    path.unlink(missing_ok=True)
    return False


def _owner_file(folder: Path, token: str) -> Path:
    return folder / f".owner-{token}"


def export_jsonl(path: Path, rows: Iterable[tuple[str, int, Evaluation]]) -> None:
    """Writes (study, trial number, evaluation) one JSON object a line."""
    lines = [json.dumps({"study": study, "trial": number, **found.to_dict()}) for study, number, found in rows]
    write_atomic(path, "".join(line + "\n" for line in lines))
