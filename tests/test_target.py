"""Claims about where kernels run: TARGET words, what a machine is, and what a container grants."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagegen import target as target_module
from pagegen.errors import ConfigError
from pagegen.target import (
    TARGETS,
    Fingerprint,
    Hardware,
    Target,
    best_cpu,
    best_target,
    cpu_quota,
    detect,
    hardware_fingerprint,
    is_present,
    parse_target,
    require_present,
)
from tests.conftest import cpu_targets


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "detect_gpu", lambda: None)


def machine(**changes: object) -> Hardware:
    plain = Hardware("A CPU", ("avx512", "avx2", "scalar"), 8, 8, None, {"L1d": 1 << 15})
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row.name)
def test_a_target_is_read_by_its_name(row: Target) -> None:
    assert parse_target(row.name) == row
    assert ":" not in row.slug and row.slug.replace("-", ":", 1) == row.name


@pytest.mark.parametrize("name", ["", "gpu", "cpu:", "cpu:avx1024", "cuda:90", "CPU", "cpu:avx512 ", "hip:gfx942:sramecc+"])
def test_an_unknown_word_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"auto, cpu, cpu:amx, cpu:avx512_bf16, cpu:avx512, .*; change --target") as caught:
        parse_target(name)
    assert repr(name) in str(caught.value)


@pytest.mark.usefixtures("no_gpu")
def test_auto_and_cpu_are_the_best_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in (("avx512", "avx2", "scalar"), ("avx2", "scalar"), ("scalar",)):
        monkeypatch.setattr(target_module, "detect", lambda isa=isa: machine(isa=isa))
        assert parse_target("cpu") == parse_target("auto") == best_cpu() == best_target() == parse_target(f"cpu:{isa[0]}")


def test_a_gpu_goes_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = parse_target("cuda:sm_90")
    monkeypatch.setattr(target_module, "detect_gpu", lambda: gpu)
    assert parse_target("auto") == gpu and is_present(gpu) and parse_target("cpu").kind == "cpu"
    assert not is_present(parse_target("cuda:sm_80"))


@pytest.mark.usefixtures("no_gpu")
def test_a_processor_without_kernels_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "detect", lambda: machine(isa=()))
    with pytest.raises(ConfigError, match="need Linux on x86-64"):
        parse_target("auto")


@pytest.mark.usefixtures("no_gpu")
def test_tests_over_cpu_targets_skip_the_absent_ones_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "detect", lambda: machine(isa=("avx2", "scalar")))
    cases = cpu_targets(long=lambda target: target.arch == "avx2")
    assert [case.values[0] for case in cases] == [target for target in TARGETS if target.kind == "cpu"]
    marks = {case.id: {mark.name: mark for mark in case.marks} for case in cases}
    skipped = {mark["skipif"].kwargs["reason"] for mark in marks.values() if mark["skipif"].args[0]}
    assert skipped == {f"this machine does not run cpu:{arch}" for arch in ("amx", "avx512_bf16", "avx512", "neon")}
    assert [name for name, mark in marks.items() if "long" in mark] == ["cpu:avx2"]


def test_an_absent_target_is_refused_with_what_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "detect", lambda: machine(isa=("avx2", "scalar")))
    require_present(parse_target("cpu:avx2"))
    for name in ("cpu:avx512", "cuda:sm_90"):
        with pytest.raises(ConfigError, match=rf"{name} is not present here \(present: cpu:avx2, cpu:scalar\).*pagegen compile"):
            require_present(parse_target(name))


def test_wider_instruction_sets_come_first_and_need_more() -> None:
    cpus = [row for row in TARGETS if row.machine == "x86_64"]
    for wide, narrow in itertools.pairwise(cpus):
        assert wide.needs > narrow.needs and wide.lanes >= narrow.lanes and wide.matrix >= narrow.matrix and wide.pairs >= narrow.pairs
    assert all(row.flags for row in cpus)


def test_every_gpu_states_the_limits_that_static_checks_use() -> None:
    for row in TARGETS:
        if row.kind != "cpu":
            assert row.shared_memory and row.registers and row.max_threads % row.warp_size == 0


# --- this machine ----------------------------------------------------------------------------------------------------


def test_detect_describes_a_machine_that_can_be() -> None:
    here = detect()
    assert here.device and here.isa[-1] == "scalar"
    assert 1 <= here.threads <= here.affinity <= here.cores
    assert all(size > 0 for size in here.caches.values())


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"), [(8, None, 8), (8, 2.0, 2), (8, 2.5, 3), (2, 6.0, 2), (8, 0.5, 1), (1, None, 1)]
)
def test_threads_are_cut_by_affinity_and_quota(affinity: int, quota: float | None, threads: int) -> None:
    assert machine(affinity=affinity, quota=quota).threads == threads


@pytest.mark.parametrize("binding", [pytest.param({}, marks=pytest.mark.long), {"OMP_PROC_BIND": "true"}, {"GOMP_CPU_AFFINITY": "0-1023"}])
def test_threads_pinned_by_openmp_still_count_as_cores(binding: dict[str, str]) -> None:
    script = "import os, torch; from pagegen.target import detect; print(detect().affinity)"
    run = subprocess.run([sys.executable, "-c", script], env=os.environ | binding, capture_output=True, text=True, check=True)
    assert int(run.stdout) == len(os.sched_getaffinity(0)), "or a package tuned with pinned threads is refused without"


def test_instruction_sets_are_read_from_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = "avx512_bf16 avx512vbmi"
    texts = {
        "sapphire rapids": f"avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl {bf16} amx_tile amx_bf16",
        "zen 4": f"avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl {bf16}",
        "cooper lake": "avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16",
        "skylake": "avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl",
        "knights landing": "avx2 fma f16c avx512f avx512cd",  # no avx512bw, dq, vl: v4 code would fault
        "haswell": "avx2 fma f16c",
        "sandy bridge": "avx",
    }
    read = target_module._read
    found = {}
    for name, flags in texts.items():
        text = f"model name\t: {name}\nflags\t\t: fpu {flags} lm\n"
        monkeypatch.setattr(target_module, "_read", lambda path, text=text: text if path.name == "cpuinfo" else read(path))
        monkeypatch.setattr(target_module, "_grants_tiles", lambda: True)
        hardware = detect.__wrapped__()
        assert hardware.device == name
        found[name] = hardware.isa[0]
        monkeypatch.setattr(target_module, "_grants_tiles", lambda: False)  # an older Linux, or a sandbox
        assert "amx" not in detect.__wrapped__().isa
    assert found == {
        "sapphire rapids": "amx",
        "zen 4": "avx512_bf16",
        "cooper lake": "avx512",
        "skylake": "avx512",
        "knights landing": "avx2",
        "haswell": "avx2",
        "sandy bridge": "scalar",
    }


def test_caches_are_read_by_level_and_of_the_last_all_that_is_in_reach(tmp_path: Path) -> None:
    rows = (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "1M"), ("4", "Unified", "?"))
    for cpu in range(6):  # three of them share an L3
        for index, (level, kind, size) in enumerate(rows):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            sharers = f"{cpu // 3 * 3}-{cpu // 3 * 3 + 2}" if level == "3" else str(cpu)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", sharers)):
                (folder / name).write_text(f"{text}\n")
    assert target_module._caches(tmp_path, range(3)) == {"L1d": 48 << 10, "L2": 2 << 20, "L3": 1 << 20}
    assert target_module._caches(tmp_path, {2, 3}) == {"L1d": 48 << 10, "L2": 2 << 20, "L3": 2 << 20}
    assert target_module._caches(tmp_path / "none", {0}) == {}


# --- what a container grants -----------------------------------------------------------------------------------------


def group(root: Path, own: str, files: dict[str, str]) -> float | None:
    """The quota in a fake tree: `own` is /proc/self/cgroup, `files` lie below the cgroup mount."""
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (root / "self").write_text(own)
    return cpu_quota(root / "cgroup", root / "self")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),  # set above us
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "200000 100000"}, 0.5),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, 3.0),  # the path as another namespace names it
        ("0::/\n", {"cpu.max": "garbage"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),
        ("9:memory:/x\n4:cpuset:/y\n", {"cpu/y/cpu.cfs_quota_us": "1", "cpu/y/cpu.cfs_period_us": "1"}, None),
        ("", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_tightest_limit_of_the_groups_above_counts(own: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert group(tmp_path, own, files) == quota


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "none") is None


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_holds_what_a_tuned_choice_rests_on() -> None:
    found = hardware_fingerprint(parse_target("cpu:scalar"))
    assert found.keys() == {"device", "target", "cores", "affinity", "quota", "caches"}
    assert found["quota"] is None or math.isfinite(found["quota"])


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", True),  # drivers before and since 470
        ("Tesla V100-SXM2-16GB", "tesla  V100-SXM2-16GB ", True),
        ("Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz", "Intel Xeon\u00ae Gold 6130 CPU @ 2.10GHz", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", False),
        ("Intel(R) Xeon(R) Gold 6130 CPU", "Intel(R) Xeon(R) Gold 6130T CPU", False),
        ("AMD EPYC 9554", "AMD EPYC 9554 Processor", False),  # nobody says that a word more means nothing
        ("NVIDIA", "AMD", False),
    ],
)
def test_a_device_is_the_same_however_its_name_is_spelt(mine: str, theirs: str, same: bool) -> None:
    one, other = ({"device": device, "cores": 2} for device in (mine, theirs))
    assert (Fingerprint(one, {}).differences(Fingerprint(other, {}))[0] == []) is same


def test_fingerprints_differ_field_by_field_and_half_by_half() -> None:
    mine = Fingerprint({"device": "A", "cores": 2}, {"torch": "2.13"})
    same = Fingerprint({"cores": 2, "device": "A"}, {"torch": "2.13"})
    assert mine.differences(same) == ([], []) and mine.hardware_key == same.hardware_key
    other = Fingerprint({"device": "B", "cores": 2, "quota": 1.0}, {"torch": "2.11"})
    assert mine.differences(other) == (["device: 'A', 'B'", "quota: None, 1.0"], ["torch: '2.13', '2.11'"])
    assert mine.hardware_key != other.hardware_key
