"""What to try next: one Optuna study a bucket, asked and told by hand.

A trial is COMPLETE when its config passed, PRUNED when it did not (so that the sampler learns to stay away), FAIL when
the process that evaluated it died. The Evaluation rides in the trial's user attributes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from pagegen.errors import ConfigError
from pagegen.paths import locked
from pagegen.records import Evaluation, Status
from pagegen.space import Config, ConfigSpace, Knob, Value
from pagegen.tuning.storage import Owner, Storage, is_alive

MAX_REPEATS = 8  # proposals in a row that are known already, before one is chosen that is not
MAX_LOSSES = 3  # evaluations of one config that died with their process, before it counts as failing

Evaluate = Callable[[Config], Evaluation]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A config that this process has undertaken to evaluate."""

    trial: optuna.Trial
    config: Config


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Handed to the watcher after every evaluation."""

    bucket: str
    evaluation: Evaluation
    best: Evaluation | None
    done: int
    total: int


@dataclasses.dataclass(slots=True)
class _Book:
    """What a study's trials say, by config."""

    evaluated: dict[Config, tuple[int, Evaluation]]
    running: set[Config]

    def __contains__(self, config: Config) -> bool:
        return config in self.evaluated or config in self.running

    def __len__(self) -> int:
        return len(self.evaluated) + len(self.running)


class BucketStudy:
    """One bucket's study. Processes may share it: what is claimed is decided under a lock.

    `identity` holds everything that makes scores comparable; together with the space it becomes part of the study's
    name, so that a changed template, machine or toolchain opens a new study.
    """

    def __init__(
        self, storage: Storage, name: str, space: ConfigSpace, identity: Mapping[str, Any], *, seed: int = 0, total: int = 40
    ) -> None:
        whole = {**identity, "space": _space_digest(space)}
        self.space, self.total = space, total
        self.name = f"{name}/{_digest(whole)}"
        self._storage, self._owner = storage, Owner(storage.folder)
        self._lock = storage.folder / ".claim.lock"
        self._distributions = {knob.name: _distribution(knob) for knob in space.knobs}
        with locked(self._lock):
            self._study = optuna.create_study(storage=storage.backend, study_name=self.name, load_if_exists=True)
            before = len(self._study.trials)
            self._study.set_user_attr("identity", whole)
            self.lost = self._recover()
            self._enqueue_missing([space.default])
        self.resumed = len(self._book().evaluated)
        self._study.sampler = _sampler(f"{seed}/{self.name}/{before}", startup=max(3, min(10, total // 3)))
        self._random = random.Random(f"{seed}/{self.name}/{before}")

    def close(self) -> None:
        """Gives up this process's claims."""
        self._owner.close()

    @property
    def evaluations(self) -> list[tuple[int, Evaluation]]:
        """(trial number, evaluation) of every config evaluated, in the order of the trials."""
        return sorted(self._book().evaluated.values(), key=lambda row: row[0])

    def ranked(self) -> list[Evaluation]:
        """Those that passed, best first; equals in the order of their configs' text."""
        passed = [found for _, found in self.evaluations if found.status is Status.PASSED]
        return sorted(passed, key=lambda found: (found.score, json.dumps(dict(found.config), sort_keys=True)))

    # --- claiming ----------------------------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        """The next config to evaluate; None if the total is reached or no config is left."""
        with locked(self._lock):
            book = self._book()
            if len(book) >= self.total:
                return None
            for _ in range(MAX_REPEATS):
                trial = self._study.ask(self._distributions)
                claimed = self._take(trial, book)
                if claimed:
                    return claimed
            config = self._untried(book)
            if config is None:
                return None
            self._study.enqueue_trial(self._params(config))
            return self._take(self._study.ask(self._distributions), book)

    def _take(self, trial: optuna.Trial, book: _Book) -> Claim | None:
        """Claims a proposal, or answers it from the record if it is known or not allowed."""
        config = self._config(trial.params)
        reason = self.space.broken(config.to_dict())
        if reason:
            trial.set_user_attr("refused", reason)
            self._study.tell(trial, state=TrialState.PRUNED)
        elif config in book.evaluated:
            number, known = book.evaluated[config]
            trial.set_user_attr("duplicate_of", number)
            self._tell(trial.number, known)
        elif config in book.running:
            trial.set_user_attr("refused", "another process is evaluating it")
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("owner", self._owner.token)
            return Claim(trial, config)
        return None

    def _untried(self, book: _Book) -> Config | None:
        """A config that was never tried: one that shares as many choices as possible with the best one found."""
        best = next(iter(self.ranked()), None)
        centre = dict(best.config) if best else self.space.default.to_dict()
        nearest, found = len(centre) + 1, list[Config]()
        for config in self.space:
            apart = sum(centre.get(name) != value for name, value in config.items)
            if apart > nearest or config in book:
                continue
            if apart < nearest:
                nearest, found = apart, []
            found.append(config)
        return self._random.choice(found) if found else None

    # --- finishing ---------------------------------------------------------------------------------------------------

    def finish(self, claim: Claim, evaluation: Evaluation) -> Evaluation:
        """Records the evaluation of a claim; a score that is not positive and finite is a failure."""
        evaluation = _trustworthy(evaluation)
        claim.trial.set_user_attr("evaluation", evaluation.to_dict())
        self._tell(claim.trial.number, evaluation)
        return evaluation

    def release(self, claim: Claim) -> None:
        """Gives back a claim that was interrupted: the config is tried first when the study is opened again."""
        self._fail(claim.trial.number, "interrupted")
        self._enqueue_missing([claim.config])

    def _tell(self, number: int, evaluation: Evaluation) -> None:
        if evaluation.score is not None:
            self._study.tell(number, evaluation.score, skip_if_finished=True)
        else:
            self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)

    def _fail(self, number: int, why: str) -> None:
        backend = self._storage.backend
        study_id = backend.get_study_id_from_name(self.name)
        trial_id = backend.get_trial_id_from_study_id_trial_number(study_id, number)
        backend.set_trial_user_attr(trial_id, "ended", why)
        self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _recover(self) -> int:
        """Ends the trials of dead processes and queues their configs again, each at most once; how many there were."""
        lost = 0
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if is_alive(self._storage.folder, trial.user_attrs.get("owner", "nobody")):
                continue
            stored = trial.user_attrs.get("evaluation")
            if stored:  # died between recording and telling: nothing is lost
                self._tell(trial.number, Evaluation.from_dict(stored))
            else:
                lost += 1
                self._fail(trial.number, "lost")
        losses = Counter(config for config, trial in self._trials() if trial.user_attrs.get("ended") == "lost")
        for config, times in losses.items():
            if times >= MAX_LOSSES and config not in self._book():
                self._record_deadly(config, times)
        self._enqueue_missing([config for config, trial in self._trials() if trial.user_attrs.get("ended")])
        return lost

    def _record_deadly(self, config: Config, times: int) -> None:
        reason = f"the tuner died {times} times while evaluating it"
        evaluation = Evaluation(Status.RUN_ERROR, config.to_dict(), reason)
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED,
                params=self._params(config),
                distributions=self._distributions,
                user_attrs={"evaluation": evaluation.to_dict()},
            )
        )

    def _enqueue_missing(self, configs: Sequence[Config]) -> None:
        queued = [t.system_attrs.get("fixed_params") for t in self._study.get_trials(False, (TrialState.WAITING,))]
        book = self._book()
        for config in dict.fromkeys(configs):
            if config not in book and self._params(config) not in queued:
                self._study.enqueue_trial(self._params(config))

    def _trials(self) -> Iterator[tuple[Config, FrozenTrial]]:
        """Trials whose config is known and allowed, with it."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.params.keys() == self._distributions.keys() and "refused" not in trial.user_attrs:
                yield self._config(trial.params), trial

    def _book(self) -> _Book:
        book = _Book({}, set())
        for config, trial in self._trials():
            if "evaluation" in trial.user_attrs:
                book.evaluated.setdefault(config, (trial.number, Evaluation.from_dict(trial.user_attrs["evaluation"])))
            elif trial.state is TrialState.RUNNING:
                book.running.add(config)
        book.running -= book.evaluated.keys()
        return book

    def _params(self, config: Config) -> dict[str, Any]:
        return {knob.name: _to_param(knob, config.to_dict()[knob.name]) for knob in self.space.knobs}

    def _config(self, params: Mapping[str, Any]) -> Config:
        return Config(tuple((knob.name, _from_param(knob, params[knob.name])) for knob in self.space.knobs))


def search(
    studies: Mapping[str, BucketStudy],
    evaluate: Mapping[str, Evaluate],
    *,
    budget: float | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> int:
    """Evaluates configs, the bucket with the fewest next, until every study has its total or no config is left.

    No evaluation begins once `budget` seconds have passed. Returns the number of evaluations made here. An exception
    gives the claim back and goes on upwards; what was finished stays.
    """
    begin, made = time.monotonic(), 0
    total = sum(study.total for study in studies.values())
    done = {name: study.resumed for name, study in studies.items()}
    open_names = list(studies)
    while open_names and (budget is None or time.monotonic() - begin < budget):
        name = min(open_names, key=done.__getitem__)
        claim = studies[name].claim()
        if claim is None:
            open_names.remove(name)
            continue
        try:
            evaluation = evaluate[name](claim.config)
        except BaseException:
            studies[name].release(claim)
            raise
        evaluation = studies[name].finish(claim, evaluation)
        made += 1
        done[name] += 1
        if watch:
            best = next(iter(studies[name].ranked()), None)
            watch(Progress(name, evaluation, best, sum(done.values()), total))
    return made


def share_trials(trials: int, buckets: Sequence[str]) -> dict[str, int]:
    """Trials over buckets, as evenly as they go, the first ones getting the rest. Raises ConfigError below one each."""
    if trials < len(buckets):
        raise ConfigError(f"--trials {trials} is less than one a bucket ({', '.join(buckets)}); allowed: {len(buckets)} or more")
    each, rest = divmod(trials, len(buckets))
    return {name: each + (place < rest) for place, name in enumerate(buckets)}


def _trustworthy(evaluation: Evaluation) -> Evaluation:
    score = evaluation.score
    if score is None or (math.isfinite(score) and score > 0):
        return evaluation
    reason = f"score {score} is not a positive finite number"
    return dataclasses.replace(evaluation, status=Status.RUN_ERROR, score=None, timings={}, reason=reason)


def _sampler(seed: str, startup: int) -> optuna.samplers.TPESampler:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate, until Optuna 5
        return optuna.samplers.TPESampler(seed=number, multivariate=True, n_startup_trials=startup)


def _is_ordinal(knob: Knob) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in knob.values)


def _distribution(knob: Knob) -> BaseDistribution:
    """Numbers are sampled by their place in order, so that neighbours are neighbours; anything else is a category."""
    return IntDistribution(0, len(knob.values) - 1) if _is_ordinal(knob) else CategoricalDistribution(_in_order(knob))


def _in_order(knob: Knob) -> list[Value]:
    return sorted(knob.values, key=lambda value: (str(type(value)), value))


def _to_param(knob: Knob, value: Value) -> Value:
    return _in_order(knob).index(value) if _is_ordinal(knob) else value


def _from_param(knob: Knob, param: Any) -> Value:
    value: Value = _in_order(knob)[param] if _is_ordinal(knob) else param
    return value


def _space_digest(space: ConfigSpace) -> str:
    knobs = {knob.name: [repr(value) for value in _in_order(knob)] for knob in space.knobs}
    return _digest({"knobs": knobs, "constraints": sorted(rule.reason for rule in space.constraints)})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
