"""Claims about iterations: who runs, who waits, who is preempted, and that everyone ends with the right tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.scheduler import ScheduledBatch, SchedulerConfig
from pagegen.runtime.sequence import FinishReason, SequenceGroup
from tests.runtime.scheduling_rig import Rig, assert_as_if_alone, output


def test_a_finished_request_leaves_and_a_new_one_joins_at_the_next_iteration() -> None:
    rig = Rig(max_num_seqs=2)
    short, long, late = rig.add(3, 1), rig.add(3, 5), rig.add(3, 2)
    assert {row.sequence.group for row in rig.step().rows} == {short, long}
    assert {row.sequence.group for row in rig.step().rows} == {long, late}
    rig.run()
    assert_as_if_alone(short, long, late)


def test_decodes_go_first_and_a_prompt_fills_what_the_budget_leaves() -> None:
    rig = Rig(budget=8)
    decoding = rig.add(2, 9)
    rig.step()
    prompt = rig.add(17, 2)
    chunks = [[(row.sequence.group, row.start, row.num_tokens) for row in rig.step().rows] for _ in range(3)]
    assert chunks == [
        [(decoding, 2, 1), (prompt, 0, 7)],
        [(decoding, 3, 1), (prompt, 7, 7)],
        [(decoding, 4, 1), (prompt, 14, 3)],
    ]
    rig.run()
    assert_as_if_alone(decoding, prompt)


@pytest.mark.parametrize(("prompt_len", "steps"), [(8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_prompt_takes_as_many_iterations_as_it_has_chunks(prompt_len: int, steps: int) -> None:
    rig = Rig(budget=8)
    sequence = rig.add(prompt_len, 1)
    assert rig.run() == steps
    assert_as_if_alone(sequence)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(1, 1), (1, 4), (2, 8), (3, 64)])
def test_a_budget_below_the_number_of_sequences_still_finishes_all(budget: int, max_num_seqs: int) -> None:
    rig = Rig(budget=budget, max_num_seqs=max_num_seqs)
    sequences = [rig.add(n, 4) for n in (5, 1, 9, 2, 3)]
    rig.run(max_steps=100)
    assert_as_if_alone(*sequences)


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    rig = Rig(num_blocks=4)
    first, big, small = rig.add(8, 3), rig.add(12, 1), rig.add(1, 1)
    rig.step()
    assert rig.scheduler.running == [first] and rig.scheduler.waiting == [big, small]
    rig.run()
    assert_as_if_alone(first, big, small)


def test_a_request_is_admitted_only_where_those_that_run_can_still_grow() -> None:
    rig = Rig(num_blocks=4)
    running, next_in_line = rig.add(4, 5), rig.add(9, 3)  # three blocks are free and three are needed
    rig.step()
    assert rig.scheduler.running == [running]
    rig.run()
    assert next_in_line.num_preemptions == 0
    assert_as_if_alone(running, next_in_line)


@pytest.mark.parametrize("num_requests", [2, 6])
def test_requests_that_outgrow_the_pool_are_preempted_and_all_advance(num_requests: int) -> None:
    rig = Rig(num_blocks=8)
    sequences = [rig.add(12, 12) for _ in range(num_requests)]
    rig.run(max_steps=4 * 24 * num_requests)
    assert_as_if_alone(*sequences)
    assert rig.scheduler.num_preemptions >= 1
    assert sequences[0].num_preemptions == 0
    assert max(sequence.num_preemptions for sequence in sequences) <= 2


def test_a_long_prompt_arriving_while_two_decode_neither_starves_nor_stalls_them() -> None:
    rig = Rig(num_blocks=8)
    sequences = [rig.add(12, 12), rig.add(12, 12)]
    rig.step()
    sequences.append(rig.add(24, 8))
    rig.run(max_steps=200)
    assert_as_if_alone(*sequences)
    assert max(sequence.num_preemptions for sequence in sequences) <= 2


def test_the_latest_arrived_is_preempted_and_computed_anew_with_its_output() -> None:
    rig = Rig(num_blocks=4, block_size=2)
    elder, younger = rig.add(2, 6), rig.add(2, 6)
    while not (batch := rig.step()).preempted:
        pass
    assert batch.preempted == (younger,) and younger.sequences[0].num_computed_tokens == 0
    generated = output(younger)
    assert generated and rig.scheduler.waiting[0] is younger
    rig.run()
    assert output(younger)[: len(generated)] == generated
    assert_as_if_alone(elder, younger)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_pools_of_one_two_and_three_blocks_make_progress(num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks, block_size=4)
    sequences = [rig.add(prompt_len, 4 * num_blocks - prompt_len + 1) for prompt_len in (1, 3, 4, 2, 4)]
    rig.run(max_steps=400)
    assert_as_if_alone(*sequences)


def test_a_request_that_fills_the_pool_runs_and_one_token_more_is_refused_with_the_budget() -> None:
    rig = Rig(num_blocks=50, block_size=16, budget=512)
    fits = rig.add(800, 1)
    for prompt_len, max_tokens in ((801, 1), (1002, 1), (800, 2)):
        with pytest.raises(RequestError, match=r"need \d+ KV blocks, the pool has 50 of 16 tokens"):
            rig.add(prompt_len, max_tokens)
    after = rig.add(10, 1)
    rig.run(max_steps=5)
    assert_as_if_alone(fits, after)


@pytest.mark.parametrize("moment", ["waiting", "mid-prompt", "decoding", "preempted", "scheduled"])
def test_an_abort_at_any_moment_frees_the_blocks_and_disturbs_nobody(moment: str) -> None:
    rig = Rig(num_blocks=8, budget=8)
    other, victim = rig.add(9, 15), rig.add(11, 15)
    moments: dict[str, Callable[[], bool]] = {
        "waiting": lambda: True,
        "mid-prompt": lambda: 0 < victim.sequences[0].num_computed_tokens < victim.prompt_len,
        "decoding": lambda: len(output(victim)) == 2,
        "preempted": lambda: victim.num_preemptions == 1,
        "scheduled": lambda: len(output(victim)) == 2,
    }
    while not moments[moment]():
        rig.step()
    if moment == "scheduled":
        batch = rig.scheduler.schedule()
        tokens = rig.execute(batch)
        rig.scheduler.end(victim.request_id, FinishReason.ABORT)
        generated = output(victim)
        rig.scheduler.update(batch, tokens)
    else:
        generated = output(victim)
    for _ in range(2):
        rig.scheduler.end(victim.request_id, FinishReason.ABORT)
    rig.memory.audit(full=True)
    rig.run()
    assert_as_if_alone(other)
    assert victim.sequences[0].finish_reason is FinishReason.ABORT and output(victim) == generated


def test_a_sequence_that_finished_in_a_step_can_be_aborted_in_the_same_step() -> None:
    rig = Rig()
    sequence = rig.add(3, 1)
    rig.step()
    assert not rig.scheduler.end(sequence.request_id, FinishReason.ABORT)
    assert sequence.sequences[0].finish_reason is FinishReason.LENGTH
    assert rig.memory.num_free_blocks == rig.memory.num_blocks


def test_a_stop_token_as_the_first_token_ends_the_request() -> None:
    rig = Rig()
    group = rig.add(2, 16, stop_token_ids=range(1000))
    rig.run(max_steps=2)
    assert len(output(group)) == 1 and group.sequences[0].finish_reason is FinishReason.STOP


def test_no_work_gives_an_empty_batch() -> None:
    assert Rig().scheduler.schedule() == ScheduledBatch()


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_config_that_schedules_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{field: 0})  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(1, 24),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    max_num_seqs=st.integers(1, 9),
    budget=st.sampled_from([1, 2, 7, 16, 64]),
    seed=st.integers(0, 2**32),
)
def test_any_workload_ends_as_if_each_request_were_alone(
    num_blocks: int, block_size: int, max_num_seqs: int, budget: int, seed: int
) -> None:
    rig, chance = Rig(num_blocks, block_size, max_num_seqs, budget), random.Random(seed)
    capacity = num_blocks * block_size
    pending = chance.randrange(1, 12)
    kept: list[SequenceGroup] = []
    while pending or rig.scheduler.has_work:
        for _ in range(min(pending, chance.choice([0, 0, 1, 3]))):
            total = chance.randrange(1, min(capacity, 60) + 1)  # KV tokens at the longest
            prompt_len = chance.randrange(1, total + 1)
            kept.append(rig.add(prompt_len, total - prompt_len + 1))
            pending -= 1
        if kept and chance.random() < 0.03:
            rig.scheduler.end(kept.pop(chance.randrange(len(kept))).request_id, FinishReason.ABORT)
        rig.step()
    assert rig.memory.num_free_blocks == num_blocks
    assert_as_if_alone(*kept)
