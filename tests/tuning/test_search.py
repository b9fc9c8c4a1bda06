"""The search evaluates each config once, counts every trial, survives kills, and never believes a broken score."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from pagegen.errors import ConfigError
from pagegen.records import Evaluation, Status
from pagegen.space import Config, ConfigSpace, Constraint, Knob
from pagegen.tuning.asked import SAMPLERS, require_sampler
from pagegen.tuning.pruning import MARGIN, MIN_BATCHES, Judge
from pagegen.tuning.search import Progress, search, share_trials
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import LOOKS, BucketStudy

from .fake_tune import SPACE, WIDE, score

ROOT = Path(__file__).parents[2]
DEAD_BEAT = 0.02  # seconds, where everybody else is dead: their leases lapse in a moment
LIVE_BEAT = 0.4  # where they live, on a machine that may be busy


@pytest.fixture
def storage(tmp_path: Path) -> BaseStorage:
    return open_storage(None, tmp_path)


def run(storage: BaseStorage, total: int, evaluate: Callable[[Config], Evaluation] = score, space: ConfigSpace = SPACE) -> BucketStudy:
    """Opens the study, searches until its total, and closes it."""
    study = BucketStudy(storage, "s", space, {}, total=total)
    try:
        search({"only": study}, {"only": lambda config, judge: evaluate(config)})
    finally:
        study.close()
    return study


def noting(seen: list[Config]) -> Callable[..., Evaluation]:
    """`score`, which also appends what it is asked to `seen`."""

    def evaluate(config: Config, judge: object = None) -> Evaluation:
        seen.append(config)
        return score(config)

    return evaluate


def counts(study: BucketStudy) -> Counter[str]:
    return Counter(found.status.value for _, found in study.evaluations)


def start_tuner(
    storage: Path | str, total: int, seconds: float = 0.01, *, beat: float = LIVE_BEAT, hangs: int = 0, wide: bool = False
) -> subprocess.Popen[str]:
    """A tuner of its own process; see fake_tune."""
    words = [storage, total, seconds, beat, hangs, *["wide"] * wide]
    command = [sys.executable, "-m", "tests.tuning.fake_tune", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def until_it_hangs(tuner: subprocess.Popen[str], number: int) -> tuple[list[str], str]:
    """Waits for the evaluation of that number to begin: the configs evaluated before, and the one in flight."""
    assert tuner.stdout
    lines = [tuner.stdout.readline().strip() for _ in range(2 * number - 1)]
    return ended(lines), lines[-1].removeprefix("begin ")


def kill(tuner: subprocess.Popen[str]) -> None:
    """Ends a tuner with SIGKILL."""
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.communicate()


def ended(lines: list[str]) -> list[str]:
    """The configs whose evaluation a tuner had ended."""
    return [line.removeprefix("end ") for line in lines if line.startswith("end")]


def test_the_default_is_evaluated_first_and_every_config_once(storage: BaseStorage) -> None:
    seen: list[Config] = []
    study = run(storage, 25, noting(seen))
    assert seen[0] == SPACE.default
    assert len(seen) == len(set(seen)) == 25 == len(study.evaluations)


def test_the_search_finds_the_bottom_of_a_bowl(storage: BaseStorage) -> None:
    best = run(storage, 30).ranked()[0]
    assert best.score is not None and best.score <= 1.25


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_total_counts_over_resumes(tmp_path: Path, kind: str) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/trials.db" if kind == "sqlite" else None, tmp_path)
    assert run(storage, 7).resumed == 0
    again = run(storage, 10)
    assert (again.resumed, len(again.evaluations)) == (7, 10)
    third = run(storage, 10)
    assert (third.resumed, len(third.evaluations)) == (10, 10)


def test_a_resumed_search_is_not_a_repetition_of_the_first(storage: BaseStorage) -> None:
    seen: list[Config] = []
    run(storage, 6, noting(seen))
    run(storage, 12, noting(seen))
    assert len(set(seen)) == 12


def test_an_exhausted_space_ends_the_search(storage: BaseStorage) -> None:
    small = ConfigSpace((Knob("a", (1, 2), 1), Knob("b", (True, False), True)))
    study = run(storage, 50, lambda config: Evaluation(Status.PASSED, config.to_dict(), score=1.0), small)
    assert len(study.evaluations) == 4 and study.stopped == "every config of the space, or its like, is known"


def test_a_space_without_knobs_has_its_default_evaluated(storage: BaseStorage) -> None:
    study = run(storage, 5, lambda config: Evaluation(Status.PASSED, {}, score=1.0), ConfigSpace(()))
    assert len(study.evaluations) == 1


def test_failing_configs_are_tried_once_and_the_valid_one_wins(storage: BaseStorage) -> None:
    space = ConfigSpace((Knob("a", (1, 2, 3, 4), 1),))
    asked: Counter[int] = Counter()

    def evaluate(config: Config) -> Evaluation:
        a = int(config.to_dict()["a"])
        asked[a] += 1
        if a == 3:
            return Evaluation(Status.PASSED, config.to_dict(), score=2.0)
        return Evaluation((Status.BUILD_ERROR, Status.RUN_ERROR, Status.TIMEOUT)[a % 3], config.to_dict(), "no")

    study = run(storage, 50, evaluate, space)
    assert set(asked.values()) == {1} and len(asked) == 4
    assert [found.config["a"] for found in study.ranked()] == [3]
    assert counts(study) == {"PASSED": 1, "RUN_ERROR": 2, "TIMEOUT": 1}


def test_all_failing_leaves_no_best(storage: BaseStorage) -> None:
    study = run(storage, 9, lambda config: Evaluation(Status.INCORRECT, config.to_dict(), "wrong"))
    assert not study.ranked() and counts(study) == {"INCORRECT": 9}


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan"), 0.0, -1.0])
def test_a_score_that_is_no_time_is_a_failure_and_never_best(storage: BaseStorage, broken: float) -> None:
    def evaluate(config: Config) -> Evaluation:
        value = broken if config.to_dict()["order"] == "columns" else 3.0
        return Evaluation(Status.PASSED, config.to_dict(), score=value)

    study = run(storage, 12, evaluate)
    assert {found.config["order"] for found in study.ranked()} == {"rows"}
    failed = [found for _, found in study.evaluations if found.config["order"] == "columns"]
    assert failed and all(found.status is Status.RUN_ERROR and "finite" in found.reason for found in failed)
    json.dumps([found.to_dict() for _, found in study.evaluations], allow_nan=False)


def test_ties_are_broken_by_a_fixed_order(tmp_path: Path) -> None:
    orders = []
    space = ConfigSpace((Knob("a", (1, 2, 3, 4), 1), Knob("b", ("x", "y"), "x")))
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        study = BucketStudy(open_storage(None, folder), "s", space, {}, total=8, seed=seed)
        search({"only": study}, {"only": lambda config, judge: Evaluation(Status.PASSED, config.to_dict(), score=1.0)})
        orders.append([dict(found.config) for found in study.ranked()])
        study.close()
    assert orders[0] == orders[1] and len(orders[0]) == 8


def test_configs_that_break_a_constraint_are_never_evaluated_nor_counted(storage: BaseStorage) -> None:
    odd = Constraint(lambda v: int(v["a"]) % 2 == 0, "a must be even")
    space = ConfigSpace((Knob("a", tuple(range(12)), 0),), (odd,))
    study = run(storage, 50, lambda config: Evaluation(Status.PASSED, config.to_dict(), score=1.0 + int(config.to_dict()["a"])), space)
    assert sorted(found.config["a"] for _, found in study.evaluations) == [0, 2, 4, 6, 8, 10]


def by_tile(config: Config) -> int:
    """As if no other knob counted: five kinds of SPACE's forty configs."""
    return int(config.to_dict()["tile"])


@pytest.mark.parametrize("sampler", ["tpe", "random", "brute"])
def test_of_configs_that_do_the_same_one_is_evaluated_and_answers_for_all(storage: BaseStorage, sampler: str) -> None:
    """The search ends when nothing else is left, and another process that continues it finds nothing to do."""
    seen: list[Config] = []
    for made in (5, 0):
        study = BucketStudy(storage, "s", SPACE, {}, total=30, sampler=sampler, signature=by_tile)
        assert search({"only": study}, {"only": noting(seen)}) == made
        study.close()
    assert sorted(map(by_tile, seen)) == [16, 32, 64, 128, 256] and len(study.evaluations) == 5
    duplicates = [trial for trial in study._study.trials if "duplicate_of" in trial.user_attrs]
    for trial in duplicates:
        first = study._study.trials[trial.user_attrs["duplicate_of"]]
        assert by_tile(study._coding.decode(trial.params)) == by_tile(study._coding.decode(first.params))
        assert trial.state is TrialState.FAIL  # no sampler is told twice what was measured once
    assert sampler == "brute" or duplicates


def test_a_config_whose_like_is_at_work_or_queued_is_not_tried_beside_it(storage: BaseStorage) -> None:
    first, second = (BucketStudy(storage, "s", SPACE, {}, total=30, signature=by_tile) for _ in range(2))
    claim = first.claim()
    assert claim and claim.config == SPACE.default
    likes = [SPACE.config({"tile": tile, "unroll": unroll}) for tile in (64, 32) for unroll in (1, 2, 4)]
    second.enqueue(likes)  # those of tile 64 are at work; of tile 32 one stands for all
    claims = [second.claim() for _ in range(5)]
    assert claims[0] and claims[0].config == likes[3] and claims[-1] is None
    assert sorted(by_tile(each.config) for each in claims if each) == [16, 32, 128, 256]
    trials = len(first._study.trials)
    assert second.claim() is None and len(first._study.trials) == trials  # as often as it looks, it proposes nothing more
    for study in (first, second):
        study.close()


def test_a_large_space_is_not_listed_to_find_that_all_of_it_does_the_same(storage: BaseStorage) -> None:
    large = ConfigSpace(tuple(Knob(f"knob{number}", tuple(range(10)), 0) for number in range(9)))
    looked: list[Config] = []

    def signature(config: Config) -> int:
        looked.append(config)
        return min(2, sum(int(value) for _, value in config.items))

    study = BucketStudy(storage, "s", large, {}, total=9, signature=signature)
    made = search({"only": study}, {"only": lambda config, judge: Evaluation(Status.PASSED, config.to_dict(), score=1.0)})
    study.close()
    assert made == 3 and len(looked) < 3 * LOOKS
    assert study.stopped.startswith("nothing new among 4096 configs around the best one, nor")


def test_what_is_new_far_from_the_best_is_found_before_a_search_is_given_up(storage: BaseStorage) -> None:
    """All that is near the default does the same."""
    large = ConfigSpace(tuple(Knob(f"knob{number}", tuple(range(10)), 0) for number in range(9)))

    def signature(config: Config) -> int:
        return max(0, sum(int(value) > 0 for _, value in config.items) - 4)

    study = BucketStudy(storage, "s", large, {}, total=4, signature=signature)
    study._study.sampler = RepeatingSampler()
    made = search({"only": study}, {"only": lambda config, judge: Evaluation(Status.PASSED, config.to_dict(), score=1.0 + signature(config))})
    study.close()
    assert made == 4 and not study.stopped


class RepeatingSampler(RandomSampler):
    """Proposes the default for ever."""

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> int:
        return 0


CHANGED = {
    "a value more": ConfigSpace((Knob("a", (16, 32, 64), 16), Knob("b", (1, 2), 1))),
    "a value less": ConfigSpace((Knob("a", (16,), 16), Knob("b", (1, 2), 1))),
    "a knob less": ConfigSpace((Knob("a", (16, 32), 16),)),
    "a rule more": ConfigSpace((Knob("a", (16, 32), 16), Knob("b", (1, 2), 1)), (Constraint(lambda v: True, "a rule"),)),
}


@pytest.mark.parametrize("space", CHANGED.values(), ids=CHANGED)
def test_a_changed_space_opens_a_new_study_and_its_best_lies_inside(storage: BaseStorage, space: ConfigSpace) -> None:
    def evaluate(config: Config) -> Evaluation:
        return Evaluation(Status.PASSED, config.to_dict(), score=1 / int(config.to_dict()["a"]))

    old = run(storage, 9, evaluate, ConfigSpace((Knob("a", (16, 32), 16), Knob("b", (1, 2), 1))))
    new = run(storage, 9, evaluate, space)
    assert new.name != old.name and new.resumed == 0
    assert space.config(new.ranked()[0].config) in set(space)


def test_the_same_space_in_another_order_is_the_same_study(storage: BaseStorage) -> None:
    knobs = Knob("a", (16, 32), 16), Knob("b", ("x", "y"), "x")
    one = run(storage, 3, lambda c: Evaluation(Status.PASSED, c.to_dict(), score=1.0), ConfigSpace(knobs))
    turned = Knob("b", ("y", "x"), "x"), Knob("a", (32, 16), 16)
    two = run(storage, 4, lambda c: Evaluation(Status.PASSED, c.to_dict(), score=1.0), ConfigSpace(turned))
    assert two.name == one.name and two.resumed == 3 and len(two.evaluations) == 4


def test_another_identity_opens_a_new_study(storage: BaseStorage) -> None:
    names = {BucketStudy(storage, "s", SPACE, {"compiler": version}).name for version in ("12", "13", "12")}
    assert len(names) == 2


def test_ctrl_c_gives_the_claim_back_and_the_config_is_tried_again(storage: BaseStorage) -> None:
    calls = 0

    def interrupted(config: Config) -> Evaluation:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt(config)
        return score(config)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(storage, 9, interrupted)
    study = run(storage, 9)
    assert (study.resumed, study.lost, len(study.evaluations)) == (3, 0, 9)
    assert caught.value.args[0].to_dict() in [dict(found.config) for _, found in study.evaluations]


def test_ctrl_c_while_a_config_is_chosen_says_so_and_the_config_is_tried_again(storage: BaseStorage) -> None:
    def interrupted(config: Config) -> Config:
        raise KeyboardInterrupt

    chosen = BucketStudy(storage, "s", SPACE, {}, total=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "_kind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chosen.claim()
    (ended,) = chosen.unevaluated
    chosen.close()
    assert ended["reason"] == "interrupted while its config was chosen and compared with those tried" and not chosen.holders
    study = run(storage, 1)
    assert [found.config for _, found in study.evaluations] == [SPACE.default.to_dict()] and study.lost == 0


def test_buckets_share_trials_and_take_turns(storage: BaseStorage) -> None:
    shares = share_trials(11, ["decode", "prefill", "mixed"])
    assert shares == {"decode": 4, "prefill": 4, "mixed": 3}
    with pytest.raises(ConfigError, match="--trials 2"):
        share_trials(2, ["decode", "prefill", "mixed"])
    studies = {name: BucketStudy(storage, name, SPACE, {}, total=total) for name, total in shares.items()}
    states: list[Progress] = []
    made = search(studies, dict.fromkeys(studies, score), watch=states.append)
    assert made == 11 == len(states) and [state.done for state in states] == list(range(1, 12))
    assert Counter(state.bucket for state in states) == shares
    assert {state.bucket for state in states[:3]} == set(shares)
    for study in studies.values():
        study.close()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_begins_with_the_default_and_tries_each_config_once(storage: BaseStorage, sampler: str) -> None:
    if sampler == "gp":
        pytest.importorskip("scipy")
    study = BucketStudy(storage, "s", SPACE, {}, total=14, sampler=sampler)
    seen: list[Config] = []
    search({"only": study}, {"only": noting(seen)})
    study.close()
    assert seen[0] == SPACE.default and len(set(seen)) == len(seen) == 14
    if sampler == "brute":
        assert seen[1:] == [config for config in SPACE if config != SPACE.default][:13]


@pytest.mark.parametrize(("sampler", "only_queued"), [("brute", False), ("tpe", True)])
def test_who_finds_the_queue_emptied_by_another_takes_nothing_from_the_sampler(
    storage: BaseStorage, sampler: str, only_queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is always there first: between the look at the queue and the proposal."""
    mine, other = (BucketStudy(storage, "s", SPACE, {}, total=20, sampler=sampler) for _ in range(2))
    ask, taken = mine._study.ask, list[Config]()

    def beaten(*arguments: Any) -> Any:
        if len(taken) < 3 and (claim := other.claim(only_queued=True)):
            taken.append(claim.config)
            other.finish(claim, score(claim.config))
        return ask(*arguments)

    monkeypatch.setattr(mine._study, "ask", beaten)
    seen: list[Config] = []
    while claim := mine.claim(only_queued):
        seen.append(claim.config)
        mine.finish(claim, score(claim.config))
    in_turn = [SPACE.default, *(config for config in SPACE if config != SPACE.default)]
    assert taken + seen == in_turn[: 1 if only_queued else 20]
    assert {each["reason"] for each in mine.unevaluated} == {"another process took what was queued"}
    for study in (mine, other):
        study.close()


def test_a_sampler_that_lacks_its_library_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scipy"):
        require_sampler("gp")


def test_a_candidate_is_judged_beside_the_best_so_far_and_pruned_with_its_reason(storage: BaseStorage) -> None:
    def evaluate(config: Config, judge: Judge) -> Evaluation:
        found = score(config)
        for step in range(8):
            why = judge.hear(step, found.score or 1.0, 1.0)
            if why:
                assert step >= MIN_BATCHES - 1
                return Evaluation(Status.PRUNED, found.config, why)
        return found

    study = BucketStudy(storage, "s", SPACE, {}, total=30)
    search({"only": study}, {"only": evaluate})
    study.close()
    pruned = [found for found in study.by_trial() if found.status is Status.PRUNED]
    assert pruned and all("slower than the best so far" in found.reason for found in pruned)
    best = study.ranked()[0].score
    assert best and best <= 1.25
    worse = [score(SPACE.config(found.config)).score or 0 for found in pruned]
    assert min(worse) > best * (1 + MARGIN)


def test_a_rule_ends_a_study_before_its_total_and_says_why(storage: BaseStorage) -> None:
    def evaluate(config: Config, judge: Judge) -> Evaluation:
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, roofline=0.5 + 0.1 * (config.to_dict()["order"] == "columns"))

    study = BucketStudy(storage, "s", SPACE, {}, total=30, sampler="brute")
    made = search({"only": study}, {"only": evaluate}, rule=StopRule(roofline_share=0.5))
    assert made == 1 and study.stopped == "the best config reaches 50% of the roofline"
    assert search({"only": study}, {"only": evaluate}, rule=StopRule(roofline_share=0.5)) == 0
    study.close()


def flat(config: Config, judge: object = None) -> Evaluation:
    """Nothing to gain anywhere, with a noise that says so."""
    return Evaluation(Status.PASSED, config.to_dict(), score=1.0, noise=0.01)


def test_what_is_queued_is_evaluated_in_a_study_that_has_stopped_and_nothing_else(storage: BaseStorage) -> None:
    """A shortlist for a study whose patience is spent; the second process has the rest, as the total was raised for both."""
    rule, seen = StopRule(patience=5), list[Config]()

    def evaluate(config: Config, judge: object) -> Evaluation:
        seen.append(config)
        return flat(config)

    first = BucketStudy(storage, "s", SPACE, {}, total=30)
    search({"only": first}, {"only": evaluate}, rule=rule)
    spent = len(seen)
    assert first.stopped and spent < 30
    asked = [config for config in SPACE if config not in seen][:4]
    first.enqueue(asked)
    second = BucketStudy(storage, "s", SPACE, {}, total=30)
    claim = first.claim(only_queued=True)
    assert claim
    search({"only": second}, {"only": evaluate}, rule=rule, budget=0.5)  # ends with the queue, but for what the first holds
    assert seen[spent:] == asked[1:] and claim.config == asked[0] and first.claim(only_queued=True) is None
    first.finish(claim, flat(claim.config))
    assert search({"only": first}, {"only": evaluate}, rule=rule) == 0 and first.stopped
    for study in (first, second):
        study.close()


def test_a_gain_from_the_queue_lets_a_stopped_search_go_on(storage: BaseStorage) -> None:
    rule = StopRule(patience=5)
    study = BucketStudy(storage, "s", SPACE, {}, total=30)
    search({"only": study}, {"only": flat}, rule=rule)
    before = study.num_evaluated
    asked = next(config for config in SPACE if config not in [SPACE.config(found.config) for found in study.by_trial()])
    study.enqueue([asked])

    def evaluate(config: Config, judge: object) -> Evaluation:
        return Evaluation(Status.PASSED, config.to_dict(), score=0.5 if config == asked else 1.0, noise=0.01)

    assert search({"only": study}, {"only": evaluate}, rule=rule) > 1
    assert study.num_evaluated > before + 1
    study.close()


def test_no_trial_begins_after_the_budget(storage: BaseStorage) -> None:
    study = BucketStudy(storage, "s", SPACE, {}, total=9)
    assert search({"only": study}, {"only": score}, budget=0.0) == 0
    study.close()


@pytest.mark.parametrize(("total", "why"), [(9, "the budget of 0.3 s ended the search after 1 of 9 trials"), (1, "")])
def test_a_search_that_the_budget_ended_says_so(storage: BaseStorage, total: int, why: str) -> None:
    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        time.sleep(0.2)  # for the timing lock, which counts
        yield

    study = BucketStudy(storage, "s", SPACE, {}, total=total)
    search({"only": study}, {"only": score}, budget=0.3, busy=waiting)
    study.close()
    assert study.stopped == why


def test_a_killed_tuner_is_continued_and_loses_only_the_trial_in_flight(tmp_path: Path) -> None:
    tuner = start_tuner(tmp_path / "journal.log", 10, hangs=5)
    done, in_flight = until_it_hangs(tuner, 5)
    kill(tuner)
    again = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=10, beat=DEAD_BEAT)
    assert again.resumed == len(done) == 4
    seen: list[Config] = []
    search({"only": again}, {"only": noting(seen)})
    again.close()
    assert in_flight in [config.slug for config in seen] and again.lost == 1
    assert len(again.evaluations) == 10 == again.resumed + len(seen)
    third = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=10)
    assert (third.resumed, third.lost, third.claim()) == (10, 0, None)
    third.close()


def test_a_config_that_always_kills_its_tuner_is_a_failure_and_not_tried_for_ever(tmp_path: Path) -> None:
    for times in range(2):  # and no more: it is retried once (F09); the default is first in the queue each time
        study = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=5, beat=DEAD_BEAT)
        while study.holders:
            study.recover()
        study.close()
        assert study.lost == min(times, 1)
        tuner = start_tuner(tmp_path / "journal.log", 5, hangs=1)
        assert until_it_hangs(tuner, 1) == ([], SPACE.default.slug)
        kill(tuner)
    study = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=5, beat=DEAD_BEAT)
    seen: list[Config] = []
    search({"only": study}, {"only": noting(seen)})
    study.close()
    deadly = [found for _, found in study.evaluations if "died 2 times" in found.reason]
    assert [found.config for found in deadly] == [SPACE.default.to_dict()] and deadly[0].status is Status.RUN_ERROR
    assert SPACE.default not in seen and len(study.evaluations) == 5


def test_a_living_worker_takes_over_the_trial_of_one_that_is_killed(tmp_path: Path) -> None:
    doomed = start_tuner(tmp_path / "journal.log", 12, hangs=3)
    done, in_flight = until_it_hangs(doomed, 3)
    living = start_tuner(tmp_path / "journal.log", 12)
    done += until_it_hangs(living, 2)[0]  # it is at work beside the other
    kill(doomed)
    lines = living.communicate(timeout=120)[0].splitlines()
    assert living.returncode == 0 and lines[-1] == "resumed 2 lost 1"
    assert in_flight in ended(lines)
    done += ended(lines)
    assert len(done) == len(set(done)) == 12
    study = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=12)
    assert (study.resumed, study.lost, study.holders) == (12, 0, [])
    study.close()


def test_a_result_that_comes_after_its_lease_has_lapsed_is_not_counted_twice(storage: BaseStorage) -> None:
    sleeper = BucketStudy(storage, "s", SPACE, {}, total=3, beat=60)  # as if its process were stopped
    late = sleeper.claim()
    assert late
    other = BucketStudy(storage, "s", SPACE, {}, total=3, beat=DEAD_BEAT)
    search({"only": other}, {"only": score})
    assert other.lost == 1 and late.config in [SPACE.config(found.config) for _, found in other.evaluations]
    before = other.evaluations
    sleeper.finish(late, score(late.config))
    assert other.evaluations == before and len(before) == 3
    sleeper.close()
    other.close()


def test_a_worker_that_is_alive_keeps_its_trial_however_long_it_takes(storage: BaseStorage) -> None:
    slow = BucketStudy(storage, "s", SPACE, {}, total=2, beat=DEAD_BEAT)
    claim = slow.claim()
    assert claim
    observer = BucketStudy(storage, "s", SPACE, {}, total=2, beat=0.2)  # sees ten beats in each of its own
    seen: list[Config] = []
    search({"only": observer}, {"only": noting(seen)}, budget=2.0)  # beyond LAPSED_BEATS of them
    assert observer.lost == 0 and claim.config not in seen and observer.holders
    slow.finish(claim, score(claim.config))
    assert len(observer.evaluations) == 2 and not observer.holders
    slow.close()
    observer.close()


def test_a_process_that_dies_in_choosing_a_config_stops_nobody(storage: BaseStorage) -> None:
    study = BucketStudy(storage, "s", SPACE, {}, total=3, beat=DEAD_BEAT)
    study._study.ask(study._coding.distributions)  # the default, out of the queue; and here it ended
    study._study.ask()  # and one without even a config
    search({"only": study}, {"only": score})
    study.close()
    assert len(study.evaluations) == 3 and study.lost == 0
    assert {each["reason"] for each in study.unevaluated if each["status"] == "ENDED"} == {
        "given up, as nobody gave a sign of life, while its config was chosen and compared with those tried"
    }
    assert SPACE.default.to_dict() in [found.config for _, found in study.evaluations]


def test_two_processes_on_one_journal_make_the_total_together(tmp_path: Path) -> None:
    tuners = [start_tuner(tmp_path / "journal.log", 20) for _ in range(2)]
    lines = [line for tuner in tuners for line in tuner.communicate(timeout=120)[0].splitlines()]
    assert [tuner.returncode for tuner in tuners] == [0, 0]
    begun = [line for line in lines if line.startswith("begin")]
    assert len(begun) == len(set(begun)) == 20
    study = BucketStudy(open_storage(None, tmp_path), "fake", SPACE, {}, total=20)
    numbers = [number for number, _ in study.evaluations]
    assert len(numbers) == len(set(numbers)) == 20 and study.lost == 0
    assert study.ranked()[0].score == min(found.score for _, found in study.evaluations if found.score is not None)
    study.close()


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_eight_processes_open_one_new_storage_at_once(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/trials.db" if kind == "sqlite" else str(tmp_path / "journal.log")
    tuners = [start_tuner(url, 80, 0.005, beat=3.0, wide=True) for _ in range(8)]  # none is taken for dead on busy cores
    lines = [line for tuner in tuners for line in tuner.communicate(timeout=900)[0].splitlines()]
    assert {tuner.returncode for tuner in tuners} == {0}
    begun = [line for line in lines if line.startswith("begin")]
    assert len(begun) == len(set(begun)) == 80
    study = BucketStudy(open_storage(url, tmp_path), "fake", WIDE, {}, total=80)
    assert len(study.evaluations) == 80 and study.lost == 0
    assert [trial.number for trial in study._study.get_trials()] == list(range(len(study._study.trials)))
    assert study.ranked()[0].score == min(found.score for _, found in study.evaluations if found.score is not None)
    study.close()


# --- the books -------------------------------------------------------------------------------------------------------


def test_every_trial_that_ended_has_an_evaluation_or_says_why_not(storage: BaseStorage) -> None:
    space = ConfigSpace(SPACE.knobs, (Constraint(lambda values: values["unroll"] != 4, "unroll 4 needs registers"),))
    study = BucketStudy(storage, "s", space, {}, total=4)
    broken = Config(tuple({**space.default.to_dict(), "unroll": 4}.items()))
    claim = study.claim()
    assert claim and claim.config == space.default
    study.finish(claim, score(claim.config))
    for config in (broken, space.default):
        study._study.enqueue_trial(study._coding.encode(config))
    interrupted = study.claim()
    assert interrupted
    study.release(interrupted)
    lost = study.claim()
    assert lost
    for step in range(2):
        study.judge(lost).hear(step, 1.0, 1.0)
    assert study._end(lost.trial._trial_id, "lost")
    study.close()
    told = {each["trial"]: (each["status"], each["reason"], each["config"]) for each in study.unevaluated}
    assert ("REFUSED", "unroll 4 needs registers", broken.to_dict()) in told.values()
    assert ("DUPLICATE", f"of trial {claim.trial.number}", space.default.to_dict()) in told.values()
    building = "while it was built, gated or timed on its first batch"
    assert told[interrupted.trial.number] == ("ENDED", f"interrupted {building}", interrupted.config.to_dict())
    assert told[lost.trial.number] == ("ENDED", "lost after 2 of its batches were timed", lost.config.to_dict())
    ended = {trial.number for trial in study._study.trials if trial.state.is_finished()}
    assert ended == told.keys() | {number for number, _ in study.evaluations}


PLAIN = Evaluation(Status.PASSED, SPACE.default.to_dict(), score=1.0).to_dict()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"status": "NEWER"}, "'NEWER' is not a valid Status"),
        ({"timings": None}, "timings is None, not a mapping"),
        ({"timings": {"2x1@37": {"median": "x", "low": 1.0, "high": 1.0, "rounds": 1}}}, "timings.2x1@37.median is 'x'"),
        ({"score": "1.0"}, "score is '1.0'"),
        ({"noise": []}, "noise is []"),
        ({"config": None}, "config is None"),
        ({"newer": 1}, "newer"),
        ("all of it", ""),
        (0, ""),
        ({key: value for key, value in PLAIN.items() if key != "timings"}, "timings is missing"),
    ],
)
def test_an_evaluation_that_another_pagegen_wrote_is_named_and_is_no_evidence_elsewhere(storage: BaseStorage, changed: Any, said: str) -> None:
    other = BucketStudy(storage, "s", SPACE, {"of": "another"}, total=1)
    claim = other.claim()
    assert claim
    whole = changed if not isinstance(changed, dict) or changed.get("config") else {**PLAIN, **changed}
    claim.trial.set_user_attr("evaluation", whole)
    study = BucketStudy(storage, "s", SPACE, {}, total=1)
    assert [told for _, _, told in study.relatives()] == [[]]
    study.close()
    with pytest.raises(ConfigError, match=f"trial {claim.trial.number} of study s/.*--study") as caught:
        BucketStudy(storage, "s", SPACE, {"of": "another"}, total=1)
    assert said in str(caught.value)
    other.close()


@pytest.mark.parametrize("params", [{"tile": 9}, {"tile": -1}, {"tile": "x"}, {"order": "diagonal"}, {"order": None}])
def test_a_config_beyond_the_space_is_named(storage: BaseStorage, params: dict[str, Any]) -> None:
    study = BucketStudy(storage, "s", SPACE, {}, total=3)
    study._study.enqueue_trial(study._coding.encode(SPACE.default) | params)
    with pytest.raises(ConfigError, match=f"trial 1 of study .*knob {next(iter(params))}|trial 1 of study .*--study"):
        study.claim()
    study.close()


@pytest.mark.parametrize("lease", [None, "x", {}])
def test_a_lease_that_is_none_lapses(storage: BaseStorage, lease: object) -> None:
    study = BucketStudy(storage, "s", SPACE, {}, total=1, beat=DEAD_BEAT)
    study._study.ask(study._coding.distributions).set_user_attr("lease", lease)
    search({"only": study}, {"only": score})
    study.close()
    assert len(study.evaluations) == 1 == study.lost
