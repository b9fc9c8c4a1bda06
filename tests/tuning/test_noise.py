"""The tuner's choice survives noise that misleads a naive one. The script that shows it at length is run here briefly."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuner_noise.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tuner_noise", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["tuner_noise"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_simulated_clock_is_as_noisy_as_it_says(script: ModuleType) -> None:
    machine = script.Machine(0, 0.1)
    config, point = script.SPACE.default, script.POINTS[0]
    call, true = machine.call(config, point), machine.seconds[config][point]
    ratios = []
    for _ in range(4000):
        begin = machine.now
        call()
        drift = 1 + 0.1 * math.sin(2 * math.pi * begin / script.DRIFT_SECONDS)
        ratios.append((machine.now - begin) / (true * drift))
    ratios.sort()
    assert ratios[0] >= 1 and 1.07 < ratios[2000] < 1.1  # the median of |t| is 0.82
    assert ratios[-40] > 1.5  # one in a hundred takes half as long again: heavy tails


def test_without_noise_the_best_config_is_chosen(script: ModuleType) -> None:
    choice = script.study(1, noise=0.0)
    assert choice.ours < 0.01 and choice.naive == pytest.approx(0)


def test_noise_rarely_leads_to_a_bad_choice(script: ModuleType) -> None:
    choices = [script.study(seed) for seed in range(3)]
    assert sum(choice.ours > script.BAD for choice in choices) <= 1
    assert any(choice.pruned for choice in choices)


@pytest.mark.long
def test_noise_leads_to_a_bad_choice_in_less_than_a_twentieth_of_studies(script: ModuleType) -> None:
    choices = [script.study(seed) for seed in range(100, 160)]
    bad = [sum(getattr(choice, name) > script.BAD for choice in choices) for name in ("ours", "naive")]
    assert bad[0] <= 3 and bad[0] < bad[1]
