"""Failures that schedulers of other engines were reported for, each with an input that provokes it and what is right.

The numbers are those of the reports' class, not of any one of them: a request that can never fit, a budget below the
prompt, mutual preemption, priorities, aborts at awkward moments, degenerate lengths, results given to the wrong input.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from pagegen.errors import RequestError
from pagegen.runtime.engine import Engine, RequestOutput
from pagegen.runtime.llm import LLM
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduling import POLICIES
from pagegen.runtime.sequence import FinishReason, SequenceGroup
from pagegen.runtime.server.worker import AbortedError, EngineWorker, Stream
from pagegen.spec import DType
from tests.runtime.engine_rig import EOS, TINY, ScriptedModel, counting, finish, make_engine
from tests.runtime.scheduling_rig import Rig, assert_as_if_alone, output

POLICY_NAMES = tuple(POLICIES)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


# --- C01: a request that can never fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("prompt_len", "max_tokens", "fits"), [(1002, 1, False), (801, 1, False), (800, 1, True)])
def test_what_can_never_fit_is_refused_at_once_and_what_comes_behind_it_runs(
    policy: str, prompt_len: int, max_tokens: int, fits: bool
) -> None:
    rig = Rig(num_blocks=50, block_size=16, budget=2000, policy=policy)
    groups = []
    if fits:
        groups.append(rig.add(prompt_len, max_tokens))
    else:
        with pytest.raises(RequestError, match="the pool has 50 of 16 tokens"):
            rig.add(prompt_len, max_tokens)
    groups.append(rig.add(10, 1))
    assert rig.run() <= 3
    assert_as_if_alone(*groups)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_that_fits_with_an_output_that_does_not_is_refused_at_once(policy: str) -> None:
    rig = Rig(num_blocks=50, block_size=16, budget=2000, policy=policy)
    with pytest.raises(RequestError, match=r"790 prompt tokens and up to 100 new ones need 56 KV blocks"):
        rig.add(790, 100)
    small = rig.add(10, 1)
    rig.run()
    assert_as_if_alone(small)


# --- C02: a token budget smaller than the prompt ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm-paper", "orca", "request"])
def test_without_chunks_a_prompt_within_the_budget_runs_and_one_above_it_is_refused(policy: str) -> None:
    rig = Rig(budget=8, policy=policy)
    fits = rig.add(8, 1)
    with pytest.raises(RequestError, match="max_num_batched_tokens is 8"):
        rig.add(9, 1)
    assert rig.run() == 1
    assert_as_if_alone(fits)


def test_what_may_be_computed_anew_in_one_piece_is_refused_by_its_longest() -> None:
    """A prompt of 6 fits 8 tokens; preempted after 4 it would be 10 and wait for ever."""
    rig = Rig(budget=8, policy="vllm-paper")
    with pytest.raises(RequestError, match="computes up to 9 tokens of it in one iteration"):
        rig.add(6, 4)
    group = rig.add(6, 3)
    rig.run()
    assert_as_if_alone(group)


@pytest.mark.parametrize(("prompt_len", "steps"), [(9, 2), (16, 2), (17, 3)])
def test_with_chunks_it_runs_in_as_many_steps_as_there_are_chunks(prompt_len: int, steps: int) -> None:
    rig = Rig(budget=8)
    group = rig.add(prompt_len, 1)
    assert rig.run() == steps
    assert_as_if_alone(group)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(1, 1), (1, 9), (3, 9)])
def test_a_budget_of_one_and_one_below_the_sequences_finish(budget: int, max_num_seqs: int) -> None:
    rig = Rig(budget=budget, max_num_seqs=max_num_seqs)
    groups = [rig.add(n, 5) for n in (9, 1, 4, 2, 7, 3)]
    rig.run(max_steps=200)
    assert_as_if_alone(*groups)


# --- C03: requests that preempt each other without progress ----------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "vllm-paper"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("arrivals", [[(12, 12)] * 2, [(12, 12)] * 6, [(12, 12), (12, 12), None, (24, 8)]])
def test_a_pool_too_small_for_all_lets_all_finish_soon(
    policy: str, preemption: str, arrivals: list[tuple[int, int] | None]
) -> None:
    """None is a step that passes before the next arrival."""
    rig = Rig(num_blocks=8, block_size=4, policy=policy, preemption=preemption, num_host_blocks=8)
    groups = []
    for arrival in arrivals:
        if arrival is None:
            rig.step()
        else:
            groups.append(rig.add(*arrival))
    steps = 0
    while rig.scheduler.has_work:
        oldest, others = (alive := [group for group in groups if group.live])[0], alive[1:]
        assert not (oldest in rig.step().preempted and others)
        steps += 1
    assert steps <= 4 * sum(group.request.max_num_tokens for group in groups)
    assert max(group.num_preemptions for group in groups) <= 2
    assert_as_if_alone(*groups)


# --- C04: priorities -------------------------------------------------------------------------------------------------


def test_an_urgent_request_starts_in_the_next_step_equals_wait_and_the_least_urgent_ends() -> None:
    rig = Rig(max_num_seqs=1)
    low = rig.add(3, 20, priority=1)
    rig.step()
    high = rig.add(3, 2)
    assert [row.sequence.group for row in rig.step().rows] == [high]
    rig.run()
    assert_as_if_alone(low, high)

    rig = Rig(max_num_seqs=1)
    equals = [rig.add(3, 5), rig.add(3, 5)]
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    assert_as_if_alone(*equals)

    rig = Rig(max_num_seqs=1)
    low, finished = rig.add(3, 2, priority=1), 0
    high = rig.add(2, 1)
    while low.live:
        rig.step()
        if not high.live:
            finished += 1
            high = rig.add(2, 1)
    assert finished <= 64, "one level of priority is worth 64 later arrivals"


# --- C05: aborts at awkward moments ----------------------------------------------------------------------------------

MOMENTS: dict[str, Callable[[Rig], bool]] = {
    "waiting": lambda rig: True,
    "between two chunks": lambda rig: 0 < victim(rig).sequences[0].num_computed_tokens < victim(rig).prompt_len,
    "decoding": lambda rig: len(output(victim(rig))) == 2,
    "preempted": lambda rig: victim(rig) in rig.scheduler.pool.preempted,
    "between schedule and update": lambda rig: len(output(victim(rig))) == 2,
    "in the step in which it ends": lambda rig: len(output(victim(rig))) == 14,
}


def victim(rig: Rig) -> SequenceGroup:
    return rig.scheduler.groups["r1"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_at_any_moment_frees_all_and_changes_nobody(moment: str, preemption: str, n: int) -> None:
    rig = Rig(num_blocks=18, block_size=4, budget=8, preemption=preemption, num_host_blocks=18)
    others = [rig.add(9, 60) if n > 1 else rig.add(45, 23)]  # such that they do not fit together in the end
    group = rig.add(11, 15, n=n)
    while not MOMENTS[moment](rig):
        rig.step()
    if moment.startswith(("between s", "in the step")):
        batch = rig.scheduler.schedule()
        sampled = rig.execute(batch)
        rig.scheduler.end("r1", FinishReason.ABORT)
        rig.scheduler.update(batch, sampled)
    else:
        rig.scheduler.end("r1", FinishReason.ABORT)
    assert not rig.scheduler.end("r1", FinishReason.ABORT) and not rig.scheduler.end("nobody", FinishReason.ABORT)
    assert all(rig.memory.num_tokens(sequence.seq_id) == 0 for sequence in group.sequences)
    rig.memory.audit(full=True)
    others.append(rig.add(5, 5))
    rig.run()
    assert_as_if_alone(*others)


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return build_model(TINY.config, TINY.weights(), DType.FP32)


def test_all_ids_are_aborted_at_once_from_eight_threads_through_the_servers_worker(tiny: CausalLM) -> None:
    engine = make_engine(tiny, num_blocks=12, max_num_seqs=8, budget=16, preemption="swap")
    alone = finish_one(make_engine(tiny), [97, 98, 99], 6)

    async def scenario() -> list[tuple[int, ...]]:
        loop = asyncio.get_running_loop()
        with EngineWorker(engine) as worker:
            streams = [await worker.submit([[97 + i] * (3 + i % 9)], greedy(30)) for i in range(24)]
            while not worker.stats.num_preemptions:
                await asyncio.sleep(0.002)

            def abort(mine: list[Stream]) -> None:
                for stream in mine * 2:
                    loop.call_soon_threadsafe(worker.abort, stream)

            threads = [threading.Thread(target=abort, args=(streams[i::8],)) for i in range(8)]
            for thread in threads:
                thread.start()
            bystander = await worker.submit([[97, 98, 99]], greedy(6))
            outputs = [update[1] async for update in bystander.updates() if update]
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
            for stream in streams:
                with pytest.raises(AbortedError):
                    async for _ in stream.updates():
                        pass
            while engine.has_work:
                await asyncio.sleep(0.002)
            assert worker.status == "ok" and worker.num_open == 0
        return [outputs[-1].token_ids]

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == [alone.token_ids]
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_swapped == stats.num_used_blocks == 0


def finish_one(engine: Engine, prompt: list[int], max_tokens: int) -> RequestOutput:
    engine.add_request("one", prompt, greedy(max_tokens))
    return finish(engine)["one"]


# --- C06: degenerate lengths -----------------------------------------------------------------------------------------


def test_an_empty_prompt_and_no_tokens_to_generate_are_refused_and_the_next_request_is_fine() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="no tokens"):
        engine.add_request("empty", [], greedy(5))
    with pytest.raises(RequestError, match="max_tokens=0"):
        greedy(0)
    assert finish_one(engine, [97], 1).text == "b"


def test_one_token_ends_by_length_and_an_end_token_first_gives_an_empty_text() -> None:
    one = finish_one(make_engine(), [97], 1)
    assert (len(one.token_ids), one.finish_reason) == (1, FinishReason.LENGTH)
    engine = make_engine(ScriptedModel(lambda position, token: EOS))
    engine.add_request("r", [97], SamplingParams(max_tokens=5, temperature=0.0))
    ended = finish(engine)["r"]
    assert (ended.text, ended.finish_reason) == ("", FinishReason.STOP)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_tokens"), [(31, 1, 1), (31, 5, 2), (32, 1, 1), (32, 5, 1)])
def test_at_the_models_limit_the_last_token_is_sampled_and_never_computed(
    policy: str, prompt_len: int, max_tokens: int, num_tokens: int
) -> None:
    positions: list[int] = []

    def script(position: int, token: int) -> int:
        positions.append(position)
        return counting(position, token)

    engine = make_engine(ScriptedModel(script), max_model_len=32, policy=policy, budget=None)
    done = finish_one(engine, [97] * prompt_len, max_tokens)
    assert len(done.token_ids) == num_tokens and max(positions) < 32
    with pytest.raises(RequestError, match="max_model_len is 32"):
        engine.add_request("long", [97] * 33, greedy(1))


# --- C07: results matched to the wrong inputs ------------------------------------------------------------------------


def test_the_second_call_gets_its_own_results_in_order_with_a_failure_in_its_place() -> None:
    from pagegen.reference import ReferenceKernels

    kernels = ReferenceKernels(TINY.config.kernel_spec(DType.FP32, block_size=8))
    llm = LLM("dummy:tiny", kernels=kernels, dtype="fp32", max_model_len=40, num_blocks=12)
    first = llm.generate(["a", "b"], [greedy(4), greedy(2)])
    second = llm.generate(["c", "", "d", "c", "e"], [greedy(n) for n in (6, 1, 4, 5, 2)])
    assert [len(out.token_ids) for out in first] == [4, 2]
    assert [len(out.token_ids) for out in second] == [6, 0, 4, 5, 2]
    assert [out.prompt_token_ids for out in second] == [(99,), (), (100,), (99,), (101,)]
    assert second[1].error is not None and second[3].token_ids == second[0].token_ids[:5]
    pairs = llm.generate(["a", "b"], SamplingParams(max_tokens=3, seed=1, n=2))
    assert [(out.prompt_token_ids, out.index) for out in pairs] == [((97,), 0), ((97,), 1), ((98,), 0), ((98,), 1)]
