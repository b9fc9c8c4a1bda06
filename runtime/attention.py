"""The one place where the model meets the paged cache."""

from __future__ import annotations

import dataclasses

import torch

from pagegen.kernel import PagedKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.kv_cache import KVCache


@dataclasses.dataclass(frozen=True, slots=True)
class PagedAttention:
    """Selective batching's other half: per-sequence attention over the flattened batch, through generated kernels."""

    kernels: PagedKernels
    kv_cache: KVCache

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Writes k, v [T, kv_heads, head_dim], attends with q [T, q_heads, head_dim]; gives [T, q_heads * head_dim]."""
        k_cache, v_cache = self.kv_cache.layers[layer]
        attend_extras, write_extras = self.kv_cache.extras[layer]
        out = torch.empty((q.shape[0], q.shape[1], self.kernels.spec.dim_v), dtype=q.dtype, device=q.device)
        self.kernels.write_kv(k, v, k_cache, v_cache, batch.slot_mapping, extras=write_extras)
        self.kernels.attend(
            out,
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.context_lens,
            batch.cu_seqlens_q,
            extras=attend_extras,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
        return out.flatten(1)
