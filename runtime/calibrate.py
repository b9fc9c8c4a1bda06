"""What preempting costs on this machine, measured once: moving blocks to the host, and computing tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pagegen.kernel import PagedKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.models import CausalLM
from pagegen.runtime.scheduling.preemption import PreemptionCosts

NUM_BLOCKS = 8
NUM_TOKENS = 64


def measure_costs(model: CausalLM, kernels: PagedKernels, kv_cache: KVCache, swap_space: KVCache) -> PreemptionCosts:
    """Times a copy of up to 8 blocks to the swap space, which must hold nothing yet, and a prompt of up to 64 tokens.

    Writes no block of the pool: the tokens have no slots, and attend to whatever is there. Takes about as long as two
    such prompts.
    """
    with torch.inference_mode():
        batch = _batch(min(NUM_TOKENS, kv_cache.num_blocks * kv_cache.spec.block_size), kv_cache)
        seconds = min(_seconds(lambda: model.forward(batch, kv_cache, kernels)) for _ in range(2))
        tokens_per_second = batch.num_tokens / seconds
        count = min(NUM_BLOCKS, swap_space.num_blocks)
        pairs = [(block, block) for block in range(count)]
        seconds = min(_seconds(lambda: swap_space.copy_from(kv_cache, pairs)) for _ in range(3))
        return PreemptionCosts(count / seconds, tokens_per_second)


def _batch(num_tokens: int, kv_cache: KVCache) -> Batch:
    """One sequence whose tokens are not written: slot -1."""
    num_blocks = -(-num_tokens // kv_cache.spec.block_size)
    return Batch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        slot_mapping=torch.full((num_tokens,), -1),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
        logits_rows=torch.tensor([num_tokens - 1]),
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return max(time.perf_counter() - begin, 1e-9)
