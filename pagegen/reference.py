"""Paged attention in plain float64 torch: the meaning of a spec. Slow on purpose, and shares no code with a kernel.

Softmax attention as in Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), section 3.2.1; block tables as in Kwon
et al. 2023 (https://arxiv.org/abs/2309.06180), section 4.1. Vendored into every kernel package.
"""

from __future__ import annotations

import torch

from .kernel import check_attend, check_copy_blocks, check_write_kv
from .spec import KernelSpec, Order


def token_view(order: Order, cache: torch.Tensor) -> torch.Tensor:
    """A view or copy of a cache tensor as `[blocks, block_size, kv_heads, head_dim]`, whatever its layout."""
    match order:
        case Order.NHD:
            return cache
        case Order.HND:
            return cache.permute(0, 2, 1, 3)
        case Order.HDN if cache.dim() == 5:  # [blocks, heads, dim / x, tokens, x]
            return cache.permute(0, 3, 1, 2, 4).flatten(-2)
        case Order.HDN:
            return cache.permute(0, 3, 1, 2)


class ReferenceKernels:
    """`PagedKernels` in float64: exact inputs, one rounding at the store."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        *,
        scale: float | None = None,
        lse: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_context_len: int | None = None,
    ) -> None:
        """See pagegen.kernel for the shapes."""
        spec, layout = self.spec, self.spec.kv_layout
        check_attend(spec, out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, lse)
        scale = spec.softmax_scale if scale is None else scale
        k_tokens, v_tokens = token_view(layout.k_order, k_cache), token_view(layout.v_order, v_cache)
        starts: list[int] = cu_seqlens_q.tolist()
        for s, context in enumerate(context_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            num_rows = rows.stop - rows.start
            positions = torch.arange(context)
            blocks = block_table[s, positions // spec.block_size].long()
            k = k_tokens[blocks, positions % spec.block_size].double().repeat_interleave(spec.group, dim=1)
            v = v_tokens[blocks, positions % spec.block_size].double().repeat_interleave(spec.group, dim=1)
            scores = torch.einsum("qhd,khd->qhk", q[rows].double(), k) * scale
            if spec.causal:
                own = context - num_rows + torch.arange(num_rows)
                scores.masked_fill_((positions[None, :] > own[:, None])[:, None, :], float("-inf"))
            total = torch.logsumexp(scores, dim=-1) if context else torch.full(scores.shape[:-1], float("-inf")).double()
            weights = torch.where(total[..., None].isneginf(), 0.0, torch.exp(scores - total[..., None]))
            out[rows] = torch.einsum("qhk,khd->qhd", weights, v).to(out.dtype)
            if lse is not None:
                lse[rows] = total.float()

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See pagegen.kernel for the shapes."""
        spec, layout = self.spec, self.spec.kv_layout
        check_write_kv(spec, k, v, k_cache, v_cache, slot_mapping)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, spec.block_size)
            if layout.k_order is Order.HDN:
                k_cache[block, :, :, offset] = k[token].view(spec.kv_heads, -1, layout.x)
            else:
                token_view(layout.k_order, k_cache)[block, offset] = k[token]
            token_view(layout.v_order, v_cache)[block, offset] = v[token]

    def copy_blocks(self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
        """See pagegen.kernel for the shapes."""
        check_copy_blocks(self.spec, k_cache, v_cache, pairs)
        for cache in (k_cache, v_cache):
            cache[pairs[:, 1]] = cache[pairs[:, 0]]
