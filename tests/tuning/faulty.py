"""What a test plants in timing processes: candidates that take their process down, for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagegen.build import build
from pagegen.check import CheckReport
from pagegen.render import Source
from pagegen.tuning import evaluate


def plant(how: str) -> None:
    """In the timing process: what is built with tile_kv=16 ends `how` when it is called, or judged; other things pass."""
    def planted(source: Source) -> Any:
        return _ENDS[how] if source.variant.config.to_dict()["tile_kv"] == 16 else build(source)

    def judged(source: Source, *_: object) -> Any:
        if source.variant.config.to_dict()["tile_kv"] == 16:
            _ENDS[how]()
        return CheckReport.of(1, [])

    patch = pytest.MonkeyPatch()  # for the process's life
    patch.setattr(evaluate, "build", planted)
    patch.setattr(evaluate, "check_variant", judged)


def before_the_timer(patch: pytest.MonkeyPatch, code: str) -> None:
    """From now on, timing processes run `code` before they serve."""
    start = subprocess.Popen

    def started(words: list[str], **options: Any) -> Any:
        return start([*words[:-1], f"{code}; {words[-1]}"], **options)

    patch.setattr(evaluate, "subprocess", SimpleNamespace(Popen=started, DEVNULL=subprocess.DEVNULL))


def _exits(*_: object, **__: object) -> None:
    sys.exit(3)


def _has_no_memory(*_: object, **__: object) -> None:
    raise MemoryError("out of resources")


def _times_out(*_: object, **__: object) -> None:
    raise TimeoutError("the driver gave up")


def _crashes(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


_ENDS: dict[str, Callable[..., None]] = {
    "SystemExit": _exits,
    "MemoryError": _has_no_memory,
    "TimeoutError": _times_out,
    "segfault": _crashes,
}
