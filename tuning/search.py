"""The search: claims, evaluates and records configs, bucket by bucket, until there is nothing left to do."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from pagegen.errors import ConfigError
from pagegen.records import Evaluation
from pagegen.space import Config
from pagegen.tuning.pruning import Judge
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.study import BucketStudy, Claim

WAIT_SECONDS = 0.5  # between two looks at what other processes are evaluating

Evaluate = Callable[[Config, Judge], Evaluation]


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Handed to the watcher after every evaluation."""

    bucket: str
    evaluation: Evaluation
    best: Evaluation | None
    done: int
    total: int


def search(
    studies: Mapping[str, BucketStudy],
    evaluate: Mapping[str, Evaluate],
    *,
    budget: float | None = None,
    rule: StopRule | None = None,
    watch: Callable[[Progress], None] | None = None,
    waits: Callable[[Sequence[str]], None] | None = None,
    busy: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> int:
    """Evaluates configs, the bucket with the fewest next, until every study has its total or no config is left.

    A study for which `rule` has a reason to stop carries it as `stopped` and ends before its total, but what is queued is
    evaluated first, as somebody asked for it; and if that takes the reason away, the search goes on. Waits for what other
    processes are evaluating, and takes it over from those that die; `waits` is told who they are, once. `busy` is held while
    a config is chosen and an evaluation recorded, not while one is made. No evaluation begins once `budget` seconds have
    passed, waiting included, and a study that this ends before its total says so. Returns the number of evaluations made here. An exception gives the claim back and goes on upwards; what was
    finished stays.
    """
    begin, made, told = time.monotonic(), 0, False
    total = sum(study.total for study in studies.values())
    rule = rule or StopRule(patience=0)
    while budget is None or time.monotonic() - begin < budget:
        with busy():
            for study in studies.values():
                study.stopped = _reason(rule, study)
            name, claim = _claim(studies)
        if claim is None:
            holders = [holder for study in studies.values() for holder in study.holders]
            if not holders:
                break
            if waits and not told:
                waits(holders)
            told = True
            time.sleep(WAIT_SECONDS)
            continue
        try:
            evaluation = evaluate[name](claim.config, studies[name].judge(claim))
        except BaseException:
            studies[name].release(claim)
            raise
        with busy():
            evaluation = studies[name].finish(claim, evaluation)
        made += 1
        if watch:
            best = next(iter(studies[name].ranked()), None)
            watch(Progress(name, evaluation, best, sum(study.num_evaluated for study in studies.values()), total))
    else:
        for study in studies.values():
            if not study.stopped and (done := len(study.evaluations)) < study.total:
                study.stopped = f"the budget of {budget:g} s ended the search after {done} of {study.total} trials"
    return made


def _claim(studies: Mapping[str, BucketStudy]) -> tuple[str, Claim | None]:
    """The next config of the study with the fewest evaluations that has one left; of one that has stopped, from its queue."""
    for name in sorted(studies, key=lambda name: studies[name].num_evaluated):
        if claim := studies[name].claim(only_queued=bool(studies[name].stopped)):
            return name, claim
    return "", None


def _reason(rule: StopRule, study: BucketStudy) -> str:
    own, inherited = study.by_origin()
    return rule.reason(own, study.total - len(inherited), inherited)


def share_trials(trials: int, buckets: Sequence[str]) -> dict[str, int]:
    """Trials over buckets, as evenly as they go, the first ones getting the rest. Raises ConfigError below one each."""
    if trials < len(buckets):
        raise ConfigError(f"--trials {trials} is less than one a bucket ({', '.join(buckets)}); allowed: {len(buckets)} or more")
    each, rest = divmod(trials, len(buckets))
    return {name: each + (place < rest) for place, name in enumerate(buckets)}
