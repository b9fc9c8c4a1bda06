"""Claims about a package where pagegen is not installed: it imports, proves, times and explains itself, and installs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
import torch

from pagegen.package import load_package, verify_package
from tests.package.conftest import edit_manifest, tree

TORCH = Path(torch.__file__).parents[1]


def run(package: Path, code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` with the package's parent and torch's folder on the path, in which nothing named pagegen imports."""
    blocked = "import sys; sys.modules['pagegen'] = None; sys.dont_write_bytecode = True\n"
    return subprocess.run(
        [sys.executable, "-S", "-c", blocked + textwrap.dedent(code)],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{package.parent}{os.pathsep}{TORCH}"},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_it_runs_without_pagegen_and_leaves_itself_alone(original: Path, tmp_path: Path) -> None:
    before = tree(original)
    code = f"""
        import runpy
        import torch
        import {original.name} as kernels

        assert kernels.SPEC.q_heads == kernels.MANIFEST["spec"]["q_heads"] == 6 and kernels.__version__ == kernels.MANIFEST["version"]
        k_cache = torch.zeros(3, 5, 2, 16)
        v_cache, rows = k_cache.clone(), torch.ones(1, 2, 16)
        kernels.write_kv(rows, 7 * rows, k_cache, v_cache, torch.tensor([6]))
        kernels.copy_blocks(k_cache, v_cache, torch.tensor([[1, 2]]))
        out, q = torch.zeros(1, 6, 16), torch.randn(1, 6, 16)
        kernels.attend(out, q, k_cache, v_cache, torch.tensor([[2]]).int(), torch.tensor([2]).int(), torch.tensor([0, 1]).int(), scale=1e-9)
        assert torch.allclose(out, torch.full_like(out, 3.5)), out  # the mean of an empty slot's 0 and of 7
        for words in (["explain"], ["selftest"], ["bench", "--seconds", "0.01", "2x1@70"]):
            sys.argv[1:] = words
            try:
                runpy.run_module("{original.name}", run_name="__main__")
            except SystemExit as done:
                assert not done.code, (words, done.code)
    """
    result = run(original, code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "attend_0" in result.stdout and "package: PASSED" in result.stdout and "attend_2: PASSED" in result.stdout and "folded" in result.stdout
    assert tree(original) == before
    assert not list(tmp_path.rglob("*.so"))  # nothing was built


def test_a_wrong_request_is_one_line_and_status_2(package: Path, tmp_path: Path) -> None:
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["hardware"].update(device="Another CPU"))
    code = f"""
        import runpy
        codes = []
        for words in (["selftest"], ["bench", "8@1"], ["explain"]):
            sys.argv[1:] = words
            try:
                runpy.run_module("{package.name}", run_name="__main__")
            except SystemExit as done:
                codes.append(done.code)
        assert codes == [2, 2, 0], codes  # what it is can be read anywhere
    """
    result = run(package, code, tmp_path)
    assert result.returncode == 0, result.stderr
    refused, malformed = result.stderr.splitlines()
    assert "made for other hardware" in refused and "SEQSxQUERY@CONTEXT" in malformed


def test_pip_installs_it_without_a_network(package: Path, tmp_path: Path) -> None:
    before, site = tree(package), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-cache-dir", "--quiet"]
    result = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(site), str(package)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert tree(package) == before
    installed = site / package.name
    metadata = next(site.glob("*.dist-info")) / "METADATA"
    assert "Requires-Dist: torch" in metadata.read_text()
    for path in (installed, *installed.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)  # pip goes by the umask
    assert verify_package(installed) == []
    assert load_package(installed).path == installed


def test_its_archives_hold_every_file(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = importlib.util.spec_from_file_location("backend", original / "_build" / "backend.py")
    assert found and found.loader
    backend = importlib.util.module_from_spec(found)
    found.loader.exec_module(backend)
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        members = {member.split("/", 1)[1] for member in archive.getnames()}
    listed = json.loads((original / "manifest.json").read_text())["files"]
    assert members == {*listed, "manifest.json", "PKG-INFO"}
    assert backend.build_wheel(str(tmp_path)).endswith("linux_x86_64.whl")
