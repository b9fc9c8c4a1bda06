"""Which configs are worth measuring, judged without measuring: what cannot be of use is pruned, the rest is ranked.

On a CPU a config alone says enough (static_cpu.py); on a GPU it takes what its compiled kernels use (static_gpu.py). An
estimate is a time only in name: it ranks, and decides nothing that a measurement can decide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping

from pagegen.space import Config
from pagegen.spec import KernelSpec
from pagegen.target import Target
from pagegen.tuning import static_cpu, static_gpu
from pagegen.tuning.static_gpu import Launch
from pagegen.tuning.workload import Workload

DUPLICATE = "duplicate"
Launches = Mapping[str, tuple[Launch, ...]]  # workload point -> what a config launches for it


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """A config, its estimated seconds by workload point, their weighted geometric mean; or why it is pruned.

    A reason is a word for its kind, a colon, and what is the matter.
    """

    config: Config
    seconds: Mapping[str, float]
    score: float
    reason: str = ""


def kind_of(reason: str) -> str:
    """The word that a reason begins with."""
    return reason.partition(":")[0]


def rank(
    spec: KernelSpec,
    target: Target,
    workload: Workload,
    configs: Iterable[Config],
    *,
    threads: int = 1,
    launches: Mapping[Config, Launches] | None = None,
) -> list[Judgement]:
    """Judges configs for a workload: those worth measuring first, best first; then the pruned, in the order given.

    Of configs that would do the same work the first given is kept. `threads` counts on a CPU; a GPU target needs
    `launches`, with every point of the workload, of every config.
    """
    kept: dict[Hashable, Judgement] = {}
    good: list[Judgement] = []
    pruned: list[Judgement] = []
    for config in configs:
        work = _work(spec, target, workload, config, threads, launches)
        if work in kept:
            twin = kept[work]
            reason = twin.reason or f"{DUPLICATE}: on these batches it does what {twin.config.slug} does"
            pruned.append(dataclasses.replace(twin, config=config, reason=reason))
            continue
        found = kept[work] = _judge(spec, target, workload, config, threads, launches)
        (pruned if found.reason else good).append(found)
    spills = {found.config: _spills(workload, launches[found.config]) for found in good} if launches else {}
    clean = sum(not words for words in spills.values())
    if clean:  # where all spill, they are what there is
        pruned += [
            dataclasses.replace(each, reason=f"{spills[each.config]}, {clean} configs never")
            for each in good
            if spills[each.config]
        ]
        good = [each for each in good if not spills[each.config]]
    return sorted(good, key=lambda found: found.score) + pruned


def work_of(spec: KernelSpec, target: Target, workload: Workload, config: Config, threads: int) -> Hashable:
    """What a config does with the batches of a workload on a CPU: equal for configs that do the same."""
    return tuple(static_cpu.work_of(spec, target, config, point, threads) for point in workload.points)


def _work(
    spec: KernelSpec,
    target: Target,
    workload: Workload,
    config: Config,
    threads: int,
    launches: Mapping[Config, Launches] | None,
) -> Hashable:
    if launches is None:
        return work_of(spec, target, workload, config, threads)
    return tuple(tuple(launch.work for launch in launches[config][point.name]) for point in workload.points)


def _judge(
    spec: KernelSpec,
    target: Target,
    workload: Workload,
    config: Config,
    threads: int,
    launches: Mapping[Config, Launches] | None,
) -> Judgement:
    """A judgement of a config by itself."""
    points, reason = workload.points, ""
    if launches is None:
        works = [static_cpu.work_of(spec, target, config, point, threads) for point in points]
        taken = [static_cpu.seconds_of(spec, target, work, threads) for work in works]
    else:
        each = [launches[config][point.name] for point in points]
        reason = next(filter(None, (static_gpu.unfit(target, own) for own in each)), "")
        taken = [static_gpu.seconds_of(spec, target, config, *pair) for pair in zip(points, each, strict=True)]
    weights = [point.weight for point in points]
    logs = (weight * math.log(seconds) for weight, seconds in zip(weights, taken, strict=True))
    names = (point.name for point in points)
    return Judgement(config, dict(zip(names, taken, strict=True)), math.exp(sum(logs) / sum(weights)), reason)


def _spills(workload: Workload, launches: Launches) -> str:
    """Which kernel of a config spills most registers, in words; nothing if none does."""
    all_launches = (launch for point in workload.points for launch in launches[point.name])
    worst = max(all_launches, key=lambda launch: launch.resources.spills or 0)
    return f"spills: {worst.kernel} spills {worst.resources.spills} times" if worst.resources.spills else ""
