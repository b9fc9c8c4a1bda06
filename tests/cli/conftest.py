"""Commands on the reference kernels: nothing is compiled, and the user's own cache stays out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.reference import ReferenceKernels
from pagegen.runtime import launcher


@pytest.fixture
def reference_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "default_kernels", ReferenceKernels)
