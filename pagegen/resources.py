"""What a compiled kernel uses, read from its binary: registers, spills, shared memory, instruction mix, occupancy.

CUDA through the cuobjdump and nvdisasm that come with Triton, AMD from the assembler text's own metadata, CPU libraries
through objdump. No device is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BuildError
from .paths import kernel_cache, write_atomic
from .target import Target, is_native

# Instruction families: what to report, and the mnemonics that count. Matrix units first: a matrix kernel whose mix shows
# none of its generation's runs on a slower path. `load 16 B` counts loads of 16 bytes a thread, the widest there is.
_CUDA_MIX = {
    "HMMA": r"HMMA\b",  # warp matrix multiply
    "HGMMA": r"HGMMA\b",  # Hopper's warpgroup matrix multiply
    "UTCMMA": r"UTC\w*MMA\b",  # Blackwell's tensor memory matrix multiply
    "FFMA": r"FFMA",
    "LDGSTS": r"LDGSTS",  # copies from global to shared memory that bypass registers
    "UTMALDG": r"UTMALDG",  # tensor memory accelerator
    "load 16 B": r"LDG(STS)?\.\S*128",
    "load": r"LDG(STS)?\b",
    "local": r"(LDL|STL)\b",  # spilled registers
}
_HIP_MIX = {
    "MFMA": r"v_mfma",
    "WMMA": r"v_wmma",
    "FMA": r"v_(pk_)?fma",
    "load 16 B": r"(global|buffer)_load_(dwordx4|b128)",
    "load": r"(global|buffer)_load",
    "scratch": r"scratch_(load|store)",
}
_CPU_MIX = {
    "FMA 512": r"vfn?m(add|sub)\w+\s.*%zmm",
    "FMA 256": r"vfn?m(add|sub)\w+\s(?!.*%zmm).*%ymm",
    "FMA scalar": r"vfn?m(add|sub)\w+s[sd]\s",
    "FMA NEON": r"\bfml[as]\s",
    "dot bf16": r"vdpbf16ps",
    "convert fp16": r"vcvtph2ps",
    "prefetch": r"prefetch",
}
_RESERVED_SHARED = 1024  # bytes that CUDA keeps of each block's shared memory, from compute capability 8.0 on


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """One kernel's use of a multiprocessor. None where the notion does not exist (CPU)."""

    registers: int | None  # of one thread; on AMD vector registers, accumulators included
    spills: int | None  # CUDA: loads and stores of local memory in the code; AMD: spilled vector registers
    shared_memory: int | None  # bytes of one program
    threads: int | None  # of one program
    occupancy: float | None  # resident threads over the most that fit, 0 to 1; 0: the kernel cannot be launched
    instructions: Mapping[str, int]  # static counts, loops counted once
    digest: str = ""  # of the code: kernels of one digest do the same

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"instructions": dict(self.instructions)}


class KeptResources:
    """What binaries use, by name, in a file beside their source in the kernel cache.

    It holds for one toolchain and for this reader of binaries; a file that is damaged counts as none.
    """

    def __init__(self, what: str, source_key: str, toolchain: Mapping[str, Any]) -> None:
        made_with = json.dumps(toolchain, sort_keys=True) + Path(__file__).read_text()
        self._path = kernel_cache() / source_key / f"{what}-{hashlib.sha256(made_with.encode()).hexdigest()[:12]}.json"

    def read(self) -> dict[str, Resources]:
        """What was written last; empty if nothing was."""
        try:
            values: dict[str, dict[str, Any]] = json.loads(self._path.read_text())
            return {name: Resources(**used) for name, used in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write(self, found: Mapping[str, Resources]) -> None:
        """Publishes the file whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps({name: used.to_dict() for name, used in found.items()}) + "\n")


def gpu_resources(target: Target, binary: bytes, assembly: str, num_warps: int, shared_memory: int) -> Resources:
    """Reads a cubin (CUDA) or AMDGCN text. Raises BuildError if NVIDIA's tools are missing or do not run."""
    if target.kind == "cuda":
        registers, code = _read_cubin(binary)
        mix = _count(_CUDA_MIX, code)
        spills = mix["local"]
    else:
        registers = _amd_field(assembly, "vgpr_count")  # the accumulators are part of it
        spills = _amd_field(assembly, "vgpr_spill_count")  # spilled scalar registers go to vector lanes: no memory
        code = "\n".join(re.findall(r"(?m)^\s+([a-z]\w*(?: [^;\n]*)?)", assembly))  # without comments and directives
        mix = _count(_HIP_MIX, code)
    threads, digest = num_warps * target.warp_size, hashlib.sha256(code.encode()).hexdigest()[:16]
    resident = occupancy(target, registers, shared_memory, threads)
    return Resources(registers, spills, shared_memory, threads, resident, mix, digest)


def cpu_resources(library: Path, target: Target) -> Resources:
    """The instruction mix of a shared library; empty where the target's objdump (binutils) is missing."""
    tool = "objdump" if is_native(target) else f"{target.machine}-linux-gnu-objdump"
    if not shutil.which(tool):
        return Resources(None, None, None, None, None, {})
    code = _run([tool, "-d", "--no-show-raw-insn", str(library)])
    return Resources(None, None, None, None, None, _count(_CPU_MIX, re.sub(r"(?m)^\s*[0-9a-f]+:\s+", "", code)))


def occupancy(target: Target, registers: int, shared_memory: int, threads: int) -> float:
    """Resident threads of one multiprocessor over its limit: NVIDIA's occupancy calculator, without the cap on blocks.

    Registers are granted a warp at a time, in eights a thread, from each scheduler's own share.
    """
    if shared_memory > target.shared_memory or not threads:
        return 0.0
    warps = threads // target.warp_size
    schedulers = schedulers_of(target)
    warp_registers = -(-max(registers, 1) // 8) * 8 * target.warp_size
    by_registers = target.registers // schedulers // warp_registers * schedulers // warps
    reserved = _RESERVED_SHARED if target.kind == "cuda" else 0
    by_shared = (target.shared_memory + reserved) // max(shared_memory + reserved, 1)
    programs = min(by_registers, by_shared, target.max_threads // threads)
    return programs * threads / target.max_threads


def schedulers_of(target: Target) -> int:
    """Of one multiprocessor: each issues instructions of its own warps."""
    return 4 if target.kind == "cuda" or target.warp_size == 64 else 2


def _read_cubin(binary: bytes) -> tuple[int, str]:
    """(registers of a thread, one `MNEMONIC operands` line an instruction)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _run([_nvidia("cuobjdump"), "--dump-resource-usage", file.name])
        code = _run([_nvidia("nvdisasm"), "-c", file.name])
    registers = re.search(r"\bREG:(\d+)", usage)
    if not registers:
        raise BuildError("cuobjdump prints no register count for this binary; install the triton that compiled it", usage)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", code)
    return int(registers[1]), "\n".join(lines)


def _nvidia(tool: str) -> str:
    triton = importlib.util.find_spec("triton")  # found, not imported
    for folder in triton.submodule_search_locations or () if triton else ():
        path = Path(folder) / "backends/nvidia/bin" / tool
        if path.is_file():
            return str(path)
    found = shutil.which(tool)
    if not found:
        raise BuildError(f"no {tool}: it comes with triton for Linux, or with the CUDA toolkit; install either")
    return found


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log = getattr(error, "stderr", "") or ""
        raise BuildError(f"{Path(command[0]).name} does not run ({error}); see the log with --debug", log) from None


def _amd_field(assembly: str, name: str) -> int:
    match = re.search(rf"(?m)^\s*\.{name}:\s*(\d+)", assembly)
    if not match:
        raise BuildError(f"the AMDGCN text states no {name}; use the triton versions that the README names", assembly)
    return int(match[1])


def _count(mix: Mapping[str, str], code: str) -> dict[str, int]:
    return {name: len(re.findall(rf"(?m)^(?:{pattern})", code)) for name, pattern in mix.items()}
