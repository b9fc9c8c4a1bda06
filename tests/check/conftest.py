"""Kernels by hand and by template, built without optimisation: what is judged here is the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagegen.build.cpp import run_compiler
from pagegen.paths import TEMPLATES
from pagegen.target import parse_target

SCALAR = parse_target("cpu:scalar")
FLAGS = ("-shared", "-std=c++17", "-O0", "-fPIC", "-fopenmp", "-fvisibility=hidden")

Builder = Callable[[str], Path]


@pytest.fixture(scope="session")
def build_text(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """C++ text to a library, fast."""

    def build(text: str) -> Path:
        folder = tmp_path_factory.mktemp("library")
        (folder / "kernel.cpp").write_text(text)
        run_compiler([*FLAGS, *SCALAR.flags, "kernel.cpp", "-o", "kernel.so"], folder)
        return folder / "kernel.so"

    return build


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of this session's own."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: torch's own threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_abi(body: str) -> str:
    """A kernel's text from what follows the headers."""
    headers = "#include <csignal>\n#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <unistd.h>\n"
    version = "PG_EXPORT int32_t pagegen_abi_version(void) { return PAGEGEN_ABI_VERSION; }\n"
    return headers + (TEMPLATES / "cpp/abi.h").read_text() + version + body
