"""Claims about cached prefixes: what is found, what is never found, what goes first, what is kept."""

from __future__ import annotations

import pytest

from pagegen.errors import ConfigError
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import Allocation, Demand
from pagegen.runtime.prefix_cache import PrefixCache
from tests.runtime.memory_model import ModelledMemory


def cached_pool(num_blocks: int = 16, block_size: int = 4, num_host_blocks: int = 0) -> BlockManager:
    return BlockManager(num_blocks, block_size, prefix_cache=PrefixCache(block_size), num_host_blocks=num_host_blocks)


def run(blocks: BlockManager, seq_id: int, demand: Demand) -> int:
    """Allocates, computes and frees; returns the tokens that were cached."""
    cached = blocks.allocate(seq_id, demand, len(demand.token_ids))
    blocks.commit(seq_id, demand.token_ids, len(demand.token_ids))
    blocks.free(seq_id)
    blocks.audit(full=True)
    return cached


def ask(*token_ids: int, salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> Demand:
    return Demand(token_ids, len(token_ids), salt=salt, extra_keys=extra_keys)


def test_a_later_request_finds_the_full_blocks_of_an_equal_prefix() -> None:
    blocks = cached_pool()
    assert run(blocks, 0, ask(*range(10))) == 0
    assert run(blocks, 1, ask(*range(10))) == 8
    assert run(blocks, 2, ask(*range(8), 99)) == 8
    assert run(blocks, 3, ask(*range(7), 99, 100)) == 4
    assert run(blocks, 4, ask(99, *range(1, 10))) == 0


def test_a_block_is_found_when_it_is_computed_and_not_before() -> None:
    blocks = cached_pool()
    blocks.allocate(0, ask(*range(12)), 12)
    assert blocks.allocate(1, ask(*range(12)), 12) == 0  # the same step: nothing is computed yet
    blocks.commit(0, range(12), 7)
    assert blocks.allocate(2, ask(*range(12)), 12) == 4
    blocks.commit(0, range(12), 12)
    assert blocks.allocate(3, ask(*range(12)), 12) == 8
    assert blocks.block_table(3)[:2] == blocks.block_table(0)[:2]
    with pytest.raises(ValueError, match="13 tokens cannot be in them"):
        blocks.commit(0, range(13), 13)
    blocks.audit(full=True)


def test_two_that_compute_the_same_prefix_at_once_each_keep_their_own_blocks() -> None:
    blocks = cached_pool()
    for seq_id in (0, 1):
        blocks.allocate(seq_id, ask(*range(8)), 8)
    for seq_id in (0, 1):
        blocks.commit(seq_id, range(8), 8)
    assert not set(blocks.block_table(0)) & set(blocks.block_table(1))
    blocks.free(0)
    blocks.free(1)
    blocks.audit(full=True)
    assert blocks.num_free_blocks == 16


def test_a_preempted_sequence_finds_its_own_output_again() -> None:
    blocks = cached_pool()
    blocks.allocate(0, ask(*range(6)), 6)
    blocks.append(0, 3)
    blocks.commit(0, range(9), 9)
    blocks.free(0)
    assert blocks.allocate(0, ask(*range(10)), 10) == 8


def test_samples_publish_their_own_continuations() -> None:
    blocks = cached_pool()
    memory = ModelledMemory(blocks)
    memory.allocate(0, ask(1, 2, 3, 4, 5))
    memory.compute(0)
    memory.fork(0, 1)
    memory.append(0, [6, 7, 8])
    memory.append(1, [66, 77, 88])
    for seq_id in (0, 1):
        memory.compute(seq_id)
    for continuation in ((6, 7, 8), (66, 77, 88)):
        seq_id = continuation[0]
        assert memory.allocate(seq_id, ask(1, 2, 3, 4, 5, *continuation, 9)) == 8
    memory.check()


def test_empty_blocks_go_before_cached_ones_and_the_least_recently_used_of_those_first() -> None:
    blocks = cached_pool(num_blocks=4)
    for seq_id, first in ((0, 0), (1, 10), (2, 20)):
        run(blocks, seq_id, ask(*range(first, first + 4)))
    assert run(blocks, 3, ask(0, 1, 2, 3, 99)) == 4  # used again, and takes the empty one for its fifth token
    blocks.allocate(4, ask(90, 91, 92, 93, 94), 5)  # takes the empty one, and evicts one
    cache = blocks.prefix_cache
    assert cache and [len(cache.match(ask(*range(first, first + 5)))[0]) for first in (0, 10, 20)] == [1, 0, 1]
    assert cache.num_evictions == 1


def test_a_chain_whose_head_was_evicted_is_whole_again_once_the_head_is_computed() -> None:
    """Two copies of one prefix: the published head can go while the other copy's tail is still referred to."""
    blocks = cached_pool(num_blocks=4)
    blocks.allocate(0, ask(*range(4)), 4)
    blocks.allocate(1, ask(*range(8)), 8)
    blocks.commit(0, range(4), 4)
    blocks.commit(1, range(8), 8)  # publishes only its second block: the first prefix is taken
    blocks.free(0)
    blocks.allocate(2, ask(*range(90, 98)), 8)  # takes the fourth block, and evicts the head
    blocks.free(2)
    assert blocks.allocate(3, ask(0, 1, 2, 3, 99), 5) == 0
    blocks.commit(3, [0, 1, 2, 3, 99], 5)
    blocks.free(3)
    blocks.free(1)
    assert run(blocks, 4, ask(*range(9))) == 8
    blocks.audit(full=True)


def one_bit(data: bytes) -> bytes:
    return bytes([sum(data) & 1])


def constant(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("digest", [one_bit, constant])
def test_a_digest_that_collides_finds_nothing_that_is_not_equal(digest: object) -> None:
    cache = PrefixCache(2, digest=digest)  # type: ignore[arg-type]
    memory = ModelledMemory(BlockManager(12, 2, prefix_cache=cache))
    for seq_id in range(60):
        token_ids = [(seq_id * i) % 3 for i in range(1, 2 + seq_id % 8)]
        memory.allocate(seq_id, Demand(token_ids, 9, salt="s" * (seq_id % 2)))
        if seq_id in memory.tokens:  # `allocate` and `check` compare what was found with what it should be
            memory.compute(seq_id)
            memory.check()
            memory.free(seq_id)
    assert memory.policy.num_free_blocks == 12


def test_a_refused_admission_hashes_no_further_than_what_it_found() -> None:
    calls: list[int] = []

    def counting(data: bytes) -> bytes:
        calls.append(len(data))
        return data[-16:] + bytes([len(calls) % 251])

    blocks = BlockManager(4, 4, prefix_cache=PrefixCache(4, digest=counting))
    blocks.allocate(0, ask(*range(12)), 12)
    calls.clear()
    for _ in range(50):
        assert blocks.can_allocate(ask(*range(100, 116))) is Allocation.LATER
    assert len(calls) <= 50 + 2  # the root each time, the first block once


# --- key spaces ----------------------------------------------------------------------------------------------------

SPACES = [
    ask(*range(9)),
    ask(*range(9), salt="X"),
    ask(*range(9), salt="Y"),
    ask(*range(9), extra_keys=(("adapter", "X"),)),
    ask(*range(9), extra_keys=(("adapter", "X"), ("adapter-id", "1"))),
    ask(*range(9), extra_keys=(("adapter", "X"), ("adapter-id", "2"))),
    ask(*range(9), extra_keys=(("adapter", "X1"), ("adapter-id", ""))),
    ask(*range(9), extra_keys=(("salt", "X"),)),
    ask(*range(9), extra_keys=(("model", ""),)),
    ask(*range(9), extra_keys=(("image", "a"), ("image", "b"))),
    ask(*range(9), extra_keys=(("image", "b"), ("image", "a"))),
    ask(*range(9), extra_keys=(("image", "ab"),)),
    ask(*range(9), salt="\udce9"),
]


def test_no_key_space_can_be_mistaken_for_another() -> None:
    blocks = cached_pool(num_blocks=3 * len(SPACES))
    assert [run(blocks, seq_id, demand) for seq_id, demand in enumerate(SPACES)] == [0] * len(SPACES)
    assert [run(blocks, seq_id, demand) for seq_id, demand in enumerate(SPACES)] == [8] * len(SPACES)


def test_other_weights_find_nothing_and_a_return_to_the_old_ones_neither() -> None:
    blocks = cached_pool()
    run(blocks, 0, ask(*range(9)))
    blocks.reset_prefix_cache("2")
    assert blocks.num_free_blocks == 16 and run(blocks, 1, ask(*range(9))) == 0
    blocks.reset_prefix_cache("")
    assert run(blocks, 2, ask(*range(9))) == 0


def test_a_reset_at_work_leaves_sequences_their_blocks_and_lets_them_publish_no_more() -> None:
    blocks = cached_pool(num_host_blocks=4)
    for seq_id in (0, 1):
        blocks.allocate(seq_id, ask(*range(9), salt=str(seq_id)), 9)
        blocks.commit(seq_id, range(9), 5)
    blocks.swap_out([1])
    blocks.reset_prefix_cache()
    blocks.swap_in([1])
    for seq_id in (0, 1):
        blocks.commit(seq_id, range(9), 9)  # half of it from before
        blocks.free(seq_id)
        assert run(blocks, seq_id + 2, ask(*range(9), salt=str(seq_id))) == 0
    blocks.audit(full=True)
    assert blocks.num_free_blocks == 16


# --- swapping ------------------------------------------------------------------------------------------------------


def test_a_sequence_that_was_swapped_publishes_what_the_cache_lost_meanwhile() -> None:
    blocks = cached_pool(num_blocks=4, num_host_blocks=4)
    blocks.allocate(0, ask(*range(8)), 8)
    blocks.commit(0, range(8), 8)
    blocks.swap_out([0])
    run(blocks, 1, ask(*range(100, 116)))  # evicts everything
    blocks.swap_in([0])
    blocks.commit(0, range(8), 8)
    blocks.free(0)
    assert run(blocks, 2, ask(*range(9))) == 8


# --- pins ----------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_outlives_everything_until_it_is_unpinned() -> None:
    blocks = cached_pool(num_blocks=6)
    blocks.pin(range(10))  # two full blocks
    assert blocks.num_free_blocks == 6, "nothing is computed yet"
    run(blocks, 0, ask(*range(10)))
    assert blocks.num_free_blocks == 4 and blocks.split().token == 8
    run(blocks, 1, ask(*range(100, 116)))
    assert run(blocks, 2, ask(*range(9))) == 8
    blocks.unpin(range(10))
    assert blocks.num_free_blocks == 6 and run(blocks, 3, ask(*range(9))) == 8
    run(blocks, 4, ask(*range(100, 124)))
    assert run(blocks, 5, ask(*range(9))) == 0


def test_pins_of_one_prefix_are_counted_and_pins_of_another_apart() -> None:
    blocks = cached_pool(num_blocks=6)
    run(blocks, 0, ask(*range(8)))
    blocks.pin(range(8))
    blocks.pin(range(4))
    blocks.pin(range(8), salt="other")  # reserves room: nothing of it is computed
    assert blocks.num_free_blocks == 4
    blocks.unpin(range(8))
    assert blocks.num_free_blocks == 5
    blocks.unpin(range(4))
    assert blocks.num_free_blocks == 6
    with pytest.raises(ConfigError, match="unpin what was pinned"):
        blocks.unpin(range(4))
    blocks.audit(full=True)


def test_a_pin_takes_nothing_that_a_request_at_work_may_need_and_later_ones_are_told() -> None:
    blocks = cached_pool(num_blocks=6)
    blocks.allocate(0, Demand(range(4), 16), 4)
    with pytest.raises(ConfigError, match="would keep 3 of 6 KV blocks, requests may need 4"):
        blocks.pin(range(12))
    blocks.pin(range(8))
    assert blocks.can_allocate(Demand(range(4), 17)) is Allocation.NEVER
    blocks.unpin(range(8))
    assert blocks.can_allocate(Demand(range(4), 17)) is Allocation.OK


def test_a_pin_stays_through_a_reset_for_what_is_computed_after_it() -> None:
    blocks = cached_pool(num_blocks=4)
    blocks.pin(range(4))
    run(blocks, 0, ask(*range(4)))
    assert blocks.num_free_blocks == 3
    blocks.reset_prefix_cache("2")
    assert blocks.num_free_blocks == 4
    run(blocks, 1, ask(*range(4)))
    assert blocks.num_free_blocks == 3
    blocks.audit(full=True)


def test_without_a_cache_nothing_can_be_pinned() -> None:
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        BlockManager(4, 4).pin(range(4))
