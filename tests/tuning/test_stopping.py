"""A search stops early for a stated reason only: good enough, or nothing more to be told apart."""

import math
import random
import statistics

import pytest

from pagegen.errors import ConfigError
from pagegen.records import Evaluation, Status
from pagegen.tuning.stopping import StopRule, chance_of


def passed(score: float, noise: float | None = 0.01, roofline: float | None = None) -> Evaluation:
    return Evaluation(Status.PASSED, {}, score=score, noise=noise, roofline=roofline)


FAILED = Evaluation(Status.INCORRECT, {}, "wrong")
FLAT = [passed(1.0 + 0.0001 * number) for number in range(30)]


def test_a_flat_space_is_left_after_the_patience_is_spent() -> None:
    rule = StopRule(patience=20)
    assert not rule.reason(FLAT[:19], 40)
    reason = rule.reason(FLAT[:25], 40)
    assert "in 2" in reason and "one of more than 2.0% among the 15 left has a chance of 0.0%" in reason


def test_a_gain_beyond_the_noise_renews_the_patience_and_one_within_it_does_not() -> None:
    gained, flicker = [*FLAT[:24], passed(0.9), passed(0.9)], [*FLAT[:24], passed(0.995), passed(0.995)]
    assert not StopRule(patience=20).reason(gained, 40) and StopRule(patience=20).reason(flicker, 40)


def test_a_wide_spread_among_the_best_promises_more_and_goes_on() -> None:
    wide = [passed(1.0 + 0.1 * number) for number in range(30)]
    assert not StopRule(patience=20).reason(wide, 300)


def test_what_was_pruned_counts_in_the_spread() -> None:
    """Of a search that prunes, those that are timed to their end are alike, and tell nothing of what is left."""
    alike = [passed(1.0 + 0.001 * number) for number in range(6)]
    pruned = [Evaluation(Status.PRUNED, {}, "slower", partial=1.03 + 0.03 * number) for number in range(24)]
    assert StopRule(patience=20).reason([*alike, *([FAILED] * 24)], 60)
    assert not StopRule(patience=20).reason([*alike, *pruned], 60)


def test_what_was_inherited_is_no_draw_of_this_search_but_its_best_is_to_be_beaten() -> None:
    rule = StopRule(patience=20)
    assert not rule.reason([], 40, FLAT) and not rule.reason(FLAT[:19], 40, FLAT)
    gained = [*FLAT[:24], passed(0.97)]
    assert not rule.reason(gained, 40) and rule.reason(gained, 40, [passed(0.97)])
    assert "among the 15 left" in rule.reason(FLAT[:25], 40, FLAT)


@pytest.mark.parametrize("evaluations", [[], [FAILED] * 30, [passed(1.0, None)] * 30], ids=["none", "failed", "no noise known"])
def test_nothing_known_is_no_reason(evaluations: list[Evaluation]) -> None:
    assert not StopRule(roofline_share=0.9).reason(evaluations, 100)


def test_no_patience_never_stops_and_the_total_is_no_early_end() -> None:
    assert not StopRule(patience=0).reason(FLAT, 40) and not StopRule().reason(FLAT, len(FLAT))


def test_the_roofline_share_is_the_best_config_s() -> None:
    rule = StopRule(roofline_share=0.8, patience=0)
    assert not rule.reason([passed(1.0, roofline=0.7), passed(2.0, roofline=0.9)], 40)
    assert rule.reason([passed(1.0, roofline=0.7), passed(0.8, roofline=0.85)], 40) == "the best config reaches 85% of the roofline"
    assert rule.reason([passed(1.0, roofline=0.7)], 40, [passed(0.8, roofline=0.85)])
    assert not rule.reason([passed(1.0, roofline=1.04)], 40), "of limits that were measured too low nothing follows"


@pytest.mark.parametrize(("share", "patience", "word"), [(0.0, 1, "share"), (1.1, 1, "share"), (math.nan, 1, "share"), (0.5, -1, "patience")])
def test_what_is_no_rule_is_refused(share: float, patience: int, word: str) -> None:
    with pytest.raises(ConfigError, match=f"--.*{word}"):
        StopRule(share, patience)


@pytest.mark.parametrize(("draw", "slack"), [("exponential", 1.5), ("normal", 4), ("uniform", 1)])
@pytest.mark.parametrize("gain", [0.0, 0.7])
def test_the_chance_bounds_that_of_more_draws_and_is_close_for_the_tail_it_assumes(draw: str, slack: float, gain: float) -> None:
    generator = random.Random(0)
    sample = {
        "exponential": lambda: -generator.expovariate(1.0),
        "normal": lambda: generator.gauss(0, 1),
        "uniform": generator.random,
    }[draw]
    gained, chances = [], []
    for _ in range(600):
        first, second = [sample() for _ in range(40)], [sample() for _ in range(40)]
        gained.append(min(second) < min(first) - gain)
        chances.append(chance_of(gain, first, 1.0))
    rate, bound = statistics.mean(gained), statistics.mean(chances)
    assert rate - 0.06 < bound  # three standard errors
    assert gain == 0 or bound < slack * rate + 0.02
