"""`pagegen tune` as a process of its own that also notes when it times: each sample, from its begin to its end.

`python -m tests.tuning.logged_tune LOG NAME START WORDS...` waits until the file START is there, and adds lines
`NAME BEGIN END` to LOG, in seconds of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pagegen import cli
from pagegen.tuning import contest, evaluate, job, measure, roofline

from .faulty import before_the_timer


def plant(log: str, name: str) -> None:
    """Has every sample that this process times noted; small pools, as how fast it is does not matter."""
    timed = measure.HostClock.__call__

    def noted(clock: measure.HostClock, call: measure.Call, count: int) -> float:
        begin = time.monotonic()
        seconds = timed(clock, call, count)
        with Path(log).open("a") as file:
            file.write(f"{name} {begin} {time.monotonic()}\n")
        return seconds

    patch = pytest.MonkeyPatch()  # for this process's life
    patch.setattr(measure.HostClock, "__call__", noted)
    for module in (contest, evaluate):
        patch.setattr(module, "cold_bytes_on", lambda device: 1 << 20)
    patch.setattr(roofline, "cold_bytes", lambda caches, free=None: 1 << 22)
    patch.setattr(roofline, "CALL_BYTES", 1 << 20)
    patch.setattr(job, "ROOFLINE_SECONDS", 0.3)


def main(log: str, name: str, start: str, *words: str) -> int:
    """The command's exit status."""
    plant(log, name)
    with pytest.MonkeyPatch.context() as patch:
        before_the_timer(patch, f"from tests.tuning.logged_tune import plant; plant({log!r}, {name!r})")
        Path(f"{start}.{name}").touch()
        while not Path(start).exists():
            time.sleep(0.005)
        return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
