"""Claims about blocks: their number, their owners, copy-on-write, and books that balance."""

from __future__ import annotations

import random

import pytest

from pagegen.errors import ConfigError
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import Allocation, AuditError, Demand
from pagegen.runtime.prefix_cache import PrefixCache


def demand(num_tokens: int) -> tuple[Demand, int]:
    return Demand(range(num_tokens), num_tokens), num_tokens


def table(blocks: BlockManager, seq_id: int) -> list[int]:
    return list(blocks.block_table(seq_id))


@pytest.mark.parametrize("block_size", [1, 4, 8, 256])
def test_a_block_is_taken_when_a_token_needs_it_and_not_before(block_size: int) -> None:
    full = BlockManager(1, block_size)
    full.allocate(0, *demand(max(block_size - 1, 1)))
    assert full.can_append(0) is (block_size > 1)  # the block's last slot needs no new block
    if block_size > 1:
        full.append(0)
    assert not full.can_append(0)
    roomy = BlockManager(2, block_size)
    roomy.allocate(0, *demand(block_size))
    assert roomy.can_append(0)
    roomy.append(0)
    assert len(table(roomy, 0)) == 2


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_sequence_holds_exactly_the_blocks_of_its_tokens(block_size: int) -> None:
    blocks = BlockManager(4, block_size)
    blocks.allocate(0, *demand(1))
    for num_tokens in range(2, 3 * block_size + 2):
        blocks.append(0)
        assert len(table(blocks, 0)) == -(-num_tokens // block_size) == blocks.num_used_blocks
        assert blocks.num_tokens(0) == num_tokens
        blocks.audit(full=True)


@pytest.mark.parametrize(
    ("num_tokens", "headroom", "answer"),
    [
        (0, 0, Allocation.OK),
        (8, 0, Allocation.OK),
        (9, 0, Allocation.LATER),
        (8, 1, Allocation.LATER),
        (16, 9, Allocation.LATER),
        (17, 0, Allocation.NEVER),
    ],
)
def test_allocation_is_possible_now_later_or_never(num_tokens: int, headroom: int, answer: Allocation) -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(0, *demand(7))
    assert blocks.can_allocate(demand(num_tokens)[0], headroom=headroom) is answer


def test_a_failed_growth_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    blocks.allocate(0, *demand(8))
    assert not blocks.can_append(0, 12)
    with pytest.raises(ValueError, match="needs 3 blocks for 12 tokens, 1 are free"):
        blocks.append(0, 12)
    with pytest.raises(ValueError, match="needs 2 blocks"):
        blocks.allocate(1, *demand(5))
    assert (len(table(blocks, 0)), blocks.num_tokens(0), blocks.num_free_blocks) == (2, 8, 1)
    blocks.audit(full=True)
    blocks.allocate(1, *demand(4))  # the failed allocation left no trace of sequence 1


def test_freeing_twice_gives_no_block_to_two_owners() -> None:
    blocks = BlockManager(4, 2)
    blocks.allocate(0, *demand(2))
    assert blocks.free(0) == 1
    assert blocks.free(0) == 0
    assert blocks.free(99) == 0
    for seq_id in range(1, 5):
        blocks.allocate(seq_id, *demand(2))
    assert sorted(block for seq_id in range(1, 5) for block in table(blocks, seq_id)) == [0, 1, 2, 3]
    blocks.audit(full=True)


def test_ten_requests_in_turn_leave_the_pool_as_it_was() -> None:
    blocks = BlockManager(8, 4)
    for seq_id in range(10):
        blocks.allocate(seq_id, *demand(16))
        blocks.free(seq_id)
        assert blocks.num_free_blocks == 8
        blocks.audit(full=True)


def test_an_id_that_holds_blocks_cannot_be_allocated_or_forked_into() -> None:
    blocks = BlockManager(4, 2)
    blocks.allocate(0, *demand(2))
    blocks.allocate(1, *demand(2))
    with pytest.raises(ValueError, match="already holds"):
        blocks.allocate(0, *demand(2))
    with pytest.raises(ValueError, match="already holds"):
        blocks.fork(0, 1)
    blocks.audit(full=True)


def pool_that_hands_out(order: list[int], num_blocks: int, block_size: int) -> BlockManager:
    """A pool whose free blocks come in this order, so that a figure's own numbers can be expected."""
    blocks = BlockManager(num_blocks, block_size)
    for seq_id in range(num_blocks):
        blocks.allocate(seq_id, *demand(1))
    for block in [*order, *(block for block in range(num_blocks) if block not in order)]:
        blocks.free(block)
    return blocks


def test_the_vllm_papers_figure_6() -> None:
    """A prompt of 7 in blocks of 4 goes to blocks 7 and 1; the 8th token takes no block, the 9th takes block 3."""
    blocks = pool_that_hands_out([7, 1, 3], 9, 4)
    blocks.allocate(0, *demand(7))
    assert (table(blocks, 0), blocks.filled(0)) == ([7, 1], [4, 3])
    assert blocks.append(0) == []
    assert (table(blocks, 0), blocks.filled(0)) == ([7, 1], [4, 4])
    assert blocks.append(0) == []
    assert (table(blocks, 0), blocks.filled(0)) == ([7, 1, 3], [4, 4, 1])


def test_the_vllm_papers_figure_8() -> None:
    """Two samples of one prompt: the first writer copies the partial block, the second writes in place."""
    blocks = pool_that_hands_out([7, 1, 3], 9, 4)
    blocks.allocate(1, *demand(7))
    assert blocks.fork(1, 2) == []
    assert table(blocks, 1) == table(blocks, 2) == [7, 1]
    assert blocks.ref_count(7) == blocks.ref_count(1) == 2 and blocks.blocks_saved() == 2
    assert blocks.append(1) == [(1, 3)]
    assert table(blocks, 1) == [7, 3] and blocks.ref_count(1) == 1
    assert blocks.append(2) == []
    assert table(blocks, 2) == [7, 1] and blocks.blocks_saved() == 1
    blocks.audit(full=True)


def test_the_vllm_papers_figure_9() -> None:
    """Beam search of width 4: the next beams come from candidates 1, 1, 2, 2; blocks 2, 4, 5, 8 go, 9 to 12 come."""
    blocks = BlockManager(13, 1)
    blocks.allocate(0, *demand(1))
    blocks.fork(0, 3)
    for seq_id in (0, 3, 0, 3):
        blocks.append(seq_id)
    for seq_id in (1, 2):
        blocks.fork(0, seq_id)
    for seq_id in range(4):
        blocks.append(seq_id)
    assert [table(blocks, seq_id) for seq_id in range(4)] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    for parent, child in ((1, 10), (1, 11), (2, 12), (2, 13)):
        blocks.fork(parent, child)
    assert sum(blocks.free(seq_id) for seq_id in range(4)) == 4
    assert [block for block in range(9) if not blocks.ref_count(block)] == [2, 4, 5, 8]
    assert [blocks.append(seq_id) for seq_id in range(10, 14)] == [[]] * 4
    assert [table(blocks, seq_id) for seq_id in range(10, 14)] == [
        [0, 1, 3, 6, 9],
        [0, 1, 3, 6, 10],
        [0, 1, 3, 7, 11],
        [0, 1, 3, 7, 12],
    ]
    assert [blocks.ref_count(block) for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    blocks.audit(full=True)


@pytest.mark.parametrize("num_samples", [2, 3, 5])
@pytest.mark.parametrize("num_prompt_tokens", [4, 5, 7, 8, 9])
def test_n_samples_copy_the_partial_block_of_the_prompt_but_once_and_a_full_one_never(
    num_samples: int, num_prompt_tokens: int
) -> None:
    blocks = BlockManager(64, 4)
    blocks.allocate(0, *demand(num_prompt_tokens))
    for child in range(1, num_samples):
        blocks.fork(0, child)
    copies = [pair for seq_id in range(num_samples) for _ in range(9) for pair in blocks.append(seq_id)]
    assert len(copies) == (num_samples - 1 if num_prompt_tokens % 4 else 0)
    assert blocks.blocks_saved() == (num_samples - 1) * (num_prompt_tokens // 4)


def test_samples_that_end_at_different_times_keep_the_prompt_until_the_last() -> None:
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(8))
    for child in (1, 2):
        blocks.fork(0, child)
    prompt = table(blocks, 0)
    for seq_id, num_living in ((1, 2), (0, 1), (2, 0)):
        blocks.append(seq_id)
        blocks.free(seq_id)
        assert [blocks.ref_count(block) for block in prompt] == [num_living] * 2
    assert blocks.num_free_blocks == 9


def test_on_average_half_a_block_less_half_a_slot_is_wasted() -> None:
    rng = random.Random(1)
    for block_size in (1, 2, 16, 33):
        blocks, num_sequences = BlockManager(60_000, block_size), 3000
        for seq_id in range(num_sequences):
            blocks.allocate(seq_id, *demand(rng.randrange(1, 8 * block_size + 1)))
        noise = 4 * block_size / (12 * num_sequences) ** 0.5  # four standard deviations of the mean
        assert blocks.split().internal / num_sequences == pytest.approx((block_size - 1) / 2, abs=noise)


def test_three_forks_of_a_partial_block_end_in_three_blocks_after_two_copies() -> None:
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(6))
    for child in (1, 2):
        blocks.fork(0, child)
    full, partial = table(blocks, 0)
    copies = [pair for seq_id in range(3) for pair in blocks.append(seq_id)]
    assert [source for source, _ in copies] == [partial, partial]
    assert len({table(blocks, seq_id)[-1] for seq_id in range(3)}) == 3
    assert blocks.ref_count(full) == 3
    blocks.free(1)
    assert blocks.ref_count(full) == 2
    for seq_id in (0, 2):
        blocks.free(seq_id)
    assert blocks.num_free_blocks == 9
    blocks.audit(full=True)


def test_forking_at_a_block_boundary_copies_nothing() -> None:
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(8))
    blocks.fork(0, 1)
    assert blocks.append(0) == blocks.append(1) == []
    assert table(blocks, 0)[:2] == table(blocks, 1)[:2] and table(blocks, 0)[2] != table(blocks, 1)[2]


@pytest.mark.parametrize("num_new", [1, 2, 3, 6, 7, 9])
def test_many_tokens_at_once_fill_a_partial_block_of_ones_own_and_copy_a_shared_one(num_new: int) -> None:
    for shared in (False, True):
        blocks = BlockManager(9, 4)
        blocks.allocate(0, *demand(6))
        if shared:
            blocks.fork(0, 1)
        assert len(blocks.append(0, num_new)) == shared
        assert len(table(blocks, 0)) == -(-(6 + num_new) // 4)
        blocks.audit(full=True)


def test_copy_on_write_needs_a_block_of_its_own() -> None:
    blocks = BlockManager(1, 4)
    blocks.allocate(0, *demand(2))
    blocks.fork(0, 1)
    assert not blocks.can_append(0)
    blocks.free(1)
    assert blocks.can_append(0)


# --- runs of consecutive blocks --------------------------------------------------------------------------------------


def test_sequences_that_grow_in_turns_each_lie_in_a_run_of_their_own() -> None:
    blocks = BlockManager(32, 4, run=8)
    for seq_id in range(3):
        blocks.allocate(seq_id, *demand(6))
    for _ in range(6):
        for seq_id in range(3):
            blocks.append(seq_id, 4)
    assert [table(blocks, seq_id) for seq_id in range(3)] == [[*range(start, start + 8)] for start in (0, 8, 16)]
    blocks.append(1, 4)  # the next run is somebody else's
    assert table(blocks, 1)[8:] == [24]
    blocks.audit(full=True)


def test_the_room_of_one_that_has_ended_is_for_the_others() -> None:
    blocks = BlockManager(16, 4, run=8)
    blocks.allocate(0, *demand(4))
    blocks.allocate(1, *demand(4))
    blocks.free(1)
    blocks.append(0, 60)
    assert table(blocks, 0) == [*range(16)]
    blocks.audit(full=True)


def test_room_to_grow_is_shared_when_nothing_else_is_free() -> None:
    blocks = BlockManager(8, 4, run=8)
    for seq_id in range(3):
        blocks.allocate(seq_id, *demand(4))
        blocks.audit(full=True)
    assert [table(blocks, seq_id) for seq_id in range(3)] == [[0], [4], [2]]  # the upper half of the oldest claim
    assert blocks.num_free_blocks == 5 and blocks.can_append(2, 20)
    blocks.append(2, 20)
    assert sorted(table(blocks, 2)) == [1, 2, 3, 5, 6, 7] and not blocks.can_append(0, 4)
    blocks.audit(full=True)


def test_what_was_cached_along_a_run_is_taken_along_it_again() -> None:
    blocks = BlockManager(16, 4, prefix_cache=PrefixCache(4), run=8)
    for seq_id in (0, 1):
        tokens = [seq_id] * 32
        blocks.allocate(seq_id, Demand(tokens, 32), 32)
        blocks.commit(seq_id, tokens, 32)
        blocks.free(seq_id)
    blocks.allocate(2, *demand(24))  # the first sequence's last blocks, in their order
    assert table(blocks, 2) == [2, 3, 4, 5, 6, 7]
    blocks.audit(full=True)


def test_no_prefix_is_lost_while_a_block_is_empty_that_nobody_claims() -> None:
    cache = PrefixCache(4)
    blocks = BlockManager(64, 4, prefix_cache=cache, run=8)
    for seq_id in range(7):  # 56 blocks of prefixes
        tokens = [seq_id] * 32
        blocks.allocate(seq_id, Demand(tokens, 32), 32)
        blocks.commit(seq_id, tokens, 32)
        blocks.free(seq_id)
    for _ in range(3):
        for seq_id in range(7):
            tokens = [seq_id] * 32
            assert blocks.allocate(seq_id, Demand([*tokens, 99], 33), 33) == 32
            blocks.free(seq_id)
    assert cache.num_evictions == 0


def test_a_run_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockManager(16, 4, run=0)


@pytest.mark.parametrize(("num_blocks", "run"), [(1, 1), (127, 1), (320, 5), (100_000, 8)])
def test_runs_are_as_long_as_the_pool_has_room_for_many(num_blocks: int, run: int) -> None:
    blocks = BlockManager(num_blocks, 16)
    blocks.allocate(0, *demand(1))
    blocks.allocate(1, *demand(1)) if num_blocks > 1 else None
    assert table(blocks, 0) == [0] and (num_blocks == 1 or table(blocks, 1) == [run])


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockManager(0, 16)


def test_the_audit_sees_a_reference_that_nobody_wrote_down() -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(0, *demand(4))
    blocks._device.pool.take(blocks._device.holdings[0])
    with pytest.raises(AuditError):
        blocks.audit()


def test_the_full_audit_names_what_the_quick_one_cannot_see() -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(0, *demand(8))
    blocks.block_table(0)[1] = blocks.block_table(0)[0]
    blocks.audit()
    with pytest.raises(AuditError, match="sequence 0"):
        blocks.audit(full=True)
    debugging = BlockManager(4, 4, debug=True)
    debugging.allocate(0, *demand(8))
    debugging.block_table(0)[1] = 3
    with pytest.raises(AuditError, match="block 1 has ref count 1 and is in 0 tables"):
        debugging.audit()


def test_many_are_extended_at_once_while_none_needs_a_copy_or_finds_no_block() -> None:
    blocks = BlockManager(9, 4)
    for seq_id, num_tokens in enumerate((5, 8, 6, 4, 3)):
        blocks.allocate(seq_id, *demand(num_tokens))
    blocks.fork(2, 9)
    others = blocks.extend([0, 1, 2, 3, 4], [6, 9, 7, 5, 3])
    assert others == [2, 3], "one needs a copy, so the next takes no block before it; the last has what it wants"
    assert [blocks.num_tokens(seq_id) for seq_id in (0, 1, 2, 3, 4, 9)] == [6, 9, 6, 4, 3, 6]
    blocks.audit(full=True)


def test_an_extension_takes_no_block_that_is_not_free() -> None:
    blocks = BlockManager(3, 4)
    blocks.allocate(0, *demand(4))
    blocks.allocate(1, *demand(4))
    assert blocks.extend([0, 1], [5, 5]) == [1]
    assert (blocks.num_tokens(0), blocks.num_tokens(1), blocks.num_free_blocks) == (5, 4, 0)
    blocks.audit(full=True)


# --- swapping ------------------------------------------------------------------------------------------------------


def test_a_group_moves_its_shared_blocks_once_and_shares_them_on_the_host_and_back() -> None:
    blocks = BlockManager(8, 4, num_host_blocks=8)
    blocks.allocate(0, *demand(8))
    for child in (1, 2):
        blocks.fork(0, child)
    for seq_id in range(3):
        blocks.append(seq_id)
    out = blocks.swap_out([0, 1, 2])
    assert len(out) == 5 == len(dict(out)) == len({host for _, host in out})
    assert (blocks.num_free_blocks, blocks.num_free_host_blocks, blocks.num_tokens(1)) == (8, 3, 9)
    back = blocks.swap_in([0, 1, 2])
    assert {host for host, _ in back} == {host for _, host in out}
    assert table(blocks, 0)[:2] == table(blocks, 1)[:2] == table(blocks, 2)[:2] and blocks.blocks_saved() == 4
    assert [blocks.filled(seq_id) for seq_id in range(3)] == [[4, 4, 1]] * 3
    blocks.audit(full=True)


def test_what_a_swapped_sequence_shares_with_others_stays_for_them() -> None:
    blocks = BlockManager(4, 4, num_host_blocks=4)
    blocks.allocate(0, *demand(7))
    blocks.fork(0, 1)
    before = table(blocks, 1)
    assert len(blocks.swap_out([0])) == 2 and table(blocks, 1) == before and blocks.num_free_blocks == 2
    assert blocks.append(1) == []  # the last holder writes in place
    blocks.swap_in([0])
    assert not set(table(blocks, 0)) & set(table(blocks, 1))
    blocks.audit(full=True)


def test_swapping_is_all_or_nothing() -> None:
    blocks = BlockManager(8, 4, num_host_blocks=3)
    blocks.allocate(0, *demand(8))
    blocks.allocate(1, *demand(8))
    assert blocks.can_swap_out([0]) and not blocks.can_swap_out([0, 1])
    with pytest.raises(ValueError, match="do not fit 3 free host blocks"):
        blocks.swap_out([0, 1])
    for seq_ids in ([0, 0], [0, 9]):
        with pytest.raises(ValueError, match="cannot be moved"):
            blocks.swap_out(seq_ids)
    blocks.swap_out([0])
    blocks.allocate(2, *demand(20))
    assert not blocks.can_swap_in([0]) and blocks.num_free_host_blocks == 1
    with pytest.raises(ValueError, match="do not fit 1 free blocks"):
        blocks.swap_in([0])
    with pytest.raises(ValueError, match="already holds"):
        blocks.allocate(0, *demand(1))
    assert blocks.free(0) == 0 and blocks.num_free_host_blocks == 3  # aborted while swapped out
    blocks.audit(full=True)


def test_headroom_is_kept_when_sequences_come_back() -> None:
    blocks = BlockManager(4, 4, num_host_blocks=2)
    blocks.allocate(0, *demand(8))
    blocks.swap_out([0])
    assert blocks.can_swap_in([0], headroom=2) and not blocks.can_swap_in([0], headroom=3)


def test_a_swap_space_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose 0 to 4 blocks"):
        BlockManager(4, 4, num_host_blocks=5)


# --- size ----------------------------------------------------------------------------------------------------------


def test_a_million_blocks_and_ten_thousand_sequences() -> None:
    """An extension that scanned the pool or the sequences would take minutes here."""
    blocks = BlockManager(1_000_000, 16, prefix_cache=PrefixCache(16), num_host_blocks=1000)
    for seq_id in range(10_000):
        blocks.allocate(seq_id, *demand(100))
    for _ in range(5):
        assert blocks.extend(range(10_000), [blocks.num_tokens(seq_id) + 1 for seq_id in range(10_000)]) == []
        blocks.audit()
    assert blocks.split().token == 10_000 * 105
    for seq_id in range(10_000):
        blocks.free(seq_id)
    assert blocks.num_free_blocks == 1_000_000
