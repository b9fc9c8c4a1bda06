"""`pagegen tune` from one end to the other: a package that loads, a record that adds up, a run that can be continued."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagegen import tune
from pagegen.catalog import template_for
from pagegen.check import CheckReport, check_kernels, check_variant
from pagegen.errors import ConfigError, GateError, SpecError
from pagegen.loader import fingerprint, read_manifest
from pagegen.package import install_package, load_package
from pagegen.records import BatchShape, DispatchTable, Evaluation, Status
from pagegen.render import Source
from pagegen.space import Config
from pagegen.spec import Op, Phase, parse_slug
from pagegen.target import Fingerprint, best_cpu
from pagegen.tuning import evaluate, job, joining, measure, workloads
from pagegen.tuning.decide import Decision, decide
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Measurement
from pagegen.tuning.record import Record
from pagegen.tuning.replay import replay
from pagegen.tuning.study import BucketStudy
from tests.cli.helpers import run
from tests.documented import documented, top

SLUG = "fp32-d8-h2x1-b4-NHD"
ROOT = Path(__file__).parents[2]


def presets(folder: Path, points: dict[Phase, str]) -> Path:
    """The folder, with a preset of one batch for each phase."""
    for phase, point in points.items():
        (folder / f"{phase}.yaml").write_text(f"format: 1\nphase: {phase}\npoints: {{{point}: 1}}\n")
    return folder


@pytest.fixture
def quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small batch a phase, short rounds, rough intervals, nothing put into the user's package cache."""
    names = {Phase.DECODE: "2x1@37", Phase.PREFILL: "1x7@19", Phase.MIXED: "2x1@37+1x7@19"}
    monkeypatch.setattr(workloads, "PRESETS", presets(tmp_path_factory.mktemp("presets"), names))
    monkeypatch.setattr(job, "FINAL_SECONDS", 0.02)
    monkeypatch.setattr(job, "CONTEST_SECONDS", 0.02)
    monkeypatch.setattr(measure, "RESAMPLES", 50)
    monkeypatch.setattr(job, "install_package", lambda path: path)


@pytest.fixture
def untimed(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quick`, and every config passes and takes as long as the others, without a look: what is kept of it is the claim."""

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, environment=self.environment, source=self.source_of(config))

    def compare(self: Evaluator, configs: dict[str, Config], anchor: str, phase: Phase, *_: object, **__: object) -> object:
        return {point: Measurement(anchor, dict.fromkeys(configs, (1.0,) * 5)) for point in self.workloads[phase].points}

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", compare)


@pytest.mark.usefixtures("quick")
def test_a_run_ends_with_a_package_and_a_record_that_adds_up(tmp_path: Path) -> None:
    first = tune(f"decode-{SLUG}", trials=1, out=tmp_path)
    assert first.document["trials"] == {"resumed": 0, "new": 1, "lost": 0}
    assert not first.winners[0].confirmed and first.winners[0].kernel == "attend_0"  # only the default was tried
    torch.manual_seed(0)
    result = tune(SLUG, trials=4, out=tmp_path)
    document = result.document
    assert document["trials"] == {"resumed": 1, "new": 3, "lost": 0}
    assert sum(document["counts"].values()) == 4
    assert 0 < document["gate"]["median"] <= document["gate"]["longest"]
    assert document.keys() == top(documented("tune.json"))
    assert [winner["phase"] for winner in document["winner"]] == ["decode", "prefill", "mixed"]
    assert {row["name"] for row in document["rows"]} == {"tuned", "default", "sdpa_gather", "sdpa_gqa", "sdpa_folded"}
    folder = tmp_path / best_cpu().slug / SLUG
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert all(line.keys() == documented("trials.jsonl") | {"study", "trial"} for line in lines)
    assert len(lines) == 4 and len({(line.pop("study"), line.pop("trial")) for line in lines}) == 4
    assert all(Evaluation.from_dict(line).environment["hardware"] for line in lines)
    assert json.loads((folder / "tune.json").read_text()) == json.loads(json.dumps(document))
    untried = [json.loads(line) for line in (folder / "unevaluated.jsonl").read_text().splitlines()]
    assert all(each["status"] in ("REFUSED", "DUPLICATE") and each["reason"] for each in untried)
    report = result.report.read_text()
    assert "sdpa folded" in report and "PASSED" in report and "s a candidate after compilation" in report
    recorded = (folder / "tune.json").read_bytes()
    assert not replay(folder).differences and (folder / "tune.json").read_bytes() == recorded
    assert result.report.read_text() == report
    loaded = load_package(result.package)
    assert check_kernels(loaded).passed
    rows = DispatchTable.from_dict(loaded.manifest["dispatch"]["attend"])
    assert rows.fallback == "attend_0" and [row.phase for row in rows.rows] == list(Phase)


@pytest.mark.usefixtures("untimed")
def test_a_deterministic_spec_gets_one_kernel_for_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_slug(f"{SLUG}-det")[0]
    other = template_for(Op.ATTEND, spec, best_cpu()).space(spec, best_cpu()).config({"tile_kv": 16})

    def favour(record: Record) -> Decision:
        (winner,) = decide(record).winners
        winner = dataclasses.replace(winner, config=other, bucket=dataclasses.replace(winner.bucket, kernel="attend_1"))
        return dataclasses.replace(decide(record), winners=(winner,))

    monkeypatch.setattr(job, "decide", favour)
    result = tune(spec, trials=1, out=tmp_path)
    assert [winner.phase for winner in result.winners] == [Phase.MIXED]
    table = DispatchTable.from_dict(load_package(result.package).manifest["dispatch"]["attend"])
    shapes = [BatchShape(phase, 1, None, 1) for phase in Phase]
    assert set(map(table.select, shapes)) == {"attend_1"} and table.fallback == "attend_0"


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"spec": "fp32-d8-h2x1-b4-auto"}, SpecError, "--layout"),
        ({"trials": 2}, ConfigError, "--trials 2"),
        ({"trials": 0, "phase": Phase.DECODE}, ConfigError, "--trials 0"),
        ({"budget": 0.0}, ConfigError, "--budget"),
        ({"budget": float("nan")}, ConfigError, "--budget"),
        ({"target": "cuda:sm_90"}, ConfigError, "cuda:sm_90"),
        ({"target": "cpu:none"}, ConfigError, "--target"),
        ({"out": "/proc/nowhere"}, ConfigError, "--out"),
        ({"storage": "/proc/nowhere/journal.log"}, ConfigError, "--storage"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word) as caught:
        tune(**{"spec": SLUG, "out": tmp_path, **changes})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_killed_run_is_continued_by_the_same_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pagegen", "tune", f"decode-{SLUG}", "--trials", "6", "--out", str(tmp_path), "--json"]
    env = {**os.environ, "PAGEGEN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    journal = tmp_path / best_cpu().slug / SLUG / "journal.log"
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as tuner:
        while not journal.exists() or journal.read_text().count('"evaluation"') < 3:
            assert tuner.poll() is None
            time.sleep(0.05)
        os.kill(tuner.pid, signal.SIGKILL)
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    trials = document["trials"]
    assert trials["resumed"] >= 3 and trials["lost"] <= 1 and trials["resumed"] + trials["new"] == 6
    assert sum(document["counts"].values()) == 6
    again = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["trials"] == {"resumed": 6, "new": 0, "lost": 0}


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_finished_and_gives_back_the_rest(number: int, status: int, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pagegen", "tune", f"decode-{SLUG}", "--trials", "30", "--out", str(tmp_path)]
    env = {**os.environ, "PAGEGEN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    folder = tmp_path / best_cpu().slug / SLUG
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as tuner:
        while not (folder / "journal.log").exists() or (folder / "journal.log").read_text().count('"evaluation"') < 2:
            assert tuner.poll() is None
            time.sleep(0.05)
        os.killpg(tuner.pid, number)
        assert tuner.wait(timeout=60) == status
    assert len((folder / "trials.jsonl").read_text().splitlines()) >= 2


@pytest.mark.usefixtures("untimed")
def test_an_interrupted_rerun_leaves_the_record_of_the_run_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tune(SLUG, trials=3, out=tmp_path).report.parent
    before = {path.name: path.read_bytes() for path in folder.glob("t*.json*")}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_last_rounds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(f"decode-{SLUG}", trials=2, out=tmp_path)
    assert {path.name: path.read_bytes() for path in folder.glob("t*.json*")} == before and len(before) == 3
    assert not replay(folder).differences
    done = tune(f"decode-{SLUG}", trials=2, out=tmp_path).document
    assert done["trials"] == {"resumed": 2, "new": 0, "lost": 0} and done["carried"] == {"prefill": 1, "mixed": 1}


# --- the default ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_default_that_no_trial_began_with_is_gated_before_it_is_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated: list[object] = []

    def noted(source: Source) -> CheckReport:
        gated.append(source.variant.config.to_dict())
        return check_variant(source)

    monkeypatch.setattr(evaluate, "check_variant", noted)
    result = tune(f"decode-{SLUG}", trials=1, budget=1e-9, out=tmp_path)
    why = "the budget of 1e-09 s ended the search after 0 of 1 trials"
    assert result.document["stopped"] == {"decode": why} and f"search for decode ended early: {why}." in result.report.read_text()
    assert sum(result.document["counts"].values()) == 0 and gated == [result.winners[0].config.to_dict()]
    monkeypatch.setattr(evaluate, "check_variant", lambda source: CheckReport(Status.INCORRECT, 1))
    with pytest.raises(GateError, match="INCORRECT"):
        tune(f"decode-{SLUG}", trials=1, budget=1e-9, out=tmp_path / "wrong")
    assert not list(tmp_path.glob("wrong/**/package"))


@pytest.mark.usefixtures("quick")
def test_a_default_that_killed_its_process_is_not_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(found: dict[str, BucketStudy], *_: object, **__: object) -> None:
        found["decode"]._record_deadly(found["decode"].space.default, 3)

    monkeypatch.setattr(job, "search", died)
    with pytest.raises(GateError, match=r"died 3 times.*--study again") as caught:
        tune(f"decode-{SLUG}", trials=1, out=tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("**/package"))


@pytest.mark.usefixtures("quick")
def test_a_default_that_fails_the_gate_ends_with_exit_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "check_variant", lambda source: CheckReport(Status.INCORRECT, 1))
    result = run("tune", f"decode-{SLUG}", "--trials", "1", "--out", str(tmp_path))
    assert result.status == 1 and "nothing to tune against" in result.stderr and result.stderr.count("\n") == 1


# --- a phase at a time ------------------------------------------------------------------------------------------------


def phases_of(package: Path) -> list[Phase]:
    """Those that the dispatch table of a package has rows for."""
    return [row.phase for row in DispatchTable.from_dict(read_manifest(package)["dispatch"]["attend"]).rows]


def test_a_run_without_a_new_trial_says_that_it_decides_anew(tmp_path: Path) -> None:
    now = {"trials": {"new": 0}, "dispatch": {"decode": {"rows": 1}}}
    assert job._redecided(tmp_path, now) == [], "nothing is replaced"
    (tmp_path / "tune.json").write_text(json.dumps({"dispatch": {"decode": {"rows": 3}}}))
    assert job._redecided(tmp_path, now) == ["no new trial: the finals were timed again, and decide anew; decode 3 rows before, 1 now"]
    assert job._redecided(tmp_path, now | {"trials": {"new": 1}}) == []


@pytest.mark.usefixtures("untimed")
def test_a_phase_that_is_tuned_by_itself_keeps_the_others(tmp_path: Path) -> None:
    whole = tune(SLUG, trials=6, out=tmp_path)
    assert "carried" not in run("package", "show", str(whole.package)).stdout
    said: list[str] = []
    one = tune(f"decode-{SLUG}", trials=3, out=tmp_path, say=said.append)
    folder = one.report.parent
    assert said == [f"prefill and mixed: kept as in the record in {folder}"]
    assert one.document["carried"] == {"prefill": 2, "mixed": 2} and one.document["trials"] == {"resumed": 2, "new": 1, "lost": 0}
    assert sum(one.document["counts"].values()) == 7 and "prefill 2" in one.report.read_text()
    assert json.dumps(one.document["workload"]) == json.dumps(whole.document["workload"])
    for name in ("winner", "rows"):  # shares of the roofline, too: they are of the limits that their own run measured
        was, now = ([row for row in each.document[name] if row["phase"] != "decode"] for each in (whole, one))
        assert [{**row, "kernel": ""} for row in was] == [{**row, "kernel": ""} for row in now]
    assert phases_of(one.package) == phases_of(whole.package) == list(Phase)
    carried = "carried over from an earlier run, with its trials: prefill 2, mixed 2"
    assert carried in run("package", "show", str(one.package)).stdout
    recorded = (folder / "tune.json").read_bytes()
    assert not replay(folder).differences and (folder / "tune.json").read_bytes() == recorded
    again = tune(f"prefill-{SLUG}", trials=2, out=tmp_path)
    assert again.document["carried"] == {"decode": 3, "mixed": 2} and phases_of(again.package) == list(Phase)
    assert again.document["rooflines"] == {"decode": one.document["roofline"], "mixed": whole.document["roofline"]}


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda patch, _: patch.setattr(evaluate, "fingerprint", lambda target: Fingerprint(fingerprint(target).hardware, {"compiler": "new"})),
            "toolchain.compiler: was ",
        ),
        (lambda patch, _: patch.setattr(joining, "source_digest", lambda template: "new"), "pagegen or its templates are others now"),
        (
            lambda patch, folder: patch.setattr(workloads, "PRESETS", presets(folder, dict.fromkeys(Phase, "1x1@8"))),
            "workload: was ",
        ),
    ],
    ids=["toolchain", "templates", "batches"],
)
def test_what_does_not_hold_any_more_is_not_kept_and_the_loss_is_explained(
    tmp_path: Path, change: Callable[[pytest.MonkeyPatch, Path], None], why: str
) -> None:
    tune(f"prefill-{SLUG}", trials=1, out=tmp_path)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        change(patch, tmp_path)
        result = tune(f"decode-{SLUG}", trials=1, out=tmp_path, say=said.append)
    assert [line for line in said if line.startswith("prefill: lost from the record") and f"({why}" in line and "\n" not in line]
    assert phases_of(result.package) == [Phase.DECODE] and not result.document["carried"]
    assert not replay(result.report.parent).differences


@pytest.mark.usefixtures("untimed")
def test_what_an_installed_package_loses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(job, "install_package", install_package)
    tune(f"prefill-{SLUG}", trials=1, out=tmp_path / "one")
    said: list[str] = []
    result = tune(f"decode-{SLUG}", trials=1, out=tmp_path / "other", say=said.append)
    assert [line for line in said if line.startswith("prefill: untuned in the package that is installed now")]
    assert result.installed and phases_of(result.installed) == [Phase.DECODE]
    said.clear()
    tune(f"mixed-{SLUG}", trials=1, out=tmp_path / "other", say=said.append)
    assert said == [f"decode: kept as in the record in {result.report.parent}"]
    seen = tmp_path / "seen.yaml"
    seen.write_text("format: 1\npoints: {1x1@8: 1}\n")
    tune(SLUG, workload=str(seen), trials=1, out=tmp_path / "other", say=said.append)
    assert [line for line in said if line.startswith("workload default: the package installed for it is replaced by this one, for seen;")]
