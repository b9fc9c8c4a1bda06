"""What was tried and what to try next: one Optuna study a bucket, asked and told by hand.

A trial is COMPLETE when its config passed, PRUNED when it did not (so that the sampler learns to stay away), FAIL when
the process that evaluated it died, or when its config is known: told again, what is known would weigh twice, and a
sampler would end by proposing little else (docs/regret.md). The Evaluation rides in the trial's user attributes.

Processes on any number of machines share a study, and no config is evaluated by two of them. There is no lock: the
number that the storage gives a trial is a ticket. Who has drawn one waits until every earlier trial that is still being
chosen is decided, looks whether its config was taken or the total was reached, and then takes it by a lease (`lease`) or
gives it up. A trial from the queue has an early number and is decided late: what waits in the queue counts as taken.

Configs of which it is known beforehand that they do the same (`signature`) are one: whichever is evaluated answers for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from pagegen.errors import ConfigError, PagegenError
from pagegen.records import Evaluation, Status, ranked
from pagegen.space import Config, ConfigSpace, Value
from pagegen.tuning.asked import BRUTE
from pagegen.tuning.lease import BEAT_SECONDS, LEASE, Heartbeat, holder
from pagegen.tuning.pruning import Judge
from pagegen.tuning.sampling import Coding, digest, make_sampler
from pagegen.tuning.shape import EVALUATION, require

MAX_REPEATS = 3  # proposals in a row that are known already, before one is chosen that is not
MAX_LOSSES = 2  # evaluations of one config that died with their process, before it counts as failing: it is retried once
LOOKS = 4096  # configs around the best one that are looked at for one that is not known, and as many around others
CENTRES = 8  # others, chosen at random, before there is said to be none
ALL_KNOWN = "every config of the space, or its like, is known"
CHOICE_SECONDS = 0.05  # between two looks at a trial that another process is choosing
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, PagegenError)  # what is met in values that another pagegen wrote
LOST, INTERRUPTED, GIVEN_UP = "lost", "interrupted", "never begun"  # how a trial `ended` that has no evaluation


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A config that this process has undertaken to evaluate."""

    trial: optuna.Trial
    config: Config


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """An evaluation of another study, and the config's time over the default's by batch, in the order of their timing."""

    evaluation: Evaluation
    ratios: Mapping[int, float]


@dataclasses.dataclass(slots=True)
class _Book:
    """What a study's trials say, by config; and by `kind`, which is the same for configs that do the same."""

    kind: Callable[[Config], int]
    evaluated: dict[Config, tuple[int, Evaluation]] = dataclasses.field(default_factory=dict)
    answers: dict[int, int] = dataclasses.field(default_factory=dict)  # by kind, the first trial that says what it is worth
    running: set[Config] = dataclasses.field(default_factory=set)
    queued: set[Config] = dataclasses.field(default_factory=set)
    taken: set[int] = dataclasses.field(default_factory=set)  # kinds that are at work or queued

    def __contains__(self, config: Config) -> bool:
        kind = self.kind(config)
        return kind in self.answers or kind in self.taken

    def __len__(self) -> int:
        return len(self.evaluated.keys() | self.running | self.queued)


class BucketStudy:
    """One bucket's study, which any number of processes share. To be closed.

    `identity` holds everything that makes scores comparable; together with the space it becomes part of the study's
    name, so that a changed template, machine or toolchain opens a new study. Configs of equal `signature`, by default equal
    ones, count as one. `beat` is the time between two renewals of this process's leases, in seconds.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        space: ConfigSpace,
        identity: Mapping[str, Any],
        *,
        seed: int | str = 0,
        total: int = 40,
        sampler: str = "tpe",
        signature: Callable[[Config], Hashable] = lambda config: config,
        beat: float = BEAT_SECONDS,
    ) -> None:
        self.space, self.total, self.sampler = space, total, sampler
        self.lost = self.adopted = 0
        self.stopped = ""  # why it ended before its total
        self.num_evaluated = 0  # configs, by whichever process, as of the last look at the storage
        self._coding = Coding(space)
        self._signature = signature
        self._kinds: dict[Hashable, int] = {}  # of signatures
        self._kind_of: dict[Config, int] = {}
        self._is_spent = False  # nothing new was left: who waits for others asks no sampler again and again
        self._rest = iter(space)  # brute force: what comes before is evaluated, at work or queued
        self._ended: dict[int, tuple[Config | None, Evaluation | None]] = {}  # by trial: what has ended changes no more
        whole = {**identity, "space": self._coding.digest}
        self.identity = whole
        self.name = f"{name}/{digest(whole)}"
        self._study = optuna.create_study(storage=storage, study_name=self.name, load_if_exists=True)
        self._storage = self._study._storage
        self._study.set_user_attr("identity", whole)
        before = len(self._read())
        self._study.sampler = make_sampler(sampler, f"{seed}/{self.name}/{before}", startup=max(3, min(10, total // 3)))
        self._random = random.Random(f"{seed}/{self.name}/{before}")
        self._heartbeat = Heartbeat(self._study, beat)
        self._queue_again()
        self._enqueue_missing([space.default])
        self.resumed = self.num_evaluated
        self.total += self.num_inherited

    def close(self) -> None:
        """Ends the renewals: a claim that is still held lapses."""
        self._heartbeat.close()

    @property
    def evaluations(self) -> list[tuple[int, Evaluation]]:
        """(trial number, evaluation) of every config evaluated, in the order of the trials."""
        return sorted(self._book(self._read()).evaluated.values(), key=lambda row: row[0])

    @property
    def unevaluated(self) -> list[dict[str, Any]]:
        """`trial`, `status`, `reason` and `config` (None if it was not chosen to its end) of what ended without an evaluation."""
        found = []
        for trial in self._read():
            notes, params = trial.user_attrs, trial.system_attrs.get("fixed_params", trial.params)
            if not trial.state.is_finished() or "evaluation" in notes:
                continue
            if "duplicate_of" in notes:
                status, reason = "DUPLICATE", f"of trial {notes['duplicate_of']}"
            elif "refused" in notes:
                status, reason = "REFUSED", notes["refused"]
            else:
                status, reason = "ENDED", _how_it_ended(trial)
            config = self._coding.decode(params).to_dict() if self._coding.fits(params) else None
            found.append({"trial": trial.number, "status": status, "reason": reason, "config": config})
        return found

    @property
    def holders(self) -> list[str]:
        """Who else has a trial at work, as `host:process:token`; "" for one that is being chosen."""
        running = [trial for trial in self._read() if trial.state is TrialState.RUNNING]
        return [holder(trial) for trial in running if self._heartbeat.is_foreign(trial)]

    @property
    def num_inherited(self) -> int:
        """Configs whose evaluation was taken over from another study: they come on top of the total."""
        return len({config for config, trial in self._known(self._read()) if "inherited" in trial.user_attrs})

    def relatives(self) -> list[tuple[str, dict[str, Any], list[Told]]]:
        """(name, identity, what was told) of every other study of this name: they differ in their identity."""
        family, found = self.name.rpartition("/")[0] + "/", []
        for other in self._storage.get_all_studies():
            identity = other.user_attrs.get("identity")
            if isinstance(identity, dict) and other.study_name.startswith(family) and other.study_name != self.name:
                told = []
                for trial in self._storage.get_all_trials(other._study_id, deepcopy=False):
                    with contextlib.suppress(*UNREADABLE):  # another pagegen's trial is no evidence here
                        told.append(Told(_evaluation(trial.user_attrs["evaluation"]), trial.intermediate_values))
                found.append((other.study_name, identity, told))
        return found

    def adopt(self, found: Mapping[Config, Told], origin: str) -> int:
        """Takes over what another study, `origin`, says of configs that are not known here; how many there were."""
        before, book = self.num_inherited, self._book(self._read())
        for config, told in found.items():
            if config not in book.evaluated:  # all are evidence, those that do the same too
                self._add(config, told, {"inherited": origin})
        adopted = self.num_inherited - before
        self.total += adopted
        self.adopted += adopted
        return adopted

    def by_trial(self) -> list[Evaluation]:
        """The evaluations, in the order of the trials."""
        return [found for _, found in self.evaluations]

    def by_origin(self) -> tuple[list[Evaluation], list[Evaluation]]:
        """The evaluations of this study's own trials, in their order, and those taken over from other studies."""
        trials = self._read()
        inherited = {trial.number for trial in trials if "inherited" in trial.user_attrs}
        split: tuple[list[Evaluation], list[Evaluation]] = [], []
        for number, evaluation in sorted(self._book(trials).evaluated.values(), key=lambda row: row[0]):
            split[number in inherited].append(evaluation)
        return split

    def ranked(self) -> list[Evaluation]:
        """Those that passed, best first."""
        return ranked(found for _, found in self.evaluations)

    def enqueue(self, configs: Sequence[Config]) -> None:
        """Has these tried next, in this order, those that are known left out."""
        self._enqueue_missing(configs)

    def suggest(self, config: Config, source: str) -> None:
        """Queues a config, unless it is known, and notes where it comes from."""
        self._enqueue_missing([config], {"suggested_by": source})

    def describe(self, key: str, value: Any) -> None:
        """Writes an attribute of the study."""
        self._study.set_user_attr(key, value)

    # --- claiming ----------------------------------------------------------------------------------------------------

    def claim(self, only_queued: bool = False) -> Claim | None:
        """The next config to evaluate; None if the total is reached, or all that is left is known or at work.

        With `only_queued` nothing is chosen any more, and what somebody asked for is still evaluated.
        """
        for attempt in itertools.count():
            trials = self.recover()
            book = self._book(trials)
            is_queued = any(trial.state is TrialState.WAITING for trial in trials)
            if len(book) >= self.total or (only_queued and not is_queued):
                return None
            from_queue = only_queued or self.sampler == BRUTE or self._is_spent or attempt >= MAX_REPEATS
            if from_queue and not is_queued:
                found = self._untried(book)
                if isinstance(found, str):
                    self._is_spent, self.stopped = True, found
                    return None
                self._is_spent = False
                self._enqueue_missing([found])
            trial = self._study.ask(self._coding.distributions)
            try:
                claimed = self._take(trial, from_queue)
            except UpdateFinishedTrialError:  # it took so long to choose that another process thought this one dead
                continue
            except (KeyboardInterrupt, SystemExit):
                self._end(trial._trial_id, INTERRUPTED)
                raise
            if claimed:
                return claimed
        raise AssertionError  # it counts for ever

    def _take(self, trial: optuna.Trial, from_queue: bool) -> Claim | None:
        """Claims a proposal, or ends it if it is known or not allowed, or is the sampler's where one `from_queue` was asked for."""
        if from_queue and "fixed_params" not in self._storage.get_trial(trial._trial_id).system_attrs:
            self._refuse(trial, TrialState.FAIL, "another process took what was queued")
            return None
        config = self._coding.decode(trial.params)
        broken = self.space.broken(config.to_dict())
        if broken:
            self._refuse(trial, TrialState.PRUNED, broken)
            return None
        book = self._book(self._await_earlier(trial.number), before=trial.number)
        answer = book.answers.get(self._kind(config))
        if answer is not None:
            trial.set_user_attr("duplicate_of", answer)
            self._study.tell(trial, state=TrialState.FAIL)
        elif config in book:
            self._refuse(trial, TrialState.FAIL, "another process is evaluating it or its like, or will")
        elif len(book) >= self.total:
            self._refuse(trial, TrialState.FAIL, "the total was reached")
        else:
            self._heartbeat.hold(trial._trial_id)
            return Claim(trial, config)
        return None

    def judge(self, claim: Claim) -> Judge:
        """What decides whether a claimed config is timed to its end: beside the best so far, batch by batch."""
        trials = [trial for _, trial in self._known(self._read()) if trial.state is TrialState.COMPLETE]
        whole = [trial for trial in trials if trial.value is not None and trial.intermediate_values]
        best = min(whole, key=lambda trial: trial.value or math.inf, default=None)

        def report(step: int, ratio: float) -> None:
            with contextlib.suppress(UpdateFinishedTrialError):
                claim.trial.report(ratio, step)

        return Judge(best.intermediate_values if best else None, report)

    def _refuse(self, trial: optuna.Trial, state: TrialState, why: str) -> None:
        trial.set_user_attr("refused", why)
        self._study.tell(trial, state=state)

    def _await_earlier(self, number: int) -> list[FrozenTrial]:
        """The trials once all with an earlier number are decided; one whose process died in choosing it is ended."""
        while True:
            trials = self.recover()
            running = (trial for trial in trials if trial.state is TrialState.RUNNING and trial.number < number)
            if all(LEASE in trial.user_attrs for trial in running):
                return trials
            time.sleep(CHOICE_SECONDS)

    def _untried(self, book: _Book) -> Config | str:
        """A config whose like was never tried: in brute force the first, else one as near as possible to the best one found,
        in random search to any; or why there is none."""
        if self.sampler == BRUTE:
            return next((config for config in self._rest if config not in book), ALL_KNOWN)
        for centre, looks in self._centres(book):
            near = self._around(centre)
            found = next((config for config in itertools.islice(near, looks) if config not in book), None)
            if found:
                return found
            if next(near, None) is None:
                return ALL_KNOWN
        return f"nothing new among {LOOKS} configs around the best one, nor among as many around {CENTRES} chosen at random"

    def _centres(self, book: _Book) -> Iterator[tuple[Mapping[str, Value], int]]:
        """Around what to look for a new config, and at how many: the best one, in random search any; then any, once."""
        passed = [found for _, found in book.evaluated.values() if found.score is not None]
        best = min(passed, key=lambda found: found.score or math.inf, default=None)
        if self.sampler != "random":
            yield dict(best.config) if best else self.space.default.to_dict(), LOOKS
        for _ in range(0 if self._is_spent and self.sampler != "random" else CENTRES):
            yield {knob.name: self._random.choice(knob.values) for knob in self.space.knobs}, LOOKS // CENTRES

    def _around(self, centre: Mapping[str, Value]) -> Iterator[Config]:
        """The configs by the number of knobs in which they differ from `centre`, those of one number in random order."""
        knobs = self.space.knobs
        for apart in range(len(knobs) + 1):
            changes = [
                dict(zip((knob.name for knob in changed), values, strict=True))
                for changed in itertools.combinations(knobs, apart)
                for values in itertools.product(*([v for v in knob.values if v != centre[knob.name]] for knob in changed))
            ]
            self._random.shuffle(changes)
            for change in changes:
                values = {knob.name: change.get(knob.name, centre[knob.name]) for knob in knobs}
                if not self.space.broken(values):
                    yield Config(tuple(values.items()))

    # --- finishing ---------------------------------------------------------------------------------------------------

    def finish(self, claim: Claim, evaluation: Evaluation) -> Evaluation:
        """Records the evaluation of a claim; a score that is not positive and finite is a failure.

        It is not recorded if the lease has lapsed meanwhile, and the trial is another's: each is counted once.
        """
        evaluation = _trustworthy(evaluation)
        with contextlib.suppress(UpdateFinishedTrialError):
            claim.trial.set_user_attr("evaluation", evaluation.to_dict())
            self._tell(claim.trial.number, evaluation)
        self._heartbeat.drop(claim.trial._trial_id)
        return evaluation

    def release(self, claim: Claim) -> None:
        """Gives back a claim that was interrupted: the config is tried first when the study is opened again."""
        self._heartbeat.drop(claim.trial._trial_id)
        if self._end(claim.trial._trial_id, INTERRUPTED):
            self._enqueue_missing([claim.config])

    def _tell(self, number: int, evaluation: Evaluation) -> None:
        if evaluation.score is not None:
            self._study.tell(number, evaluation.score, skip_if_finished=True)
        else:
            self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)

    def _end(self, trial_id: int, why: str) -> bool:
        """Fails a running trial; whether it was this call that did it."""
        try:
            self._storage.set_trial_user_attr(trial_id, "ended", why)
            return self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False

    # --- recovering --------------------------------------------------------------------------------------------------

    def recover(self) -> list[FrozenTrial]:
        """Ends the trials of the dead and queues their configs again; `lost` counts those that were being evaluated.

        Answers all trials as they are then.
        """
        trials = self._read()
        lapsed = [trial for trial in trials if trial.state is TrialState.RUNNING and self._heartbeat.has_lapsed(trial)]
        for trial in lapsed:
            stored = self._content(trial)[1]
            if stored:  # died between recording and telling: nothing is lost
                with contextlib.suppress(UpdateFinishedTrialError):
                    self._tell(trial.number, stored)
            elif self._end(trial._trial_id, LOST if LEASE in trial.user_attrs else GIVEN_UP):
                self.lost += LEASE in trial.user_attrs
        if lapsed:
            self._queue_again()
            return self._read()
        return trials

    def _queue_again(self) -> None:
        """Queues what was lost or interrupted and is not evaluated; what was lost too often counts as failing."""
        trials = self._read()
        book = self._book(trials)
        ended = [(config, trial.user_attrs["ended"]) for config, trial in self._known(trials) if "ended" in trial.user_attrs]
        for config, times in Counter(config for config, why in ended if why == LOST).items():
            if times >= MAX_LOSSES and self._kind(config) not in book.answers:
                self._record_deadly(config, times)
        self._enqueue_missing([config for config, _ in ended])

    def _record_deadly(self, config: Config, times: int) -> None:
        reason = f"the tuner died {times} times while evaluating it"
        self._add(config, Told(Evaluation(Status.RUN_ERROR, config.to_dict(), reason), {}), {})

    def _add(self, config: Config, told: Told, notes: Mapping[str, Any]) -> None:
        """A trial that has ended before it began."""
        evaluation = told.evaluation
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if evaluation.score is None else TrialState.COMPLETE,
                value=evaluation.score,
                params=self._coding.encode(config),
                distributions=self._coding.distributions,
                user_attrs={"evaluation": evaluation.to_dict(), **notes},
                intermediate_values=dict(told.ratios),
            )
        )

    def _enqueue_missing(self, configs: Sequence[Config], notes: dict[str, Any] | None = None) -> None:
        book = self._book(self._read(), before=math.inf)
        for config in configs:
            if config not in book:
                self._study.enqueue_trial(self._coding.encode(config), user_attrs=notes)
                book.taken.add(self._kind(config))

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _known(self, trials: Sequence[FrozenTrial]) -> Iterator[tuple[Config, FrozenTrial]]:
        """Those whose config is known and allowed, with it."""
        for trial in trials:
            if config := self._content(trial)[0]:
                yield config, trial

    def _content(self, trial: FrozenTrial) -> tuple[Config | None, Evaluation | None]:
        """The config of a trial, if it is known and allowed, and what became of it. Raises ConfigError for what is neither."""
        if trial.number in self._ended:
            return self._ended[trial.number]
        params, told = trial.system_attrs.get("fixed_params", trial.params), trial.user_attrs.get("evaluation")
        is_known = self._coding.fits(params) and "refused" not in trial.user_attrs
        try:
            content = (self._coding.decode(params) if is_known else None, _evaluation(told) if told is not None else None)
        except UNREADABLE as error:
            raise ConfigError(
                f"trial {trial.number} of study {self.name} cannot be read ({what_misses(error)}): another pagegen wrote it, or it is "
                "damaged; tune under another name (--study), or with the pagegen that wrote it"
            ) from None
        if trial.state.is_finished():
            self._ended[trial.number] = content
        return content

    def _kind(self, config: Config) -> int:
        """A number for all configs that do the same: signatures may be large, and are looked at often."""
        if config not in self._kind_of:
            self._kind_of[config] = self._kinds.setdefault(self._signature(config), len(self._kinds))
        return self._kind_of[config]

    def _book(self, trials: Sequence[FrozenTrial], before: float = 0) -> _Book:
        """What is evaluated, at work, and in the queue with a number below `before`."""
        book = _Book(self._kind)
        for config, trial in self._known(trials):
            evaluation = self._content(trial)[1]
            if evaluation:
                book.evaluated.setdefault(config, (trial.number, evaluation))
                book.answers.setdefault(self._kind(config), trial.number)
            elif trial.state is TrialState.RUNNING and LEASE in trial.user_attrs:
                book.running.add(config)
                book.taken.add(self._kind(config))
            elif trial.state is TrialState.WAITING and trial.number < before:
                book.queued.add(config)
                book.taken.add(self._kind(config))
        self.num_evaluated = len(book.evaluated)
        return book


def _evaluation(values: Any) -> Evaluation:
    """Reads an evaluation that any pagegen may have written. Raises what UNREADABLE has."""
    require(EVALUATION, values)
    return Evaluation.from_dict(values)


def what_misses(error: Exception) -> str:
    """What is wrong with something that was read."""
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _how_it_ended(trial: FrozenTrial) -> str:
    """What became of a trial that was ended, and at what: a lease is taken once the config is chosen, a value told for each batch."""
    how, timed = trial.user_attrs.get("ended", ""), len(trial.intermediate_values)
    if LEASE not in trial.user_attrs:
        how = "given up, as nobody gave a sign of life," if how == GIVEN_UP else how
        return f"{how} while its config was chosen and compared with those tried"
    return f"{how} after {timed} of its batches were timed" if timed else f"{how} while it was built, gated or timed on its first batch"


def _trustworthy(evaluation: Evaluation) -> Evaluation:
    score = evaluation.score
    if score is None or (math.isfinite(score) and score > 0):
        return evaluation
    reason = f"score {score} is not a positive finite number"
    return dataclasses.replace(evaluation, status=Status.RUN_ERROR, score=None, timings={}, reason=reason)
