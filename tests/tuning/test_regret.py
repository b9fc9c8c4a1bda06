"""The search needs few trials to find a good config, where brute force has shown which are good.

The script that shows it is run on the truth files that it made, with few seeds: nothing is timed.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagegen.space import Config

ROOT = Path(__file__).parents[2]
TRUTHS = sorted(ROOT.glob("results/*/regret/*.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regret", ROOT / "benchmarks" / "regret.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["regret"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=TRUTHS, ids=lambda path: path.stem)
def truth(script: ModuleType, request: pytest.FixtureRequest) -> Any:
    return script.Truth.read(request.param)


def test_a_truth_file_is_worth_searching(script: ModuleType, truth: Any) -> None:
    """Many configs, few of them good, the default not among them, and the best known better than by one timing."""
    assert set(truth.space) == set(truth.once) and len(truth.once) >= 500
    assert len(truth.again) >= script.AGAIN and truth.good < set(truth.again)
    assert len(truth.good) <= 0.03 * len(truth.once)
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


def test_the_search_needs_few_trials(script: ModuleType, truth: Any) -> None:
    row = script.replay(truth, range(5), (script.TUNER,))
    assert row.median(script.TUNER) <= script.TRIALS_SHARE * row.configs, row.trials


@pytest.mark.long
def test_the_search_needs_half_the_trials_of_random_search(script: ModuleType, truth: Any) -> None:
    row = script.replay(truth, range(20), (script.TUNER, script.RANDOM))
    assert row.ok, row.trials
