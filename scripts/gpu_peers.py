"""What attention on a GPU is compared with beside SDPA: torch's FlexAttention, and FlashInfer's and vLLM's kernels if they
are installed. Each function makes a call on the tensors of one batch; it raises whatever is missing or refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from pagegen.kernel import TORCH_DTYPES
from pagegen.reference import token_view
from pagegen.spec import KVLayout
from pagegen.tuning.workload import Inputs

Call = Callable[[], None]


def flex(inputs: Inputs) -> Call:
    """FlexAttention on KV that is contiguous already, compiled on a GPU; for batches whose sequences are all alike."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    spec, point = inputs.spec, inputs.point
    shapes = set(zip(point.query_lens, point.context_lens, strict=True))
    if len(shapes) > 1 or spec.head_dim & (spec.head_dim - 1):
        raise NotImplementedError("for sequences that are alike, and head dims that are a power of two")
    (rows, context), seqs, device = shapes.pop(), len(point.query_lens), inputs.q.device

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query + (context - rows)

    blocks = create_block_mask(mask, None, None, rows, context, device=str(device))
    k, v = (tensor.contiguous() for tensor in gathered(inputs, context))
    q = inputs.q.view(seqs, rows, spec.q_heads, spec.head_dim).transpose(1, 2)
    attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    out = inputs.out.view(seqs, rows, spec.q_heads, spec.dim_v)

    def call() -> None:
        out.copy_(attend(q, k, v, block_mask=blocks, scale=spec.softmax_scale, enable_gqa=spec.group > 1).transpose(1, 2))

    return call


def gathered(inputs: Inputs, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first block table as [seqs, kv_heads, context, dim]."""
    spec, pool, table = inputs.spec, inputs.pool, inputs.block_tables[0]
    layout, found = spec.kv_layout, []
    for order, cache, dim in ((layout.k_order, pool.k_cache, spec.head_dim), (layout.v_order, pool.v_cache, spec.dim_v)):
        tokens = token_view(order, cache[table.flatten()]).reshape(len(table), -1, spec.kv_heads, dim)
        found.append(tokens[:, :context].transpose(1, 2))
    return found[0], found[1]


def flashinfer(inputs: Inputs) -> Call:
    """FlashInfer's paged kernels: that for decode where every sequence has one row, that for prefill elsewhere."""
    import flashinfer as library

    spec = _plain(inputs)
    counts = [-(-context // spec.block_size) for context in inputs.point.context_lens]
    device, table = inputs.q.device, inputs.block_tables[0]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    last = torch.tensor([(context - 1) % spec.block_size + 1 for context in inputs.point.context_lens], dtype=torch.int32, device=device)
    heads, dtype = (spec.q_heads, spec.kv_heads, spec.head_dim, spec.block_size), TORCH_DTYPES[spec.dtype]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    layout = spec.kv_layout.name
    if max(inputs.point.query_lens) == 1:
        planned = library.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        planned.plan(indptr, indices, last, *heads, sm_scale=spec.softmax_scale, q_data_type=dtype, kv_data_type=dtype)
    else:
        planned = library.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
        planned.plan(inputs.cu_seqlens_q, indptr, indices, last, *heads, causal=spec.causal, sm_scale=spec.softmax_scale, q_data_type=dtype, kv_data_type=dtype)

    def call() -> None:
        inputs.out.copy_(planned.run(inputs.q, (inputs.pool.k_cache, inputs.pool.v_cache)))

    return call


def vllm(inputs: Inputs) -> Call:
    """The FlashAttention that vLLM carries, on the paged cache."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    spec = _plain(inputs)
    if spec.kv_layout.name != "NHD":
        raise NotImplementedError("for NHD caches")
    point, table = inputs.point, inputs.block_tables[0]

    def call() -> None:
        flash_attn_varlen_func(
            q=inputs.q,
            k=inputs.pool.k_cache,
            v=inputs.pool.v_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=max(point.query_lens),
            seqused_k=inputs.context_lens,
            max_seqlen_k=max(point.context_lens),
            softmax_scale=spec.softmax_scale,
            causal=spec.causal,
            block_table=table,
        )

    return call


def _plain(inputs: Inputs) -> Any:
    """The spec, if it is one that other kernels read: 16-bit caches, NHD or HND, K and V of one width."""
    spec = inputs.spec
    if spec.dtype.bits != 16 or spec.cache_dtype is not spec.dtype or spec.head_dim != spec.dim_v:
        raise NotImplementedError("for 16-bit caches with K and V of one width")
    if spec.kv_layout not in (KVLayout.parse("NHD"), KVLayout.parse("HND")):
        raise NotImplementedError("for NHD and HND caches")
    return spec


PEERS: dict[str, Callable[[Inputs], Call]] = {"flex": flex, "flashinfer": flashinfer, "vllm": vllm}
