"""Workload files and presets: what the simulator saw is what the tuner times."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen import tune
from pagegen.errors import ConfigError
from pagegen.records import BatchShape, DispatchTable, Evaluation, Status
from pagegen.space import Config
from pagegen.spec import DType, Op, Phase, parse_slug
from pagegen.target import best_cpu, detect, parse_target
from pagegen.transfer import block_bytes
from pagegen.tuning import job, workloads
from pagegen.tuning.asked import PRESETS, preset_names
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Measurement
from pagegen.tuning.workload import Point, Workload, blocks_of
from pagegen.tuning.workloads import MAX_POINTS, read_workloads, sampled, select
from tests.cli.helpers import run

SLUG = "fp32-d8-h2x1-b4-NHD"
SPEC = parse_slug(SLUG)[0]
SCALAR, AVX2 = parse_target("cpu:scalar"), parse_target("cpu:avx2")
LLAMA = parse_slug("bf16-d128-h32x8-b16-NHD")[0]
NAMED = ("chat", "code", "long-context", "batch-offline", "speculative")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("slug", [SLUG, "bf16-d64-h9x3-b16-NHD", "bf16-d128-h32x8-b16-NHD"])  # small, SmolLM2's, Llama 3 8B's
def test_a_preset_is_ragged_and_has_at_least_eight_points(name: str, slug: str) -> None:
    found = select(name, parse_slug(slug)[0], SCALAR)
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
        ("format: 1\npoints:\n  1x1@1: １２\n", "line 3: weight '１２' of 1x1@1 is not a number such as 3"),
        ("format: 1\npoints:\n  1x1@１２: 1\n", "line 3: point '1x1@１２' is not SEQSxQUERY@CONTEXT"),
        ("format: 1\npoints:\n  1x9@3: 1\n", "line 3: point"),
        ("format: 1\npoints:\n  99999999x1@5: 1\n", "line 3: point"),
        ("format: 1\npoints:\n  1x1@1: 1\n  1x1@1: 2\n", "line 4: batch 1x1@1 stands on line 3"),
        ("format: 1\npoints:\n  1x1@64+1x1@64: 1\n  2x1@64: 2\n", "line 4: batch 2x1@64 stands on line 3"),
        ("format: 1\npoints:\n  1x1@1: 2e9\n", "line 3: weight 2e9 of 1x1@1 is more than 1e+09"),
        ("format: true\npoints: {1x1@1: 1}\n", "format True"),
        ("format: 1\npoints: {1x1@1: 1}\npoints: {2x1@9: 1}\n", "line 3: points stands on line 2 too"),
        ("format: 1\nphase: decode\npoints: {1x16@16: 1}\n", "line 3: batch 1x16@16 has 16 queries for a sequence, decode has one"),
        ("format: 1\npoints: {1x1@2000000000: 1}\n", "has a number above 999,999,999"),
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
        select(str(tmp_path / "nowhere.yaml"), SPEC, SCALAR)
    with pytest.raises(ConfigError, match="has no prefill batches"):
        select("decode", SPEC, SCALAR).only(Phase.PREFILL)


@pytest.mark.parametrize("name", ["default.yaml", "static.yaml", "package.yml", "chat.yaml", "..yaml", "...yaml"])
def test_a_file_whose_results_would_lie_among_those_of_another_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rename the file") as caught:
        select(str(write(tmp_path / name, "format: 1\npoints: {1x1@1: 1}\n")), SPEC, best_cpu())
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("point", ["1x1@999999999", "60000x1@999999"])
@pytest.mark.parametrize("slug", ["bf16-d64-h9x3-b16-NHD", "bf16-d64-h9x3-b16-NHD-w128"])
def test_a_batch_larger_than_memory_is_refused_before_anything_is_built(point: str, slug: str, tmp_path: Path) -> None:
    """A window bounds what is read, not what is held."""
    path = write(tmp_path / "w.yaml", f"format: 1\npoints: {{{point}: 1}}\n")
    with pytest.raises(ConfigError, match=rf"w\.yaml: point '{point}' takes .* GiB are free; write a smaller batch"):
        select(str(path), parse_slug(slug)[0], SCALAR)


def test_a_batch_that_takes_for_ever_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workloads, "free_bytes", lambda: 1 << 60)
    path = write(tmp_path / "w.yaml", "format: 1\npoints: {1x99999999@99999999: 1}\n")
    with pytest.raises(ConfigError, match=r"w\.yaml: one call of point '1x99999999@99999999' takes about \d+ s on cpu:scalar, .*: 60 s") as caught:
        select(str(path), SPEC, SCALAR)
    assert "\n" not in str(caught.value)
    beside = write(tmp_path / "v.yaml", "format: 1\npoints: {1x99999999@99999999: 1, 1x9@9: 1}\n")
    assert select(str(beside), SPEC, SCALAR).moved == {Phase.PREFILL: 0.5}  # the other one stands for it


# --- what is too large to be timed -----------------------------------------------------------------------------------


def weights(workloads: Mapping[Phase, Workload]) -> dict[Phase, float]:
    return {phase: sum(point.weight for point in workload.points) for phase, workload in workloads.items()}


def all_of(name: str) -> dict[Phase, Workload]:
    return read_workloads(PRESETS / f"{name}.yaml")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads and 16 GiB."""
    monkeypatch.setattr(workloads, "detect", lambda: dataclasses.replace(detect(), affinity=2, quota=None))
    monkeypatch.setattr(workloads, "total_bytes", lambda: 16 << 30)
    monkeypatch.setattr(workloads, "free_bytes", lambda: 15 << 30)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", NAMED)
def test_a_model_of_billions_of_parameters_is_tuned_for_all_of_a_preset_s_weight(name: str) -> None:
    found = select(name, LLAMA, AVX2)
    assert weights(found.workloads) == pytest.approx(weights(all_of(name)))
    assert found.moved[Phase.DECODE] == 0  # 128 sequences of 370 tokens are 200 MiB of KV
    assert all(share < 0.3 for share in found.moved.values()), found.moved  # chunks of a prompt at 6,000 tokens and more


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", NAMED)
def test_whatever_a_batch_is_timed_in_stays_small_and_short(name: str) -> None:
    wide = LLAMA.replace(kv_heads=32, dtype=DType.FP32)
    for pools in (1, 9, 20):
        for workload in select(name, wide, AVX2, pools=pools).workloads.values():
            for point in workload.points:
                held = blocks_of(wide, point) * block_bytes(wide)
                assert held * max(16, 2 * pools) <= 16 << 30 and point.flops(wide) <= 100e9


def test_what_is_too_large_is_said_and_its_weight_and_its_shapes_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", "format: 1\nphase: decode\npoints: {1x1@100: 1, 8x1@100: 2, 8x1@32768: 3, 90x1@900: 4}\n")
    monkeypatch.setattr(workloads, "total_bytes", lambda: 16 * 1000 * SPEC.kv_heads * 2 * SPEC.head_dim * 4)
    found = select(str(path), SPEC, SCALAR)
    assert {point.name: point.weight for point in found.workloads[Phase.DECODE].points} == {"1x1@100": 1, "8x1@100": 9}
    assert found.moved == {Phase.DECODE: 0.7} and found.spans == {Phase.DECODE: ((1, 100, 1), (90, 32768, 1))}
    monkeypatch.setattr(workloads, "CALL_SECONDS", 1e-9)
    slow = select(str(path), SPEC, SCALAR)
    assert [point.name for point in slow.workloads[Phase.DECODE].points] == ["1x1@100"] and slow.moved == {Phase.DECODE: 0.9}


def test_a_gpu_times_batches_of_gigabytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", "format: 1\npoints: {1x1@100: 1, 64x1@8192: 1, 256x1@8192: 1}\n")
    absent = select(str(path), LLAMA, parse_target("cuda:sm_90"))
    assert [point.name for point in absent.workloads[Phase.DECODE].points] == ["1x1@100"]
    monkeypatch.setattr(workloads, "_device_memory", lambda target: 80 << 30)
    assert [p.name for p in select(str(path), LLAMA, parse_target("cuda:sm_90")).workloads[Phase.DECODE].points] == ["1x1@100", "64x1@8192"]


# --- what a model does not take --------------------------------------------------------------------------------------


def test_contexts_longer_than_the_model_takes_are_cut_to_it_and_equal_batches_merge(tmp_path: Path) -> None:
    points = "{1x1@4000: 1, 1x1@512: 2, 2x1@9000+1x1@30: 3, 1x700@800: 4, 1x900@900: 5, 3x1@600+1x600@600: 6}"
    path = write(tmp_path / "w.yaml", f"format: 1\npoints: {points}\n")
    found = select(str(path), SPEC, SCALAR, max_context=512)
    assert {phase: {p.name: p.weight for p in workload.points} for phase, workload in found.workloads.items()} == {
        Phase.DECODE: {"1x1@512": 3, "2x1@512+1x1@30": 3},
        Phase.PREFILL: {"1x512@512": 9},
        Phase.MIXED: {"3x1@512+1x512@512": 6},
    }
    assert (found.cut, found.to_dict()["cut"], found.to_dict()["max_context"], found.num_points) == (5, 5, 512, 6)
    assert found.spans[Phase.DECODE] == ((1, 512, 1), (3, 512, 1))
    whole = select(str(path), SPEC, SCALAR, max_context=9000)
    assert whole.cut == 0 and whole.workloads == select(str(path), SPEC, SCALAR).workloads


@pytest.mark.usefixtures("timed")
def test_tune_with_a_model_says_what_was_cut_to_its_positions(tmp_path: Path) -> None:
    """dummy:tiny takes 512."""
    path = write(tmp_path / "w.yaml", "format: 1\nphase: decode\npoints: {1x1@4000: 1, 1x1@100: 1}\n")
    words = ("--model", "dummy:tiny", "--workload", str(path), "--trials", "1", "--out", str(tmp_path))
    result = run("tune", *words, "--json")
    assert list(result.document["workloads"]["decode"]["points"]) == ["1x1@512", "1x1@100"]
    said = "takes 512 tokens: longer contexts of 1 batches were cut"
    assert said in run("tune", *words).stderr and said in Path(result.document["report"]).read_text()


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


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, Point]]:
    """What an evaluator is given to time that times nothing."""
    timed = list[tuple[Phase, Point]]()

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        timed.extend((phase, point) for point in self.workloads[phase].points)
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, environment=self.environment)

    def compare(self: Evaluator, configs: dict[str, Config], anchor: str, phase: Phase, *_: object, **__: object) -> object:
        return {point: Measurement(anchor, dict.fromkeys([*configs, "sdpa_gather"], (1.0,) * 5)) for point in self.workloads[phase].points}

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", compare)
    monkeypatch.setattr(job, "install_package", lambda path: path)
    return timed


def test_a_workload_s_own_batches_lie_in_the_range_of_its_table_whatever_is_timed(
    timed: list[tuple[Phase, Point]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "total_bytes", lambda: 16 * 5000 * SPEC.kv_heads * 2 * SPEC.head_dim * 4)
    crowd = "".join(f"  {seqs}x1@{seqs}: 1\n" for seqs in range(2, 60))
    path = write(tmp_path / "w.yaml", f"format: 1\npoints:\n  1x1@32768: 2\n  128x1@400: 1\n  1x40@40: 1\n{crowd}")
    said = run("tune", SLUG, "--workload", str(path), "--trials", "2", "--out", str(tmp_path)).stderr
    assert "too large to be timed here: 5% of decode" in said
    (manifest,) = (tmp_path / best_cpu().slug / SLUG / "w" / "package").glob("*/manifest.json")
    table = DispatchTable.from_dict(json.loads(manifest.read_text())["dispatch"][Op.ATTEND])
    batches = [(phase, point) for phase, found in read_workloads(path).items() for point in found.points]
    assert len(set(timed)) < len(batches) and all(table.find(BatchShape(phase, *point.shape)) for phase, point in batches)
    assert not table.find(BatchShape(Phase.DECODE, 129, 400, 1)) and not table.find(BatchShape(Phase.DECODE, 1, 32769, 1))


def test_the_tuner_times_what_the_simulator_saw_and_keeps_workloads_apart(timed: list[tuple[Phase, Point]], tmp_path: Path) -> None:
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
    assert {row["phase"] for row in result.document["winner"]} == {"decode"} and result.document["workload"]["name"] == "seen"
    assert {row["point"] for row in result.document["rows"]} == {p.name for p in read_workloads(path)[Phase.DECODE].points}


def test_tune_names_its_presets_in_its_help() -> None:
    text = "".join(run("tune", "--help").stdout.split())
    assert all(name in text for name in NAMED)
