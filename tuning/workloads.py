"""Which batches a tuning run times: a preset by name, or a file such as `pagegen simulate --emit-workload` writes.

format: 1
phase: decode           # or left out: each batch belongs to the phase that the runtime dispatches it to
points:
  8x1@2048: 3           # SEQSxQUERY@CONTEXT, joined by +, and how much of the traffic it stands for
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pagegen.errors import ConfigError, SpecError
from pagegen.memory import free_bytes, total_bytes
from pagegen.records import phase_of
from pagegen.spec import KernelSpec, Phase
from pagegen.target import Target, detect, is_present
from pagegen.transfer import block_bytes
from pagegen.tuning.asked import PRESETS, preset_names, require_workload
from pagegen.tuning.dispatch import Span, span_of
from pagegen.tuning.shape import has_format
from pagegen.tuning.static_cpu import CLOCK, READ
from pagegen.tuning.static_gpu import DEVICES
from pagegen.tuning.workload import MAX_WEIGHT, WORKLOAD_FORMAT, Point, Workload, blocks_of

MAX_POINTS = 12  # of a phase; what has more is sampled
CALL_SECONDS = 1.0  # of one call, by nominal rates: in a trial a batch takes fourteen, in the contest seven a contender
MOST_SECONDS = 60.0  # of one call of the smallest batch of a phase, by the same rates
MEMORY_SHARE = 16  # a batch takes at most one in so many parts of the memory: torch SDPA copies int4 KV as numbers, twice
ABSENT_GPU = 24 << 30  # bytes of memory, of a GPU that is not here
RESERVED = frozenset({"default", "static", "package", ".", ".."})  # what lies beside a workload's results, or around them
FIELDS = ("format", "phase", "points", "warm")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What is timed for each phase, and what the file or preset has in all."""

    name: str
    workloads: Mapping[Phase, Workload]
    num_points: int
    spans: Mapping[Phase, Span] = dataclasses.field(default_factory=dict)  # between which shapes all its batches lie
    moved: Mapping[Phase, float] = dataclasses.field(default_factory=dict)  # share of the weight that is too large to be timed
    max_context: int | None = None  # tokens that the model takes
    cut: int = 0  # batches with a longer context, which were cut to it

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        timed = sum(len(workload.points) for workload in self.workloads.values())
        return {
            "name": self.name,
            "points": self.num_points,
            "timed": timed,
            "max_context": self.max_context,
            "cut": self.cut,
            "digests": {phase.value: workload.digest for phase, workload in self.workloads.items()},
            "spans": {phase.value: span for phase, span in self.spans.items() if phase in self.workloads},
            "moved": {phase.value: share for phase, share in self.moved.items() if phase in self.workloads},
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


def _with_own_name(word: str, presets: Collection[str]) -> Path:
    """A file. Raises ConfigError if its name is that of another folder among the results of a spec."""
    name = name_of(word)
    if name in RESERVED or name in presets:
        raise ConfigError(f"workload {word}: results of {name!r} lie where those of another workload or a package do; rename the file")
    return Path(word)


def select(
    word: str | None, spec: KernelSpec, target: Target, *, max_context: int | None = None, pools: int = 1
) -> Selection:
    """The workload of that name or file, bounded for a spec and target; None is what every phase is tuned for unless told
    otherwise.

    Contexts beyond `max_context`, the tokens that a model takes, are cut to it. For batches that take too long, or too much memory where there are so many `pools` at once, the nearest of their phase
    stand; of a phase with more than MAX_POINTS, so many stand for the others. Raises ConfigError.
    """
    require_workload(word, PRESETS)
    known, found = preset_names(PRESETS), dict[Phase, Workload]()
    if word is None or word in known:
        for path in [PRESETS / f"{name}.yaml" for name in ([word] if word else Phase)]:
            found |= read_workloads(path)
    else:
        found = read_workloads(_with_own_name(word, known))
    num_points = sum(len(workload.points) for workload in found.values())
    longer = sum(max(point.context_lens) > (max_context or math.inf) for each in found.values() for point in each.points)
    if longer:
        found = {phase: cut(workload, max_context or 0) for phase, workload in found.items()}
    fits = limit(spec, target, max(MEMORY_SHARE, 2 * pools))
    kept = {phase: workload.within(spec, fits) for phase, workload in found.items()}
    bounded = {phase: sampled(workload, spec) for phase, workload in kept.items()}
    _check_bounds(word or "default", [point for workload in bounded.values() for point in workload.points], spec, target)
    return Selection(
        name_of(word),
        bounded,
        num_points,
        {phase: span_of(workload.points) for phase, workload in found.items()},
        {phase: _left_out(workload, kept[phase]) for phase, workload in found.items()},
        max_context,
        longer,
    )


def cut(workload: Workload, max_context: int) -> Workload:
    """With no context, and so no query, longer than that: the last tokens of each. Batches that become equal are one."""
    weights = dict[str, float]()
    for point in workload.points:
        queries, contexts = (tuple(min(each, max_context) for each in lens) for lens in (point.query_lens, point.context_lens))
        name = Point(queries, contexts).name
        weights[name] = weights.get(name, 0.0) + point.weight
    return dataclasses.replace(workload, points=tuple(Point.parse(name, weight) for name, weight in weights.items()))


def limit(spec: KernelSpec, target: Target, share: int) -> Callable[[Point], bool]:
    """Whether a batch can be timed. By what the machine has, not by what is free or was measured: the same command is to find
    the same batches, or its study would be another one.
    """
    memory, seconds = total_bytes() if target.kind == "cpu" else _device_memory(target), nominal_seconds(spec, target)
    return lambda point: (memory is None or _held(spec, point) * share <= memory) and seconds(point) <= CALL_SECONDS


def nominal_seconds(spec: KernelSpec, target: Target) -> Callable[[Point], float]:
    """How long a call of a batch takes by the nominal rates of what the target is made of."""
    if target.kind == "cpu":
        threads = detect().threads
        read, compute = threads * CLOCK * READ, threads * CLOCK * 2 * target.lanes
    else:
        read, compute = DEVICES[target.arch].bandwidth, DEVICES[target.arch].fp32
    return lambda point: max((point.kv_bytes(spec) + point.io_bytes(spec)) / read, point.flops(spec) / compute)


def _device_memory(target: Target) -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if is_present(target) else ABSENT_GPU


def _held(spec: KernelSpec, point: Point) -> int:
    """Bytes of a batch's blocks, q and out. A window bounds what is read, not what is held."""
    return blocks_of(spec, point) * block_bytes(spec) + point.io_bytes(spec)


def _left_out(workload: Workload, kept: Workload) -> float:
    """Share of the weight whose batches were not kept."""
    names = {point.name for point in kept.points}
    return sum(p.weight for p in workload.points if p.name not in names) / sum(p.weight for p in workload.points)


def select_phases(
    word: str | None,
    spec: KernelSpec,
    phase: Phase | None,
    target: Target,
    *,
    max_context: int | None = None,
    pools: int = 1,
) -> Selection:
    """`select`, and of it what is tuned: `phase` alone, or all; of a deterministic spec, which has one config, one phase.

    Raises ConfigError, or SpecError for a layout of `auto`.
    """
    if spec.layout is None:
        raise SpecError("layout is `auto`, which only `pagegen tune SPEC --workload W` chooses; set --layout NHD, or another by its name")
    selection = select(word, spec, target, max_context=max_context, pools=pools)
    if spec.deterministic:
        phase = phase or max(selection.workloads, key=list(Phase).index)
    return selection.only(phase) if phase else selection


def _check_bounds(name: str, points: Iterable[Point], spec: KernelSpec, target: Target) -> None:
    """Raises ConfigError for a batch that cannot be held or takes for ever: the smallest of a phase is timed whatever its size."""
    free, seconds = free_bytes() if target.kind == "cpu" else _device_memory(target), nominal_seconds(spec, target)
    for point in points:
        size = _held(spec, point)
        if free is not None and size > free:
            raise ConfigError(
                f"workload {name}: point {point.name!r} takes {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
                "write a smaller batch"
            )
        if seconds(point) > MOST_SECONDS:
            raise ConfigError(
                f"workload {name}: one call of point {point.name!r} takes about {seconds(point):.0f} s on {target.name}, and is "
                f"made many times; allowed: {MOST_SECONDS:.0f} s; write a smaller batch"
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
    if not isinstance(values, dict) or not isinstance(root, yaml.MappingNode) or not has_format(values, WORKLOAD_FORMAT):
        found = values.get("format") if isinstance(values, dict) else None
        raise ConfigError(f"workload {path}: format {found!r} is not known; allowed: {WORKLOAD_FORMAT}")
    first: dict[str, int] = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if first.setdefault(str(key.value), line) != line:
            raise ConfigError(f"workload {path}, line {line}: {key.value} stands on line {first[key.value]} too; write it once")
    if unknown := [name for name in values if name not in FIELDS]:
        raise ConfigError(f"workload {path}: field {unknown[0]!r} is not known; allowed: {', '.join(FIELDS)}")
    try:
        empty = Workload.from_dict(
            {"phase": Phase.DECODE.value, **values, "points": {"1x1@1": 1}}
        )  # all but the points
    except ConfigError as error:
        raise ConfigError(f"workload {path}: {error}") from None
    by_phase: dict[Phase, list[Point]] = {}
    lines = dict[str, int]()
    for line, name, weight in _entries(path, root):
        where = f"workload {path}, line {line}"
        point = _parse(where, name, weight)
        if point.name in lines:  # perhaps spelt otherwise
            raise ConfigError(f"{where}: batch {name} stands on line {lines[point.name]} too; leave one of them out")
        lines[point.name] = line
        rows = point.query_lens
        phase = empty.phase if "phase" in values else phase_of(sum(rows), len(rows), max(rows))
        if phase is Phase.DECODE and max(rows) > 1:
            raise ConfigError(f"{where}: batch {name} has {max(rows)} queries for a sequence, decode has one; leave out the phase, or change one")
        by_phase.setdefault(phase, []).append(point)
    return {
        phase: dataclasses.replace(empty, phase=phase, points=tuple(by_phase[phase]))
        for phase in Phase
        if phase in by_phase
    }


def _entries(path: Path, root: yaml.MappingNode) -> list[tuple[int, str, str]]:
    """(line, batch, weight) of every point as it is written. Raises ConfigError."""
    points = next((value for key, value in root.value if key.value == "points"), None)
    if not isinstance(points, yaml.MappingNode) or not points.value:
        raise ConfigError(f"workload {path}: points must map a batch such as 8x1@2048 to its weight")
    return [
        (key.start_mark.line + 1, str(key.value), value.value if isinstance(value, yaml.ScalarNode) else "")
        for key, value in points.value
    ]


def _parse(where: str, name: str, weight: str) -> Point:
    try:
        point = Point.parse(name, float(weight.encode("ascii")))  # float reads the digits of every script
    except ValueError:
        raise ConfigError(f"{where}: weight {weight!r} of {name} is not a number such as 3 or 0.5") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if point.weight > MAX_WEIGHT:  # those of a record are sums of such
        raise ConfigError(f"{where}: weight {weight} of {name} is more than {MAX_WEIGHT:g}; only their ratios count")
    return point
