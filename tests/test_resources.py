"""Claims about occupancy, by numbers of NVIDIA's calculator, and about what is read from texts and binaries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagegen.errors import BuildError
from pagegen.resources import cpu_resources, gpu_resources, occupancy
from pagegen.target import best_cpu, parse_target

SM_80, SM_90, GFX942 = (parse_target(name) for name in ("cuda:sm_80", "cuda:sm_90", "hip:gfx942"))

AMDGCN = """
	v_mfma_f32_32x32x8_bf16_1k v[0:15], v[2:3], v[4:5], v[0:15]
	global_load_dwordx4 v[6:9], v[10:11], off
	global_load_dword v6, v[10:11], off
	; global_load_dwordx4 in a comment
    .group_segment_fixed_size: 0
    .sgpr_spill_count: 1
    .vgpr_count:     285
    .vgpr_spill_count: 4
"""


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (32, 0, 256, 1.0),
        (64, 0, 128, 0.5),
        (65, 0, 128, 0.4375),  # granted in eights: 72
        (255, 0, 128, 0.125),
        (32, 81920, 128, 0.125),  # two programs' shared memory fit
        (168, 0, 384, 0.1875),  # one program; a second finds no room in any scheduler's share
        (32, 227 * 1024, 128, 0.0625),  # all the shared memory there is
        (32, 227 * 1024 + 1, 128, 0.0),  # a byte more: cannot be launched
    ],
)
def test_occupancy_is_that_of_nvidias_calculator(registers: int, shared: int, threads: int, expected: float) -> None:
    assert occupancy(SM_90, registers, shared, threads) == expected


def test_a_wave_of_amd_takes_its_registers_from_one_simd() -> None:
    assert occupancy(GFX942, 128, 0, 256) == 0.5
    assert occupancy(GFX942, 285, 0, 256) == 0.125  # one wave a SIMD, though the CU's total would do for seven
    assert occupancy(GFX942, 32, 40 * 1024, 256) == 0.125


def test_amd_resources_come_from_the_text() -> None:
    found = gpu_resources(GFX942, b"", AMDGCN, num_warps=4, shared_memory=1024)
    assert (found.registers, found.spills, found.threads, found.shared_memory) == (285, 4, 256, 1024)
    assert {name: count for name, count in found.instructions.items() if count} == {"MFMA": 1, "load 16 B": 1, "load": 2}


def test_an_unknown_text_is_refused_in_one_line() -> None:
    with pytest.raises(BuildError, match="states no vgpr_count"):
        gpu_resources(GFX942, b"", "nothing", num_warps=4, shared_memory=0)


@pytest.mark.triton
def test_a_damaged_cubin_is_refused_in_one_line() -> None:
    with pytest.raises(BuildError, match="cuobjdump does not run"):
        gpu_resources(SM_80, b"no cubin", "", num_warps=4, shared_memory=0)


def test_a_missing_tool_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="no cuobjdump: it comes with triton"):
        gpu_resources(SM_80, b"", "", num_warps=4, shared_memory=0)


def test_a_library_without_objdump_has_an_empty_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = cpu_resources(Path(sys.executable), best_cpu())
    assert found.instructions == {} and found.registers is None
