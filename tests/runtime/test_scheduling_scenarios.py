"""Any workload, under every policy x memory policy x preemption mode: all end, with the tokens they give alone."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.policies import MEMORY_POLICIES
from pagegen.runtime.scheduler import Preemption, PreemptionCosts
from pagegen.runtime.scheduling import POLICIES
from pagegen.runtime.scheduling.events import Added, Planned, SchedulerEvent
from pagegen.runtime.sequence import FinishReason, SequenceGroup
from tests.runtime.scheduling_rig import MAX_MODEL_LEN, Rig, assert_as_if_alone

STOPS = tuple(range(0, 1000, 8))  # about every eighth token ends a sequence that heeds them


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A pool, limits and a seed for who comes when; `longest` bounds the slots of one sequence."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    seed: int
    num_host_blocks: int = 0
    prefix_cache: bool = False

    @property
    def longest(self) -> int:
        return min(self.num_blocks * self.block_size, MAX_MODEL_LEN, 40)


scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(1, 24),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    max_num_seqs=st.integers(1, 9),
    budget=st.sampled_from([1, 2, 7, 16, 64]),
    seed=st.integers(0, 2**32),
    num_host_blocks=st.integers(0, 24),
    prefix_cache=st.booleans(),
)


def make_rig(scenario: Scenario, policy: str, memory_policy: str, preemption: str, **more: Any) -> Rig:
    paged = memory_policy == "paged"
    return Rig(
        scenario.num_blocks,
        scenario.block_size,
        scenario.max_num_seqs,
        scenario.budget if POLICIES[policy].chunked else max(scenario.budget, MAX_MODEL_LEN),
        policy=policy,
        memory_policy=memory_policy,
        preemption=preemption,
        num_host_blocks=min(scenario.num_host_blocks, scenario.num_blocks) if paged else 0,
        prefix_cache=scenario.prefix_cache and paged,
        **more,
    )


def add_some(rig: Rig, scenario: Scenario, chance: random.Random) -> SequenceGroup | None:
    """A random request; None if it could never be served, which is said at once."""
    total = chance.randrange(1, scenario.longest + 1)  # KV slots at the longest
    prompt_len = chance.randrange(1, total + 1)
    stops = STOPS if chance.random() < 0.5 else ()
    try:
        return rig.add(
            prompt_len,
            total - prompt_len + 1,
            first=chance.choice([0, 100, None]),  # some begin alike
            n=chance.choice([1, 1, 2, 3]),
            beams=chance.random() < 0.5,
            priority=chance.choice([0, 0, 0, 1, -2]),
            stop_token_ids=stops,
            oracle=chance.random() < 0.5,
        )
    except RequestError:
        return None


def play(rig: Rig, scenario: Scenario, num_requests: int = 10) -> list[SequenceGroup]:
    """Runs a workload with arrivals, aborts and pins on the way; gives the requests that were left alone."""
    chance, kept, pending = random.Random(scenario.seed), list[SequenceGroup](), num_requests
    pins = list[range]()
    for _ in range(20_000):
        if not pending and not rig.scheduler.has_work:
            break
        for _ in range(min(pending, chance.choice([0, 0, 1, 3]))):
            pending -= 1
            if group := add_some(rig, scenario, chance):
                kept.append(group)
        if kept and chance.random() < 0.05:
            victim = kept.pop(chance.randrange(len(kept)))
            rig.scheduler.end(victim.request_id, FinishReason.ABORT)
        if scenario.prefix_cache and chance.random() < 0.1:
            change_pins(rig, pins, chance)
        rig.step()
    for prefix in pins:
        rig.scheduler.unpin(prefix)
    assert not rig.scheduler.has_work
    assert rig.memory.num_free_blocks == rig.memory.num_blocks
    return [group for group in kept if "a prefix was pinned" not in (group.sequences[0].error or "")]


def change_pins(rig: Rig, pins: list[range], chance: random.Random) -> None:
    """Pins the beginning of some prompts, or unpins one."""
    if pins and chance.random() < 0.5:
        rig.scheduler.unpin(pins.pop())
        return
    prefix = range(first := chance.choice([0, 100]), first + chance.randrange(1, 12))
    with contextlib.suppress(ConfigError):  # too much for this pool, or no cache under this memory policy
        rig.scheduler.pin(prefix)
        pins.append(prefix)


COMBINATIONS = [
    (policy, memory_policy, preemption)
    for policy in POLICIES
    for memory_policy in MEMORY_POLICIES
    for preemption in ("recompute", "swap", "auto")
    if preemption == "recompute" or (memory_policy == "paged" and POLICIES[policy].preempts)
]


@pytest.mark.parametrize(("policy", "memory_policy", "preemption"), COMBINATIONS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_all_end_as_if_each_were_alone(policy: str, memory_policy: str, preemption: str, scenario: Scenario) -> None:
    costs: Callable[[], PreemptionCosts] | None = (
        (lambda: PreemptionCosts(100.0, 300.0)) if preemption == "auto" else None
    )
    rig = make_rig(scenario, policy, memory_policy, preemption, costs=costs)
    assert_as_if_alone(*play(rig, scenario))
    assert rig.scheduler.num_deadlocks == 0
    if not POLICIES[policy].preempts:
        assert rig.scheduler.num_preemptions == 0
    assert len(rig.released) == len({sequence.seq_id for sequence in rig.released})


@pytest.mark.long
@pytest.mark.parametrize(("policy", "memory_policy", "preemption"), COMBINATIONS)
@settings(max_examples=600, deadline=None)
@given(scenario=scenarios)
def test_all_end_as_if_each_were_alone_at_length(
    policy: str, memory_policy: str, preemption: str, scenario: Scenario
) -> None:
    rig = make_rig(scenario, policy, memory_policy, preemption, costs=lambda: PreemptionCosts(100.0, 300.0))
    assert_as_if_alone(*play(rig, scenario, num_requests=20))
    assert rig.scheduler.num_deadlocks == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(scenario=scenarios, policy=st.sampled_from(["default", "vllm-paper"]))
def test_without_preemption_a_deadlock_ends_one_request_with_its_reason_and_the_others_go_on(
    scenario: Scenario, policy: str
) -> None:
    rig = make_rig(scenario, policy, "paged", "none")
    kept = play(rig, scenario)
    failed = [group for group in kept if group.sequences[0].finish_reason is FinishReason.ERROR]
    assert len(failed) <= rig.scheduler.num_deadlocks and rig.scheduler.num_preemptions == 0
    assert all("preemption none" in (group.sequences[0].error or "") for group in failed)
    assert_as_if_alone(*(group for group in kept if group not in failed))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenario=scenarios, combination=st.sampled_from(COMBINATIONS))
def test_a_recorded_run_repeats_from_its_events_alone(scenario: Scenario, combination: tuple[str, str, str]) -> None:
    log: list[SchedulerEvent] = []
    answers = iter([PreemptionCosts(100.0, 300.0)])  # asked for once
    play(make_rig(scenario, *combination, recorder=log.append, costs=lambda: next(answers)), scenario)

    def never() -> PreemptionCosts:
        raise AssertionError("a repeated run measures nothing")

    again: list[SchedulerEvent] = []
    repeated = make_rig(scenario, *combination, recorder=again.append, costs=never)
    for event in log:
        repeated.scheduler.apply(event)
    assert not repeated.scheduler.has_work
    kinds = [event for event in log if isinstance(event, Added | Planned)]
    assert kinds == [event for event in again if isinstance(event, Added | Planned)]


def test_a_repeated_run_that_plans_otherwise_is_told() -> None:
    log: list[SchedulerEvent] = []
    rig = Rig(recorder=log.append)
    rig.add(9, 3)
    rig.run()
    other = Rig(budget=4)
    with pytest.raises(RuntimeError, match="plans another iteration"):
        for event in log:
            other.scheduler.apply(event)


@pytest.mark.parametrize("preemption", tuple(Preemption))
def test_every_preemption_mode_is_seen_to_do_what_it_says(preemption: Preemption) -> None:
    rig = Rig(8, num_host_blocks=8, preemption=preemption, costs=lambda: PreemptionCosts(1e9, 1.0))
    groups = [rig.add(12, 12) for _ in range(4)]
    rig.run()
    pool = rig.scheduler.pool
    if preemption is Preemption.NONE:
        assert pool.num_preemptions == 0
        return
    assert pool.num_preemptions > 0
    assert pool.num_swaps == (0 if preemption is Preemption.RECOMPUTE else pool.num_preemptions)
    assert_as_if_alone(*groups)


def test_a_policy_that_goes_without_a_prefix_cache_pins_nothing() -> None:
    """Found by a long run: orca promised blocks that a pin had taken."""
    scenario = Scenario(num_blocks=8, block_size=2, max_num_seqs=5, budget=1, seed=8, num_host_blocks=0, prefix_cache=True)
    rig = make_rig(scenario, "orca", "paged", "recompute")
    with pytest.raises(ConfigError, match="policy orca goes without a prefix cache"):
        rig.scheduler.pin(range(4))
    assert_as_if_alone(*play(rig, scenario, num_requests=20))
    assert rig.scheduler.num_deadlocks == 0
