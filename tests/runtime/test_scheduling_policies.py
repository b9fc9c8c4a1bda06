"""Claims about each scheduling policy: its order, its reasons, whom it makes wait and whom it makes yield."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.scheduler import Preemption, PreemptionCosts, SchedulerConfig, WaitReason
from pagegen.runtime.scheduling.default import PRIORITY_LEVEL
from pagegen.runtime.scheduling.plan import TransferKind
from pagegen.runtime.sequence import FinishReason, GroupStatus, SequenceGroup
from tests.runtime.scheduling_rig import Rig, assert_as_if_alone, expected, output


def names(groups: list[SequenceGroup]) -> list[str]:
    return [group.request_id for group in groups]


# --- request-level batching ------------------------------------------------------------------------------------------


def test_request_batches_answer_when_their_slowest_member_ends_and_latecomers_wait_for_that() -> None:
    rig = Rig(policy="request", max_num_seqs=3)
    batch = [rig.add(3, 2), rig.add(5, 9), rig.add(1, 4)]
    rig.step()
    late = rig.add(2, 1)
    for _ in range(7):
        rig.step()
        assert rig.released == [] and names(rig.scheduler.waiting) == ["r3"]
    assert rig.scheduler.wait_reasons() == {WaitReason.BATCH: 1}
    rig.step()
    assert [sequence.group for sequence in rig.released] == [batch[0], batch[2], batch[1]]  # as they ended
    rig.step()
    assert rig.released[-1].group is late
    assert_as_if_alone(*batch, late)
    # Slots of the first (2 of 9 iterations) and the third (4 of 9) ran idle for the rest.
    assert rig.scheduler.policy.num_idle_slot_iterations == (9 - 2) + (9 - 4)


def test_request_batches_of_equal_lengths_idle_never() -> None:
    rig = Rig(policy="request", max_num_seqs=4)
    groups = [rig.add(4, 6) for _ in range(8)]
    assert rig.run() == 2 * 6
    assert_as_if_alone(*groups)
    assert rig.scheduler.policy.num_idle_slot_iterations == 0


def test_a_member_of_a_batch_that_has_ended_keeps_its_blocks_until_the_batch_ends() -> None:
    rig = Rig(policy="request", block_size=4)
    rig.add(4, 1), rig.add(4, 6)
    rig.step()
    used = rig.memory.num_used_blocks
    rig.step()
    assert rig.memory.num_used_blocks >= used
    assert rig.scheduler.end("r1", FinishReason.ABORT)  # the last that lived: the batch ends
    assert rig.memory.num_used_blocks == 0 and not rig.scheduler.has_work
    assert [s.group.request_id for s in rig.scheduler.take_released()] == ["r1", "r0"]


# --- Orca ------------------------------------------------------------------------------------------------------------


def test_orca_stops_at_the_first_that_does_not_fit() -> None:
    rig = Rig(num_blocks=10, block_size=4, policy="orca")
    big, bigger, small = rig.add(8, 13), rig.add(8, 25), rig.add(1, 1)  # reserve 5, 8 and 1 of 10 blocks
    rig.step()
    assert names(rig.scheduler.running) == ["r0"] and names(rig.scheduler.waiting) == ["r1", "r2"]
    assert rig.scheduler.wait_reasons() == {WaitReason.BLOCKS: 2}
    rig.run()
    assert_as_if_alone(big, bigger, small)


def test_orca_reserves_what_a_request_may_come_to_need_though_pages_are_free() -> None:
    """Three blocks hold its prompt, ten are reserved: the second waits, with 17 blocks free."""
    rig = Rig(num_blocks=20, block_size=4, policy="orca")
    rig.add(12, 29), rig.add(12, 33)
    rig.step()
    assert names(rig.scheduler.running) == ["r0"] and rig.memory.num_free_blocks == 17
    orca_on_oracle = Rig(num_blocks=20, block_size=4, policy="orca", memory_policy="orca-oracle")
    for _ in range(2):
        orca_on_oracle.add(12, 29, stop_token_ids=range(1000), oracle=True)  # ends after one token
    orca_on_oracle.step()
    assert [len(output(sequence.group)) for sequence in orca_on_oracle.released] == [1, 1]


def test_orca_runs_at_most_max_bs_together() -> None:
    rig = Rig(policy="orca", max_num_seqs=2)
    groups = [rig.add(2, 3) for _ in range(5)]
    rig.step()
    assert names(rig.scheduler.running) == ["r0", "r1"] and rig.scheduler.wait_reasons() == {WaitReason.SEATS: 3}
    rig.run()
    assert_as_if_alone(*groups)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=9),
    num_blocks=st.integers(6, 14),
    max_bs=st.integers(1, 5),
)
def test_orca_earlier_requests_have_run_as_many_iterations_as_later_ones(
    requests: list[tuple[int, int]], num_blocks: int, max_bs: int
) -> None:
    """Orca, section 4.2: x earlier than y has run the same or more iterations, at all times while both live."""
    rig = Rig(num_blocks=num_blocks, policy="orca", max_num_seqs=max_bs)
    groups = [rig.add(*request) for request in requests]
    while rig.scheduler.has_work:
        rig.step()
        alive = [len(output(group)) for group in groups if group.live]
        assert alive == sorted(alive, reverse=True)
    assert rig.scheduler.num_preemptions == 0
    assert_as_if_alone(*groups)


# --- vLLM's paper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_vllm_paper_preempts_the_latest_first_and_admits_nobody_new_while_one_waits(preemption: str) -> None:
    rig = Rig(num_blocks=9, block_size=2, policy="vllm-paper", preemption=preemption, num_host_blocks=9)
    groups = [rig.add(4, 8) for _ in range(4)]
    while not (batch := rig.step()).preempted:
        pass
    assert [group.request_id for group in batch.preempted] == ["r3"]
    expected_status = GroupStatus.SWAPPED if preemption == "swap" else GroupStatus.WAITING
    assert groups[3].status is expected_status
    small = rig.add(1, 1)  # a block is enough, and would often be free
    while groups[3].status is not GroupStatus.RUNNING:
        assert small.status is GroupStatus.WAITING
        assert rig.scheduler.wait_reason("r4") is WaitReason.PREEMPTED_FIRST
        assert rig.scheduler.wait_reason("r3") is WaitReason.BLOCKS
        rig.step()
    rig.run()
    assert_as_if_alone(*groups, small)
    assert groups[0].num_preemptions == 0


def test_vllm_paper_computes_prompts_whole_beside_decodes() -> None:
    rig = Rig(policy="vllm-paper")
    decoding = rig.add(2, 9)
    rig.step()
    prompt = rig.add(17, 2)
    assert [(row.sequence.group, row.num_tokens) for row in rig.step().rows] == [(decoding, 1), (prompt, 17)]


def test_a_full_swap_space_falls_back_to_recomputation() -> None:
    rig = Rig(num_blocks=8, block_size=2, policy="vllm-paper", preemption="swap", num_host_blocks=1)
    groups = [rig.add(4, 9) for _ in range(3)]
    rig.run()
    assert rig.scheduler.num_preemptions > 0 and rig.scheduler.pool.num_swaps == 0
    assert_as_if_alone(*groups)


# --- default: priorities ---------------------------------------------------------------------------------------------


def test_a_more_urgent_request_takes_the_seat_of_a_less_urgent_one_in_the_next_iteration() -> None:
    rig = Rig(max_num_seqs=1)
    low = rig.add(3, 9, priority=1)
    rig.step()
    high = rig.add(3, 2)
    batch = rig.step()
    assert batch.preempted == (low,) and [row.sequence.group for row in batch.rows] == [high]
    rig.run()
    assert low.num_preemptions == 1
    assert_as_if_alone(low, high)


def test_it_takes_blocks_too_but_only_if_that_lets_it_start() -> None:
    rig = Rig(num_blocks=6, block_size=4)
    rig.add(12, 5), rig.add(8, 5, priority=1)
    rig.step()
    high = rig.add(4, 5, priority=-1)
    assert names(list(rig.step().preempted)) == ["r1"] and high.status is GroupStatus.RUNNING
    rig.run()

    rig = Rig(num_blocks=8, block_size=4)
    rig.add(16, 9), rig.add(4, 9, priority=1)
    rig.step()
    rig.add(20, 9, priority=0)  # 5 blocks and one for the first's growth: the second's one would not do
    assert rig.step().preempted == ()
    rig.run()


def test_equals_never_change_places() -> None:
    rig = Rig(max_num_seqs=1)
    groups = [rig.add(3, 4, priority=5) for _ in range(3)]
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    assert_as_if_alone(*groups)


def test_priorities_age_so_that_a_stream_of_urgent_requests_starves_nobody() -> None:
    rig = Rig(max_num_seqs=1)
    low = rig.add(3, 3, priority=1)
    ended_before = 0
    for _ in range(2 * PRIORITY_LEVEL):
        high = rig.add(1, 1)
        while high.live:
            rig.step()
            if not low.live:
                break
        if not low.live:
            break
        ended_before += 1
    assert not low.live and ended_before <= PRIORITY_LEVEL
    rig.run()
    assert_as_if_alone(low)


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_len", "num_copies"), [(8, 0), (6, 3), (1, 3), (3, 3)])
def test_samples_share_their_prompt_and_copy_one_block_less_than_they_are(prompt_len: int, num_copies: int) -> None:
    """vLLM, figure 8: all but the last writer copy the partial block; a prompt of whole blocks has none."""
    rig = Rig(block_size=4)
    group = rig.add(prompt_len, 6, n=4)
    rig.step()
    assert rig.memory.num_used_blocks == -(-prompt_len // 4)
    batch = rig.step()
    copies = [pair for transfer in batch.transfers for pair in transfer.pairs]
    assert len(copies) == num_copies and all(t.kind is TransferKind.COPY for t in batch.transfers)
    full = prompt_len // 4
    assert rig.memory.num_used_blocks == full + 4
    assert group.num_saved_blocks == 3 * full
    rig.run()
    assert_as_if_alone(group)
    assert len({tuple(sequence.output_token_ids) for sequence in group.sequences}) == 4


def test_a_prompt_lives_until_the_last_of_its_samples_has_ended() -> None:
    rig = Rig(block_size=4)
    undisturbed = rig.add(8, 9, first=0, n=3).request
    rig.run()
    stops = {expected(undisturbed, index)[1 + index] for index in range(2)}  # the second token of one, the third...
    group = rig.add(8, 9, first=0, n=3, stop_token_ids=stops)
    while group.live:
        rig.step()
        if group.live:
            assert [rig.memory.ref_count(b) for b in rig.memory.block_table(group.live[0].seq_id)[:2]] == [
                len(group.live)
            ] * 2
    assert [len(sequence.output_token_ids) for sequence in group.sequences] == [2, 3, 9]
    assert_as_if_alone(group)
    rig.run()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_group_shares_its_prompt_again(preemption: str) -> None:
    rig = Rig(num_blocks=12, block_size=4, preemption=preemption, num_host_blocks=12)
    elder, group = rig.add(8, 25), rig.add(12, 13, n=2)  # 8 and 3 + 2 * 3 blocks at their longest
    while not rig.step().preempted:
        pass
    assert group.num_preemptions == 1 and len(group.live) == 2
    assert rig.memory.num_used_blocks <= 8, "all of the group is gone"
    while group.status is not GroupStatus.RUNNING or not group.decoding:
        rig.step()
    tables = [list(rig.memory.block_table(sequence.seq_id)) for sequence in group.live]
    assert tables[0][:3] == tables[1][:3] and set(tables[0][3:]).isdisjoint(tables[1][3:])
    rig.run()
    assert_as_if_alone(elder, group)


def test_a_group_waits_for_the_blocks_of_all_its_sequences() -> None:
    rig = Rig(num_blocks=8, block_size=4)
    rig.add(16, 2)
    rig.step()
    group = rig.add(4, 5, n=3)  # its prompt would fit beside the first; with the samples' own blocks it does not
    rig.step()
    assert group.status is GroupStatus.WAITING and rig.scheduler.wait_reason("r1") is WaitReason.GROUP
    rig.run()
    assert_as_if_alone(group)


@pytest.mark.parametrize(("limit", "value"), [("max_num_seqs", 3), ("budget", 3)])
def test_a_group_wider_than_an_iteration_is_refused(limit: str, value: int) -> None:
    rig = Rig(**{limit: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"its 4 sequences run together, .* is 3") as caught:
        rig.add(2, 2, n=4)
    assert caught.value.param == "n"
    rig.add(2, 2, n=3)
    rig.run()


def test_methods_mix_in_one_iteration() -> None:
    rig = Rig(budget=16)
    groups = [rig.add(5, 6), rig.add(9, 6, n=3), rig.add(20, 3, n=2), rig.add(1, 9)]
    widest = 0
    while rig.scheduler.has_work:
        batch = rig.step()
        widest = max(widest, len({row.sequence.group for row in batch.rows}))
    assert widest == 4
    assert_as_if_alone(*groups)


# --- preemption ------------------------------------------------------------------------------------------------------


def test_auto_takes_the_cheaper_way_of_each_request_and_measures_once() -> None:
    asked = []

    def costs() -> PreemptionCosts:
        asked.append(1)
        return PreemptionCosts(blocks_per_second=100.0, tokens_per_second=100.0)

    rig = Rig(16, block_size=4, preemption="auto", num_host_blocks=16, costs=costs)
    groups = [rig.add(10, 20) for _ in range(6)]
    rig.run()
    assert len(asked) == 1 and rig.scheduler.preemption_costs == PreemptionCosts(100.0, 100.0)
    assert rig.scheduler.pool.num_swaps == rig.scheduler.num_preemptions > 0  # 2 blocks out and in beat 10 tokens
    assert_as_if_alone(*groups)
    few = PreemptionCosts(blocks_per_second=1.0, tokens_per_second=100.0)
    assert few.cheaper(4, 16) is Preemption.RECOMPUTE
    assert PreemptionCosts(100.0, 1.0).cheaper(4, 16) is Preemption.SWAP


def test_a_deadlock_without_preemption_is_told_with_what_to_change() -> None:
    """Two requests that each hold what the other needs: the paper's reason for reserving, or preempting."""
    rig = Rig(num_blocks=4, block_size=2, policy="vllm-paper", preemption="none")
    first, second = rig.add(3, 5), rig.add(3, 5)
    rig.run()
    assert rig.scheduler.num_deadlocks == 1
    error = second.sequences[0].error or ""
    assert "nothing can advance with 0 of 4 KV blocks free" in error and "allow preemption" in error
    assert_as_if_alone(first)


def test_nothing_is_reserved_and_nothing_is_preempted_where_memory_reserves() -> None:
    rig = Rig(num_blocks=32, block_size=4, memory_policy="reserve-on-paged")
    groups = [rig.add(9, 20) for _ in range(9)]
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    assert_as_if_alone(*groups)


@pytest.mark.parametrize(("field", "value"), [("policy", "fifo"), ("preemption", "swop")])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{value}.*allowed: "):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]
