"""The machine's limits, measured: read bandwidth of each level of memory, FP32 and BF16 peaks, by number of threads.

A batch cannot take less time than its bytes at the bandwidth of where they lie, nor than its operations at the peak
(Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from pagegen.build.cpp import compile_library
from pagegen.kernel import allocate_bytes
from pagegen.memory import free_bytes
from pagegen.paths import TEMPLATES
from pagegen.spec import DType, KernelSpec
from pagegen.target import Hardware, Target, best_cpu, detect
from pagegen.tuning.machine import Disturbance, working
from pagegen.tuning.measure import Interval, Measurement, measure
from pagegen.tuning.workload import Point, cold_bytes

CALL_BYTES = 32 << 20  # a call reads at least so much, smaller memory several times
FMA_STEPS = 1_000_000  # about 5 milliseconds: after the loops that read memory the first one is slower
AMX_STEPS = 200_000
MEMORY = "memory"  # the level below the last cache


class Limits:
    """The plain loops of templates/cpp/roofline.cpp, built for a CPU target."""

    def __init__(self, target: Target) -> None:
        text = (TEMPLATES / "cpp" / "roofline.cpp").read_text()
        library = ctypes.CDLL(str(compile_library(text, target)))
        self._read, self._fma = library.pagegen_read, library.pagegen_fma
        self._amx, self._pairs = library.pagegen_amx, library.pagegen_pairs
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
        self._read_pieces, self._products = library.pagegen_read_pieces, library.pagegen_products
        self._read_pieces.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_int32] * 3]
        self._products.argtypes, self._products.restype = [ctypes.c_int32], ctypes.c_int32
        self._read.restype = self._read_pieces.restype = ctypes.c_uint64
        self._prefetched = library.pagegen_read_prefetched
        self._prefetched.argtypes, self._prefetched.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32], ctypes.c_int64
        self._follow = library.pagegen_follow
        self._follow.argtypes, self._follow.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_void_p
        for function in (self._fma, self._amx, self._pairs):
            function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int32], ctypes.c_int64

    def read(self, address: int, num_bytes: int, threads: int, repeats: int = 1) -> None:
        """Streams once (or `repeats` times) over `num_bytes` from `address`, a multiple of 64, on `threads` threads."""
        self._read(address, num_bytes, repeats, threads)

    def read_pieces(self, addresses: int, count: int, num_bytes: int, threads: int, products: int = 0, again: int = 0) -> int:
        """Streams over `count` pieces of `num_bytes`, a multiple of 64, in their order, their addresses (int64) at `addresses`;
        answers all their 8-byte words or'ed together. Each vector is multiplied `products(products)` times beside; `again`, 0, 3
        or 6: how often a line of the next piece is prefetched again, as attend's knob `prefetch_again`."""
        return int(self._read_pieces(addresses, count, num_bytes, threads, products, again))

    def products(self, asked: int) -> int:
        """How many multiply-adds of each vector `read_pieces` does where so many are asked for: as many, or the next fewer it has."""
        return int(self._products(asked))

    def read_prefetched(self, address: int, num_bytes: int, passes: int) -> int:
        """Nanoseconds of reading `num_bytes` from `address`, both multiples of 64, some time after all lines have been prefetched
        `passes` times over; -1: after they have been read."""
        return int(self._prefetched(address, num_bytes, passes))

    def follow(self, address: int, count: int) -> int:
        """Loads the address at `address`, then the one that stands there, `count` times in all; answers the last."""
        return int(self._follow(address, count))

    def fma(self, threads: int, steps: int = FMA_STEPS) -> int:
        """FP32 multiply-adds in registers; answers how many operations that were."""
        return int(self._fma(steps, threads))

    def bf16(self, threads: int) -> int:
        """BF16 products of AMX tiles, else of the target's vectors; answers how many operations, 0 where neither has them."""
        return int(self._amx(AMX_STEPS, threads) or self._pairs(FMA_STEPS, threads))


@functools.cache
def limits(target: Target) -> Limits:
    """`Limits` of a target, loaded once."""
    return Limits(target)


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """What was measured, each by number of threads: bytes a second of a level of memory, operations a second.

    `levels` has the bytes that were read in all threads together. `bf16` is empty where nothing multiplies it: it is then
    widened to fp32 and its peak is that of fp32.
    """

    levels: Mapping[str, Mapping[int, int]]
    bandwidth: Mapping[str, Mapping[int, Interval]]
    fp32: Mapping[int, Interval]
    bf16: Mapping[int, Interval]
    disturbance: Disturbance
    raised: tuple[str, ...] = ()  # "L1d 2": what came out below one thread's twice, and was given one thread's figure

    def read_bandwidth(self, num_bytes: int, threads: int) -> float:
        """Bytes a second at which `num_bytes` can be read: of the smallest level that held as much when it was measured.

        Between two levels that is the slower one's.
        """
        for level, sizes in self.levels.items():
            if num_bytes <= sizes[threads]:
                return self.bandwidth[level][threads].median
        return self.bandwidth[MEMORY][threads].median

    def peak(self, dtype: DType, threads: int) -> float:
        """Operations a second of the fastest unit for products of `dtype`."""
        peaks = self.bf16 if self.bf16 and dtype is DType.BF16 else self.fp32
        return peaks[threads].median

    def floor(self, spec: KernelSpec, point: Point, threads: int, resident: int) -> float:
        """Seconds that a batch takes at least, whose KV lies among `resident` bytes that are in use in turn."""
        moved = point.kv_bytes(spec) + point.io_bytes(spec)
        return max(moved / self.read_bandwidth(resident, threads), point.flops(spec) / self.peak(spec.dtype, threads))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: bandwidth in bytes a second, peaks in operations a second, with their intervals."""

        def plain(values: Mapping[int, Interval]) -> dict[str, dict[str, float]]:
            return {str(threads): dataclasses.asdict(found) for threads, found in values.items()}

        return {
            "levels": {level: {str(t): size for t, size in sizes.items()} for level, sizes in self.levels.items()},
            "bandwidth": {level: plain(values) for level, values in self.bandwidth.items()},
            "fp32": plain(self.fp32),
            "bf16": plain(self.bf16),
            "disturbance": self.disturbance.to_dict(),
            "raised": list(self.raised),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Roofline:
        """Reads what `to_dict` wrote."""

        def intervals(plain: Mapping[str, Mapping[str, float]]) -> dict[int, Interval]:
            return {int(threads): Interval(**found) for threads, found in plain.items()}

        return cls(
            {level: {int(t): size for t, size in sizes.items()} for level, sizes in values["levels"].items()},
            {level: intervals(found) for level, found in values["bandwidth"].items()},
            intervals(values["fp32"]),
            intervals(values["bf16"]),
            Disturbance(**values["disturbance"]),
            tuple(values.get("raised", ())),  # older records do not say
        )


def level_sizes(hardware: Hardware, threads: int, free: int | None) -> dict[str, int]:
    """Bytes to be read by all threads together so that they lie in each level: half a private cache; of the last one
    well beyond the private ones, and no more than a quarter, as others use it too; beyond it, what counts as cold."""
    caches = dict(hardware.caches)
    last = next(reversed(caches), None)
    sizes = {level: threads * size // 2 for level, size in caches.items() if level != last or len(caches) == 1}
    if last is not None and len(caches) > 1:
        private = max(sizes.values())
        sizes[last] = max(min(caches[last] // 4, 16 * private), 2 * private)
    return {**sizes, MEMORY: cold_bytes(caches, free)}


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({threads, *(1 << i for i in range(threads.bit_length()) if 1 << i < threads)})


def measure_roofline(target: Target | None = None, *, seconds: float = 2.0) -> Roofline:
    """Measures this machine's CPU in interleaved rounds for about `seconds`; takes twice the last cache of memory.

    What more threads do slower than one is measured again: others had a core. It counts for no less than what one does.
    Raises BuildError if there is no compiler.
    """
    with working():  # it compiles, and runs the loops once to count their operations
        loops, hardware, free = limits(target or best_cpu()), detect(), free_bytes()
        counts = thread_counts(hardware.threads)
        sizes_by_count = {count: level_sizes(hardware, count, free) for count in counts}
        levels = {level: {count: sizes_by_count[count][level] for count in counts} for level in sizes_by_count[counts[0]]}
        memory = allocate_bytes(max(size for sizes in levels.values() for size in sizes.values()))
        memory.fill_(1)
        calls: dict[str, Callable[[], object]] = {}
        work: dict[str, int] = {}
        for level, sizes in levels.items():
            for count, size in sizes.items():
                repeats = max(1, math.ceil(CALL_BYTES / size))
                calls[f"{level} {count}"] = functools.partial(loops.read, memory.data_ptr(), size, count, repeats)
                work[f"{level} {count}"] = size * repeats
        for name, loop in (("fp32", loops.fma), ("bf16", loops.bf16)):
            for count in counts:
                if operations := loop(count):
                    calls[f"{name} {count}"] = functools.partial(loop, count)
                    work[f"{name} {count}"] = operations
    silent = {name: _silent(call) for name, call in calls.items()}
    taken = measure(silent, next(iter(silent)), seconds=seconds)
    rates, disturbances = _rates(taken, work), [taken.disturbance]
    if slow := _below_one_thread(rates):
        again = measure({name: silent[name] for name in slow}, slow[0], seconds=seconds * len(slow) / len(silent))
        found = _rates(again, {name: work[name] for name in slow})
        rates |= {name: max(rates[name], rate, key=lambda each: each.median) for name, rate in found.items()}
        disturbances.append(again.disturbance)
    raised = _below_one_thread(rates)
    rates |= {name: rates[_of_one_thread(name)] for name in raised}

    def by_count(what: str) -> dict[int, Interval]:
        return {count: rates[f"{what} {count}"] for count in counts if f"{what} {count}" in rates}

    bandwidth = {level: by_count(level) for level in levels}
    return Roofline(levels, bandwidth, by_count("fp32"), by_count("bf16"), Disturbance.over(disturbances), tuple(raised))


def _rates(taken: Measurement, work: Mapping[str, int]) -> dict[str, Interval]:
    timings = {name: taken.timing(name) for name in work}
    return {name: Interval(work[name] / each.median, work[name] / each.high, work[name] / each.low) for name, each in timings.items()}


def _of_one_thread(name: str) -> str:
    return f"{name.rpartition(' ')[0]} 1"


def _below_one_thread(rates: Mapping[str, Interval]) -> list[str]:
    return [name for name, rate in rates.items() if rate.median < rates[_of_one_thread(name)].median]


def _silent(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()

    return run
