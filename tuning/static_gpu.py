"""How long a Triton attend would take on a GPU that is not here, from what its compiled kernels use: for ranking configs.

A batch takes what its launches take, one after the other. A launch takes LAUNCH, and on top the longest of

  memory   bytes that must come from memory, over the bandwidth
  cache    bytes that its programs load, each tile of K and V as often as a tile of rows meets it, over CACHE times that
  compute  multiplications of whole tiles, padding included, over the matrix peak, and exponentials over theirs: of r
           programs that share a multiprocessor, the phases overlap, those of one follow each other

Both bandwidths are cut to what the loads in flight can sustain (Little 1961): resident programs * the bytes that each has
under way, a LATENCY; and to what the multiprocessors that have programs take in, PORT a clock each. A program has under way
what its shared memory holds beyond the tile that it works on, or half a tile: V, while it multiplies K. That is read from its
binary, as the compiler makes one of several num_stages. All three are stretched by how unevenly programs fall on
multiprocessors: whole waves, and never less than the longest program.

Assumed: nominal peaks of the device named in DEVICES; two kernels that follow each other in a stream cost LAUNCH each; an
exponential is a sixteenth of the FP32 rate (a multiprocessor's 16 of 256 operations a cycle; CUDA C++ programming guide,
arithmetic instructions; a quarter-rate instruction in AMD's guides). On Hopper and later, kernels without the
generation's own matrix instruction reach OLD_MATRIX of the peak, as was measured for mma.sync on H100
(https://arxiv.org/abs/2402.13499). What spilled registers cost is not modelled: configs that spill are left out where
others do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from pagegen.resources import Resources, schedulers_of
from pagegen.space import Config
from pagegen.spec import DType, KernelSpec
from pagegen.target import Target
from pagegen.tuning.workload import Point

LAUNCH = 2e-6  # seconds
LATENCY = 600e-9  # seconds of a load from memory under load
# Bytes a clock from the second cache into one multiprocessor, assumed: of what A100's L2 gives in all, a multiprocessor's share
# is 47 (A100 white paper: 5120 of 108).
PORT = 64
CACHE = 3.0  # A100's L2: 5120 bytes a cycle, 3.5 times its memory (A100 white paper); MI300X: 17.2 TB/s, 3.2 times (CDNA 3)
OLD_MATRIX = 0.63
MERGE = "merge"  # the kernel that combines parts
EXP_SHARE = 1 / 16  # of the FP32 rate


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Nominal limits of one product of a target. `matrix`: dense bf16 and fp16 products, summed in fp32."""

    name: str
    processors: int
    bandwidth: float  # bytes a second
    matrix: float  # operations a second
    fp32: float  # operations a second, without a matrix unit
    clock: float  # hertz, at which these are reached
    source: str


DEVICES = {
    "sm_80": Device("A100 SXM 80 GB", 108, 2.039e12, 312e12, 19.5e12, 1.41e9, "NVIDIA A100 datasheet"),
    "sm_86": Device("A10", 72, 0.6e12, 125e12, 31.2e12, 1.695e9, "NVIDIA A10 datasheet"),
    "sm_89": Device("L40S", 142, 0.864e12, 362e12, 91.6e12, 2.52e9, "NVIDIA L40S datasheet"),
    "sm_90": Device("H100 SXM", 132, 3.35e12, 989e12, 67e12, 1.98e9, "NVIDIA H100 datasheet"),
    "sm_100": Device("B200", 148, 8e12, 2250e12, 75e12, 1.98e9, "NVIDIA HGX B200 datasheet, an eighth"),
    "sm_120": Device("RTX 5090", 170, 1.792e12, 209.5e12, 104.8e12, 2.407e9, "NVIDIA RTX Blackwell architecture white paper"),
    "gfx90a": Device("MI250X, one die", 110, 1.638e12, 191.5e12, 23.9e12, 1.7e9, "AMD Instinct MI250X datasheet, half"),
    "gfx942": Device("MI300X", 304, 5.3e12, 1307.4e12, 163.4e12, 2.1e9, "AMD Instinct MI300X datasheet"),
    "gfx950": Device("MI355X", 256, 8e12, 2516.6e12, 157.3e12, 2.4e9, "AMD Instinct MI355X datasheet"),
    "gfx1100": Device("RX 7900 XTX", 96, 0.96e12, 122.8e12, 61.4e12, 2.5e9, "AMD Radeon RX 7900 XTX product page"),
}
_OWN_MATRIX = {"sm_90": "HGMMA", "sm_100": "UTCMMA"}  # the instruction that reaches the peak, where an older one runs too
_COPIES = ("LDGSTS", "UTMALDG")  # into shared memory, asynchronously
_MATRIX = ("HMMA", "HGMMA", "UTCMMA", "MFMA", "WMMA")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a batch. `rows` are those of one program."""

    kernel: str
    grid: tuple[int, ...]
    rows: int
    resources: Resources

    @property
    def parts(self) -> int:
        """Into how many parts it cuts contexts."""
        return self.grid[2] if len(self.grid) > 2 else 1

    @property
    def work(self) -> tuple[object, ...]:
        """What tells two launches of one batch apart in time."""
        used = self.resources
        return self.kernel, self.grid, used.digest, used.shared_memory, used.threads


def unfit(target: Target, launches: tuple[Launch, ...]) -> str:
    """Why a config cannot be of use on a target, or nothing. A word, a colon, and the figures."""
    for launch in launches:
        used = launch.resources
        assert used.shared_memory is not None and used.occupancy is not None and used.threads is not None
        if used.shared_memory > target.shared_memory:
            return f"shared memory: {launch.kernel} takes {used.shared_memory} bytes, a program may have {target.shared_memory}"
        if not used.occupancy:
            return f"registers: {launch.kernel} takes {used.registers} of each of {used.threads} threads, and cannot be launched"
        warps, schedulers = round(used.occupancy * target.max_threads) // target.warp_size, schedulers_of(target)
        if warps < schedulers:
            return f"occupancy: {launch.kernel} leaves {schedulers - warps} of {schedulers} schedulers without a warp"
    return ""


def seconds_of(spec: KernelSpec, target: Target, config: Config, point: Point, launches: tuple[Launch, ...]) -> float:
    """Seconds of a batch, by the formula above."""
    parts = max(launch.parts for launch in launches)
    return sum(
        _merge_seconds(spec, target, point, parts)
        if launch.kernel == MERGE
        else _attend_seconds(spec, target, config, point, launch)
        for launch in launches
    )


def _merge_seconds(spec: KernelSpec, target: Target, point: Point, parts: int) -> float:
    moved = parts * _part_bytes(spec, point) + point.io_bytes(spec) / 2
    return LAUNCH + moved / DEVICES[target.arch].bandwidth


def _part_bytes(spec: KernelSpec, point: Point) -> int:
    """Bytes of one part of every row, its log-sum-exp included."""
    return sum(point.query_lens) * spec.q_heads * (spec.dim_v + 1) * 4


def _attend_seconds(spec: KernelSpec, target: Target, config: Config, point: Point, launch: Launch) -> float:
    device, used, tile_kv = DEVICES[target.arch], launch.resources, int(config.to_dict()["tile_kv"])
    programs = _programs(spec, point, launch, tile_kv)
    whole, count, longest = sum(t * n for t, n in programs.items()), sum(programs.values()), max(programs)
    assert used.occupancy is not None and used.threads is not None and used.shared_memory is not None
    resident = max(1, round(used.occupancy * target.max_threads / used.threads))

    def uneven(places: int) -> float:
        """How much longer the fullest of so many places works than the mean of all, if each worked."""
        return max(math.ceil(count / places) * whole / count, longest) * places / whole

    tile_bytes = tile_kv * (spec.head_dim + (0 if spec.v_in_k else spec.dim_v)) * spec.cache_dtype.bits / 8
    active = min(count, device.processors * resident)
    under_way = active * max(used.shared_memory - tile_bytes, tile_bytes / 2) / LATENCY
    sustained = min(under_way, min(count, device.processors) * PORT * device.clock)
    written = launch.parts * _part_bytes(spec, point) if launch.parts > 1 else point.io_bytes(spec) / 2
    memory = (point.kv_bytes(spec) + point.io_bytes(spec) / 2 + written) / min(device.bandwidth, sustained)
    cache = whole * tile_bytes / min(CACHE * device.bandwidth, sustained)
    scores = whole * launch.rows * tile_kv
    dims = _padded(spec.head_dim) + _padded(spec.dim_v)
    multiply = 2 * scores * dims / _peak(spec, target, used)
    exponentials = scores / (EXP_SHARE * device.fp32)
    compute = max(multiply, exponentials) + min(multiply, exponentials) / resident
    loads = max(memory, cache) * uneven(active)
    compute *= uneven(device.processors)
    return LAUNCH + max(loads, compute) + (0.0 if _loads_ahead(target, used) else min(loads, compute) / resident)


def _loads_ahead(target: Target, used: Resources) -> bool:
    """Whether a program loads while it multiplies. AMD's loads ahead look like any other: taken for granted there."""
    return target.kind != "cuda" or any(used.instructions.get(name) for name in _COPIES)


def _programs(spec: KernelSpec, point: Point, launch: Launch, tile_kv: int) -> Counter[int]:
    """How many programs have so many tiles of keys; those without any are left out."""
    tokens = max(1, launch.rows // spec.group)
    found: Counter[int] = Counter()
    for (queries, context), count in Counter(zip(point.query_lens, point.context_lens, strict=True)).items():
        for first in range(0, queries, tokens):
            before = context - queries + first
            end = before + min(tokens, queries - first) if spec.causal else context
            start = 0 if spec.window is None else max(0, before + 1 - spec.window)
            tiles = math.ceil(end / tile_kv) - start // tile_kv
            each = math.ceil(tiles / launch.parts)
            found[each] += count * launch.grid[1] * math.ceil(tiles / each)
    return found


def _padded(dims: int) -> int:
    return 1 << (dims - 1).bit_length()


def _peak(spec: KernelSpec, target: Target, used: Resources) -> float:
    device, mix = DEVICES[target.arch], used.instructions
    if spec.dtype is DType.FP32 or not any(mix.get(name) for name in _MATRIX):
        return device.fp32
    own = _OWN_MATRIX.get(target.arch)
    return device.matrix * (OLD_MATRIX if own and not mix.get(own) else 1.0)
