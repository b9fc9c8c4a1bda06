"""A command of pagegen as a process of its own that kills itself at one of the moments at which it is about to change a file.

`python -m tests.tuning.doomed_tune FOLDER MOMENT WORDS...` counts what it opens to write, renames, makes or removes below FOLDER,
and dies by SIGKILL before number MOMENT. If it comes to its end, it prints how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from pagegen import cli
from pagegen.tuning import contest, evaluate, job, roofline

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.chmod")


def main(folder: str, moment: int, *words: str) -> int:
    """The command's exit status."""
    passed = 0

    def hook(event: str, about: tuple[object, ...]) -> None:
        nonlocal passed
        changes = event in CHANGES or (event == "open" and isinstance(about[2], int) and about[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and isinstance(about[0], str | Path) and str(about[0]).startswith(folder):
            passed += 1
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:  # small pools: how fast it is does not matter
        for module in (contest, evaluate):
            patch.setattr(module, "cold_bytes_on", lambda device: 1 << 20)
        patch.setattr(roofline, "cold_bytes", lambda caches, free=None: 1 << 22)
        patch.setattr(roofline, "CALL_BYTES", 1 << 20)
        patch.setattr(job, "ROOFLINE_SECONDS", 0.1)
        sys.addaudithook(hook)
        status = cli.main(words)
    print(passed)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
