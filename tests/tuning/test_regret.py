"""The search needs few trials to find a good config, where brute force has shown which are good.

The script that shows it is run on the truth files that it made, with few seeds: nothing is timed.
"""

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagegen.catalog import template_for, variant
from pagegen.render import render
from pagegen.space import Config
from pagegen.spec import Op, parse_slug
from pagegen.target import parse_target

ROOT = Path(__file__).parents[2]
TRUTHS = sorted(ROOT.glob("results/*/regret/*.json"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("regret")


@pytest.fixture(scope="module", params=TRUTHS, ids=lambda path: path.stem)
def truth(script: ModuleType, request: pytest.FixtureRequest) -> Any:
    return script.Truth.read(request.param)


def test_a_truth_file_is_worth_searching(script: ModuleType, truth: Any) -> None:
    """Many configs, few of them good, the default not among them, and the best known better than by one timing."""
    assert {truth.like(config) for config in truth.space} == set(truth.once) and len(truth.once) >= 500
    assert len(truth.again) >= script.AGAIN and truth.good < set(truth.again)
    assert len(truth.good) <= 0.01 * len(truth.once)
    assert truth.space.default not in truth.good


def test_a_search_is_told_what_was_measured_and_pruned_as_by_the_evaluator(script: ModuleType, truth: Any) -> None:
    best = min(truth.once, key=lambda config: truth.score(truth.once[config]))
    found = truth.evaluate(best, script.Judge())
    assert found.score == pytest.approx(truth.score(truth.once[best])) and len(found.timings) == len(
        truth.workload.points
    )
    worst = max(truth.once, key=lambda config: truth.score(truth.once[config]))
    judge = script.Judge(dict(enumerate(truth.once[best])))
    assert truth.evaluate(worst, judge).status is script.Status.PRUNED


def test_a_search_that_meets_no_good_config_finds_none(script: ModuleType, truth: Any) -> None:
    """The count is of configs evaluated: with nothing good it is all of them."""
    few = dict(list(truth.once.items())[:12])
    barren = script.dataclasses.replace(truth, once=few, space=script.only(set(few), truth.space.knobs))
    barren.__dict__["good"] = set[Config]()
    assert script.trials_until_found(barren, script.RANDOM, 0) == 12


def test_the_static_model_ranks_better_than_chance(script: ModuleType, truth: Any) -> None:
    assert script.spearman(truth, script.ranking(truth)) > 0.3


def test_the_search_needs_few_trials(script: ModuleType) -> None:
    """The claim itself, on the smallest space: fewer seeds are a matter of luck. Who needs more than the share is not followed."""
    truth = min(map(script.Truth.read, TRUTHS), key=lambda each: len(each.once))
    most = script.TRIALS_SHARE * len(truth.once)
    row = script.replay(truth, range(20), (script.TUNER,), int(most) + 1)
    assert row.median(script.TUNER) <= most, row.trials


def test_the_search_needs_half_the_trials_of_random_search(script: ModuleType, truth: Any) -> None:
    """None is followed beyond twice the share: what random search needs then is more than enough."""
    most = int(2 * script.TRIALS_SHARE * len(truth.once)) + 1
    row = script.replay(truth, range(20), (script.TUNER, script.RANDOM), most)
    assert row.ok, row.trials


def test_kernels_share_a_compile_where_they_differ_in_how_work_is_cut_only() -> None:
    shared, spec, target = (
        load("shared_compile").shared,
        parse_slug("bf16-d64-h9x3-b16-NHD")[0],
        parse_target("cpu:avx512"),
    )
    space = template_for(Op.ATTEND, spec, target).space(spec, target)

    def seen(**knobs: int) -> tuple[str, tuple[int, ...]]:
        text, values = shared(render(variant(Op.ATTEND, spec, target, space.config(knobs))).text)
        return text, struct.unpack("4i", values)

    text, values = seen(tile_q=16, split_kv=1024, pack_rows=16, tile_few=32)
    assert values == (16, 1024, 16, 32)
    assert seen(tile_q=4, split_kv=256, pack_rows=64, tile_few=128) == (text, (4, 256, 64, 128))
    assert seen(row_block=1)[0] != text and seen(tile_kv=128)[0] != text and seen(prefetch=0)[0] != text
