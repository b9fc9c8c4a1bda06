"""A PostgreSQL server of the tests' own: in a temporary folder, on a free port of the loopback, without a password."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DEBIAN = Path("/usr/lib/postgresql")  # Debian keeps the server's programs out of the PATH, one folder a version
NOBODY = "nobody"  # the server refuses to run as root


def missing() -> str:
    """Why there can be no server here; "" if there can be."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    return "" if _programs() else "PostgreSQL is not installed (Debian: apt-get install postgresql)"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Runs a fresh server; yields the URL of its empty database."""
    programs = _programs()
    assert programs
    user = NOBODY if os.getuid() == 0 else getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="pagegen-postgres-"))
    os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *words: str) -> subprocess.Popen[bytes]:
        # `user` is None without root: nobody else may change it
        return subprocess.Popen(
            [programs / program, *words],
            user=user if os.getuid() == 0 else None,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=(folder.parent / f"{folder.name}.log").open("ab"),
        )

    data = str(folder / "data")
    assert run("initdb", "-D", data, "-A", "trust", "-U", "tuner", "--no-sync").wait() == 0
    settings = [f"-p{port}", "-h127.0.0.1", f"-k{folder}", "-F"]  # -F: no fsync, nothing here outlives the test
    process = run("postgres", "-D", data, *settings)
    try:
        while run("pg_isready", "-h", "127.0.0.1", "-p", str(port)).wait():
            assert process.poll() is None, (folder.parent / f"{folder.name}.log").read_text()
            time.sleep(0.1)
        yield f"postgresql://tuner@127.0.0.1:{port}/postgres"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / f"{folder.name}.log").unlink()


def _programs() -> Path | None:
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted((path / "bin" for path in DEBIAN.glob("*")), key=lambda path: -float(path.parent.name))
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)
