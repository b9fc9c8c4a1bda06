"""Claims about a package in use: other hardware is refused, a new toolchain is proved once, what is missing is rebuilt."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from pagegen import loader, target
from pagegen.build import cpp
from pagegen.build.cpp import file_sha256
from pagegen.catalog import variant
from pagegen.check.compare import CheckReport, check_kernels
from pagegen.errors import BuildError, ConfigError, KernelError, PackageError
from pagegen.loader import PackagedKernels, fingerprint, tune_command
from pagegen.package import Packaged, load_package, verify_package, write_package
from pagegen.records import DispatchTable
from pagegen.render import render
from pagegen.spec import PAGED_OPS, Op, parse_slug
from pagegen.target import Fingerprint, detect, parse_target
from tests.package.conftest import SPEC, edit_manifest, marked, tree, write

HERE = parse_target("cpu")


def made_with(**toolchain: str) -> Fingerprint:
    mine = fingerprint(HERE)
    return Fingerprint(mine.hardware, {**mine.toolchain, **toolchain})


# --- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "Another CPU"), ("cores", 4096), ("affinity", 4095), ("quota", 0.25), ("caches", {"L1d": 1})],
)
def test_other_hardware_is_refused_naming_both_sides_and_the_cure(field: str, value: Any, package: Path) -> None:
    mine = fingerprint(HERE).hardware[field]
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["hardware"].update({field: value}))
    with pytest.raises(PackageError) as caught:
        load_package(package)
    message = str(caught.value)
    assert f"{field}: {value!r} there, {mine!r} here" in message and "\n" not in message
    assert f"`pagegen tune {SPEC.slug} --target {HERE.name}`" in message


def test_every_field_that_differs_is_named(package: Path) -> None:
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["hardware"].update(device="Another CPU", cores=4096))
    with pytest.raises(PackageError, match=r"device: 'Another CPU' there.*; cores: 4096 there"):
        load_package(package)


def test_an_instruction_set_that_is_not_here_is_refused_before_any_code_runs(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lesser = dataclasses.replace(detect(), isa=("scalar",))
    monkeypatch.setattr(target, "detect", lambda: lesser)
    monkeypatch.setattr(loader, "detect", lambda: lesser)
    monkeypatch.setattr(cpp, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(PackageError, match=rf"target: '{HERE.name}' there, 'cpu:scalar' here.*--target auto"):
        PackagedKernels(original).prepare()


def test_a_gpu_package_is_sources_and_is_refused_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = parse_target("cuda:sm_90")
    monkeypatch.setattr(target, "detect_gpu", lambda: None)
    monkeypatch.setattr(loader, "detect_gpu", lambda: None)
    spec = parse_slug("bf16-d64-h9x3-b16-NHD")[0]
    path = write_package(
        tmp_path,
        spec=spec,
        target=gpu,
        kernels={op.value: Packaged(render(variant(op, spec, gpu))) for op in PAGED_OPS},
        dispatch={op: DispatchTable((), op.value) for op in PAGED_OPS},
        evidence={},
        made_on=Fingerprint({"device": "NVIDIA H200", "target": gpu.name}, {"triton": "3.6.0", "torch": "2.11.0"}),
    )
    assert not (path / "bin").exists() and len(list((path / "sources").glob("*.py"))) == 3
    assert verify_package(path) == []
    with pytest.raises(PackageError, match="device: 'NVIDIA H200' there, None here; target: 'cuda:sm_90' there, None here"):
        PackagedKernels(path).prepare()


def test_the_cure_names_a_file_where_the_slug_has_no_words(tmp_path: Path) -> None:
    assert tune_command(SPEC.replace(scale=0.5), HERE, tmp_path) == f"pagegen tune {tmp_path}/spec.json --target {HERE.name}"


# --- toolchain -------------------------------------------------------------------------------------------------------


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the suites that a package runs; they all pass."""
    ran: list[str] = []

    def passing(kernels: object, suite: str, *_: object, **__: object) -> CheckReport:
        ran.append(suite)
        return CheckReport.of(1, [])

    monkeypatch.setattr(loader, "check_kernels", passing)
    return ran


def test_the_same_toolchain_proves_nothing_again(original: Path, suites: list[str]) -> None:
    PackagedKernels(original).prepare()
    assert suites == []


@pytest.mark.parametrize("changes", [{"torch": "0.9"}, {"compiler": "cc 1.0"}])
def test_another_toolchain_proves_every_kernel_once(changes: dict[str, str], package: Path, suites: list[str]) -> None:
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["toolchain"].update(changes))
    before = tree(package)
    PackagedKernels(package).prepare()
    assert suites == ["quick"] * 3  # attend_0, attend_1, attend_2
    PackagedKernels(package).prepare()
    assert len(suites) == 3
    edit_manifest(package, lambda manifest: manifest.update(evidence={"another": "package"}))
    PackagedKernels(package).prepare()
    assert len(suites) == 6
    assert (tree(package).keys()) == before.keys()


def test_kernels_that_fail_under_another_toolchain_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {f"attend_{i}": marked(i) for i in range(3)}, made_on=made_with(torch="0.9"))
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(PackageError, match=r"torch: '0\.9', .*attend_0: attend, .*pagegen tune"):
            PackagedKernels(path).prepare()


def test_a_machine_without_a_compiler_runs_the_binaries(original: Path, suites: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    PackagedKernels(original).prepare()
    assert suites == ["quick"] * 3  # the compiler is part of the toolchain, and it is not there


def test_a_proof_that_cannot_be_remembered_is_a_warning(package: Path, suites: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["toolchain"].update(torch="0.9"))
    monkeypatch.setenv("PAGEGEN_CACHE", "/proc/nowhere")
    for _ in range(2):
        with pytest.warns(UserWarning, match="proves itself again at every start.*PAGEGEN_CACHE"):
            PackagedKernels(package).prepare()
    assert len(suites) == 6


# --- binaries --------------------------------------------------------------------------------------------------------


def test_a_missing_binary_is_rebuilt_into_the_users_cache(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "own cache"))
    for name in ("attend_0", "write_kv"):
        (package / "bin" / f"{name}.so").unlink()
    before = tree(package)
    loaded = load_package(package)
    assert check_kernels(loaded, ops=[Op.WRITE_KV]).passed
    assert len(list((tmp_path / "own cache" / "kernels").glob("*/kernel.so"))) == 2
    assert tree(package) == before


def test_a_binary_that_cannot_be_rebuilt_says_why(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "bin" / "copy_blocks.so").unlink()
    monkeypatch.setenv("PAGEGEN_CACHE", "/proc/nowhere")
    with pytest.raises(ConfigError, match="set PAGEGEN_CACHE"):
        load_package(package)
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "own cache"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        load_package(package)


def test_a_failed_load_is_tried_again_and_not_remembered(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "bin" / "copy_blocks.so").unlink()
    with monkeypatch.context() as without, pytest.raises(ConfigError):
        without.setenv("PAGEGEN_CACHE", "/proc/nowhere")
        load_package(package)
    assert check_kernels(load_package(package), ops=[Op.COPY_BLOCKS]).passed


def test_whole_binaries_need_no_cache(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", "/proc/nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackagedKernels(original).prepare()


def test_files_are_checked_when_they_are_used_without_pagegen_too(package: Path) -> None:
    (package / "bin" / "attend_1.so").write_bytes((package / "bin" / "attend_0.so").read_bytes())
    with pytest.raises(PackageError, match=r"attend_1\.so.*delete it and it is rebuilt"):
        PackagedKernels(package).prepare()
    (package / "sources" / "attend_1.cpp").unlink()
    with pytest.raises(PackageError, match=r"attend_1\.cpp cannot be read"):
        PackagedKernels(package).prepare()


def test_a_file_that_is_no_library_is_refused_even_with_its_hash(package: Path) -> None:
    path = package / "bin" / "attend_1.so"
    path.write_bytes(b"not a library")
    edit_manifest(package, lambda manifest: manifest["files"].update({"bin/attend_1.so": file_sha256(path)}))
    with pytest.raises(KernelError, match="cannot be loaded"):
        load_package(package)
