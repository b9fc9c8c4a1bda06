"""What a new study has from older ones of its name: why it is another one, field by field, and the trials that still hold.

The name of a study ends in a hash of its identity: spec, rendered source of the default, knobs, templates, toolchain,
hardware, threads and quota, workload. A trial of another study holds here if nothing differs but knobs and templates, and
its config renders to the very source that was timed then.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagegen.errors import ConfigError
from pagegen.records import Status
from pagegen.render import Source
from pagegen.space import Config, ConfigSpace
from pagegen.target import device_name

if TYPE_CHECKING:
    from pagegen.tuning.study import BucketStudy, Told

HARMLESS = frozenset({"knobs", "space", "templates"})  # fields that the source of each trial answers for
HOLDING = frozenset({Status.PASSED, Status.INCORRECT, Status.BUILD_ERROR})  # what depends on nothing but source and identity
ABSENT = "absent"
WORDS = {  # what a field that is a hash or a count is of
    "anchor": "rendered source of the default config",
    "templates": "template files",
    "space": "config space",
    "workload": "batches",
    "threads": "affinity, cut by the CPU quota",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ancestor:
    """An older study of the same name and bucket."""

    study: str
    differences: tuple[str, ...]  # `field: was this, is that`
    reused: int  # of its trials

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def explained(ancestors: Mapping[str, Sequence[Ancestor]]) -> list[str]:
    """Lines for people: why this is a new study, one a field that differs from the nearest older one, and what holds.

    `ancestors` are those of each bucket; empty where there is no older study.
    """
    nearest = [older[0] for older in ancestors.values() if older]
    if not nearest:
        return []
    reused = sum(ancestor.reused for ancestor in nearest)
    taken = f"{reused} of its trials render to the same source, and count" if reused else "its trials do not count here"
    name = nearest[0].study.rpartition("/")[2]
    fields = dict.fromkeys(line for ancestor in nearest for line in ancestor.differences)
    return [f"this is a new study: its key is not that of the one before ({name}), and {taken}", *map(_in_words, fields)]


def _in_words(difference: str) -> str:
    name, _, values = difference.partition(":")
    return f"  {name} ({WORDS[name]}):{values}" if name in WORDS else f"  {difference}"


def source_hash(source: Source) -> str:
    """Hash of the text that is compiled. The config's own words, a comment in it, do not count: a new knob changes them."""
    text = source.text.replace(source.variant.config.slug, "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def comparable(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment, or what has one's fields, as it counts in an identity: a device by one of its names, and not how OpenMP was set."""
    hardware = dict(environment.get("hardware", {}))
    if "device" in hardware:
        hardware["device"] = device_name(hardware["device"])
    return {name: value for name, value in environment.items() if name != "openmp"} | {"hardware": hardware}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each field in which two identities differ, nested ones with dots: `toolchain.compiler: was g++ 12, is g++ 13`."""
    before, after = dict(_flat(was)), dict(_flat(now))
    names = sorted(name for name in before.keys() | after.keys() if before.get(name, ABSENT) != after.get(name, ABSENT))
    if any(name.startswith("knobs.") for name in names):
        names = [name for name in names if name != "space"]  # the hash of the same
    return [f"{name}: was {before.get(name, ABSENT)}, is {after.get(name, ABSENT)}" for name in names]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def inherit(study: BucketStudy, source_of: Callable[[Config], str]) -> list[Ancestor]:
    """Takes over what still holds of the older studies of `study`'s name, those with the fewest differences first.

    `source_of` gives the `source_hash` of a config now, "" if it does not render. Does nothing for a study that has trials.
    """
    if study.num_evaluated:
        return []
    ancestors = []
    for name, identity, told in study.relatives():
        identity = comparable(identity) if isinstance(identity.get("hardware"), Mapping) else identity
        differing = {field for field in study.identity | identity if identity.get(field) != study.identity.get(field)}
        found = dict(_holding(study.space, told, source_of)) if differing <= HARMLESS else {}
        ancestors.append(Ancestor(name, tuple(differences(identity, study.identity)), study.adopt(found, name)))
    return sorted(ancestors, key=lambda ancestor: len(ancestor.differences))


def _holding(
    space: ConfigSpace, told: list[Told], source_of: Callable[[Config], str]
) -> Iterator[tuple[Config, Told]]:
    names = {knob.name for knob in space.knobs}
    for each in told:
        evaluation = each.evaluation
        try:
            config = space.config({name: value for name, value in evaluation.config.items() if name in names})
        except ConfigError:
            continue  # a value or a combination that is no longer allowed
        if evaluation.source and evaluation.status in HOLDING and source_of(config) == evaluation.source:
            yield config, dataclasses.replace(each, evaluation=dataclasses.replace(evaluation, config=config.to_dict()))
