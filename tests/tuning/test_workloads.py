"""Workload files and presets: what the simulator saw is what the tuner times."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen import tune
from pagegen.errors import ConfigError
from pagegen.records import Evaluation, Status
from pagegen.space import Config
from pagegen.spec import Phase, parse_slug
from pagegen.tuning import job
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Measurement
from pagegen.tuning.workload import Point, Workload
from pagegen.tuning.workloads import MAX_POINTS, preset_names, read_workloads, sampled, select
from tests.cli.helpers import run

SLUG = "fp32-d8-h2x1-b4-NHD"
SPEC = parse_slug(SLUG)[0]
NAMED = ("chat", "code", "long-context", "batch-offline", "speculative")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("slug", [SLUG, "bf16-d64-h9x3-b16-NHD", "bf16-d128-h32x8-b16-NHD"])  # small, SmolLM2's, Llama 3 8B's
def test_a_preset_is_ragged_and_has_at_least_eight_points(name: str, slug: str) -> None:
    found = select(name, parse_slug(slug)[0])
    points = [point for workload in found.workloads.values() for point in workload.points]
    assert len(points) >= 8 and (slug != SLUG or len(points) == found.num_points)
    assert any(len(set(point.context_lens)) > 2 for point in points)
    assert len({point.weight for point in points}) > 2
    assert name in preset_names() and len(found.workloads) >= 2


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_batches_without_a_phase_belong_to_where_they_are_dispatched(tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", "format: 1\npoints: {8x1@9: 2, 1x7@7: 1, 3x1@9+1x7@7: 3, 4x5@30: 1}\n")
    found = {phase: [point.name for point in workload.points] for phase, workload in read_workloads(path).items()}
    assert found == {Phase.DECODE: ["8x1@9"], Phase.PREFILL: ["1x7@7", "4x5@30"], Phase.MIXED: ["3x1@9+1x7@7"]}
    path = write(tmp_path / "w.yaml", "format: 1\nphase: mixed\npoints: {8x1@9: 2}\n")
    assert list(read_workloads(path)) == [Phase.MIXED]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "format None"),
        ("[1]\n", "format None"),
        ("format: 2\npoints: {1x1@1: 1}\n", "format 2"),
        ("format: 1\nspeed: 3\npoints: {1x1@1: 1}\n", "field 'speed'"),
        ("format: 1\nphase: idle\npoints: {1x1@1: 1}\n", "'idle'"),
        ("format: 1\nphase: [decode]\npoints: {1x1@1: 1}\n", "phase ['decode']"),
        ("format: 1\n", "points must map"),
        ("format: 1\npoints: {}\n", "points must map"),
        ("format: 1\npoints:\n  1x1@1: 1\n  8x1: 2\n", "line 4: point '8x1'"),
        ("format: 1\npoints:\n  1x1@1: fast\n", "line 3: weight 'fast'"),
        ("format: 1\npoints:\n  1x1@1: [1]\n", "line 3: weight ''"),
        ("format: 1\npoints:\n  1x1@1: -1\n", "line 3: point"),
        ("format: 1\npoints:\n  1x9@3: 1\n", "line 3: point"),
        ("format: 1\npoints:\n  99999999x1@5: 1\n", "line 3: point"),
        ("format: 1\npoints:\n  1x1@1: 1\n  1x1@1: 2\n", "line 4: batch 1x1@1 stands on line 3"),
        ("format: 1\npoints: {1x1@1: 1\n", "line 3"),
        ("format: 1\npoints: 1999-99-99\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_says_where(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_workloads(write(tmp_path / "w.yaml", text))
    assert said in str(caught.value) and "\n" not in str(caught.value) and "w.yaml" in str(caught.value)


def test_what_is_neither_a_file_nor_known_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat, code"):
        select(str(tmp_path / "nowhere.yaml"), SPEC)
    with pytest.raises(ConfigError, match="has no prefill batches"):
        select("decode", SPEC).only(Phase.PREFILL)


@pytest.mark.parametrize("point", ["1x1@999999999", "60000x1@999999"])
@pytest.mark.parametrize("slug", ["bf16-d64-h9x3-b16-NHD", "bf16-d64-h9x3-b16-NHD-w128"])
def test_a_batch_larger_than_memory_is_refused_before_anything_is_built(point: str, slug: str, tmp_path: Path) -> None:
    """A window bounds what is read, not what is held."""
    path = write(tmp_path / "w.yaml", f"format: 1\npoints: {{{point}: 1}}\n")
    with pytest.raises(ConfigError, match=rf"w\.yaml: point '{point}' takes .* GiB are free; write a smaller batch"):
        select(str(path), parse_slug(slug)[0])


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0.01, 100)), min_size=1, max_size=60, unique_by=lambda p: p[0]))
def test_a_sample_is_small_and_keeps_weight_and_size(drawn: list[tuple[int, float]]) -> None:
    points = tuple(Point((1,), (context,), weight) for context, weight in drawn)
    kept = sampled(Workload(Phase.DECODE, points), SPEC).points
    assert 1 <= len(kept) <= MAX_POINTS and {point.name for point in kept} <= {point.name for point in points}
    assert sum(point.weight for point in kept) == pytest.approx(sum(point.weight for point in points))
    if len(points) <= MAX_POINTS:
        assert kept == points
    elif max(weight for _, weight in drawn) == min(weight for _, weight in drawn):
        assert min(p.context_lens for p in kept) <= sorted(p.context_lens for p in points)[len(points) // MAX_POINTS]


# --- from the simulator to the package -------------------------------------------------------------------------------


def emitted(tmp_path: Path, name: str, *words: str) -> Path:
    path = tmp_path / f"{name}.yaml"
    result = run("simulate", "--trace", "alpaca", "--requests", "30", "--rate", "20", "--emit-workload", str(path), *words)
    assert result.status == 0, result.stderr
    return path


def test_the_tuner_times_what_the_simulator_saw_and_keeps_workloads_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an evaluator that times nothing."""
    timed = list[tuple[Phase, Point]]()

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        timed.extend((phase, point) for point in self.workloads[phase].points)
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, environment=self.environment)

    def compare(self: Evaluator, configs: dict[str, Config], anchor: str, phase: Phase, *_: object, **__: object) -> object:
        return {point: Measurement(anchor, dict.fromkeys([*configs, "sdpa_gather"], (1.0,) * 5)) for point in self.workloads[phase].points}

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", compare)
    monkeypatch.setattr(job, "install_package", lambda path: path)
    first, second = emitted(tmp_path, "one"), emitted(tmp_path, "two", "--seed", "5")
    journal = str(tmp_path / "journal.log")
    result = tune(SPEC, workload=first, trials=6, out=tmp_path, storage=journal)
    whole = read_workloads(first)
    assert set(timed) == {(phase, point) for phase, workload in whole.items() for point in workload.points}
    document = result.document
    assert document["workload"]["name"] == "one" and document["workload"]["timed"] == document["workload"]["points"]
    assert document["workloads"] == {phase.value: workload.to_dict() for phase, workload in whole.items()}
    assert result.report.parent.name == "one" and "Workload: one" in result.report.read_text()
    other = tune(SPEC, workload=second, trials=6, out=tmp_path, storage=journal).document
    assert other["trials"]["resumed"] == 0 and not set(other["studies"].values()) & set(document["studies"].values())
    again = tune(SPEC, workload=first, trials=6, out=tmp_path, storage=journal).document
    assert again["trials"]["resumed"] == 6 and again["studies"] == document["studies"]


@pytest.mark.long
def test_a_simulated_run_ends_as_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "install_package", lambda path: path)
    monkeypatch.chdir(tmp_path)
    path = emitted(tmp_path, "seen", "--phase", "decode")
    result = run("tune", SLUG, "--workload", str(path), "--trials", "3", "--json")
    assert result.status == 0, result.stderr
    (winner,) = result.document["winner"]
    assert winner["phase"] == "decode" and result.document["workload"]["name"] == "seen"
    assert {row["point"] for row in result.document["rows"]} == {p.name for p in read_workloads(path)[Phase.DECODE].points}


def test_tune_names_its_presets_in_its_help() -> None:
    text = "".join(run("tune", "--help").stdout.split())
    assert all(name in text for name in NAMED)
