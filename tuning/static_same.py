"""Which configs do the same on the batches of a workload, as far as that is known before anything is compiled.

On a CPU the config alone says it (static_cpu.py). On a GPU the launcher does: the programs, options and grids that it would
launch. Programs that differ, and compile to the same binary, are found by `tune --static` alone, which compiles all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from pagegen.errors import BuildError, RenderError
from pagegen.space import Config
from pagegen.spec import KernelSpec
from pagegen.target import Target
from pagegen.tuning import static_model
from pagegen.tuning.static_compile import Job, launched_by
from pagegen.tuning.workload import Workload


def signature_of(spec: KernelSpec, target: Target, workload: Workload, threads: int) -> Callable[[Config], Hashable]:
    """What gives each config of `attend` a value that is equal for configs that do the same. `threads` counts on a CPU."""
    if target.kind == "cpu":
        return lambda config: static_model.work_of(spec, target, workload, config, threads)

    def launches(config: Config) -> Hashable:
        try:
            calls = launched_by(Job(spec, target.name, config, workload.points))[1]
        except (BuildError, RenderError):
            return config  # is like no other: evaluating it says what is wrong
        return tuple(
            tuple((call.kernel.cache_key, call.identity, tuple(call.options.items()), call.grid) for call in each) for each in calls
        )

    return launches
