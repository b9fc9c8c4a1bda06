"""What a Triton attend would launch for each batch of a workload, compiled for a GPU that need not be here.

One candidate is one job, so that jobs can run in processes of their own; what was found stays in the kernel cache, beside
the source, under the toolchain that made it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from pagegen.build.triton import KernelCall, attend_calls, compile_call, toolchain
from pagegen.catalog import variant
from pagegen.errors import BuildError, RenderError
from pagegen.render import Source, render
from pagegen.resources import KeptResources, Resources, gpu_resources
from pagegen.space import Config
from pagegen.spec import KernelSpec, Op
from pagegen.target import Target, parse_target
from pagegen.tuning.machine import working
from pagegen.tuning.static_gpu import MERGE, Launch
from pagegen.tuning.static_model import Launches
from pagegen.tuning.workload import Point

_KEPT = 256  # binaries of which a process remembers the resources: candidates share many


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A candidate and the batches that it is compiled for."""

    spec: KernelSpec
    target: str
    config: Config
    points: tuple[Point, ...]


def compile_candidate(job: Job) -> Launches | str:
    """What the candidate launches for every batch, by its name; or why it does not compile."""
    with working(say=lambda line: None):  # a CPU's timing beside it would not be alone
        return _launches(job)


def _launches(job: Job) -> Launches | str:
    try:
        source, calls = launched_by(job)
        found = _resources_of([call for each in calls for call in each], parse_target(job.target), source.key)
    except (BuildError, RenderError) as error:
        return str(error)
    return {
        point.name: tuple(Launch(_name(call), call.grid, _rows(call), found[_program(call)]) for call in each)
        for point, each in zip(job.points, calls, strict=True)
    }


def launched_by(job: Job) -> tuple[Source, list[list[KernelCall]]]:
    """The candidate's source, and what it would launch for each batch; nothing is compiled. Raises RenderError or BuildError."""
    source = render(variant(Op.ATTEND, job.spec, parse_target(job.target), job.config))
    batches = [(sum(point.query_lens), len(point.query_lens), max(point.context_lens)) for point in job.points]
    return source, attend_calls(source, batches)


def _resources_of(calls: Sequence[KernelCall], target: Target, key: str) -> dict[str, Resources]:
    """What the binaries of some calls use, by program: from the cache, or compiled."""
    kept = KeptResources("launched", key, toolchain())
    found = kept.read()
    missing = {_program(call): call for call in calls if _program(call) not in found}
    if missing:
        found |= {program: _compiled(_name(call), call, target) for program, call in missing.items()}
        kept.write(found)
    return found


def _compiled(name: str, call: KernelCall, target: Target) -> Resources:
    made = compile_call(name, call, target)
    return _inspected(target, made.binary, made.assembly, made.num_warps, made.shared_memory)


@functools.lru_cache(_KEPT)
def _inspected(target: Target, binary: bytes, assembly: str, num_warps: int, shared_memory: int) -> Resources:
    return gpu_resources(target, binary, assembly, num_warps, shared_memory)


def _program(call: KernelCall) -> str:
    return hashlib.sha256(repr(call.program).encode()).hexdigest()[:16]


def _rows(call: KernelCall) -> int:
    return int(call.constants.get("ROWS", 1))


def _name(call: KernelCall) -> str:
    if call.kernel.__name__ == MERGE:
        return MERGE
    parts = " in parts" if call.grid[2] > 1 else ""
    return f"{call.kernel.__name__} of {_rows(call)} rows{parts}"
