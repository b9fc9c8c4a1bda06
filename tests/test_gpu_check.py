"""Claims about scripts/gpu_check.sh: it runs from end to end without a GPU, and refuses in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts/gpu_check.sh"


def check(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, timeout=280, env=environment, check=False)


@pytest.mark.triton
def test_the_dry_run_judges_inspects_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    result = check("--dry-run", "--out", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert result.returncode == 0, result.stdout + result.stderr
    assert record["passed"] and record["complete"] and record["dry_run"] and record["format"] == 1
    assert {row["op"] for row in record["correctness"]} == {"attend", "write_kv", "copy_blocks"}
    assert {row["kernel"] for row in record["resources"]} >= {"decode", "merge"}
    assert set(record["timings"][0]["speedup"]) == {"sdpa_gather", "sdpa_gqa", "sdpa_folded"}


@pytest.mark.parametrize(
    ("words", "message"), [((), "usage:"), (("--out",), "needs a folder"), (("--fast", "--out", "x"), "unknown argument --fast")]
)
def test_a_wrong_command_line_is_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    result = check(*words)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = check("--out", str(tmp_path))
    assert result.returncode == 2 and "--dry-run needs none" in result.stderr
