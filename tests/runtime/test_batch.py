"""Claims about the tensors of one iteration, and about the pool they address."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError
from pagegen.reference import ReferenceKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.kv_cache import KVCache, block_bytes
from pagegen.runtime.policies import Demand
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import ScheduledBatch, ScheduledSequence
from pagegen.runtime.sequence import Sequence
from pagegen.spec import DType, KernelSpec


def scheduled(
    *rows: tuple[list[int], int, int], prompt_len: int | None = None, prompt_logprobs: int | None = None
) -> ScheduledBatch:
    """Rows of (token ids, start, number of tokens); a sequence's prompt is all of its tokens unless told."""
    made = []
    for seq_id, (token_ids, start, num_tokens) in enumerate(rows):
        params = SamplingParams(prompt_logprobs=prompt_logprobs)
        sequence = Sequence(seq_id, str(seq_id), token_ids[:prompt_len], params, max_num_tokens=99)
        sequence.token_ids = token_ids
        made.append(ScheduledSequence(sequence, start, num_tokens))
    return ScheduledBatch(tuple(made))


def test_a_decode_a_whole_prompt_and_a_chunk_share_one_flat_batch() -> None:
    blocks = BlockManager(10, 4)
    blocks.allocate(0, Demand(range(6), 6), 6)  # blocks 0, 1
    blocks.allocate(1, Demand(range(3), 3), 3)  # block 2
    blocks.allocate(2, Demand(range(9), 9), 9)  # blocks 3, 4, 5
    plan = scheduled(([10, 11, 12, 13, 14, 15], 5, 1), ([20, 21, 22], 0, 3), (list(range(30, 39)), 3, 3))
    batch = Batch.from_scheduled(plan, blocks)
    assert batch.input_ids.tolist() == [15, 20, 21, 22, 33, 34, 35]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [5, 8, 9, 10, 15, 16, 17]
    assert batch.block_table.tolist() == [[0, 1], [2, -1], [3, 4]]
    assert batch.context_lens.tolist() == [6, 3, 6]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 7]
    assert batch.logits_rows.tolist() == [0, 3]  # the chunk's last token is not the sequence's
    assert (batch.max_query_len, batch.max_context_len, batch.num_tokens) == (3, 6, 7)
    assert {tensor.dtype for tensor in (batch.input_ids, batch.positions, batch.slot_mapping)} == {torch.int64}
    assert {tensor.dtype for tensor in (batch.block_table, batch.context_lens, batch.cu_seqlens_q)} == {torch.int32}


def test_prompt_logprobs_ask_for_the_rows_that_score_the_prompt_after_the_sampled_ones() -> None:
    blocks = BlockManager(10, 4)
    blocks.allocate(0, Demand(range(5), 5), 5)
    whole = Batch.from_scheduled(scheduled(([1, 2, 3, 4, 5], 0, 5), prompt_logprobs=0), blocks)
    assert whole.logits_rows.tolist() == [4, 0, 1, 2, 3]
    chunk = Batch.from_scheduled(scheduled(([1, 2, 3, 4, 5], 1, 3), prompt_logprobs=0), blocks)
    assert chunk.logits_rows.tolist() == [0, 1, 2]
    again = Batch.from_scheduled(scheduled(([1, 2, 3, 4, 5], 0, 5), prompt_len=4, prompt_logprobs=0), blocks)
    assert again.logits_rows.tolist() == [4]  # recomputed after a preemption: already scored


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(1, 17),
    st.lists(st.tuples(st.integers(1, 70), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9),
)
def test_every_token_gets_the_slot_its_table_says(block_size: int, wanted: list[tuple[int, float, float]]) -> None:
    blocks, rows = BlockManager(700, block_size), []
    for seq_id, (length, low, high) in enumerate(wanted):
        blocks.allocate(seq_id, Demand(range(length), length), length)
        start = int(low * (length - 1))
        rows.append((list(range(1000 * seq_id, 1000 * seq_id + length)), start, 1 + int(high * (length - start - 1))))
    batch = Batch.from_scheduled(scheduled(*rows), blocks)
    expected = [
        (token_ids[p], p, blocks.block_table(s)[p // block_size] * block_size + p % block_size)
        for s, (token_ids, start, count) in enumerate(rows)
        for p in range(start, start + count)
    ]
    columns = (batch.input_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist())
    assert list(zip(*columns, strict=True)) == expected
    assert batch.context_lens.tolist() == [start + count for _, start, count in rows]


SPEC = KernelSpec(4, 2, 8, DType.FP32, block_size=2)


def test_copies_run_in_order_even_where_a_block_is_both_source_and_destination() -> None:
    cache, kernels = KVCache(SPEC, 2, 4), ReferenceKernels(SPEC)
    for k_cache, v_cache in cache.layers:
        k_cache[:] = torch.arange(4)[:, None, None, None]
        v_cache[:] = 10 + torch.arange(4)[:, None, None, None]
    cache.copy_blocks(kernels, [(0, 1), (0, 2), (2, 3), (1, 2), (3, 2)])
    for k_cache, v_cache in cache.layers:
        assert k_cache[:, 0, 0, 0].tolist() == [0, 0, 0, 0] and v_cache[:, 1, 1, 7].tolist() == [10, 10, 10, 10]


def test_one_source_copied_to_several_destinations_keeps_every_destination() -> None:
    cache = KVCache(SPEC, 1, 4)
    cache.layers[0][0][0] = 5
    cache.copy_blocks(ReferenceKernels(SPEC), [(0, 1), (0, 2), (0, 3)])
    assert (cache.layers[0][0] == 5).all()


def test_the_pool_costs_what_block_bytes_says() -> None:
    cache = KVCache(SPEC, 3, 7)
    assert sum(k.nbytes + v.nbytes for k, v in cache.layers) == 7 * block_bytes(SPEC, 3)


def test_a_pool_larger_than_memory_is_refused_with_the_option_to_change() -> None:
    with pytest.raises(ConfigError, match="lower num_blocks"):
        KVCache(SPEC, 1, 2**45)
