"""Which batches a tuning run times: a preset by name, or a file such as `pagegen simulate --emit-workload` writes.

format: 1
phase: decode           # or left out: each batch belongs to the phase that the runtime dispatches it to
points:
  8x1@2048: 3           # SEQSxQUERY@CONTEXT, joined by +, and how much of the traffic it stands for
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pagegen.errors import ConfigError, SpecError
from pagegen.memory import free_bytes
from pagegen.records import phase_of
from pagegen.spec import KernelSpec, Phase
from pagegen.transfer import block_bytes
from pagegen.tuning.evaluate import MAX_KV_BYTES, PRESETS, preset
from pagegen.tuning.workload import WORKLOAD_FORMAT, Point, Workload, blocks_of

MAX_POINTS = 12  # of a phase; what has more is sampled
FIELDS = ("format", "phase", "points", "warm")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What is timed for each phase, and what the file or preset has in all."""

    name: str
    workloads: Mapping[Phase, Workload]
    num_points: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        timed = sum(len(workload.points) for workload in self.workloads.values())
        return {
            "name": self.name,
            "points": self.num_points,
            "timed": timed,
            "digests": {phase.value: workload.digest for phase, workload in self.workloads.items()},
        }

    def only(self, phase: Phase) -> Selection:
        """One phase of it. Raises ConfigError if it has none such."""
        if phase not in self.workloads:
            raise ConfigError(
                f"workload {self.name} has no {phase} batches; it has {', '.join(self.workloads)}: leave the phase out of "
                "SPEC, or name another --workload"
            )
        return dataclasses.replace(self, workloads={phase: self.workloads[phase]})


def name_of(word: str | None) -> str:
    """What a workload named on the command line is called: the folder of its results, which for `default` is the spec's own."""
    return "default" if word is None else re.sub(r"[^\w.-]", "_", Path(word).stem)


def preset_names() -> list[str]:
    """What `--workload` takes beside a file."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def select(word: str | None, spec: KernelSpec) -> Selection:
    """The workload of that name or file, bounded for a spec; None is what every phase is tuned for unless told otherwise.

    Batches with too much KV for the spec are left out; of a phase with more than MAX_POINTS, so many stand for the others.
    Raises ConfigError.
    """
    if word is None:
        whole = {phase: preset(phase, spec) for phase in Phase}
        return Selection("default", whole, sum(len(workload.points) for workload in whole.values()))
    known = preset_names()
    if word in known:
        path = PRESETS / f"{word}.yaml"
    elif Path(word).is_file():
        path = Path(word)
    else:
        raise ConfigError(f"workload {word!r} is no file, nor known; allowed: {', '.join(known)}, or a file")
    found = read_workloads(path)
    bounded = {phase: sampled(workload.within(spec, MAX_KV_BYTES), spec) for phase, workload in found.items()}
    _check_memory(path, [point for workload in bounded.values() for point in workload.points], spec)
    return Selection(name_of(word), bounded, sum(len(workload.points) for workload in found.values()))


def select_phases(word: str | None, spec: KernelSpec, phase: Phase | None) -> Selection:
    """`select`, and of it what is tuned: `phase` alone, or all; of a deterministic spec, which has one config, one phase.

    Raises ConfigError, or SpecError for a layout of `auto`.
    """
    if spec.layout is None:
        raise SpecError("layout is `auto`, which only `pagegen tune SPEC --workload W` chooses; set --layout NHD, or another by its name")
    selection = select(word, spec)
    if spec.deterministic:
        phase = phase or max(selection.workloads, key=list(Phase).index)
    return selection.only(phase) if phase else selection


def _check_memory(path: Path, points: Iterable[Point], spec: KernelSpec) -> None:
    """Raises ConfigError for a batch that cannot be held: the smallest of a phase is timed whatever its size."""
    free = free_bytes()
    for point in points:
        size = blocks_of(spec, point) * block_bytes(spec) + point.io_bytes(spec)
        if free is not None and size > free:
            raise ConfigError(
                f"workload {path}: point {point.name!r} takes {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
                "write a smaller batch"
            )


def sampled(workload: Workload, spec: KernelSpec, most: int = MAX_POINTS) -> Workload:
    """At most `most` points that stand for all: those in order of their KV are cut into parts of about equal weight, and
    the heaviest of each part gets the part's weight.
    """
    if len(workload.points) <= most:
        return workload
    points = sorted(workload.points, key=lambda point: (point.kv_bytes(spec), point.name))
    middles = [end - point.weight / 2 for end, point in zip(_ends(points), points, strict=True)]
    whole = sum(point.weight for point in points)
    parts = itertools.groupby(zip(middles, points, strict=True), key=lambda pair: int(most * pair[0] / whole))
    kept = []
    for _, part in parts:
        members = [point for _, point in part]
        heaviest = max(members, key=lambda point: point.weight)
        kept.append(dataclasses.replace(heaviest, weight=sum(point.weight for point in members)))
    return dataclasses.replace(workload, points=tuple(kept))


def _ends(points: Iterable[Point]) -> Iterable[float]:
    return itertools.accumulate(point.weight for point in points)


def read_workloads(path: Path) -> dict[Phase, Workload]:
    """The workload of each phase that a file has batches of. Raises ConfigError naming the line or field."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"workload {path}, line {line}: {error.problem or 'it is not YAML'}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: an impossible date or number
        raise ConfigError(f"workload {path} is not YAML: {str(error).splitlines()[0]}") from None
    if (
        not isinstance(values, dict)
        or not isinstance(root, yaml.MappingNode)
        or values.get("format") != WORKLOAD_FORMAT
    ):
        found = values.get("format") if isinstance(values, dict) else None
        raise ConfigError(f"workload {path}: format {found!r} is not known; allowed: {WORKLOAD_FORMAT}")
    if unknown := [name for name in values if name not in FIELDS]:
        raise ConfigError(f"workload {path}: field {unknown[0]!r} is not known; allowed: {', '.join(FIELDS)}")
    try:
        empty = Workload.from_dict(
            {"phase": Phase.DECODE.value, **values, "points": {"1x1@1": 1}}
        )  # all but the points
    except ConfigError as error:
        raise ConfigError(f"workload {path}: {error}") from None
    points = [_parse(*entry) for entry in _entries(path, root)]
    by_phase: dict[Phase, list[Point]] = {}
    for point in points:
        rows = point.query_lens
        phase = empty.phase if "phase" in values else phase_of(sum(rows), len(rows), max(rows))
        by_phase.setdefault(phase, []).append(point)
    return {
        phase: dataclasses.replace(empty, phase=phase, points=tuple(by_phase[phase]))
        for phase in Phase
        if phase in by_phase
    }


def _entries(path: Path, root: yaml.MappingNode) -> list[tuple[str, str, str]]:
    """(where it stands, batch, weight) of every point as it is written. Raises ConfigError."""
    points = next((value for key, value in root.value if key.value == "points"), None)
    if not isinstance(points, yaml.MappingNode) or not points.value:
        raise ConfigError(f"workload {path}: points must map a batch such as 8x1@2048 to its weight")
    entries, seen = [], dict[str, int]()
    for key, value in points.value:
        line, name = key.start_mark.line + 1, str(key.value)
        where = f"workload {path}, line {line}"
        if name in seen:
            raise ConfigError(f"{where}: batch {name} stands on line {seen[name]} too; leave one of them out")
        seen[name] = line
        entries.append((where, name, value.value if isinstance(value, yaml.ScalarNode) else ""))
    return entries


def _parse(where: str, name: str, weight: str) -> Point:
    try:
        return Point.parse(name, float(weight))
    except ValueError:
        raise ConfigError(f"{where}: weight {weight!r} of {name} is not a number") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
