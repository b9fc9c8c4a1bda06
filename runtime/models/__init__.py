"""The models that can be served: one row and one module each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from pagegen.errors import ModelError

if TYPE_CHECKING:
    import torch

    from pagegen.kernel import PagedKernels
    from pagegen.runtime.batch import Batch
    from pagegen.runtime.kv_cache import KVCache
    from pagegen.runtime.models.config import ModelConfig
    from pagegen.spec import DType


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRow:
    """Who computes an architecture: `class_name` in `runtime/models/<module>.py`. `model_type` is the file's short name."""

    model_type: str
    module: str
    class_name: str


MODELS = {
    "LlamaForCausalLM": ModelRow("llama", "llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ModelRow("mistral", "llama", "LlamaForCausalLM"),  # the same where there is no sliding window
}


class CausalLM(Protocol):
    """What the engine needs of a model: its sizes, its dtype, whether a token's row has the same bits in every batch, and
    one step over a batch."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def deterministic(self) -> bool: ...

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        """Writes the batch's K and V into the cache; returns logits [R, vocab_size], float32, of batch.logits_rows."""
        ...


def architecture_of(model_type: object) -> str:
    """The architecture with this `model_type`. Raises ModelError for one without a row."""
    rows = {row.model_type: architecture for architecture, row in MODELS.items()}
    if not isinstance(model_type, str) or model_type not in rows:
        raise ModelError(f"model_type {model_type!r} is not supported; allowed: {', '.join(rows)}")
    return rows[model_type]


def check_architecture(architecture: str) -> None:
    """Raises ModelError for an architecture without a row."""
    if architecture not in MODELS:
        raise ModelError(f"architecture {architecture!r} is not supported; allowed: {', '.join(MODELS)}")


def build_model(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    dtype: DType,
    deterministic: bool = False,
    weight_dtype: DType | None = None,
) -> CausalLM:
    """The model of config.architecture with these weights. `deterministic` needs kernels of a deterministic spec, too.

    `weight_dtype` int8 or int4 is that of the layers' linears; embedding and head stay in `dtype`.
    """
    row = MODELS[config.architecture]
    make = getattr(import_module(f"{__name__}.{row.module}"), row.class_name)
    model: CausalLM = make(config, weights, dtype, deterministic, weight_dtype)
    return model
