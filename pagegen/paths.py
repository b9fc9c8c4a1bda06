"""Every folder and every PAGEGEN_* variable; the one place that reads the environment.

| variable        | meaning                                             | default                          |
|-----------------|-----------------------------------------------------|----------------------------------|
| PAGEGEN_CACHE   | built kernels and packages of this user (written)   | $XDG_CACHE_HOME or ~/.cache, /pagegen |
| PAGEGEN_CXX     | the C++ compiler                                    | g++, else clang++                |
| PAGEGEN_TIMING_LOCK | the file that whoever times on this machine holds | pagegen-timing.lock in /run/lock, else /tmp |

Vendored into every kernel package. The package folder and the installation are never written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


def compiler_override() -> str | None:
    """$PAGEGEN_CXX, or None."""
    return os.environ.get("PAGEGEN_CXX") or None


def timing_lock() -> Path:
    """The lock file of all timings of this machine, in a folder that its users share."""
    named = os.environ.get("PAGEGEN_TIMING_LOCK")
    if named:
        return Path(named)
    folder = Path("/run/lock")
    everybodys = folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH  # in some systems it is root's alone
    return (folder if everybodys else Path("/tmp")) / "pagegen-timing.lock"


def cache_dir() -> Path:
    """This user's cache folder, created with mode 0700.

    Raises ConfigError if it cannot be created or written, or belongs to somebody else: it holds native code that is run.
    """
    named = os.environ.get("PAGEGEN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        path = Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "pagegen"
    except RuntimeError as error:  # no HOME, and no such user
        raise ConfigError(f"the cache has no place ({error}); set PAGEGEN_CACHE to a folder you can write") from None
    return _own(path)


def _own(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"the cache folder cannot be made ({error}); set PAGEGEN_CACHE to a folder you can write") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"the cache folder {path} cannot be written; set PAGEGEN_CACHE to a folder you can write")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"the cache folder {path} is not yours alone (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}) "
            "and holds code that is run; set PAGEGEN_CACHE to a folder that only you can write"
        )
    return path


def kernel_cache() -> Path:
    """Built libraries, one folder a key."""
    return _own(cache_dir() / "kernels")


def package_cache() -> Path:
    """Kernel packages that `generate`, `chat` and `serve` find by themselves."""
    return _own(cache_dir() / "packages")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Publishes a file whole or not at all: a temporary file in the same folder, fsync, rename."""
    payload = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`. The operating system releases it when its holder dies, however it dies.

    The holder may remove the file: who waited for it then locks the new one.
    """
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = path.stat()
            except FileNotFoundError:
                continue
            if not os.path.samestat(os.fstat(file.fileno()), current):
                continue
            yield
            return


def lock_of(entry: Path) -> Path:
    """The lock file of a cache entry."""
    return entry.with_name(f"{entry.name}.lock")


def remove_entry(entry: Path) -> None:
    """Removes a folder of the cache and its lock, while nobody is building it; readers see it whole or not at all."""
    doomed = entry.with_name(f".removed-{entry.name}")
    with locked(lock_of(entry)):
        with contextlib.suppress(OSError):  # not there; or there is a doomed one of a killed process
            entry.rename(doomed)
        for folder in (entry, doomed):
            shutil.rmtree(folder, ignore_errors=True)
        lock_of(entry).unlink()
