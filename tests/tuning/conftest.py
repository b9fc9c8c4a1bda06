"""What makes timings in tests quick: they need not be right, only there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch

from pagegen.tuning import contest, evaluate, job, roofline
from pagegen.tuning.evaluate import Timer


@pytest.fixture(scope="session", autouse=True)
def little_work() -> Iterator[None]:
    """KV pools of a megabyte instead of twice the last cache; one thread, as threads wait for each other on busy cores, in
    the timing process too. The roofline is measured once for each target.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        made = Timer.__init__
        patch.setattr(Timer, "__init__", lambda timer, setup: made(timer, dataclasses.replace(setup, threads=1)))
        for module in (contest, evaluate):
            patch.setattr(module, "cold_bytes_on", lambda device: 1 << 20)
        patch.setattr(roofline, "cold_bytes", lambda caches, free: 1 << 22)
        patch.setattr(roofline, "CALL_BYTES", 1 << 20)
        patch.setattr(job, "ROOFLINE_SECONDS", 0.01)
        patch.setattr(job, "measure_roofline", functools.cache(roofline.measure_roofline))
        yield
