"""Claims about scripts/gpu_check.sh: it runs from end to end without a GPU, and refuses in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts/gpu_check.sh"


def check(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, timeout=550, env=environment, check=False)


def assert_rows(record: Mapping[str, Any]) -> None:
    """What the parts of a dry run say, by part."""
    assert {row["op"] for row in record["correctness"]} == {"attend", "write_kv", "copy_blocks"}
    assert all(row["cases"] for row in record["correctness"])
    assert {row["kernel"] for row in record["resources"]} >= {"decode", "merge"}
    assert set(record["timings"][0]["speedup"]) == {"sdpa_gather", "sdpa_gqa", "sdpa_folded"}
    assert all("flex" in row["speedup"] and {"flashinfer", "vllm"} <= row["absent"].keys() for row in record["peers"])
    assert record["graphs"][0]["layers"] == 2 and record["graphs"][0]["stand_in"]


def assert_tuned(record: Mapping[str, Any]) -> None:
    listed, *judged = record["tuning"]
    assert listed["candidates"] == 2 and Path(listed["shortlist"]).is_file() and judged
    assert all("default" in row["speedup"] for row in judged)


PARTS_ALONE = """
import json, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import gpu_check

if __name__ == "__main__":
    with gpu_check.started(True, Path(sys.argv[1]), 300.0) as run:
        rows = {{name: [row for words in part.dry for row in part.work(run, *words)] for name, part in gpu_check.PARTS.items() if name != "tuning"}}
    Path(sys.argv[1], "rows.json").write_text(json.dumps(rows))
"""


def run_text(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that imports scripts/gpu_check.py."""
    script = folder / "script.py"
    script.write_text(text.format(scripts=str(SCRIPT.parent)))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "PAGEGEN_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=550, env=environment, check=False
    )


@pytest.mark.triton
def test_parts_give_their_records_without_a_gpu(tmp_path: Path) -> None:
    """In one process, and on one interpreter; what tuning adds, tuning/test_static tries in every run."""
    done = run_text(tmp_path, PARTS_ALONE, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "rows.json").read_text())
    assert_rows(record)
    assert not [row for rows in record.values() for row in rows if row["failures"]]


@pytest.mark.long
@pytest.mark.triton
@pytest.mark.timeout(600)  # where many share few cores; alone it takes one minute
def test_the_dry_run_goes_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    result = check("--dry-run", "--out", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert result.returncode == 0, result.stdout + result.stderr
    assert record["passed"] and record["complete"] and record["dry_run"] and record["format"] == 2
    assert_rows(record)
    assert_tuned(record)
    parts = record["parts"].values()
    assert all(part["complete"] for part in parts) and sum(part["share"] for part in parts) <= 9 * 60 - 20


PLANTED = """
import contextlib, os, signal, sys, time
from pathlib import Path
from unittest.mock import MagicMock
sys.path.insert(0, {scripts!r})
sys.modules.update(dict.fromkeys(("torch", "torch.nn", "torch.nn.functional"), MagicMock()))  # seconds a process, for nothing
import gpu_check

def work(run, how):
    if how == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang": time.sleep(600)
    if how == "raise": raise RuntimeError("an illegal memory access was encountered")
    if how == "refuse": raise gpu_check.PagegenError("not served")
    yield {{"op": how, "cases": 1, "failures": []}}

@contextlib.contextmanager
def started(dry, out, seconds):
    yield gpu_check.Run(None, "cpu", None, dry, out, time.monotonic() + seconds)

def part(share, *pieces, lanes=1):
    return gpu_check.Part(share, work, (), [(piece,) for piece in pieces], lanes)

gpu_check.started, gpu_check.environment, gpu_check.GRACE, gpu_check.CORES = started, lambda *_: {{}}, 0.5, 8
gpu_check.PARTS = {{"hanging": part(15, "e", "hang", "f"), "failing": part(200, "a", "segfault", "b", "raise", "c", "refuse", "d", lanes=2), "last": part(60, "g")}}
if __name__ == "__main__":
    sys.exit(gpu_check.main())
"""


@pytest.mark.triton
def test_what_a_piece_of_work_does_to_its_process_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A crash, an error that may have spoiled the device, a refusal, and a hang, which costs its own part what is left."""
    done = run_text(tmp_path, PLANTED, "--dry-run", "--out", str(tmp_path))
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert done.returncode == 1 and not record["passed"] and not record["complete"], done.stdout + done.stderr
    right = {name: sorted(row["op"] for row in record[name] if not row["failures"]) for name in record["parts"]}
    assert right == {"hanging": ["e"], "failing": list("abcd"), "last": ["g"]}
    failed = {row["spec"]: row["failures"][0]["message"] for name in right for row in record[name] if row["failures"]}
    assert failed == {
        "segfault": "the process ended with SIGSEGV",
        "raise": "RuntimeError: an illegal memory access was encountered",
        "refuse": "PagegenError: not served",
        "hang": "the process gave no answer within its share",
    }
    assert {name: part["complete"] for name, part in record["parts"].items()} == {"hanging": False, "failing": True, "last": True}


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
