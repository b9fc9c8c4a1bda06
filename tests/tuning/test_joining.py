"""Who joins a study evaluates its configs if its trials would compare, and is told field by field why not otherwise."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagegen.errors import ConfigError
from pagegen.spec import KernelSpec, Phase
from pagegen.target import best_cpu
from pagegen.tuning import joining
from pagegen.tuning.crew import crew
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.joining import Job, differences, join, studies
from pagegen.tuning.machine import NO_DISTURBANCE
from pagegen.tuning.measure import Interval
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.storage import open_storage
from pagegen.tuning.workload import Point, Workload
from tests.documented import documented

ROOT = Path(__file__).parents[2]
SPEC = KernelSpec(q_heads=2, kv_heads=1, head_dim=8, block_size=4)
WORKLOADS = {Phase.DECODE: Workload(Phase.DECODE, (Point.parse("2x1@37"),))}


def job(total: int = 1) -> Job:
    return Job("ours", SPEC, best_cpu().name, WORKLOADS, {Phase.DECODE: total}, "tpe", 0, StopRule())


def begin(url: str, total: int = 1) -> None:
    """What `tune` does first."""
    with (
        Evaluator(SPEC, best_cpu(), WORKLOADS) as evaluator,
        studies(open_storage(url, Path.cwd()), evaluator, job(total)) as found,
    ):
        assert list(found) == ["decode"]


def test_a_job_survives_the_storage() -> None:
    one = Interval(1e9, 1e9, 1e9)
    limits = Roofline({"memory": {1: 9}}, {"memory": {1: one}}, {1: one}, {}, NO_DISTURBANCE)
    for roofline in (None, limits):
        whole = dataclasses.replace(job(), roofline=roofline)
        assert Job.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_who_joins_evaluates_what_is_left(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    begin(url)
    first, second = join("ours", url), join("ours", url)
    assert first.keys() == documented("tune --join --json")
    assert first["made"] == 1 and first["trials"] == {"resumed": 0, "new": 1, "lost": 0} and first["counts"]["PASSED"] == 1
    assert second["made"] == 0 and second["trials"] == {"resumed": 1, "new": 0, "lost": 0}


def test_another_machine_is_refused_field_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, identity = str(tmp_path / "journal.log"), joining.identity
    begin(url)

    def elsewhere(evaluator: Evaluator, phase: Phase) -> dict[str, object]:
        found = identity(evaluator, phase)
        return {**found, "hardware": {**found["hardware"], "device": "another", "quota": 0.5}, "templates": "older"}

    monkeypatch.setattr(joining, "identity", elsewhere)
    with pytest.raises(ConfigError) as caught:
        join("ours", url)
    said = str(caught.value)
    assert "hardware.device: " in said and "there, another here" in said and "hardware.quota: " in said and "templates: " in said
    assert "threads" not in said and "\n" not in said
    begin(url)  # opens a study of its own beside it, which is joined
    assert join("ours", url)["made"] == 1


def test_a_study_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.log")
    begin(url)
    with pytest.raises(ConfigError, match=r"no study theirs in .*which has: ours"):
        join("theirs", url)


def test_a_study_for_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.log")
    backend = open_storage(url, tmp_path)
    study = backend.create_new_study([1], "ours/decode/x")  # type: ignore[list-item]
    absent = {**job().to_dict(), "target": "cpu:neon" if best_cpu().machine != "aarch64" else "cpu:avx2", "opened": 1.0}
    backend.set_study_user_attr(study, "job", absent)
    backend.set_study_user_attr(study, "identity", {"workload": WORKLOADS[Phase.DECODE].digest})
    with pytest.raises(ConfigError, match="not present here"):
        join("ours", url)


@pytest.mark.parametrize(
    "changed",
    [
        {"opened": "x"},
        {"totals": {"decode": "x"}},
        {"totals": {"mixed": 1}},
        {"sampler": "luck"},
        {"rule": {"patience": "x"}},
        {"rule": {"newer": 1}},
        {"spec": None},
        {"target": "tpu:v9"},
        {"workloads": None},
    ],
    ids=str,
)
def test_a_study_that_another_pagegen_opened_is_named_and_blocks_no_other(changed: dict[str, object], tmp_path: Path) -> None:
    url = str(tmp_path / "journal.log")
    backend = open_storage(url, tmp_path)
    study = backend.create_new_study([1], "ours/decode/x")  # type: ignore[list-item]
    backend.set_study_user_attr(study, "job", {**job().to_dict(), "opened": 1.0, **changed})
    backend.set_study_user_attr(study, "identity", {"workload": WORKLOADS[Phase.DECODE].digest})
    with pytest.raises(ConfigError, match=r"study ours cannot be read \(.*--study"):
        join("ours", url)
    begin(url)
    assert join("ours", url)["made"] == 1


def test_differences_name_nested_fields() -> None:
    assert differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}) == [
        "b.c: 2 there, 4 here",
        "e: None there, 5 here",
    ]


def test_why_a_worker_ended_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with crew(1, "theirs", str(tmp_path / "journal.log"), None, said.append) as members:
        for process in members:
            process.wait(120)
    assert len(said) == 1 and said[0].startswith("worker 2 ended with status 1") and "there is no file" in said[0]


@pytest.mark.long
def test_two_workers_tune_together_and_nobody_is_left(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("format: 1\nphase: decode\npoints: {2x1@37: 1, 3x1@80: 2}\n")
    words = ["tune", "decode-fp32-d8-h2x1-b4-NHD", "--trials", "6", "--workers", "2", "--workload", "small.yaml", "--json"]
    env = {**os.environ, "PAGEGEN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pagegen", *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["trials"] == {"resumed": 0, "new": 6, "lost": 0}, done.stderr
    (journal,) = tmp_path.rglob("journal.log")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    owners = {line["user_attr"]["lease"]["owner"] for line in lines if "lease" in line.get("user_attr", {})}
    assert len(owners) == 2
    assert not [owner for owner in owners if Path(f"/proc/{owner.split(':')[1]}").exists()]
