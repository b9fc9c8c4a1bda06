"""Where trials live: an Optuna storage that survives kills, of one process or of many.

The storage is the one source of truth; `record.write_trials` writes a copy of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.event
import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pagegen.errors import ConfigError

# What drivers are told: SQLite waits for another writer, psycopg for a server, so many seconds.
CONNECT: Mapping[str, Mapping[str, Any]] = {"sqlite": {"timeout": 60}, "postgresql": {"connect_timeout": 10}}
DRIVERS = {"postgresql": "pip install 'psycopg[binary]'"}  # what brings the driver of a scheme
TABLE_ATTEMPTS = 6  # at making a new database's tables, which others may be making
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
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            _cut_torn_line(self._journal)
        except BaseException:  # Optuna releases what was acquired only: the next to acquire would wait for ever
            self.release()
            raise
        return True

    def release(self) -> None:
        """Gives the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _Backend(JournalFileBackend):
    """A journal whose loss is a storage's, as that of a database is."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        try:
            yield from super().read_logs(log_number_from)
        except OSError as error:
            raise StorageInternalError(str(error)) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:
            raise StorageInternalError(str(error)) from error


def _cut_torn_line(journal: Path) -> None:
    with journal.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """Opens `folder`/journal.log, the journal file named, or a database by its SQLAlchemy URL.

    SQLite and PostgreSQL are tested; whatever else SQLAlchemy has a driver for is passed through. Raises ConfigError if
    it cannot be opened, read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # progress is ours to show
    if url is None or "://" not in url:
        return _open_journal(Path(url) if url else folder / "journal.log")
    try:
        return _open_database(sqlalchemy.make_url(url))
    except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
        remedy = DRIVERS.get(url.split(":")[0], "install its driver")
        raise ConfigError(f"storage {shown(url)} has no driver here ({_first_line(error)}); {remedy}, or change --storage") from None
    except (OSError, ValueError, RuntimeError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise ConfigError(f"storage {shown(url)} cannot be opened ({_first_line(error)}); change --storage") from None


def shown(url: str | None) -> str:
    """A storage as it may be printed: without its password."""
    if url is None or "://" not in url:
        return url or "journal.log"
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except (ValueError, sqlalchemy.exc.SQLAlchemyError):
        return url


@contextlib.contextmanager
def in_reach(url: str | None) -> Iterator[None]:
    """Turns the loss of an open storage into one line. Raises ConfigError."""
    try:
        yield
    except StorageInternalError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ConfigError(
            f"storage {shown(url)} was lost ({_first_line(cause)}); cure that, and run the same command again: it goes on from what is there"
        ) from None


def _open_database(url: sqlalchemy.URL) -> RDBStorage:
    if url.drivername == "postgresql":  # what that means changed with SQLAlchemy 2.1
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("it names no file: it would lie in memory, for this process alone")
    options = {"pool_pre_ping": True, "connect_args": CONNECT.get(url.get_backend_name(), {})}
    probe = sqlalchemy.create_engine(url, **options)  # a server that is not there is not to be asked several times
    probe.connect().close()
    probe.dispose()
    for attempt in range(TABLE_ATTEMPTS):
        try:
            storage = RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)
            break
        except sqlalchemy.exc.SQLAlchemyError:  # another process made a table at the same moment
            if attempt == TABLE_ATTEMPTS - 1:
                raise
            time.sleep(random.uniform(0, 0.2) * (attempt + 1))
    if url.get_backend_name() == "sqlite":
        _begin_immediately(storage.engine)
    return storage


def _begin_immediately(engine: sqlalchemy.Engine) -> None:
    """Lets every transaction on SQLite take the write lock when it begins.

    SQLite has no SELECT FOR UPDATE, by which Optuna gives numbers to trials; and of two transactions that have read, one
    cannot go on to write, however long it waits.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    @sqlalchemy.event.listens_for(engine, "begin")
    def _(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections that were made before


def _open_journal(path: Path) -> BaseStorage:
    try:
        if not path.parent.is_dir():
            raise NotADirectoryError(f"there is no folder {path.parent}")
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("no permission to write it")
        _require_journal(path)
        return JournalStorage(_Backend(str(path), KernelLock(path)))
    except (OSError, StorageInternalError) as error:
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
