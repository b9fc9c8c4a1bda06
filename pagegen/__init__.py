"""pagegen: generates, proves, tunes and ships paged-attention kernels, and serves a model with the winner.

The names below are imported when first touched, so that `import pagegen` and the command line's help cost no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagegen.package import load_package
    from pagegen.runtime.llm import LLM
    from pagegen.runtime.sampling_params import SamplingParams
    from pagegen.tuning.job import tune

_EXPORTS = {
    "LLM": "pagegen.runtime.llm",
    "SamplingParams": "pagegen.runtime.sampling_params",
    "load_package": "pagegen.package",
    "tune": "pagegen.tuning.job",
}

__all__ = ["LLM", "SamplingParams", "__version__", "load_package", "tune"]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pagegen' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
