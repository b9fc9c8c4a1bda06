"""Where a kernel runs: `Target` (a row of a table), `Hardware` (what this machine is) and the fingerprint of both.

Vendored into every kernel package. Importing it costs no torch; `detect_gpu` imports it when asked.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One processor family. CPU rows carry compiler flags, GPU rows the limits that static checks use."""

    kind: str  # cpu, cuda or hip
    arch: str
    lanes: int = 1  # fp32 lanes of a SIMD register (CPU)
    flags: tuple[str, ...] = ()  # for g++ and clang++ (CPU)
    needs: frozenset[str] = frozenset()  # cpuinfo flags without which its code faults (CPU)
    machine: str = ""  # as platform.machine() says it (CPU)
    matrix: frozenset[str] = frozenset()  # dtypes whose values its matrix unit multiplies, exactly, into fp32 (CPU)
    pairs: frozenset[str] = frozenset()  # the same of its vectors, two products a lane (CPU)
    warp_size: int = 32
    shared_memory: int = 0  # bytes one thread block may use (GPU)
    registers: int = 0  # 32-bit registers of one multiprocessor (GPU)
    max_threads: int = 0  # resident threads of one multiprocessor (GPU)

    @property
    def name(self) -> str:
        """`cpu:avx512`, `cuda:sm_90`, `hip:gfx942`."""
        return f"{self.kind}:{self.arch}"

    @property
    def slug(self) -> str:
        """The name as a folder name."""
        return self.name.replace(":", "-")


def _cpu(arch: str, lanes: int, flags: str, needs: str, machine: str = "x86_64", matrix: str = "", pairs: str = "") -> Target:
    words = tuple(flags.split()), frozenset(needs.split()), machine, frozenset(matrix.split()), frozenset(pairs.split())
    return Target("cpu", arch, lanes, *words)


def _cuda(arch: str, shared_kib: int, max_threads: int) -> Target:
    # "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ programming guide.
    return Target("cuda", arch, shared_memory=shared_kib * 1024, registers=65536, max_threads=max_threads)


def _hip(arch: str, warp_size: int, lds_kib: int, max_threads: int, registers: int = 131072) -> Target:
    # LDS a work-group, vector registers and wave slots a CU, from AMD's CDNA and RDNA instruction set guides.
    return Target("hip", arch, warp_size=warp_size, shared_memory=lds_kib * 1024, registers=registers, max_threads=max_threads)


_AVX512, _AVX512_NEEDS = "-march=x86-64-v4 -mprefer-vector-width=512", "avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma f16c"
_AVX512_BF16, _AVX512_BF16_NEEDS = f"{_AVX512} -mavx512bf16 -mavx512vbmi", f"{_AVX512_NEEDS} avx512_bf16 avx512vbmi"

TARGETS: tuple[Target, ...] = (
    # An ISA: templates/cpp/simd/<arch>.h.jinja and a row here, best first.
    _cpu("amx", 16, _AVX512_BF16, f"{_AVX512_BF16_NEEDS} amx_tile amx_bf16", matrix="bf16", pairs="bf16"),
    _cpu("avx512_bf16", 16, _AVX512_BF16, _AVX512_BF16_NEEDS, pairs="bf16"),
    _cpu("avx512", 16, _AVX512, _AVX512_NEEDS),
    _cpu("avx2", 8, "-march=x86-64-v3", "avx2 fma f16c"),
    _cpu("scalar", 8, "-march=x86-64", ""),
    _cpu("neon", 4, "-march=armv8-a", "", "aarch64"),
    _cuda("sm_80", 163, 2048),
    _cuda("sm_86", 99, 1536),
    _cuda("sm_89", 99, 1536),
    _cuda("sm_90", 227, 2048),
    _cuda("sm_100", 227, 2048),
    _cuda("sm_120", 99, 1536),
    _hip("gfx90a", 64, 64, 2048),
    _hip("gfx942", 64, 64, 2048),
    _hip("gfx950", 64, 160, 2048),
    _hip("gfx1100", 32, 64, 2048, registers=98304),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """What this machine offers a process: every value that decides whether a tuned choice still holds."""

    device: str
    isa: tuple[str, ...]  # CPU targets that run here, best first
    cores: int  # in the machine
    affinity: int  # cores this process may use
    quota: float | None  # cores' worth of time that the container grants; None: no limit
    caches: Mapping[str, int]  # bytes: L1d, L2 of one core, of the last all that its cores reach

    @property
    def threads(self) -> int:
        """Threads worth starting: the affinity, cut by the container's quota."""
        return max(1, min(self.affinity, math.ceil(self.quota) if self.quota else self.affinity))


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """`hardware` must match or a package is refused; `toolchain` may change, and then the package re-verifies itself."""

    hardware: Mapping[str, Any]
    toolchain: Mapping[str, Any]

    @property
    def hardware_key(self) -> str:
        """Short hash of the hardware half."""
        return hashlib.sha256(json.dumps(dict(self.hardware), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: Fingerprint) -> tuple[list[str], list[str]]:
        """(hardware, toolchain) fields in which `other` differs, each as `field: mine, theirs`."""
        return _differences(self.hardware, other.hardware), _differences(self.toolchain, other.toolchain)


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(set(mine) | set(theirs))
    apart = [name for name in names if not is_same(name, mine.get(name), theirs.get(name))]
    return [f"{name}: {mine.get(name)!r}, {theirs.get(name)!r}" for name in apart]


def is_same(field: str, mine: object, theirs: object) -> bool:
    """Whether a field of two fingerprints means the same: a device may have several names."""
    if field == "device" and isinstance(mine, str) and isinstance(theirs, str):
        return device_name(mine) == device_name(theirs)
    return mine == theirs


def device_name(name: str) -> str:
    """What counts of a device's name: drivers, firmware and hypervisors write the same one with the maker's name and marks or
    without (NVIDIA's drivers have put theirs before it since release 470). Any other word or number makes it another device.
    """
    words = re.sub(r"\((?:r|tm)\)|[\u00ae\u2122]", " ", name.lower()).split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("nvidia", "amd", "intel") else words)


def parse_target(name: str) -> Target:
    """Reads a TARGET word: `auto` and `cpu` mean this machine's best, otherwise a row of TARGETS. Raises ConfigError."""
    if name == "auto":
        return best_target()
    if name == "cpu":
        return best_cpu()
    for target in TARGETS:
        if target.name == name:
            return target
    known = ", ".join(target.name for target in TARGETS)
    raise ConfigError(f"target {name!r} is not known; allowed: auto, cpu, {known}; change --target")


def best_target() -> Target:
    """The GPU if torch sees one that is in the table, else this CPU's best ISA."""
    return detect_gpu() or best_cpu()


def best_cpu() -> Target:
    """The widest ISA this CPU runs. Raises ConfigError on a processor that is neither x86-64 nor AArch64."""
    hardware = detect()
    if not hardware.isa:
        raise ConfigError(f"CPU kernels need Linux on x86-64 or AArch64, this is {platform.system()} on {platform.machine()}")
    return parse_target(f"cpu:{hardware.isa[0]}")


def is_native(target: Target) -> bool:
    """Whether this machine's own compiler makes code for a CPU target; others take a cross compiler (build/cpp.py)."""
    return target.machine == platform.machine()


def is_present(target: Target) -> bool:
    """Whether kernels for `target` run on this machine."""
    return target.arch in detect().isa if target.kind == "cpu" else target == detect_gpu()


def require_present(target: Target) -> None:
    """Raises ConfigError naming both sides unless kernels for `target` run here."""
    if not is_present(target):
        here = [f"cpu:{arch}" for arch in detect().isa] + [gpu.name for gpu in [detect_gpu()] if gpu]
        raise ConfigError(
            f"target {target.name} is not present here (present: {', '.join(here) or 'none'}); "
            "`pagegen render`, `pagegen compile` and `pagegen tune --static` work without the device"
        )


@functools.cache
def detect_gpu() -> Target | None:
    """The first GPU that torch sees, as a row of the table; None if there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        name = f"hip:{properties.gcnArchName.split(':')[0]}"
    else:
        name = f"cuda:sm_{properties.major * 10 + properties.minor}"
    return next((target for target in TARGETS if target.name == name), None)


@functools.cache
def detect() -> Hardware:
    """Reads this machine from /proc, /sys and the container's cgroup."""
    info = _read(Path("/proc/cpuinfo"))
    flags = set(_first(r"^flags\s*:\s*(.*)$", info).split())
    cpus = [t for t in TARGETS if t.kind == "cpu" and is_native(t) and t.needs <= flags]
    isa = tuple(t.arch for t in cpus if not t.matrix or _grants_tiles())
    return Hardware(
        device=_device(info),
        isa=isa if platform.system() == "Linux" else (),
        cores=os.cpu_count() or 1,
        affinity=_affinity(),
        quota=cpu_quota(),
        caches=_caches(Path("/sys/devices/system/cpu"), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}),
    )


def _device(info: str, identity: Path = Path("/etc/machine-id")) -> str:
    """The processor's name, as /proc/cpuinfo has it for x86-64 or in parts for AArch64.

    One without a name gets that of its machine: two that are both unknown are not the same.
    """
    name = _first(r"^model name\s*:\s*(.*)$", info)
    if name and name.lower() != "unknown":
        return name
    parts = [_first(rf"^CPU {part}\s*:\s*(.*)$", info) for part in ("implementer", "variant", "part", "revision")]
    if all(parts):
        return f"{platform.machine()} {' '.join(parts)}"
    machine = hashlib.sha256((_read(identity) or platform.node()).encode()).hexdigest()[:8]
    return f"{platform.machine()} of machine {machine}"


def _grants_tiles() -> bool:
    """Whether Linux lets processes ask for AMX's tiles: from 5.16 on, and not in every sandbox."""
    features = ctypes.c_uint64()
    answer = ctypes.CDLL(None).syscall(158, 0x1021, ctypes.byref(features))  # arch_prctl(ARCH_GET_XCOMP_SUPP)
    return answer == 0 and bool(features.value >> 18 & 1)


def _affinity() -> int:
    """Cores that this process may use.

    With OMP_PROC_BIND or GOMP_CPU_AFFINITY set, loading libgomp (as torch does) pins the calling thread to one core, and
    then only libgomp knows how many there are.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    own = len(os.sched_getaffinity(0))
    try:
        return max(own, int(ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_get_num_procs()))
    except OSError:  # not loaded: nothing was pinned
        return own


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of CPU time granted by cgroup v2 or v1; None without a limit.

    Reads this process's own group and every one above it: the tightest limit counts.
    """
    limits: list[float] = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = "cpu" in controllers.split(",")
        base = root / "cpu" if v1 else root
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if v1:
                words = [_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()]
            else:
                words = _read(group / "cpu.max").split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                limits.append(int(words[0]) / int(words[1]))
            if group == base:
                break
    return min(limits, default=None)


def _caches(cpus: Path, mine: Collection[int]) -> dict[str, int]:
    """Bytes by level: a core's own, and of the last level all that the cores `mine` reach, which may be one for every few."""
    sizes: dict[str, int] = {}
    sharers: dict[str, set[str]] = {}
    for cpu in sorted(mine):
        for index in sorted((cpus / f"cpu{cpu}" / "cache").glob("index*")):
            level, kind = _read(index / "level").strip(), _read(index / "type").strip()
            match = re.fullmatch(r"(\d+)([KM])", _read(index / "size").strip())
            if match and kind != "Instruction":
                name = f"L{level}" + ("d" if kind == "Data" else "")
                sizes[name] = int(match[1]) * {"K": 1 << 10, "M": 1 << 20}[match[2]]
                sharers.setdefault(name, set()).add(_read(index / "shared_cpu_list").strip())
    if len(sizes) > 1:
        last = next(reversed(sizes))
        sizes[last] *= len(sharers[last])
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


def hardware_fingerprint(target: Target) -> dict[str, Any]:
    """The hardware half for `target` on this machine."""
    if target.kind == "cpu":
        here = detect()
        return {
            "device": here.device,
            "target": target.name,
            "cores": here.cores,
            "affinity": here.affinity,
            "quota": here.quota,
            "caches": dict(here.caches),
        }
    import torch

    return {"device": torch.cuda.get_device_name(0), "target": target.name}
