"""What to try first: winners of earlier runs with the same template, on related specs or other targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagegen.catalog import template_for
from pagegen.errors import ConfigError, PagegenError
from pagegen.space import Config, ConfigSpace
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import Target, parse_target
from pagegen.tuning.shape import CONFIG, parse, require

MOST = 3  # configs of a bucket


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """A config that won elsewhere."""

    phase: Phase
    config: Config
    source: str  # the spec and the target that it won on
    distance: int  # fields in which that spec differs, and one for another target

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"phase": self.phase.value, "config": self.config.to_dict(), "source": self.source}


def suggestions(root: Path, spec: KernelSpec, target: Target, space: ConfigSpace, phase: Phase) -> list[Suggestion]:
    """The nearest MOST different configs that `root`'s records prove better than their default, nearest first.

    Records that cannot be read, or whose config this space does not have, are passed over.
    """
    found = [each for path in sorted(root.glob("**/tune.json")) for each in _winners(path, spec, target, space)]
    nearest = sorted((each for each in found if each.phase is phase), key=lambda each: each.distance)
    distinct = {each.config: each for each in reversed(nearest)}  # of equal ones the nearest stays
    return sorted(distinct.values(), key=nearest.index)[:MOST]


def _winners(path: Path, spec: KernelSpec, target: Target, space: ConfigSpace) -> Iterator[Suggestion]:
    try:
        record = parse(path.read_text(encoding="utf-8"))
        theirs, where = KernelSpec.from_dict(record["spec"]), parse_target(record["target"])
        if template_for(Op.ATTEND, theirs, where) != template_for(Op.ATTEND, spec, target):
            return
        mine, its = spec.to_dict(), theirs.to_dict()
        distance = sum(mine[name] != its[name] for name in mine) + (where != target)
        won = [(Phase(winner["phase"]), winner["config"]) for winner in record["winner"] if winner["confirmed"]]
        require([CONFIG], [values for _, values in won])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, PagegenError):
        return
    for phase, values in won:
        try:
            config = space.config(values)
        except ConfigError:
            continue
        if config != space.default:
            yield Suggestion(phase, config, f"{theirs.slug} on {where.name}", distance)
