"""The models that can be served: one row and one module each."""

from __future__ import annotations

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

MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),  # the same network where there is no sliding window
}


class CausalLM(Protocol):
    """What the engine needs of a model: its sizes, its dtype, and one step over a batch."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> DType: ...

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        """Writes the batch's K and V into the cache; returns logits [R, vocab_size], float32, of batch.logits_rows."""
        ...


def build_model(config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: DType) -> CausalLM:
    """The model of config.architecture with these weights. Raises ModelError for an architecture without a row."""
    if config.architecture not in MODELS:
        raise ModelError(f"architecture {config.architecture!r} is not supported; allowed: {', '.join(MODELS)}")
    module, name = MODELS[config.architecture]
    model: CausalLM = getattr(import_module(f"{__name__}.{module}"), name)(config, weights, dtype)
    return model
