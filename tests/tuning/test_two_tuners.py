"""Two `pagegen tune` at once on one machine never time together; and where they did, this would notice.

In every run processes with the lock (test_machine) and evaluators (test_throughput) do not, which takes less.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLUG = "decode-fp32-d8-h2x1-b4-NHD"
SECONDS = 540  # for both, where others use the cores; alone they take 20
Sample = tuple[str, float, float]  # whose, begin, end


def samples(tmp_path: Path, locks: Sequence[Path], trials: int) -> list[Sample]:
    """What two tuners timed that began in the same moment, in the order of the clock; each holds one of the locks."""
    (tmp_path / "small.yaml").write_text("format: 1\nphase: decode\npoints: {2x1@37: 1, 3x1@80: 2}\n")
    log, start = tmp_path / "log", tmp_path / "start"
    words = [SLUG, "--trials", str(trials), "--workload", str(tmp_path / "small.yaml")]
    tuners = []
    for name, lock in zip("ab", locks, strict=True):
        command = [sys.executable, "-m", "tests.tuning.logged_tune", str(log), name, str(start), "tune", *words]
        env = {**os.environ, "PAGEGEN_TIMING_LOCK": str(lock), "PYTHONPATH": str(ROOT)}
        command += ["--out", str(tmp_path / name)]
        tuners.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        while not all(start.with_name(f"start.{name}").exists() or tuner.poll() is not None for name, tuner in zip("ab", tuners, strict=True)):
            time.sleep(0.01)
        start.touch()
        said = [tuner.communicate(timeout=SECONDS)[1] for tuner in tuners]
    finally:
        for tuner in tuners:
            tuner.kill()
    assert [tuner.returncode for tuner in tuners] == [0, 0], said
    lines = [line.split() for line in log.read_text().splitlines()]
    return sorted(((name, float(begin), float(end)) for name, begin, end in lines), key=lambda sample: sample[1])


def together(timed: Sequence[Sample]) -> int:
    """Pairs of samples, one after the other, of which the second began before the first had ended."""
    ends: dict[str, float] = {}
    found = 0
    for name, begin, end in timed:
        found += any(begin < other for its, other in ends.items() if its != name)
        ends[name] = max(end, ends.get(name, end))
    return found


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_two_tuners_at_once_never_time_together(tmp_path: Path) -> None:
    timed = samples(tmp_path, [tmp_path / "lock"] * 2, 3)
    owners = [name for name, _, _ in timed]
    turns = sum(one != other for one, other in itertools.pairwise(owners))
    assert turns >= 4 and min(owners.count("a"), owners.count("b")) > 100  # they had to take turns, roofline and trials
    assert together(timed) == 0


def test_a_sample_that_begins_before_anothers_end_is_seen() -> None:
    alone = [("a", 0.0, 2.0), ("b", 2.0, 3.0), ("b", 3.0, 4.0), ("a", 4.0, 5.0)]
    assert together(alone) == 0
    assert together([*alone, ("b", 4.9, 6.0)]) == 1


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_with_a_lock_each_they_would_and_it_is_seen(tmp_path: Path) -> None:
    assert together(samples(tmp_path, [tmp_path / "one", tmp_path / "other"], 1)) > 0
