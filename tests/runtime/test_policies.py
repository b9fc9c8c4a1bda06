"""Claims about every memory policy: any history of changes leaves each sequence its own tokens and books that balance."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagegen.errors import ConfigError
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.extents import BuddyAllocator, FirstFitAllocator, ScatterAllocator
from pagegen.runtime.policies import (
    MEMORY_POLICIES,
    Allocation,
    AuditError,
    Demand,
    MemoryPolicy,
    make_memory_policy,
)
from pagegen.runtime.prefix_cache import PrefixCache
from tests.runtime.memory_model import ModelledMemory

TOKENS = st.lists(st.integers(0, 1), max_size=11)  # few tokens, so that prefixes are often equal
RESERVING = [name for name in MEMORY_POLICIES if name != "paged"]


class PolicyMachine(RuleBasedStateMachine):
    """Allocate, compute, append, fork, free, swap, pin, reset, in any order, over every one of `names`."""

    names: Sequence[str] = (*RESERVING, *["paged"] * 5)

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.pins: list[tuple[list[int], str]] = []

    @initialize(data=st.data(), cache=st.booleans())
    def start(self, data: st.DataObject, cache: bool) -> None:
        name = data.draw(st.sampled_from(self.names))
        if name == "paged":
            run, found = data.draw(st.sampled_from([None, 2, 4])), PrefixCache(3) if cache else None
            policy: MemoryPolicy = BlockManager(9, 3, prefix_cache=found, num_host_blocks=5, run=run)
        else:
            policy = make_memory_policy(name, 9, 3, max_model_len=10, prefix_cache=cache)
        self.memory = ModelledMemory(policy)

    def pick(self, among: object, data: st.DataObject) -> int:
        assert isinstance(among, list)
        return data.draw(st.sampled_from(among))  # type: ignore[no-any-return]

    @rule(
        token_ids=TOKENS,
        num_new=st.integers(0, 8),
        final=st.none() | st.integers(0, 8),
        salt=st.sampled_from(["", "", "x"]),
        num_sequences=st.sampled_from([1, 1, 1, 2]),
    )
    def allocate(self, token_ids: list[int], num_new: int, final: int | None, salt: str, num_sequences: int) -> None:
        final_tokens = None if final is None else len(token_ids) + min(final, num_new)
        demand = Demand(token_ids, len(token_ids) + num_new, final_tokens, salt=salt, num_sequences=num_sequences)
        answer = self.memory.policy.can_allocate(demand)
        if answer is Allocation.NEVER:
            assert self.memory.policy.can_allocate(demand, headroom=3) is Allocation.NEVER
        elif not self.memory.tokens:
            assert answer is Allocation.OK, "in an empty pool nothing waits"
        self.memory.allocate(next(self.ids), demand)

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data(), num_tokens=st.none() | st.integers(0, 4), token_ids=st.lists(st.integers(0, 1), max_size=4))
    def compute_and_append(self, data: st.DataObject, num_tokens: int | None, token_ids: list[int]) -> None:
        seq_id = self.pick(self.memory.resident, data)
        self.memory.compute(seq_id, num_tokens)
        self.memory.append(seq_id, token_ids)

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data(), extra=st.integers(0, 2))
    def extend(self, data: st.DataObject, extra: int) -> None:
        memory, seq_id = self.memory, self.pick(self.memory.resident, data)
        before = memory.policy.num_free_blocks
        if not memory.policy.extend([seq_id], [len(memory.tokens[seq_id]) + extra]):
            memory.tokens[seq_id] += [seq_id] * extra
        assert before - memory.policy.num_free_blocks in (0, extra)

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.memory.fork(self.pick(self.memory.resident, data), next(self.ids))

    @precondition(lambda self: self.memory.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.memory.free(self.pick(list(self.memory.tokens), data))

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.memory.swap_out(data.draw(st.lists(st.sampled_from(self.memory.resident), min_size=1, unique=True)))

    @precondition(lambda self: self.memory.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        swapped = st.sampled_from(sorted(self.memory.swapped))
        self.memory.swap_in(data.draw(st.lists(swapped, min_size=1, unique=True)))

    @rule(data=st.data(), what=st.sampled_from(["pin", "pin", "unpin", "reset", "free all"]))
    def housekeeping(self, data: st.DataObject, what: str) -> None:
        """One rule for all that would otherwise crowd out the daily work."""
        policy = self.memory.policy
        if what == "pin":
            prefix = data.draw(st.tuples(TOKENS, st.sampled_from(["", "x"])))
            try:
                policy.pin(*prefix)
            except ConfigError:
                return
            self.pins.append(prefix)
        elif what == "unpin" and self.pins:
            policy.unpin(*self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))
        elif what == "reset":
            policy.reset_prefix_cache(data.draw(st.sampled_from([None, "1", "2"])))
        elif what == "free all":
            for seq_id in list(self.memory.tokens):
                self.memory.free(seq_id)
            kept = policy.split().token // policy.block_size
            assert policy.num_free_blocks + kept == policy.num_blocks and (self.pins or not kept)

    @invariant()
    def all_is_well(self) -> None:
        self.memory.check()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_changes_of_the_block_manager_alone() -> None:
    changes = 0

    class Counted(PolicyMachine):
        names = ("paged",)
        num_checks = 0

        @invariant()
        def counted(self) -> None:
            nonlocal changes
            changes += self.num_checks > 0  # the first one is of what nothing has changed
            self.num_checks += 1

    run_state_machine_as_test(
        Counted, settings=settings(max_examples=3500, stateful_step_count=50, deadline=None, derandomize=True)
    )
    print(f"\n{changes} changes")
    assert changes >= 100_000


# --- what is reserved ----------------------------------------------------------------------------------------------

MODEL_LEN = 64


def reserving(name: str, num_blocks: int, block_size: int = 1) -> MemoryPolicy:
    return make_memory_policy(name, num_blocks, block_size, max_model_len=MODEL_LEN)


@pytest.mark.parametrize(
    ("name", "num_prompt", "num_output", "num_blocks"),
    [
        ("orca-max", 5, 25, 64),
        ("orca-pow2", 5, 25, 5 + 32),  # the paper's example: 25 reserve 32
        ("orca-pow2", 5, 32, 5 + 32),
        ("orca-pow2", 5, 33, 64),  # not more than the model can hold
        ("orca-pow2", 5, 1, 5 + 1),
        ("orca-pow2", 5, 0, 5),
        ("orca-oracle", 5, 25, 5 + 25),
        ("contiguous-first-fit", 5, 25, 5 + 40),
        ("reserve-on-paged", 5, 25, 5 + 40),
    ],
)
def test_a_policy_reserves(name: str, num_prompt: int, num_output: int, num_blocks: int) -> None:
    """For a prompt and up to 40 output tokens, of which some number is really made."""
    policy, demand = reserving(name, 100), Demand(range(num_prompt), num_prompt + 40, num_prompt + num_output)
    assert policy.blocks_needed(demand) == num_blocks
    policy.allocate(0, demand, num_prompt)
    assert len(policy.block_table(0)) == num_blocks
    assert policy.filled(0) == [1] * num_prompt + [0] * (num_blocks - num_prompt)


@pytest.mark.parametrize("name", ["orca-pow2", "orca-oracle"])
def test_without_an_oracle_what_is_promised_stands_in(name: str) -> None:
    policy = reserving(name, 64)
    assert policy.blocks_needed(Demand(range(5), 5 + 16)) == 21


@pytest.mark.parametrize("name", RESERVING)
def test_a_reservation_is_never_outgrown_and_never_copied(name: str) -> None:
    policy = reserving(name, 64)
    policy.allocate(0, Demand(range(5), 21, 21), 5)
    assert all(policy.can_append(0) and policy.append(0) == [] for _ in range(16))
    capacity = len(policy.block_table(0))
    assert policy.extend([0], [capacity]) == [] and not policy.can_append(0)
    with pytest.raises(ValueError, match="reserved"):
        policy.append(0)
    policy.audit(full=True)


@pytest.mark.parametrize("name", [name for name in RESERVING if name != "reserve-on-paged"])
def test_a_reservation_is_a_run_of_consecutive_blocks(name: str) -> None:
    policy = reserving(name, 200, 4)
    for seq_id in range(3):
        policy.allocate(seq_id, Demand(range(5), 40, 30), 5)
        table = list(policy.block_table(seq_id))
        assert table == list(range(table[0], table[0] + len(table)))


@pytest.mark.parametrize("name", RESERVING)
def test_a_demand_for_several_sequences_reserves_for_all_or_waits(name: str) -> None:
    policy, demand = reserving(name, 3 * 64), Demand(range(5), 64, 64, num_sequences=3)
    assert policy.can_allocate(Demand(range(5), 64, 64, num_sequences=4)) is Allocation.NEVER
    memory = ModelledMemory(policy)
    memory.allocate(0, demand)
    memory.compute(0)
    assert policy.can_allocate(Demand(range(5), 64, 64)) is Allocation.LATER and policy.can_fork(0, 2)
    assert memory.fork(0, 1) and memory.fork(0, 2) and not memory.fork(0, 3)
    for seq_id in range(3):
        memory.append(seq_id, [seq_id])
        memory.compute(seq_id)
    memory.check()
    memory.free(1)  # a beam that dies makes place for another
    assert memory.fork(2, 4)
    memory.check()
    for seq_id in (0, 2):
        assert policy.free(seq_id) == 0
    assert policy.free(4) == 3 * 64 == policy.num_free_blocks


def test_a_policy_that_reserves_neither_swaps_nor_pins() -> None:
    policy = reserving("orca-max", 64)
    policy.allocate(0, Demand(range(5), 64), 5)
    assert not policy.can_swap_out([0]) and not policy.can_swap_in([0]) and policy.num_free_host_blocks == 0
    for change in (policy.swap_out, policy.swap_in):
        with pytest.raises(ValueError, match="swapped out"):
            change([0])
    for refused in (policy.pin, policy.unpin):
        with pytest.raises(ConfigError, match="reserves"):
            refused(range(5))


# --- where the slots are -------------------------------------------------------------------------------------------


def three_rows(policy: MemoryPolicy) -> Allocation:
    """24 cells, three requests of up to 8 tokens that hold 5, 8 and 2: nine are free. Is there room for a fourth?"""
    for seq_id, num_tokens in enumerate((5, 8, 2)):
        policy.allocate(seq_id, Demand(range(num_tokens), 8), num_tokens)
    assert policy.split().token == 24 - 9
    return policy.can_allocate(Demand(range(4), 8))


def test_nine_cells_are_free_and_a_contiguous_policy_has_no_room_for_a_prompt_of_four() -> None:
    for name in ("contiguous-first-fit", "orca-max"):
        assert three_rows(make_memory_policy(name, 6, 4, max_model_len=8)) is Allocation.LATER
    assert three_rows(make_memory_policy("reserve-on-paged", 6, 4, max_model_len=8)) is Allocation.LATER
    assert three_rows(make_memory_policy("paged", 6, 4, max_model_len=8)) is Allocation.OK


def test_a_hole_serves_only_what_is_no_longer_than_it() -> None:
    policy = reserving("contiguous-first-fit", 24)
    for seq_id, num_slots in enumerate((8, 6, 10)):
        policy.allocate(seq_id, Demand((1,), num_slots), 1)
    policy.free(1)
    policy.free(2)
    policy.allocate(3, Demand((1,), 12), 1)  # the holes have become one
    policy.free(0)
    assert policy.num_free_blocks == 12
    assert policy.can_allocate(Demand((1,), 8)) is Allocation.OK
    assert policy.can_allocate(Demand((1,), 9)) is Allocation.LATER, "8 and 4 are free, not 9 in a row"
    assert policy.split(waiting=Demand((1,), 9)).external == 12
    assert policy.split(waiting=Demand((1,), 7)).free == 7


def test_orca_max_splits_its_pool_as_the_paper_says() -> None:
    """12 GiB hold 15728 slots of OPT-13B: 7 requests of 2048, and 8.9 % that nobody can use."""
    policy = make_memory_policy("orca-max", 15728, 1, max_model_len=2048)
    demand = Demand(range(161), 161 + 1887, 161 + 338)
    seq_ids = itertools.count()
    while policy.can_allocate(demand) is Allocation.OK:
        policy.allocate(next(seq_ids), demand, 161 + 100)
    split = policy.split()
    assert next(seq_ids) == 7 and split.free == 0
    assert split.external == 1392 and split.external / 15728 == pytest.approx(0.0885, abs=1e-4)
    assert (split.token, split.reserved, split.internal) == (7 * 261, 7 * 238, 7 * (2048 - 499))


def test_an_oracle_wastes_nothing_within_a_reservation_and_the_buddys_rounding_is_external() -> None:
    policy = reserving("orca-oracle", 128)
    policy.allocate(0, Demand(range(10), 64, 33), 20)
    split = policy.split()
    assert (split.token, split.reserved, split.internal, split.external, split.free) == (20, 13, 0, 31, 64)
    assert split.fractions() == pytest.approx((20 / 64, 13 / 64, 0, 31 / 64))


def test_an_empty_pool_has_no_fractions() -> None:
    assert make_memory_policy("paged", 4, 4, max_model_len=4).split().fractions() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pages", {}, "choose one of paged, orca-max"),
        ("orca-max", {"num_host_blocks": 1}, "never swaps"),
        ("orca-max", {"num_blocks": 0}, "at least 1"),
        ("paged", {"block_size": 0}, "at least 1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(name: str, changes: dict[str, int], message: str) -> None:
    sizes = {"num_blocks": 4, "block_size": 4, "max_model_len": 8} | changes
    with pytest.raises(ConfigError, match=message):
        make_memory_policy(name, **sizes)  # type: ignore[arg-type]


# --- the allocators below ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", [BuddyAllocator, FirstFitAllocator, ScatterAllocator])
@pytest.mark.parametrize("num_blocks", [1, 7, 64, 100])
def test_an_allocator_gives_no_block_twice_and_ends_as_it_began(
    allocator: type[BuddyAllocator | FirstFitAllocator | ScatterAllocator], num_blocks: int
) -> None:
    rng, blocks = random.Random(num_blocks), allocator(num_blocks)
    tables: list[array[int]] = []
    for _ in range(400):
        size, count = rng.randint(1, max(1, num_blocks // 4)), rng.randint(1, 3)
        if rng.random() < 0.5:
            fits = blocks.fits(size, count)
            taken = [blocks.take(size) for _ in range(count if fits else 0)]
            tables += taken
            assert all(len(table) == size for table in taken)
        elif tables:
            blocks.release(tables.pop(rng.randrange(len(tables))))
        listed = [block for table in tables for block in table]
        free = blocks.free_blocks()
        assert len(set(listed) | set(free)) == len(listed) + len(free)
        assert len(listed) + blocks.num_lost + blocks.num_free == num_blocks and len(free) == blocks.num_free
        assert allocator is ScatterAllocator or blocks.fits(size) == (blocks.usable(size) > 0)
    for table in tables:
        blocks.release(table)
    assert blocks.fits(1 << num_blocks.bit_length() - 1) and blocks.num_lost == 0
    assert blocks.fits(1, num_blocks) and not blocks.fits(1, num_blocks + 1)


@pytest.mark.parametrize("allocator", [BuddyAllocator, FirstFitAllocator])
def test_an_allocator_does_not_take_a_run_back_twice(
    allocator: type[BuddyAllocator | FirstFitAllocator],
) -> None:
    blocks = allocator(8)
    kept, table = blocks.take(2), blocks.take(2)
    blocks.release(table)
    with pytest.raises(AuditError, match="released twice"):
        blocks.release(table)
    assert list(kept) == [0, 1]
