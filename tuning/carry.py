"""What a run of some phases keeps of the others: their part of the record in its folder, as far as it holds here.

It holds if the phase's study would be the same one now: the key at the end of its name covers spec, templates, knobs,
toolchain, hardware, threads and batches. Then its trials, last rounds and winners are those of the new record and package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.errors import ConfigError
from pagegen.spec import Phase
from pagegen.tuning.inherit import comparable, differences
from pagegen.tuning.record import TUNE, Record, read_record
from pagegen.tuning.sampling import digest
from pagegen.tuning.workload import Workload

BY_PHASE = ("workloads", "studies", "ancestors", "stopped", "finalists")  # facts that have a part for each


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The record that was there, which of its phases hold, and lines for people: what is kept, what is lost and why."""

    record: Record | None = None
    phases: tuple[Phase, ...] = ()
    lines: tuple[str, ...] = ()

    def joined(self, record: Record) -> Record:
        """The record of a run together with what is kept."""
        if self.record is None or not self.phases:
            return record

        def both(its: Mapping[Any, Any], mine: Mapping[Any, Any]) -> dict[Any, Any]:
            found = {**{phase: part for phase, part in its.items() if phase in self.phases}, **mine}
            return {phase: found[phase] for phase in sorted(found, key=list(Phase).index)}

        its, mine = self.record.facts, record.facts
        facts = {**mine, **{name: both(its.get(name, {}), mine[name]) for name in BY_PHASE}}
        facts["warm_start"] = [each for each in its.get("warm_start", []) if each["phase"] in self.phases] + mine["warm_start"]
        facts["carried"] = {phase.value: len(self.record.trials[phase]) for phase in self.phases}
        facts["rooflines"] = {phase.value: _limits(its, phase) for phase in self.phases}
        timed = sum(len(plain["points"]) for plain in facts["workloads"].values())
        parts = {name: both(its["workload"].get(name, {}), mine["workload"].get(name, {})) for name in ("digests", "spans", "moved")}
        facts["workload"] = {**mine["workload"], "timed": timed, **parts}
        measured = ("trials", "finals", "contest", "unevaluated")
        return Record(facts, *(both(getattr(self.record, name), getattr(record, name)) for name in measured))


def _limits(facts: Mapping[str, Any], phase: Phase) -> Mapping[str, Any] | None:
    """The roofline of the run that tuned a phase; None where a record that carried it does not say."""
    found = facts.get("rooflines", {}).get(phase, None if phase in facts.get("carried", {}) else facts.get("roofline"))
    return dict(found) if found else None


def keep(
    folder: Path, identity: Mapping[str, Any], tuned: Sequence[Phase], workloads: Mapping[Phase, Workload]
) -> Kept:
    """What the record in `folder` holds of other phases than those `tuned`. `identity` is that of any study of the run,
    `workloads` are what each phase would be tuned for now.
    """
    if not (folder / TUNE).exists():
        return Kept()
    try:
        record, _ = read_record(folder)
    except ConfigError as error:
        return Kept(lines=() if workloads.keys() <= set(tuned) else (f"nothing is kept of other phases: {error}",))
    reasons = {
        phase: _refusal(record, phase, identity, workloads.get(phase)) for phase in record.workloads if phase not in tuned
    }
    by_reason = {why: tuple(phase for phase in reasons if reasons[phase] == why) for why in reasons.values()}
    lines = [
        f"{' and '.join(phases)}: kept as in the record in {folder}"
        if not why
        else f"{' and '.join(phases)}: lost from the record in {folder}, which does not hold here ({why}); without a phase all are tuned"
        for why, phases in by_reason.items()
    ]
    return Kept(record, by_reason.get("", ()), tuple(lines))


def _refusal(record: Record, phase: Phase, identity: Mapping[str, Any], workload: Workload | None) -> str:
    """Why a phase of the record does not hold here; "" if it does."""
    if record.spec.deterministic:
        return "a deterministic spec has one config for all batches"
    if workload is None:
        return f"workload {record.facts['workload']['name']} has no such batches any more"
    now = {**identity, "workload": workload.digest}
    if record.facts["studies"][phase].endswith(f"/{digest(now)}"):
        return ""
    was = {**comparable(record.facts["environment"]), "workload": record.workloads[phase].digest}
    return "; ".join(differences(was, {name: now[name] for name in was})) or "pagegen or its templates are others now"
