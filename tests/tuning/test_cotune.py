"""A layout of `auto`: every pair of block size and layout is tuned, and the pair whose step times memory is least is taken."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.build import build_kernels
from pagegen.errors import SpecError
from pagegen.records import Evaluation, Status
from pagegen.reference import token_view
from pagegen.space import Config
from pagegen.spec import KernelSpec, KVLayout, Phase, parse_slug
from pagegen.target import best_cpu, parse_target
from pagegen.tuning import beside, job
from pagegen.tuning import cotune as module
from pagegen.tuning.beside import Batch, slots_of, timing_of
from pagegen.tuning.cotune import (
    choose,
    cotune,
    held_tokens,
    judge,
    memory,
    served_pairs,
    step_rounds,
)
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import Measurement
from pagegen.tuning.workload import Inputs, Point, Pool
from tests.cli.helpers import run
from tests.documented import documented, top

AUTO = parse_slug("fp32-d8-h2x1-b4-auto")[0]
POINTS = (Point.parse("2x1@100", 3.0), Point.parse("1x1@500", 1.0))
WORKLOAD = "format: 1\nphase: decode\npoints: {2x1@100: 3, 1x1@500: 1}\n"


def pairs_of(*names: str) -> dict[str, KernelSpec]:
    """Specs of pairs such as b16-NHD."""
    words = {name: name[1:].split("-") for name in names}
    return {name: AUTO.replace(block_size=int(size), layout=KVLayout.parse(layout)) for name, (size, layout) in words.items()}


def timed(seconds: Mapping[str, float], noise: float = 0.0) -> dict[Point, Measurement]:
    """Ten rounds in which attend takes `seconds` a sequence, and write_kv a tenth of it."""
    found = {}
    for point in POINTS:
        taken = {
            f"{name} {word}": tuple(share * value * len(point.query_lens) * (1 + noise * (-1) ** (i + len(name))) for i in range(10))
            for name, value in seconds.items()
            for word, share in (("attend", 1.0), ("write_kv", 0.1))
        }
        found[point] = Measurement(next(iter(taken)), taken)
    return found


def decided(seconds: Mapping[str, float], noise: float = 0.0) -> tuple[dict[str, module.Pair], str]:
    pairs, measured, copies = pairs_of(*seconds), timed(seconds, noise), dict.fromkeys(seconds, 0.0)
    steps = {name: step_rounds(name, POINTS, measured, copies) for name in pairs}
    judged = judge(pairs, POINTS, steps, measured, copies)
    return judged, choose(judged, POINTS, steps)


# --- memory -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.sampled_from([1, 2, 16, 48, 128]))
def test_a_sequence_holds_half_a_block_more_than_its_tokens_and_a_whole_one_where_it_is_short(context: int, block_size: int) -> None:
    held = held_tokens(context, block_size)
    assert context - 1e-9 <= held < context + block_size
    if context <= block_size // 2:
        assert held == block_size
    if context > block_size:
        assert held - context == pytest.approx((block_size - 1) / 2, abs=1.0)


def test_memory_is_that_of_the_sequences_of_a_step_by_how_often_they_are_there() -> None:
    spec = pairs_of("b16-NHD")["b16-NHD"]
    wasted, size = memory(spec, POINTS)
    held, own = 3 * 2 * held_tokens(100, 16) + held_tokens(500, 16), 3 * 200 + 500
    assert wasted == pytest.approx(1 - own / held) and size == pytest.approx(held / own * 2 * 8 * 4)  # K and V of a head of 8 fp32
    assert memory(spec.replace(block_size=64), POINTS)[0] > wasted


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_step_is_the_weighted_mean_of_its_parts() -> None:
    pairs, measured = pairs_of("b16-NHD"), timed({"b16-NHD": 1e-3})
    copies = {"b16-NHD": 256e-3}
    steps = {"b16-NHD": step_rounds("b16-NHD", POINTS, measured, copies)}
    pair = judge(pairs, POINTS, steps, measured, copies)["b16-NHD"]
    sequences = (3 * 2 + 1 * 1) / 4  # of a step
    assert pair.attend == pytest.approx(sequences * 1e-3) and pair.write_kv == pytest.approx(sequences * 1e-4)
    assert pair.copies == pytest.approx(sequences * 1e-3)
    assert pair.step.median == pytest.approx(pair.attend + pair.write_kv + pair.copies)
    assert pair.cost == pytest.approx(pair.step.median * pair.bytes_per_token)


@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN8"])
def test_new_tokens_are_written_where_attend_will_read_them(layout: str) -> None:
    spec = parse_slug(f"fp32-d8-h2x1-b4-{layout}")[0]
    point = Point.parse("1x3@10+1x1@4")
    pool = Pool.for_points(spec, (point,), 0)
    inputs = Inputs(pool, point)
    table = inputs.block_tables[0]
    slots = slots_of(inputs, table)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [int(table[0, p // 4]) * 4 + p % 4 for p in (7, 8, 9)] + [int(table[1, 0]) * 4 + 3]
    torch.manual_seed(1)  # after the pool's own seed the new tokens may be what lies there
    beside._writing(inputs, parse_target("cpu:scalar"))()
    tokens = token_view(spec.kv_layout.k_order, pool.k_cache).reshape(-1, 1, 8)
    fresh = Pool.for_points(spec, (point,), 0)
    before = token_view(spec.kv_layout.k_order, fresh.k_cache).reshape(-1, 1, 8)
    changed = (tokens != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(slots.tolist())


def test_pairs_are_timed_in_the_same_rounds_on_caches_of_their_own() -> None:
    scalar = parse_target("cpu:scalar")
    packages = {name: build_kernels(spec, scalar) for name, spec in pairs_of("b4-NHD", "b8-HND").items()}
    timed = timing_of(packages, scalar, POINTS, 1 << 16)
    for point in POINTS:
        found = timed(Batch(point, warm=False, seconds=0.01))
        assert found.seconds.keys() == {f"{pair} {word}" for pair in packages for word in ("attend", "write_kv")}
        assert len(set(map(len, found.seconds.values()))) == 1 and found.disturbance.seconds > 0
        assert found.setting and found.setting.rotated_bytes <= 2 << 16 and not found.setting.warm
    copies = timed(Batch(None, warm=False, seconds=0.01))
    assert copies.seconds.keys() == packages.keys() and min(map(min, copies.seconds.values())) > 0


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_least_step_times_memory_is_taken_and_the_front_is_marked() -> None:
    judged, chosen = decided({"b16-NHD": 1.0e-3, "b64-NHD": 0.97e-3, "b64-HND": 1.2e-3})
    assert judged["b64-NHD"].wasted > judged["b16-NHD"].wasted
    assert {name for name, pair in judged.items() if pair.front} == {"b16-NHD", "b64-NHD"}  # b64-HND is slower, and wastes as much
    assert chosen == "b16-NHD"  # 3 % of the step are less than what the larger blocks waste
    assert decided({"b16-NHD": 1.0e-3, "b64-NHD": 0.5e-3})[1] == "b64-NHD"


def test_what_noise_does_not_tell_apart_is_decided_by_memory() -> None:
    ratio = memory(pairs_of("b64-NHD")["b64-NHD"], POINTS)[1] / memory(pairs_of("b16-HND")["b16-HND"], POINTS)[1]
    closely = {"b16-HND": 1.0e-3 * ratio * 1.001, "b64-NHD": 1.0e-3}  # the larger blocks cost a thousandth less
    assert decided(closely)[1] == "b64-NHD"
    assert decided(closely | {"b16-HND": 1.0e-3 * ratio}, noise=0.05)[1] == "b16-HND"


@settings(max_examples=15)
@given(st.lists(st.floats(1e-4, 1e-2), min_size=6, max_size=6))
def test_whoever_is_not_on_the_front_is_beaten_and_the_choice_costs_least(drawn: list[float]) -> None:
    names = [f"b{size}-{layout}" for size in (16, 32, 64) for layout in ("NHD", "HND")]
    judged, chosen = decided(dict(zip(names, drawn, strict=True)))
    for pair in judged.values():
        beaten = [
            other
            for other in judged.values()
            if other.step.median <= pair.step.median
            and other.bytes_per_token <= pair.bytes_per_token
            and (other.step.median, other.bytes_per_token) != (pair.step.median, pair.bytes_per_token)
        ]
        assert pair.front != bool(beaten)
    assert judged[chosen].cost == pytest.approx(min(pair.cost for pair in judged.values()), rel=1e-9)  # there is no noise


# --- from one end to the other ----------------------------------------------------------------------------------------


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Nothing is built or timed: b8 is twice as fast as b4, whatever the layout. Answers what is installed."""
    installed: list[Path] = []

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, environment=self.environment)

    def within(self: Evaluator, configs: dict[str, Config], anchor: str, phase: Phase, *_: object, **__: object) -> object:
        return {point: Measurement(anchor, dict.fromkeys(configs, (1.0,) * 5)) for point in self.workloads[phase].points}

    def compared(folders: Mapping[str, Path], *_: object) -> object:
        return timed({name: 1e-3 if name.startswith("b8") else 2e-3 for name in folders}), dict.fromkeys(folders, 1e-9)

    def write_package(out: Path, *_: object) -> Path:
        out.mkdir(exist_ok=True)
        return out

    def install(path: Path) -> Path:
        installed.append(path)
        return path

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", within)
    monkeypatch.setattr(job, "_write_package", write_package)
    monkeypatch.setattr(module, "compare", compared)
    for where in (job, module):
        monkeypatch.setattr(where, "install_package", install)
    return installed


def test_the_command_tunes_every_pair_installs_the_best_and_reports_the_front(tmp_path: Path, untimed: list[Path]) -> None:
    (tmp_path / "seen.yaml").write_text(WORKLOAD)
    words = ["fp32-d8-h2x1-b4-auto", "--workload", str(tmp_path / "seen.yaml"), "--out", str(tmp_path / "r"), "--trials", "2"]
    chosen = ["--block-sizes", "4,8", "--layouts", "NHD,HDN16", "--json"]
    result = run("tune", *words, *chosen)
    assert result.status == 0, result.stderr
    document = result.document
    assert [pair["name"] for pair in document["pairs"]] == ["b8-NHD", "b4-NHD"] and document["chosen"] == "b8-NHD"
    assert document.keys() == top(documented("cotune.json"))
    assert {"b4-HDN16", "b8-HDN16"} == document["refused"].keys()  # 16 does not divide a head of 8
    folder = tmp_path / "r" / best_cpu().slug
    assert untimed == [folder / "fp32-d8-h2x1-b8-NHD" / "seen" / "package"]
    assert Path(document["package"]) == untimed[0] and document["winner"] and document["trials"]["new"] == 2
    for pair in document["pairs"]:
        record = json.loads((Path(pair["folder"]) / "tune.json").read_text())
        assert record["spec"]["block_size"] == pair["block_size"] and record["installed"] is None
    here = folder / "fp32-d8-h2x1-b4-auto" / "seen"
    assert json.loads((here / "cotune.json").read_text()) == document
    assert "| b8-NHD (chosen) |" in (here / "report.md").read_text()
    page = Path(run("report", str(here), "--json").document["report"]).read_text()
    assert page.count("<circle") == 2 and "<polyline" in page and "Chosen: <b>b8-NHD</b>" in page
    again = run("tune", *words, *chosen).document
    assert again["trials"] == {"resumed": 2, "new": 0, "lost": 0}
    people = run("tune", *words, *chosen[:-1])
    assert "b8-NHD *" in people.stdout and "chosen: b8-NHD, by the rule" in people.stderr


def test_the_front_is_drawn(tmp_path: Path, untimed: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "seen.yaml").write_text(WORKLOAD)
    shares = list[float]()
    document = cotune(
        AUTO, str(tmp_path / "seen.yaml"), block_sizes=(4, 8), layouts=("NHD",), trials=1, out=tmp_path,
        watch=lambda share, pair: shares.append(share),
    )  # fmt: skip
    assert shares == [0.5, 1.0]  # who waits is told how far it is
    (plot,) = run("report", str(Path(document["report"]).parent), "--png", "--json").document["plots"]
    assert Path(plot).name == "front.png" and Path(plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fp32-d8-h2x1-b4-auto"], "name its batches with --workload"),
        (["fp32-d8-h2x1-b4-auto", "--workload", "chat", "--block-sizes", "16,x"], "--block-sizes '16,x' are no numbers"),
        (["fp32-d8-h2x1-b4-auto", "--workload", "chat", "--block-sizes", "0"], "change --block-sizes or --layouts"),
        (["fp32-d8-h2x1-b4-auto", "--workload", "chat", "--layouts", "XYZ"], "KV layout 'XYZ' is not known"),
        (["fp32-d8-h2x1-b4-auto", "--workload", "chat", "--study", "x"], "--study would do nothing with a layout of auto, which takes SPEC, --block-sizes"),
        (["fp32-d8-h2x1-b4-NHD", "--layouts", "NHD"], "set --layout auto"),
        (["fp32-d8-h2x1-b4-auto", "--static"], "set --layout NHD"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(words: list[str], said: str) -> None:
    result = run("tune", *words)
    assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path) -> None:
    for text, said in (("{", "cannot be read"), ('{"format": 0}', "has format 0"), ("[]", "cannot be read")):
        (tmp_path / "cotune.json").write_text(text)
        result = run("report", str(tmp_path))
        assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_pairs_that_no_template_serves_are_told_with_their_reason() -> None:
    pairs, refused = served_pairs(AUTO, parse_target("cpu:scalar"), (4, 5000), ("NHD", "HDN16"))
    assert list(pairs) == ["b4-NHD"] and refused.keys() == {"b5000-NHD", "b4-HDN16", "b5000-HDN16"}
    assert all(refused.values())
    with pytest.raises(SpecError, match="no pair of block size and layout is served"):
        served_pairs(AUTO, parse_target("cpu:scalar"), (5000,), ("NHD",))


@pytest.mark.long
def test_two_real_pairs_are_tuned_timed_and_one_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(beside, "SECONDS", 0.05)
    (tmp_path / "seen.yaml").write_text(WORKLOAD)
    document = cotune(AUTO, str(tmp_path / "seen.yaml"), block_sizes=(4, 64), layouts=("NHD",), trials=2, out=tmp_path)
    assert {pair["name"] for pair in document["pairs"]} == {"b4-NHD", "b64-NHD"} and Path(document["installed"]).is_dir()
    wasted = {pair["block_size"]: pair["wasted"] for pair in document["pairs"]}
    assert wasted[64] > wasted[4] and all(math.isfinite(pair["cost"]) for pair in document["pairs"])
    conditions = document["conditions"]  # as tune's, in a process of its own: the threads of this one are not pinned
    assert conditions["pinned"] and conditions["threads"] == 1 and conditions["disturbance"]["seconds"] > 0  # one: conftest.py
    assert "each pinned to a core" in Path(document["report"]).read_text()
