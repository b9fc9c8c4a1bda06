"""More processes of one study on this machine: each joins it as a process of another machine would."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pagegen
from pagegen.errors import PagegenError
from pagegen.tuning.machine import working

TERMINATED = 128 + signal.SIGTERM  # the exit status of one that gave its trial back when it was told to end
SECONDS_TO_END = 60.0  # for giving back a trial: a compiler or a driver of the gate may have to be waited for


@contextlib.contextmanager
def crew(
    count: int, study: str, storage: str, budget: float | None, say: Callable[[str], None] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs `count` processes that take part in a study, until the block is left; then they give their trials back.

    They are fresh interpreters, and end with this process however it ends. `say` is told why one ended before.
    """
    request = json.dumps({"study": study, "storage": storage, "budget": budget, "parent": os.getpid()})
    with contextlib.ExitStack() as stack:
        members = []
        for _ in range(count):
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            members.append((_start(request, errors.fileno()), errors))
        try:
            yield [process for process, _ in members]
        finally:
            for process, _ in members:
                process.terminate()
            for number, (process, errors) in enumerate(members, 2):
                try:
                    status = process.wait(SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    process.kill()
                    status = process.wait()
                if say and status not in (0, TERMINATED, -signal.SIGTERM, 128 + signal.SIGINT):
                    errors.seek(0)
                    last = errors.read().strip().rpartition("\n")[2]
                    say(f"worker {number} ended with status {status}" + (f": {last}" if last else ""))


def _start(request: str, errors: int) -> subprocess.Popen[str]:
    root = str(Path(pagegen.__file__).parents[1])  # found there even if pagegen is not installed
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", "from pagegen.tuning.crew import serve; serve()"],
        stdin=subprocess.PIPE,  # not in the arguments, which everybody sees: a storage may have a password
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin
    process.stdin.write(request)
    process.stdin.close()
    return process


def serve() -> None:
    """A member of the crew: joins the study that stands on its stdin."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinds: the trial is given back
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    request = json.load(sys.stdin)
    if os.getppid() != request["parent"]:
        return
    try:
        join = _loaded_join()
        join(request["study"], request["storage"], budget=request["budget"], say=lambda line: None)
    except PagegenError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _loaded_join() -> Callable[..., object]:
    """`join`. Loading it takes a core for seconds, on which another may be timing."""
    with working(say=lambda line: None):
        from pagegen.tuning.joining import join

        return join
