"""What the machine has and what pagegen keeps on it: targets, doctor, cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagegen.target import TARGETS, detect
from tests.cli.helpers import run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PAGEGEN_CACHE", str(cache))
    return cache


def test_targets_are_present_or_cross_and_none_is_lost() -> None:
    document = run("targets", "--json").document
    names = [row["name"] for row in document["present"] + document["cross"]]
    assert sorted(names) == sorted(target.name for target in TARGETS)
    assert {row["arch"] for row in document["present"]} >= set(detect().isa)
    assert all({"arch", "limits", "compiler"} <= row.keys() for row in document["cross"])


def test_a_missing_compiler_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CXX", "no-such-compiler")
    rows = run("targets", "--json").document["present"]
    assert all(
        row["compiler"] is None and "PAGEGEN_CXX" in row["missing"] for row in rows if row["name"].startswith("cpu")
    )
    result = run("doctor", "--json")
    compiler = next(check for check in result.document["checks"] if check["name"] == "compiler")
    assert result.status == 1
    assert not compiler["ok"] and "no-such-compiler" in compiler["message"] and "PAGEGEN_CXX" in compiler["remedy"]


def test_doctor_checks_everything_it_promises() -> None:
    checks = {check["name"]: check for check in run("doctor", "--json").document["checks"]}
    assert set(checks) == {"processor", "compiler", "openmp", "torch", "triton", "cache", "server", "model package"}
    assert all(check["ok"] == (check["remedy"] == "") for check in checks.values())


def test_doctor_says_whose_cache_it_is_not(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o700)
    own_cache.chmod(0o777)
    result = run("doctor", "--json")
    cache = next(check for check in result.document["checks"] if check["name"] == "cache")
    assert result.status == 1 and "PAGEGEN_CACHE" in cache["remedy"]


def fill(cache: Path) -> None:
    for name, size in (("kernels/aaa", 100), ("kernels/bbb", 2000), ("packages/tuned", 30)):
        (cache / name).mkdir(mode=0o700, parents=True)
        (cache / name / "file").write_bytes(b"x" * size)
    for folder in (cache, cache / "kernels", cache / "packages"):
        folder.chmod(0o700)
    (cache / "kernels" / "aaa.lock").touch()
    for name in ("kernels/.build-crashed", "kernels/.build-busy", "packages/.tuned-crashed"):
        (cache / name).mkdir()
        if name.endswith("crashed"):
            os.utime(cache / name, (0, 0))


def test_cache_lists_kernels_and_packages(own_cache: Path) -> None:
    fill(own_cache)
    document = run("cache", "list", "--json").document
    assert {(row["kind"], row["bytes"]) for row in document["rows"]} == {
        ("kernel", 100),
        ("kernel", 2000),
        ("package", 30),
        ("unfinished", 0),
    }
    assert document["bytes"] == 2130
    assert "tuned" in run("cache", "list").stdout


def test_cache_says_what_a_kernel_is(own_cache: Path) -> None:
    fill(own_cache)
    (own_cache / "kernels" / "aaa" / "kernel.cpp").write_text("// attend cpu:avx2 fp32-d8-h1x1-b4-NHD\n#include <omp.h>\n")
    listed = run("cache", "list").stdout
    assert "attend cpu:avx2 fp32-d8-h1x1-b4-NHD" in " ".join(listed.split()) and "aaa" not in listed


def test_clear_keeps_packages_unless_they_are_named(own_cache: Path) -> None:
    fill(own_cache)
    assert run("cache", "clear", "--json").document["bytes"] == 2100
    assert [path.name for path in (own_cache / "packages").iterdir()] == ["tuned"]  # without what a killed tuner left
    assert [path.name for path in (own_cache / "kernels").iterdir()] == [".build-busy"]  # may be in the making
    assert len(run("cache", "clear", "--packages", "--json").document["removed"]) == 1
    assert run("cache", "list", "--json").document["rows"] == []
