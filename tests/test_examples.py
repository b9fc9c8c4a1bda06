"""Every example runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pagegen.package import KernelPackage
from pagegen.reference import ReferenceKernels
from pagegen.runtime import launcher
from pagegen.spec import parse_slug
from pagegen.target import parse_target
from tests.server.scripted import live

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"generate", "serve_client", "tune", "load_package"}


def test_generate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(launcher, "default_kernels", ReferenceKernels)
    example("generate").main("dummy:tiny")
    assert capsys.readouterr().out.count(" -> ") == 3


def test_serve_client(capsys: pytest.CaptureFixture[str]) -> None:
    with live() as server:
        example("serve_client").main(f"http://127.0.0.1:{server.port}/v1")
    assert "'total_tokens'" in capsys.readouterr().out


def test_load_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec, _ = parse_slug("fp32-d8-h6x2-b3-NHD")
    kernels = ReferenceKernels(spec)
    calls = (kernels.attend, kernels.write_kv, kernels.copy_blocks)
    stub = KernelPackage(spec, parse_target("cpu:scalar"), Path("stub"), {"name": "stub"}, *calls, kernels)
    module = example("load_package")
    monkeypatch.setattr(module, "load_package", lambda path: stub)
    module.main("stub")
    assert capsys.readouterr().out.startswith("stub: attention over 6 tokens")


@pytest.mark.long
@pytest.mark.compiler
def test_tune_and_load_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    example("tune").main("decode-fp32-d8-h2x1-b16-NHD", "1", str(tmp_path / "results"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("package: "))
    example("load_package").main(line.removeprefix("package: "))
    assert "attention over 32 tokens" in capsys.readouterr().out
