"""Packages of several specs side by side, each on a KV pool of its own: what block sizes and layouts are compared by."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from pagegen.build import build
from pagegen.catalog import variant
from pagegen.errors import CheckError
from pagegen.kernel import TORCH_DTYPES, PagedKernels, WriteExtras, WriteKV
from pagegen.memory import free_bytes
from pagegen.package import load_package
from pagegen.render import render
from pagegen.spec import KernelSpec, Op
from pagegen.target import Target, detect, parse_target
from pagegen.tuning.evaluate import POINT_TIMEOUT, Timer, TimerDied
from pagegen.tuning.machine import Setting, exclusive, working
from pagegen.tuning.measure import Call, Measurement, measure, stopwatch_for
from pagegen.tuning.workload import COLD_SHARE, Inputs, Point, Pool, cold_bytes_on
from pagegen.tuning.workloads import Selection

SECONDS = 0.5  # a batch and pair
COPIED = 64  # blocks of one call that is timed
TABLES = 64  # of a batch's block tables, to whose slots write_kv writes in turn


@dataclasses.dataclass(frozen=True, slots=True)
class _Packages:
    """The pairs' packages, each with a KV pool of its own, for a timing process."""

    folders: Mapping[str, Path]
    target: str
    points: tuple[Point, ...]
    pool_bytes: int
    threads: int

    def ready(self) -> Callable[[Batch], Measurement]:
        """See `evaluate.Setup`."""
        packages = {name: load_package(folder) for name, folder in self.folders.items()}
        return timing_of(packages, parse_target(self.target), self.points, self.pool_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What is timed in the same rounds: attend and write_kv of every pair on a batch; of None, their copy_blocks."""

    point: Point | None
    warm: bool
    seconds: float


def compare(
    folders: Mapping[str, Path], pairs: Mapping[str, KernelSpec], target: Target, selection: Selection
) -> tuple[dict[Point, Measurement], dict[str, float]]:
    """(attend and write_kv of every pair on every batch, named `PAIR attend` and `PAIR write_kv`, in the same rounds;
    seconds of copying a block). Timed as `tune` times: in a process of its own, with pinned threads.

    Raises CheckError if a package takes that process down.
    """
    device, threads = "cpu" if target.kind == "cpu" else "cuda", detect().threads
    points = tuple(point for each in selection.workloads.values() for point in each.points)
    free, size = free_bytes(), cold_bytes_on(device)
    if free is not None:
        size = min(size, free // COLD_SHARE // len(folders))
    timer = Timer(_Packages(folders, target.name, points, size, threads))
    seconds, patience = SECONDS * len(folders), 2 * len(folders) * POINT_TIMEOUT

    def timed(point: Point | None, warm: bool = False) -> Measurement:
        found = timer.ask(Batch(point, warm, seconds), seconds + patience)
        assert isinstance(found, Measurement)
        return found

    try:
        with working():
            for spec in pairs.values():
                _write_kv(spec, target)  # into the cache, or the process would compile while it times
            timer.start()
        with exclusive():
            measured = {point: timed(point, each.warm) for each in selection.workloads.values() for point in each.points}
            copied = timed(None)
    except TimerDied as error:
        raise CheckError(f"a package that was tuned failed beside the others: {error}; run the command again") from None
    finally:
        timer.close()
    return measured, {name: copied.timing(name).median / COPIED for name in folders}


def timing_of(
    packages: Mapping[str, PagedKernels], target: Target, points: tuple[Point, ...], pool_bytes: int
) -> Callable[[Batch], Measurement]:
    """What times a `Batch`, each pair with a pool of at least `pool_bytes`. The caller holds `machine.exclusive`."""
    device = "cpu" if target.kind == "cpu" else "cuda"
    pools = {name: Pool.for_points(kernels.spec, points, pool_bytes, device) for name, kernels in packages.items()}

    def timed(batch: Batch) -> Measurement:
        calls, settings = dict[str, Call](), list[Setting]()
        for name, kernels in packages.items():
            if batch.point is None:
                calls[name] = _copying(kernels, pools[name])
                continue
            inputs = Inputs(pools[name], batch.point, warm=batch.warm)
            calls[f"{name} attend"], calls[f"{name} write_kv"] = inputs.bind(kernels.attend), _writing(inputs, target)
            calls[f"{name} attend"]()  # starts the threads that the setting speaks of
            settings.append(inputs.setting())
        lock = contextlib.nullcontext()
        found = measure(calls, next(iter(calls)), seconds=batch.seconds, stopwatch=stopwatch_for(device), lock=lock)
        return dataclasses.replace(found, setting=_worst(settings)) if settings else found

    return timed


def _worst(settings: Sequence[Setting]) -> Setting:
    """What every pair was given at least."""
    shares = [setting.huge_pages for setting in settings if setting.huge_pages is not None]
    least = min(setting.rotated_bytes for setting in settings)
    return dataclasses.replace(settings[-1], rotated_bytes=least, huge_pages=min(shares, default=None))


def _write_kv(spec: KernelSpec, target: Target) -> WriteKV:
    """What else write_kv may do (rotate, normalise) does not depend on where it writes, and is left out."""
    plain = spec.replace(rope=None, rotary_dim=None, qk_norm=False)
    return cast(WriteKV, build(render(variant(Op.WRITE_KV, plain, target))))


def _writing(inputs: Inputs, target: Target) -> Call:
    """write_kv of the batch's new tokens, to one copy of it after the other."""
    pool, spec, write_kv = inputs.pool, inputs.spec, _write_kv(inputs.spec, target)
    tokens, dtype = sum(inputs.point.query_lens), TORCH_DTYPES[spec.dtype]
    k, v = (torch.randn(tokens, spec.kv_heads, dim, device=pool.device).to(dtype) for dim in (spec.head_dim, spec.dim_v))
    slots = itertools.cycle([slots_of(inputs, table) for table in inputs.block_tables[:TABLES]])
    extras = WriteExtras(scales=pool.scales)

    def call() -> None:
        write_kv(k, v, pool.k_cache, pool.v_cache, next(slots), extras=extras)

    return call


def slots_of(inputs: Inputs, table: torch.Tensor) -> torch.Tensor:
    """Where the new tokens of a batch are written, int64: the last of each sequence."""
    size, found = inputs.spec.block_size, []
    for row, (queries, context) in enumerate(zip(inputs.point.query_lens, inputs.point.context_lens, strict=True)):
        positions = torch.arange(context - queries, context, device=table.device)
        found.append(table[row].long()[positions // size] * size + positions % size)
    return torch.cat(found)


def _copying(kernels: PagedKernels, pool: Pool) -> Call:
    """copy_blocks of COPIED blocks, from one half of the pool to the other, so far as it has as many."""
    count = min(COPIED, len(pool.permutation) // 2)
    pairs = pool.permutation[: 2 * count].long().view(2, count).T.contiguous()
    pairs = pairs.repeat(-(-COPIED // count), 1)[:COPIED].to(pool.device) if count < COPIED else pairs.to(pool.device)
    return lambda: kernels.copy_blocks(pool.k_cache, pool.v_cache, pairs, scales=pool.scales)
