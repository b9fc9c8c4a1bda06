"""What makes timings in tests quick: they need not be right, only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagegen.tuning import contest, evaluate, job, roofline


@pytest.fixture(scope="session", autouse=True)
def little_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """KV pools of a megabyte instead of twice the last cache; one thread, as threads wait for each other on busy cores.

    The timing lock is the tests' own: they do not wait for what else is timed on this machine.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEGEN_TIMING_LOCK", str(tmp_path_factory.mktemp("lock") / "timing"))
        for module in (contest, evaluate):
            patch.setattr(module, "cold_bytes_on", lambda device: 1 << 20)
        patch.setattr(roofline, "cold_bytes", lambda caches, free: 1 << 22)
        patch.setattr(roofline, "CALL_BYTES", 1 << 20)
        patch.setattr(job, "ROOFLINE_SECONDS", 0.01)
        yield
