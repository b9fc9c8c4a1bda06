"""How a study is taken part in: what it is about stands in its storage, and who cannot reproduce it is told why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

from pagegen import __version__
from pagegen.catalog import template_for
from pagegen.errors import ConfigError
from pagegen.records import Status
from pagegen.space import ConfigSpace
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import is_present, parse_target
from pagegen.tuning.asked import require_budget, require_counts, require_sampler, require_storage, require_words
from pagegen.tuning.crew import crew
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.inherit import comparable
from pagegen.tuning.machine import working
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.sampling import Coding
from pagegen.tuning.search import Progress, search
from pagegen.tuning.shortlist import source_digest
from pagegen.tuning.static_same import signature_of
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.storage import in_reach, open_storage, shown
from pagegen.tuning.study import UNREADABLE, BucketStudy, what_misses
from pagegen.tuning.workload import Workload

JOB, IDENTITY = "job", "identity"  # attributes of a study


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What a study is about: all that another process needs to evaluate its configs."""

    name: str
    spec: KernelSpec
    target: str
    workloads: Mapping[Phase, Workload]
    totals: Mapping[Phase, int]  # configs to evaluate, a bucket
    sampler: str
    seed: int
    rule: StopRule
    roofline: Roofline | None = None  # of who opened it

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return {
            "name": self.name,
            "spec": self.spec.to_dict(),
            "target": self.target,
            "workloads": {phase.value: workload.to_dict() for phase, workload in self.workloads.items()},
            "totals": {phase.value: total for phase, total in self.totals.items()},
            "sampler": self.sampler,
            "seed": self.seed,
            "rule": dataclasses.asdict(self.rule),
            "roofline": self.roofline.to_dict() if self.roofline else None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """Reads what `to_dict` wrote."""
        return cls(
            values["name"],
            KernelSpec.from_dict(values["spec"]),
            values["target"],
            {Phase(phase): Workload.from_dict(workload) for phase, workload in values["workloads"].items()},
            {Phase(phase): total for phase, total in values["totals"].items()},
            values["sampler"],
            values["seed"],
            StopRule(**values["rule"]),
            Roofline.from_dict(values["roofline"]) if values["roofline"] else None,
        )


def space_of(evaluator: Evaluator) -> ConfigSpace:
    """The configs of attend for the evaluator's spec and target."""
    return template_for(Op.ATTEND, evaluator.spec, evaluator.target).space(evaluator.spec, evaluator.target)


def identity(evaluator: Evaluator, phase: Phase) -> dict[str, Any]:
    """Everything that makes scores comparable: trials of another identity are another study's."""
    spec, target = evaluator.spec, evaluator.target
    return {
        **comparable(evaluator.environment),
        "pagegen": __version__,
        "spec": spec.to_dict(),
        "target": target.name,
        "templates": source_digest(template_for(Op.ATTEND, spec, target)),
        "anchor": evaluator.source_of(evaluator.default),  # what scores are relative to
        "knobs": {knob.name: sorted(knob.values, key=repr) for knob in space_of(evaluator).knobs},
        "workload": evaluator.workloads[phase].digest,
    }


@contextlib.contextmanager
def studies(
    storage: BaseStorage, evaluator: Evaluator, job: Job, *, worker: str = ""
) -> Iterator[dict[str, BucketStudy]]:
    """A study a bucket, opened or made, which says what it is about. `worker` tells apart the seeds of those who share it."""
    opened: dict[str, BucketStudy] = {}
    try:
        with evaluator.busy():
            for phase, total in job.totals.items():
                opened[phase.value] = BucketStudy(
                    storage,
                    f"{job.name}/{phase.value}",
                    space_of(evaluator),
                    identity(evaluator, phase),
                    seed=f"{job.seed}{worker}",
                    total=total,
                    sampler=job.sampler,
                    signature=signature_of(job.spec, evaluator.target, evaluator.workloads[phase], evaluator.threads),
                )
                if not worker:
                    opened[phase.value].describe(JOB, {**job.to_dict(), "opened": time.time()})
        yield opened
    finally:
        for study in opened.values():
            study.close()


def tally(found: Mapping[str, BucketStudy]) -> dict[str, int]:
    """Trials that were there when these studies were opened, that all workers have added since, and that were lost."""
    return {
        "resumed": sum(study.resumed for study in found.values()),
        "new": sum(len(study.evaluations) - study.resumed - study.adopted for study in found.values()),
        "lost": sum(study.lost for study in found.values()),
    }


# --- joining ---------------------------------------------------------------------------------------------------------


def join(
    name: str,
    storage: str,
    *,
    budget: float | None = None,
    workers: int = 1,
    watch: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Evaluates configs of a study that another process opened, until it has its total; answers what was done here.

    Who opened the study decides and packages. Raises ConfigError if there is no such study, or if this machine, its
    compiler or this pagegen differ from those of its trials.
    """
    require_words({"--join": name, "--storage": storage})
    require_storage(storage)
    require_budget(budget)
    require_counts({"--workers": workers})
    backend = open_storage(storage, Path.cwd())
    with in_reach(storage):
        with working(say=say):
            job, evaluator = _matching(backend, name, storage)
        with evaluator, studies(backend, evaluator, job, worker=f" {time.time()}") as found:
            evaluate = {phase.value: functools.partial(evaluator.evaluate, phase) for phase in job.totals}
            with crew(workers - 1, name, storage, budget, say):
                made = search(
                    found,
                    evaluate,
                    budget=budget,
                    rule=job.rule,
                    watch=watch,
                    waits=lambda who: tell_waiting(who, say),
                    busy=evaluator.busy,
                )
            counts = Counter(evaluation.status for study in found.values() for evaluation in study.by_trial())
            return {
                "format": 1,
                "study": name,
                "spec": job.spec.to_dict(),
                "target": job.target,
                "made": made,
                "trials": tally(found),
                "counts": {status.value: counts[status] for status in Status},
            }


def tell_waiting(holders: Sequence[str], say: Callable[[str], None] | None) -> None:
    """Says for whom the end is waited for."""
    if say:
        say(f"waiting for trials of {', '.join(sorted({who or 'a new worker' for who in holders}))}")


def _matching(backend: BaseStorage, name: str, storage: str) -> tuple[Job, Evaluator]:
    """The newest job of that name whose trials this machine can reproduce."""
    attributes = [study.user_attrs for study in backend.get_all_studies() if isinstance(study.user_attrs.get(JOB), Mapping)]
    named = [found for found in attributes if found[JOB].get("name") == name]
    if not named:
        others = ", ".join(dict.fromkeys(str(found[JOB].get("name")) for found in attributes)) or "none"
        raise ConfigError(f"no study {name} in {shown(storage)}, which has: {others}; change --join or --storage")
    refused, readable = "", list[tuple[float, Job, Phase, Mapping[str, Any]]]()
    for found in named:
        try:
            readable.append((float(found[JOB]["opened"]), _readable(found[JOB]), _phase_of(found), found[IDENTITY]))
        except UNREADABLE as error:
            unreadable = what_misses(error)
    if not readable:
        raise ConfigError(
            f"study {name} cannot be read ({unreadable}): another pagegen wrote it, or it is damaged; join with the pagegen that "
            "wrote it, or tune under another name (--study)"
        )
    for _, job, phase, theirs in sorted(readable, key=lambda row: -row[0]):
        target = parse_target(job.target)
        if is_present(target):
            evaluator = Evaluator(job.spec, target, job.workloads, job.roofline)
            mine = identity(evaluator, phase) | {"space": Coding(space_of(evaluator)).digest}
            apart = differences(theirs, mine)
        else:
            apart = [f"target: {job.target} there, not present here"]
        if not apart:
            return job, evaluator
        refused = refused or "; ".join(apart)
    raise ConfigError(
        f"study {name} cannot be joined from here: {refused}. Its trials would not compare; `pagegen tune` with its spec "
        "begins a study of this machine's own"
    )


def _readable(values: Mapping[str, Any]) -> Job:
    """Reads a job that any pagegen may have written. Raises what UNREADABLE has."""
    job = Job.from_dict(values)
    parse_target(job.target)
    require_sampler(job.sampler)
    if not job.totals.keys() <= job.workloads.keys() or not all(type(total) is int for total in job.totals.values()):
        raise ValueError(f"totals are {values['totals']}")
    return job


def _phase_of(attributes: Mapping[str, Any]) -> Phase:
    """The bucket of a study, by its attributes."""
    digests = {Workload.from_dict(w).digest: Phase(phase) for phase, w in attributes[JOB]["workloads"].items()}
    return digests[attributes[IDENTITY]["workload"]]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> list[str]:
    """Fields in which two identities differ, each as `field: value there, value here`."""
    found: list[str] = []
    for name in sorted({*there, *here}):
        one, other = there.get(name), here.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{path}{name}.")
        elif one != other:
            found.append(f"{path}{name}: {one} there, {other} here")
    return found
