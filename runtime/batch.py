"""The tensors of one iteration, built here and nowhere else."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import torch

from pagegen.runtime.policies import MemoryPolicy
from pagegen.runtime.scheduler import ScheduledBatch, ScheduledSequence


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T tokens of S sequences, flattened: the model's only input besides its weights and the cache.

    =============== ============ ===========================================================================
    input_ids       [T], int64   tokens, sequence after sequence
    positions       [T], int64   of each token in its sequence
    slot_mapping    [T], int64   where its K and V go: table[pos // B] * B + pos % B
    block_table     [S, W], int32 physical blocks; -1 pads
    context_lens    [S], int32   tokens of each sequence up to and including this iteration's
    cu_seqlens_q    [S + 1], int32 rows of sequence s are [cu[s], cu[s + 1])
    logits_rows     [R], int64   tokens whose logits are wanted: the sampled first, then the prompt's
    =============== ============ ===========================================================================
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    logits_rows: torch.Tensor
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def from_scheduled(cls, scheduled: ScheduledBatch, block_manager: MemoryPolicy) -> Batch:
        """Needs at least one row, and each sequence's blocks to reach its last scheduled token."""
        rows, block_size = scheduled.rows, block_manager.block_size
        starts = np.array([row.start for row in rows])
        query_lens = np.array([row.num_tokens for row in rows])
        context_lens = starts + query_lens
        cu_seqlens = np.concatenate(([0], np.cumsum(query_lens)))
        block_table = _block_table(rows, block_manager, -(-int(context_lens.max()) // block_size))
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[row_of_token]
        blocks = block_table[row_of_token, positions // block_size].astype(np.int64)
        return cls(
            input_ids=torch.tensor(list(chain.from_iterable(_token_ids(row) for row in rows))),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
            block_table=torch.from_numpy(block_table),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            cu_seqlens_q=torch.from_numpy(cu_seqlens.astype(np.int32)),
            logits_rows=torch.from_numpy(_logits_rows(rows, cu_seqlens)),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
        )


def prompt_logprob_positions(row: ScheduledSequence) -> range:
    """Positions of the row whose logits score the prompt token after them; empty unless the request asks for it."""
    sequence = row.sequence
    if sequence.params.prompt_logprobs is None or sequence.num_tokens > sequence.prompt_len:
        return range(0)  # the second: scored before a preemption, computed again for the cache alone
    return range(row.start, min(row.start + row.num_tokens, sequence.prompt_len - 1))


def _token_ids(row: ScheduledSequence) -> list[int]:
    return row.sequence.token_ids[row.start : row.start + row.num_tokens]


def _block_table(rows: tuple[ScheduledSequence, ...], block_manager: MemoryPolicy, width: int) -> np.ndarray:
    block_table = np.full((len(rows), width), -1, dtype=np.int32)
    for padded, row in zip(block_table, rows, strict=True):
        table = block_manager.block_table(row.sequence.seq_id)[:width]
        padded[: len(table)] = table
    return block_table


def _logits_rows(rows: tuple[ScheduledSequence, ...], cu_seqlens: np.ndarray) -> np.ndarray:
    sampled = [cu_seqlens[i + 1] - 1 for i, row in enumerate(rows) if row.completes]
    prompt = [
        cu_seqlens[i] + position - row.start for i, row in enumerate(rows) for position in prompt_logprob_positions(row)
    ]
    return np.array(sampled + prompt, dtype=np.int64)
