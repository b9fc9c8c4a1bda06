"""The commands `tune` and `bench kernel` on the command line."""

import contextlib
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagegen.cli import tune
from pagegen.package import write_package
from pagegen.records import DispatchTable, Evaluation, Status
from pagegen.spec import PAGED_OPS, parse_slug
from pagegen.target import best_cpu, detect
from pagegen.tuning import job, joining, roofline
from pagegen.tuning.job import _packaged
from pagegen.tuning.machine import PINNED
from pagegen.tuning.search import Progress
from tests.cli.helpers import run
from tests.documented import documented, keys_of

SLUG = "fp32-d8-h2x1-b4-NHD"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of default configs."""
    spec, target = parse_slug(SLUG)[0], best_cpu()
    kernels = {op: _packaged(op, spec, target, None) for op in PAGED_OPS}
    dispatch = {op: DispatchTable((), fallback=op.value) for op in PAGED_OPS}
    named = {op.value: kernel for op, kernel in kernels.items()}
    folder = tmp_path_factory.mktemp("package")
    return write_package(folder, spec=spec, target=target, kernels=named, dispatch=dispatch, evidence={})


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many `bench` asks torch for; it gets one, as do the tests after it. It measures the roofline in little time."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(roofline, "measure_roofline", functools.partial(roofline.measure_roofline, seconds=0.01))
    return asked


def test_bench_times_the_package_against_its_default_and_three_sdpa_forms(package: Path, threads: list[int]) -> None:
    result = run("bench", "kernel", str(package), "--phase", "mixed", "--seconds", "0.01", "--json")
    assert result.status == 0, result.stderr
    assert keys_of(result.document, "rows") == documented("bench kernel --json")
    assert threads == [detect().threads]
    rows = result.document["rows"]
    names = ["package", "default", "sdpa_gather", "sdpa_gqa", "sdpa_folded"]
    points = list(dict.fromkeys(row["point"] for row in rows))
    assert len(points) >= 2 and [row["name"] for row in rows] == names * len(points)
    for row in rows:
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["gbs"] > 0 and row["gflops"] > 0 and row["ratio"]["median"] > 0
    assert all(row["ratio"]["median"] == 1.0 for row in rows if row["name"] == "package")


@pytest.mark.parametrize(("set_by_user", "pinned"), [({}, True), ({"OMP_PROC_BIND": "false"}, False)])
def test_bench_times_with_the_tuners_openmp_settings_but_for_what_the_user_has_set(
    package: Path, set_by_user: dict[str, str], pinned: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in PINNED}
    words = ["bench", "kernel", str(package), "--against", "default", "--phase", "mixed", "--seconds", "0.01", "--json"]
    command = [sys.executable, "-m", "pagegen", *words]
    found = subprocess.run(command, env={**environment, **set_by_user}, capture_output=True, text=True, check=True)
    document = json.loads(found.stdout)
    wanted = {**PINNED, **set_by_user}
    assert {name: document["openmp"].get(name) for name in ("OMP_PLACES", "OMP_PROC_BIND")}.items() <= wanted.items()
    assert document["conditions"]["pinned"] is pinned


@pytest.mark.usefixtures("threads")
def test_bench_prints_a_table_for_people(package: Path) -> None:
    result = run("bench", "kernel", str(package), "--against", "default", "--phase", "prefill", "--seconds", "0.01")
    assert result.status == 0 and "default" in result.stdout and "sdpa" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "kernel", "nowhere"], "nowhere"),
        (["bench", "kernel", "nowhere", "--against", "flex"], "--against"),
        (["tune"], "name one spec"),
        (["tune", "fp32-d7-h2x1-b4-NHD"], "head_dim"),
        (["tune", SLUG, "--trials", "1"], "--trials 1"),
        (["tune", SLUG, "--workers", "0"], "--workers 0"),
        (["tune", SLUG, "--sampler", "luck"], "allowed: tpe, gp, random, brute"),
        (["tune", SLUG, "--join", "other", "--storage", "x"], "SPEC would do nothing with --join"),
        (["tune", SLUG, "--storage", ""], "--storage is empty"),
        (["tune", SLUG, "--study", " "], "--study is empty"),
        (["tune", "--join", "", "--storage", "x"], "--join is empty"),
        (["tune", "--join", "other", "--storage", ""], "--storage is empty"),
        (["tune", "--join", "other"], "name --storage"),
        (["tune", "--join", "other", "--storage", "journal.log"], "no file journal.log"),
        (["tune", "--join", "other", "--storage", "sqlite:///nowhere.db"], "no file nowhere.db"),
        (["tune", "--join", "other", "--storage", "sqlite:////proc/x.db"], "--storage"),
        (["tune", SLUG, "--target", "cuda:sm_90"], "`pagegen tune --static` work without the device"),
        (["tune", SLUG, "--target", "cuda:sm_90", "--roofline-share", "0.9"], "--roofline-share 0.9"),
    ],
)
def test_a_wrong_request_ends_with_2_and_one_line(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.status == 2 and said in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # refused before anything was written


@pytest.mark.parametrize(
    ("words", "idle", "takes"),
    [
        (["--join", "s", "--storage", "u", "--trials", "5"], "--trials", "--budget, --join, --json, --storage, --workers;"),
        (["--join", "s", "--storage", "u", "--patience", "20"], "--patience", "--workers"),  # the default, but it was asked for
        (["--join", "s", "--storage", "u", "--block-size", "32"], "--block-size", "--workers"),
        (["--join", "s", "--storage", "u", "--model", "m", "--cold-start"], "--model and --warm-start", "--workers"),
        ([SLUG, "--static", "--storage", "u", "--sampler", "gp"], "--sampler and --storage", "--top"),
        ([SLUG, "--static", "--shortlist", "f"], "--shortlist", "--workload"),
        ([SLUG, "--replay", "--workers", "2"], "--workers", "SPEC, --json, --out, --replay, --target, --workload;"),
        ([SLUG, "--replay", "--static"], "--static", "--out"),
        ([".", "--replay", "--target", "cpu"], "--target", "SPEC, --json, --replay;"),
        ([SLUG, "--top", "3"], "--top", "--shortlist"),
        ([SLUG, "--layouts", "NHD"], "--layouts", "--storage"),
        ([SLUG, "--layout", "auto", "--workload", "chat", "--top", "3"], "--top", "--block-sizes"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(
    words: list[str], idle: str, takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("tune", *words)
    assert result.status == 2 and f"pagegen: {idle} would do nothing with " in result.stderr, result.stderr
    assert takes in result.stderr and result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_every_flag_of_tune_counts_somewhere() -> None:
    assert inspect.signature(tune.command).parameters.keys() - {"context", "json"} == frozenset().union(*tune.TAKES.values())


def test_who_joins_sees_how_far_the_study_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def joined(study: str, storage: str, *, watch: Callable[[Progress], None], **_: object) -> dict[str, Any]:
        best = Evaluation(Status.PASSED, {}, score=0.8)
        watch(Progress("decode", best, best, 10, 40))
        return {"made": 1, "trials": {}, "counts": {}}

    monkeypatch.setattr(joining, "join", joined)
    monkeypatch.setattr(tune, "progress", lambda *_: contextlib.nullcontext(lambda *said: seen.append(said)))
    assert run("tune", "--join", "s", "--storage", "postgresql://u").status == 0
    assert seen == [(25, "best so far: decode 1.25x")]


def test_tune_json_is_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"winner": [], "counts": {}, "trials": {}, "ancestors": {}, "package": "p", "report": "r"}
    made = job.TuneResult(tmp_path, tmp_path, tmp_path, (), (), None, document)
    monkeypatch.setattr(job, "tune", lambda spec, **options: made)
    result = run("tune", SLUG, "--json")
    assert result.status == 0 and json.loads(result.stdout) == document
