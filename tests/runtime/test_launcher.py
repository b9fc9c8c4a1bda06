"""Which kernels a model gets: a named package, one of the cache, or the default config."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.errors import ModelError, PackageError
from pagegen.package import KernelPackage
from pagegen.reference import ReferenceKernels
from pagegen.runtime import launcher
from pagegen.runtime.engine import EngineConfig
from pagegen.runtime.launcher import find_kernels, launch
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType, KernelSpec, KVLayout, parse_slug
from pagegen.target import Target, parse_target

SPEC, _ = parse_slug("fp32-d16-h6x2-b16-NHD")
FOLDER = Path("some/package")


def package(spec: KernelSpec, target: str = "cpu:scalar") -> KernelPackage:
    kernels = ReferenceKernels(spec)
    calls = (kernels.attend, kernels.write_kv, kernels.copy_blocks)
    return KernelPackage(spec, parse_target(target), FOLDER, {}, *calls, kernels)


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "default_kernels", ReferenceKernels)
    monkeypatch.setattr(launcher, "find_package", lambda spec, target, **_: None)


def loads(found: KernelPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "load_package", lambda path: found)


def test_without_a_package_the_default_config_is_built_and_says_how_to_tune() -> None:
    kernels, message = find_kernels(SPEC)
    assert isinstance(kernels, ReferenceKernels) and kernels.spec == SPEC
    assert message.startswith("default config") and f"`pagegen tune {SPEC.slug}`" in message


@pytest.mark.parametrize(
    "own",
    [
        SPEC,
        SPEC.replace(block_size=32),
        SPEC.replace(layout=KVLayout.parse("HDN8")),
        SPEC.replace(deterministic=True),  # more than was asked for
    ],
)
def test_a_named_package_brings_its_own_block_size_and_layout(own: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    loads(package(own), monkeypatch)
    kernels, message = find_kernels(SPEC, FOLDER)
    assert kernels.spec == own and str(FOLDER) in message and own.slug in message


@pytest.mark.parametrize(
    "other",
    [
        SPEC.replace(q_heads=4),
        SPEC.replace(dtype="bf16", kv_dtype="bf16"),
        SPEC.replace(scale=0.5),
        SPEC.replace(causal=False),
    ],
)
def test_a_package_that_does_not_fit_is_refused_with_both_sides_and_the_remedy(
    other: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(package(other), monkeypatch)
    with pytest.raises(PackageError) as caught:
        find_kernels(SPEC, FOLDER)
    message = str(caught.value)
    assert other.slug in message and SPEC.slug in message and f"pagegen tune {SPEC.slug}" in message


def test_a_package_that_is_not_deterministic_is_refused_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads(package(SPEC), monkeypatch)
    wanted = SPEC.replace(deterministic=True)
    with pytest.raises(PackageError, match=f"computes {SPEC.slug}, the model needs {wanted.slug}; `pagegen tune"):
        find_kernels(wanted, FOLDER)


def test_launch_of_a_deterministic_engine_brings_all_of_it() -> None:
    config = EngineConfig(dtype=DType.FP32, num_blocks=8, deterministic=True)
    engine = launch("dummy:tiny", None, config, block_size=4).engine
    assert engine.kernels.spec.deterministic and engine.model.deterministic


def test_a_gpu_package_is_refused_by_the_cpu_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(package(SPEC, "cuda:sm_90"), monkeypatch)
    with pytest.raises(PackageError, match="cuda:sm_90"):
        find_kernels(SPEC, FOLDER)


def test_the_cache_is_asked_for_any_layout_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KernelSpec] = []
    freely: list[bool] = []

    def find(spec: KernelSpec, target: Target, *, any_block_size: bool) -> Path:
        asked.append(spec)
        freely.append(any_block_size)
        return Path("cache/tuned")

    monkeypatch.setattr(launcher, "find_package", find)
    loads(package(SPEC.replace(layout=KVLayout.parse("HND"))), monkeypatch)
    kernels, message = find_kernels(SPEC)
    assert [spec.slug for spec in asked] == ["fp32-d16-h6x2-b16-auto"]
    assert kernels.spec.kv_layout.name == "HND" and message.startswith("package tuned of the cache")
    config = EngineConfig(dtype=DType.FP32, num_blocks=8)
    tiny = resolve_model("dummy:tiny").config.kernel_spec(DType.FP32)
    loads(package(tiny), monkeypatch)
    for block_size in (None, tiny.block_size):
        launch("dummy:tiny", None, config, block_size)
    assert freely == [False, True, False]  # a block size that nobody named is the package's to choose


def test_a_cached_package_that_does_not_load_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PackageError("attend_0.so is not what the manifest says")

    monkeypatch.setattr(launcher, "find_package", lambda spec, target, **_: Path("made-up"))
    monkeypatch.setattr(launcher, "load_package", refuse)
    kernels, message = launcher.find_kernels(SPEC)
    assert kernels.spec == SPEC
    assert "default config" in message and "not what the manifest says" in message


def test_launch_makes_an_engine_of_a_model_word() -> None:
    launched = launch("dummy:tiny", None, EngineConfig(dtype=DType.FP32, num_blocks=8), block_size=4)
    assert launched.name == "dummy:tiny"
    assert launched.engine.kernels.spec.block_size == 4 and launched.engine.stats().num_blocks == 8
    assert launched.tokenizer.decode(launched.tokenizer.encode("abc")) == "abc"


def test_a_model_that_is_not_there_is_a_model_error() -> None:
    with pytest.raises(ModelError):
        launch("no/such/model", None, EngineConfig())
