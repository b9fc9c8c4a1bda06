"""How far something is, for who pipes the output: a line now and then on stderr, nothing on stdout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagegen.cli import _common
from pagegen.cli._common import PROGRESS_LINES, progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What says the time, in seconds; `now` is to be set."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(_common, "time", clock)
    return clock


def test_without_a_terminal_there_is_a_line_of_progress_now_and_then(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("tuning s", 40) as advance:
        for trial in range(1, 41):
            clock.now += PROGRESS_LINES / 3
            advance(trial, f"best so far: decode 1.{trial}x")
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines[:2] == ["tuning s: 8%, best so far: decode 1.3x", "tuning s: 15%, best so far: decode 1.6x"]
    assert len(lines) == 13 and not shown.out


def test_what_is_soon_done_shows_no_progress(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("checking", 2) as advance:
        for done in (1, 2):
            clock.now += PROGRESS_LINES / 3
            advance(done, "")
    assert not capsys.readouterr().err
