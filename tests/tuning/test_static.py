"""Claims about tuning without the device: candidates compiled and recorded, a shortlist that fits where it was made for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pagegen.errors import BuildError, ConfigError
from pagegen.records import Evaluation, Status
from pagegen.space import Config
from pagegen.spec import Phase, parse_slug
from pagegen.target import best_cpu, parse_target
from pagegen.tuning import job, static
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Measurement
from pagegen.tuning.shortlist import Shortlist
from pagegen.tuning.static import tune_static
from pagegen.tuning.static_compile import Job, compile_candidate
from pagegen.tuning.workers import Died
from pagegen.tuning.workload import Point, Workload
from pagegen.tuning.workloads import Selection
from tests.cli.helpers import run
from tests.documented import documented

SLUG = "fp16-d16-h2x1-b16-NHD"
SPEC = parse_slug(SLUG)[0]
SM_90 = parse_target("cuda:sm_90")
SELECTION = Selection("one", {Phase.DECODE: Workload(Phase.DECODE, (Point.parse("8x1@64"),))}, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))


def trials(folder: Path) -> list[Evaluation]:
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return [Evaluation.from_dict({name: value for name, value in line.items() if name not in ("study", "trial")}) for line in lines]


@pytest.mark.triton
def test_candidates_for_an_absent_gpu_are_compiled_recorded_and_listed(tmp_path: Path) -> None:
    document = tune_static(SPEC, SM_90, SELECTION, tmp_path / "out", trials=2, workers=1, top=1)
    found = trials(tmp_path / "out")
    assert document["candidates"] == len(found) == 2 and sum(document["counts"].values()) == 2
    assert document["label"] == "not measured" and document["counts"]["PASSED"] == 0 and not document["winner"]
    assert {each.status for each in found} <= {Status.NOT_MEASURED, Status.PRUNED}
    for each in found:
        (used,) = each.kernels.values()
        assert used["registers"] > 0 and used["spills"] == 0 and used["instructions"]["load"] > 0 and 0 < used["occupancy"] <= 1
        assert each.estimate["8x1@64"] > 0 and each.environment["toolchain"]["triton"]
    shortlist = Shortlist.read(Path(document["shortlist"]))
    assert shortlist.configs_for(SPEC, SM_90)[Phase.DECODE][0].to_dict() == found[0].config
    assert shortlist.described(found[0].environment["toolchain"])["toolchain"] == {}
    assert "not measured" in Path(document["report"]).read_text()
    kept = list((tmp_path / "cache/kernels").glob("*/launched-*.json"))
    assert len(kept) == 2  # by source


@pytest.mark.triton
def test_what_was_compiled_once_is_read_from_beside_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegen.catalog import template_for
    from pagegen.spec import Op
    from pagegen.tuning import static_compile

    default = template_for(Op.ATTEND, SPEC, SM_90).space(SPEC, SM_90).default
    job = Job(SPEC, SM_90.name, default, SELECTION.workloads[Phase.DECODE].points)
    first = compile_candidate(job)

    def refuse(*_: object) -> None:
        raise BuildError("compiled again")

    monkeypatch.setattr(static_compile, "compile_call", refuse)
    assert compile_candidate(job) == first and isinstance(first, dict)
    other = dataclasses.replace(job, points=(Point.parse("1x9@9"),))
    assert compile_candidate(other) == "compiled again"  # a failure is a result, in words


def test_a_candidate_that_takes_its_compiler_down_is_a_build_error_and_the_default_must_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs(answers: dict[int, Any]) -> Any:
        return lambda function, jobs, workers, timeout: ((place, answers.get(place, {"8x1@64": ()})) for place in range(len(jobs)))

    monkeypatch.setattr(static, "rank", lambda *_, **__: [])
    monkeypatch.setattr(static, "run_jobs", jobs({1: Died("its process ended with SIGSEGV")}))
    document = tune_static(SPEC, SM_90, SELECTION, tmp_path, trials=3)
    assert document["counts"]["BUILD_ERROR"] == 1 and [each.reason for each in trials(tmp_path)] == [
        "the compiler failed: its process ended with SIGSEGV"
    ]
    monkeypatch.setattr(static, "run_jobs", jobs({0: "no"}))
    with pytest.raises(BuildError, match="default config does not compile"):
        tune_static(SPEC, SM_90, SELECTION, tmp_path, trials=3)


# --- the command line, on this machine's own CPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shortlist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--static` writes for this CPU."""
    out = tmp_path_factory.mktemp("static")
    result = run("tune", f"decode-{SLUG}", "--static", "--trials", "60", "--top", "3", "--out", str(out), "--json")
    assert result.status == 0, result.stderr
    document = result.document
    assert document["candidates"] == 60 and document["counts"]["PRUNED"] > 0
    assert len(document["phases"]["decode"]["rows"]) == 3 and set(document["phases"]["decode"]["pruned"]) == {"duplicate"}
    assert document.keys() == documented("tune --static --json")
    files = {path.name for path in Path(document["shortlist"]).parent.iterdir()}
    assert files == documented("static/") and json.loads(Path(document["shortlist"]).read_text()).keys() == documented("shortlist.json")
    return Path(document["shortlist"])


def test_the_table_for_people_says_that_nothing_was_measured(tmp_path: Path) -> None:
    result = run("tune", f"decode-{SLUG}", "--static", "--trials", "60", "--out", str(tmp_path))
    assert result.status == 0 and "not measured" in result.stdout and "duplicate" in result.stdout and "shortlist" in result.stderr


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda values: "{", "it is not JSON"),
        (lambda values: json.dumps([]), "format None is not known"),
        (lambda values: json.dumps({**values, "format": 2}), "format 2 is not known"),
        (lambda values: json.dumps({**values, "spec": 1}), "spec is 1, not a mapping"),
        (lambda values: json.dumps({**values, "configs": {"decode": [{}]}}), "configs.decode[0].config is missing"),
        (lambda values: json.dumps({**values, "configs": {"decode": []}}), "configs of 'decode' are missing"),
        (lambda values: json.dumps({**values, "configs": {"decode": 5}}), "configs.decode is 5, not a list"),
        (lambda values: json.dumps({**values, "configs": {"decode": [5]}}), "configs.decode[0] is 5, not a mapping"),
        (lambda values: json.dumps({**values, "configs": {"decode": [{"config": {"tile_kv": []}}]}}), "configs.decode[0].config.tile_kv is []"),
        (lambda values: json.dumps({**values, "format": True}), "format True is not known"),
        (lambda values: json.dumps({**values, "configs": {"nap": []}}), "configs of 'nap' are missing, or it is no phase"),
        (lambda values: json.dumps({**values, "target": "cuda:sm_90"}), "target is 'cuda:sm_90', asked is 'cpu:"),
        (lambda values: json.dumps({**values, "spec": {**values["spec"], "head_dim": 64}}), "spec.head_dim is 64, asked is 16"),
        (lambda values: json.dumps({**values, "template": {**values["template"], "source": "0"}}), "template.source is '0'"),
        (lambda values: json.dumps({**values, "configs": {"decode": [{"config": {"tile_kv": 7}}]}}), "shortlist.json: knob tile_kv=7"),
    ],
)
def test_a_shortlist_that_does_not_fit_is_refused_by_field_in_one_line(shortlist: Path, tmp_path: Path, edit: Any, said: str) -> None:
    path = tmp_path / "shortlist.json"
    path.write_text(edit(json.loads(shortlist.read_text())))
    with pytest.raises(ConfigError) as caught:
        Shortlist.read(path).configs_for(SPEC, best_cpu())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_toolchain_that_differs_is_told_field_by_field() -> None:
    made = Shortlist(Path("x"), {}, "", {}, {"triton": "3.6", "torch": "2.13"}, {"decode": [{}]})
    described = {"file": "x", "configs": {"decode": 1}, "toolchain": {"triton": ["3.6", "3.7"]}}
    assert made.described({"triton": "3.7", "torch": "2.13"}) == described


@pytest.mark.parametrize(("words", "said"), [(("--top", "0"), "--top 0"), (("--workers", "0"), "--workers 0"), (("--trials", "0"), "--trials 0")])
def test_a_wrong_request_ends_with_2_and_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = run("tune", SLUG, "--static", "--out", str(tmp_path), *words)
    assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.compiler
def test_what_a_shortlist_names_is_measured_first_after_the_default(shortlist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an evaluator that measures nothing; tests/tuning/test_job.py measures."""
    seen: list[Config] = []

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        seen.append(config)
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0 + len(seen) / 10, environment=self.environment)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", lambda self, configs, anchor, phase, *_, **__: {
        point: Measurement(anchor, dict.fromkeys([*configs, "sdpa_folded"], (1.0,) * 5)) for point in self.workloads[phase].points
    })
    monkeypatch.setattr(job, "measure_roofline", lambda *_, **__: None)
    monkeypatch.setattr(job, "install_package", lambda path: path)
    result = run("tune", f"decode-{SLUG}", "--shortlist", str(shortlist), "--trials", "5", "--out", str(tmp_path / "out"))
    assert result.status == 0, result.stderr
    listed = [row["config"] for row in json.loads(shortlist.read_text())["configs"]["decode"]]
    others = [each for each in listed if each != seen[0].to_dict()]
    assert [config.to_dict() for config in seen[1 : 1 + len(others)]] == others and len(others) >= 2 and len(seen) == 5
    assert f"shortlist: 3 configs of {shortlist}" in result.stderr
    refused = run("tune", f"decode-{SLUG}-w9", "--shortlist", str(shortlist), "--out", str(tmp_path / "out"))
    assert refused.status == 2 and "spec.window is None, asked is 9" in refused.stderr and refused.stderr.count("\n") == 1
