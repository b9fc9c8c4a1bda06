"""Claims about every memory policy: any history of changes leaves each sequence its own tokens and books that balance."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagegen.errors import ConfigError
from pagegen.runtime.policies import MEMORY_POLICIES, Allocation, Demand, make_memory_policy
from tests.runtime.memory_model import ModelledMemory

TOKENS = st.lists(st.integers(0, 1), max_size=11)  # few tokens, so that prefixes are often equal
RESERVING = [name for name in MEMORY_POLICIES if name != "paged"]


class PolicyMachine(RuleBasedStateMachine):
    """Allocate, compute, append, fork, free, swap, pin, reset, in any order, over every policy."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.pins: list[tuple[list[int], str]] = []

    @initialize(name=st.sampled_from([*MEMORY_POLICIES, "paged", "paged"]), cache=st.booleans())
    def start(self, name: str, cache: bool) -> None:
        self.memory = ModelledMemory(
            make_memory_policy(
                name, 9, 3, max_model_len=10, prefix_cache=cache, num_host_blocks=5 if name == "paged" else 0
            )
        )

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
    @rule(data=st.data(), num_tokens=st.none() | st.integers(0, 4))
    def compute(self, data: st.DataObject, num_tokens: int | None) -> None:
        self.memory.compute(self.pick(self.memory.resident, data), num_tokens)

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), max_size=4))
    def append(self, data: st.DataObject, token_ids: list[int]) -> None:
        self.memory.append(self.pick(self.memory.resident, data), token_ids)

    @precondition(lambda self: self.memory.resident)
    @rule(data=st.data(), extra=st.integers(0, 2))
    def grow_in_place(self, data: st.DataObject, extra: int) -> None:
        memory, seq_id = self.memory, self.pick(self.memory.resident, data)
        before = memory.policy.num_free_blocks
        if not memory.policy.grow_in_place([seq_id], [len(memory.tokens[seq_id]) + extra]):
            memory.tokens[seq_id] += [0] * extra
        assert memory.policy.num_free_blocks == before

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

    @rule(token_ids=TOKENS, salt=st.sampled_from(["", "x"]))
    def pin(self, token_ids: list[int], salt: str) -> None:
        try:
            self.memory.policy.pin(token_ids, salt)
        except ConfigError:
            return
        self.pins.append((token_ids, salt))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.memory.policy.unpin(*self.pins.pop(self.pick(list(range(len(self.pins))), data)))

    @rule(version=st.sampled_from([None, "1", "2"]))
    def reset(self, version: str | None) -> None:
        self.memory.policy.reset_prefix_cache(version)

    @rule()
    def free_all(self) -> None:
        for seq_id in list(self.memory.tokens):
            self.memory.free(seq_id)
        policy = self.memory.policy
        kept = policy.split().token // policy.block_size
        assert policy.num_free_blocks + kept == policy.num_blocks and (self.pins or not kept)

    @invariant()
    def all_is_well(self) -> None:
        self.memory.check()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.long
def test_a_hundred_thousand_changes() -> None:
    """Not hypothesis: no shrinking, but seconds for what the machine above takes minutes for."""
    machine_rules = ("allocate", "compute", "append", "fork", "free", "swap_out", "swap_in")
    for seed in range(50):
        rng = random.Random(seed)
        name = rng.choice([*MEMORY_POLICIES, "paged", "paged"])
        policy = make_memory_policy(
            name, 9, 3, max_model_len=10, prefix_cache=seed % 3 > 0, num_host_blocks=5 if name == "paged" else 0
        )
        memory, ids = ModelledMemory(policy), itertools.count()
        for _ in range(2000):
            change = rng.choice(machine_rules)
            step_at_random(memory, change, rng, ids)
            memory.check()


def step_at_random(memory: ModelledMemory, change: str, rng: random.Random, ids: itertools.count[int]) -> None:
    if change == "allocate":
        token_ids = [rng.randrange(2) for _ in range(rng.randrange(12))]
        memory.allocate(next(ids), Demand(token_ids, len(token_ids) + rng.randrange(9), salt=rng.choice(["", "x"])))
    elif change == "swap_in" and memory.swapped:
        memory.swap_in(rng.sample(sorted(memory.swapped), rng.randint(1, len(memory.swapped))))
    elif change == "free" and memory.tokens:
        memory.free(rng.choice(list(memory.tokens)))
    elif memory.resident:
        seq_id = rng.choice(memory.resident)
        if change == "compute":
            memory.compute(seq_id, rng.choice([None, 1, 3]))
        elif change == "append":
            memory.append(seq_id, [rng.randrange(2) for _ in range(rng.randrange(4))])
        elif change == "fork":
            memory.fork(seq_id, next(ids))
        elif change == "swap_out":
            memory.swap_out(rng.sample(memory.resident, rng.randint(1, len(memory.resident))))
