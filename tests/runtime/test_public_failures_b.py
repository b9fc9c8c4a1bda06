"""Public failures of other block managers and prefix caches, each with the answer that is right.

A `ModelledMemory` stands for the model: it knows what each slot should hold and looks at every one, so that a run which
would give other tokens fails.
"""

from __future__ import annotations

import itertools

import pytest

from pagegen.errors import RequestError
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import Allocation, Demand
from pagegen.runtime.prefix_cache import PrefixCache
from tests.runtime.memory_model import ModelledMemory
from tests.runtime.scheduling_rig import Rig, assert_as_if_alone

IDS = itertools.count(1000)


def pool(num_blocks: int, block_size: int = 4, *, cache: bool = True, num_host_blocks: int = 0) -> ModelledMemory:
    prefix_cache = PrefixCache(block_size) if cache else None
    policy = BlockManager(num_blocks, block_size, prefix_cache=prefix_cache, num_host_blocks=num_host_blocks)
    return ModelledMemory(policy)


def ask(first: int, last: int, salt: str = "", **extra_keys: str) -> Demand:
    """The tokens first to last."""
    return Demand(range(first, last + 1), last - first + 1, salt=salt, extra_keys=tuple(extra_keys.items()))


def run(memory: ModelledMemory, demand: Demand) -> int:
    """Serves a request from beginning to end; returns how many of its tokens were cached."""
    seq_id = next(IDS)
    cached = memory.allocate(seq_id, demand)
    assert cached is not None, "there was no room"
    memory.compute(seq_id)
    memory.check()
    memory.free(seq_id)
    memory.check()
    return cached


@pytest.mark.parametrize("block_size", [1, 4, 8, 256])
def test_b01_a_new_block_is_needed_by_the_token_after_the_last_slot(block_size: int) -> None:
    full = pool(1, block_size, cache=False)
    full.allocate(0, Demand(range(block_size - 1), block_size))
    assert full.policy.can_append(0) and full.append(0, [0]) == []  # the last slot, with no block free
    assert not full.policy.can_append(0) and full.append(0, [0]) is None
    roomy = pool(4, block_size, cache=False)
    roomy.allocate(0, Demand((0,), 4 * block_size))
    for length in range(2, 3 * block_size + 2):
        roomy.append(0, [0])
        assert len(roomy.policy.block_table(0)) == -(-length // block_size)
    roomy.check()


def test_b02_a_recycled_block_is_not_found_under_what_it_held() -> None:
    memory = pool(2)
    assert [run(memory, ask(1, 8)), run(memory, ask(9, 16)), run(memory, ask(1, 8))] == [0, 0, 0]


def test_b03_a_prompt_that_is_all_cached_leaves_its_last_block_to_compute() -> None:
    """Whole blocks are shared, so at least one token, and up to a block of them, is computed again."""
    memory = pool(16)
    assert [run(memory, ask(1, 8)), run(memory, ask(1, 8))] == [0, 4]
    assert [run(memory, ask(1, 12)), run(memory, ask(1, 12))] == [8, 8]
    assert [run(memory, ask(1, 9)), run(memory, ask(1, 7))] == [8, 4]
    singles = pool(16, block_size=1)
    assert [run(singles, ask(1, 8)), run(singles, ask(1, 8)), run(singles, ask(1, 1))] == [0, 7, 0]


@pytest.mark.parametrize("block_size", [1, 4])
def test_b03_the_first_token_of_a_cached_prompt_is_that_of_a_cold_one(block_size: int) -> None:
    rig = Rig(64, block_size, prefix_cache=True)
    for prompt_len in (8, 8, 12, 9, 7, 1, 1):
        group = rig.add(prompt_len, 3, first=1)
        rig.run()
        assert_as_if_alone(group)


def test_b04_adapters_salts_and_images_have_key_spaces_of_their_own() -> None:
    memory = pool(32)
    adapter = {"adapter": "X", "adapter_id": "1"}
    assert run(memory, ask(1, 8, **adapter)) == 0
    assert run(memory, ask(1, 8, salt="X")) == 0
    assert run(memory, ask(1, 8, adapter="X", adapter_id="2")) == 0
    assert run(memory, ask(1, 8, **adapter)) == 4
    assert run(memory, ask(1, 8, salt="Y")) == 0
    assert run(memory, ask(1, 8, image="digest of one")) == 0
    assert run(memory, ask(1, 8, image="digest of another")) == 0
    cache = PrefixCache(4)
    blocks = [cache.extend(cache.extend(cache.root(ask(1, 8, salt)), range(1, 5)), range(5, 9)).digest for salt in "XY"]
    assert blocks[0] != blocks[1], "the salt reaches the second block"


def test_b05_a_chain_loses_its_tail_first() -> None:
    memory = pool(3)
    run(memory, ask(1, 12))
    memory.allocate(0, ask(91, 94))  # takes one of the three
    memory.free(0)
    assert run(memory, ask(1, 12)) == 8


def test_b05_what_was_just_matched_is_not_evicted_for_the_same_request() -> None:
    memory = pool(3)
    run(memory, ask(1, 8))
    too_long = Demand(range(1, 17), 16)
    assert memory.policy.can_allocate(too_long) is Allocation.NEVER
    with pytest.raises(ValueError, match="needs 2 blocks for 16 tokens, 1 are free"):
        memory.policy.allocate(0, too_long, 16)
    memory.check()
    assert memory.allocate(1, ask(1, 12)) == 8, "both were left intact"
    memory.compute(1)
    memory.check()


def test_b06_freeing_twice_gives_no_block_to_two_owners() -> None:
    policy = pool(4).policy
    policy.allocate(0, ask(1, 4), 4)
    assert (policy.free(0), policy.free(0), policy.num_free_blocks) == (1, 0, 4)
    for seq_id in range(1, 5):
        policy.allocate(seq_id, ask(1, 4), 4)
    assert {policy.block_table(seq_id)[0] for seq_id in range(1, 5)} == {0, 1, 2, 3}
    policy.audit(full=True)


def test_b07_a_failed_growth_loses_nothing_and_ended_requests_give_all_back() -> None:
    memory = pool(3)
    memory.allocate(0, Demand(range(8), 12))
    assert memory.append(0, [0] * 12) is None
    assert (len(memory.policy.block_table(0)), memory.policy.num_free_blocks) == (2, 1)
    memory.check()
    memory = pool(8)
    for request in range(10):
        run(memory, ask(100 * request, 100 * request + 15))
        assert memory.policy.num_free_blocks == 8


def test_b08_beams_that_part_write_into_blocks_of_their_own() -> None:
    memory = pool(12)
    memory.allocate(0, Demand(range(6), 12))
    memory.compute(0)
    for child in (1, 2):
        memory.fork(0, child)
    for seq_id in range(3):
        memory.append(seq_id, [100 + seq_id])
        memory.compute(seq_id)
        memory.check()
    tables = [memory.policy.block_table(seq_id) for seq_id in range(3)]
    assert len({table[1] for table in tables}) == 3 and memory.policy.ref_count(tables[0][0]) == 3
    assert memory.num_copies == 2, "the last of three writes in place"
    memory.free(1)
    memory.check()
    memory.append(0, [7])
    memory.fork(0, 3)  # 8 tokens: the block is exactly full
    assert memory.append(0, [8]) == memory.append(3, [9]) == []
    memory.compute(3)
    memory.check()
    for seq_id in list(memory.tokens):
        memory.free(seq_id)
    assert not any(memory.policy.ref_count(block) for block in range(12))


def test_b09_a_group_that_lost_a_beam_is_preempted_as_what_it_is() -> None:
    memory = pool(8, cache=False, num_host_blocks=8)
    memory.allocate(0, Demand(range(8), 12, num_sequences=3))
    for child in (1, 2):
        memory.fork(0, child)
    for seq_id in range(3):
        memory.append(seq_id, [seq_id])
    before = memory.policy.num_free_blocks
    memory.free(2)
    assert memory.policy.num_free_blocks == before + 1
    for seq_id in (0, 1):
        memory.free(seq_id)
    assert memory.policy.num_free_blocks - before == 5, "2 shared and 3 of their own: none twice"
    assert [memory.policy.free(seq_id) for seq_id in range(3)] == [0, 0, 0]
    memory.check()


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_b10_a_group_that_the_swap_space_cannot_hold_stays_where_it_is(num_host_blocks: int) -> None:
    """And can still be recomputed; one that the pool cannot hold is refused at once."""
    memory = pool(8, cache=False, num_host_blocks=num_host_blocks)
    assert memory.policy.can_allocate(Demand(range(8), 16, num_sequences=4)) is Allocation.NEVER
    for _ in range(2):
        memory.allocate(0, Demand(range(8), 12, num_sequences=4))
        memory.compute(0)
        for child in (1, 2, 3):
            memory.fork(0, child)
        for seq_id in range(4):
            memory.append(seq_id, [seq_id])
            memory.compute(seq_id)
        assert not memory.policy.can_swap_out([0, 1, 2, 3]) and not memory.swap_out([0, 1, 2, 3])
        memory.check()
        for seq_id in range(4):
            memory.free(seq_id)
    assert memory.policy.num_free_blocks == 8 and memory.policy.num_free_host_blocks == num_host_blocks


@pytest.mark.parametrize("policy", ["default", "vllm-paper"])
@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_b10_requests_end_by_recomputation_where_the_swap_space_is_full(policy: str, num_host_blocks: int) -> None:
    rig = Rig(8, 4, policy=policy, preemption="swap", num_host_blocks=num_host_blocks)
    with pytest.raises(RequestError, match="KV blocks"):
        rig.add(8, 8, n=4)
    for _ in range(2):
        groups = [rig.add(1, 24), rig.add(4, 13, n=2), rig.add(3, 12)]
        rig.run()
        assert_as_if_alone(*groups)
    assert rig.scheduler.num_preemptions and rig.memory.num_free_host_blocks == num_host_blocks


def test_b11_other_weights_find_nothing_of_the_old_ones_whoever_is_at_work() -> None:
    memory = pool(8)
    run(memory, ask(1, 8))
    memory.allocate(0, ask(1, 12))
    memory.compute(0, 2)
    memory.policy.reset_prefix_cache("v2")
    memory.check()
    assert memory.allocate(1, ask(1, 12)) == 0
    memory.free(1)
    memory.compute(0)  # goes on, half of it from the old weights: nobody may find that
    memory.free(0)
    assert [run(memory, ask(1, 12)), run(memory, ask(1, 12))] == [0, 8]
    assert memory.policy.num_free_blocks == 8
