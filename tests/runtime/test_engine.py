"""Claims about the engine: what it refuses, what it survives, and that a request never notices its batch mates."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError, KernelError, RequestError
from pagegen.reference import ReferenceKernels
from pagegen.runtime.engine import Engine, EngineConfig, RequestOutput
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.policies import MEMORY_POLICIES, make_memory_policy
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Scheduler
from pagegen.runtime.scheduling import POLICIES
from pagegen.runtime.scheduling.events import SchedulerEvent
from pagegen.runtime.sequence import FinishReason
from pagegen.spec import DType
from tests.runtime.engine_rig import (
    EOS,
    GREEDY,
    TINY,
    ScriptedModel,
    counting,
    finish,
    finish_all,
    make_engine,
    run_one,
)

# --- how a request ends ----------------------------------------------------------------------------------------------


def test_max_tokens_end_a_request_with_length() -> None:
    output = run_one(make_engine(), "a", SamplingParams(max_tokens=3, temperature=0.0))
    assert (output.text, output.finish_reason, output.token_ids) == ("bcd", FinishReason.LENGTH, (98, 99, 100))


def test_an_end_token_first_gives_an_empty_text_and_stop() -> None:
    output = run_one(make_engine(ScriptedModel(lambda position, token: EOS)), "a", SamplingParams(temperature=0.0))
    assert (output.text, output.finish_reason, output.token_ids) == ("", FinishReason.STOP, (EOS,))


def test_ignore_eos_goes_on_and_a_stop_token_id_still_ends() -> None:
    engine = make_engine(ScriptedModel(lambda position, token: EOS if position < 3 else 120))
    output = run_one(engine, "a", SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(120,)))
    assert (output.token_ids, output.text, output.finish_reason) == ((EOS, EOS, EOS, 120), "", FinishReason.STOP)


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text"),
    [("de", 9, "bc"), ("f", 5, "bcde"), ("zz", 3, "bcd"), ("dx", 3, "bcd"), ("def", 5, "bc")],
    ids=["stops", "on the last token allowed", "never", "held back to the end", "complete with the last token"],
)
def test_a_stop_string_is_cut_and_wins_over_length(stop: str, max_tokens: int, text: str) -> None:
    output = run_one(make_engine(), "a", SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=(stop,)))
    assert output.text == text
    assert output.finish_reason is (FinishReason.LENGTH if stop in ("zz", "dx") else FinishReason.STOP)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_tokens"), [(9, 1, 1), (9, 5, 2), (10, 1, 1), (10, 5, 1), (1, 99, 10)]
)
def test_the_models_limit_bounds_computed_positions(prompt_len: int, max_tokens: int, num_tokens: int) -> None:
    positions: list[int] = []

    def script(position: int, token: int) -> int:
        positions.append(position)
        return 97

    engine = make_engine(ScriptedModel(script), max_model_len=10)
    output = run_one(engine, [97] * prompt_len, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    assert len(output.token_ids) == num_tokens and output.finish_reason is FinishReason.LENGTH
    assert max(positions) < 10


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "no tokens"),
        ([97] * 11, GREEDY, "has 11 tokens, max_model_len is 10"),
        ([97, 259], GREEDY, "token id 259 is not in the vocabulary; allowed: 0 to 258"),
        ([-1], GREEDY, "token id -1"),
        ([True], GREEDY, "token id True"),
        ([97], SamplingParams(stop_token_ids=(259,)), "stop_token_ids"),
        ([97] * 9, SamplingParams(max_tokens=5), "need 3 KV blocks, the pool has 2 of 4 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_others_go_on(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine = make_engine(num_blocks=2, max_model_len=10)
    engine.add_request("good", [97], SamplingParams(max_tokens=2, temperature=0.0))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, params)
    assert finish(engine)["good"].text == "bc"
    assert not engine.abort("bad")


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = make_engine()
    engine.add_request("a", [97], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [98], GREEDY)
    finish(engine)
    engine.add_request("a", [98], GREEDY)
    assert finish(engine)["a"].prompt_token_ids == (98,)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    model = ScriptedModel(counting)
    config = EngineConfig(num_blocks=4, dtype=DType.FP32)
    engine = Engine(model, ReferenceKernels(model.config.kernel_spec(DType.FP32)), None, config)
    with pytest.raises(RequestError, match="need a tokenizer"):
        engine.add_request("a", [97], SamplingParams(stop=("x",)))
    engine.add_request("a", [97], GREEDY)
    assert finish(engine)["a"].text == ""


def test_limits_and_kernels_that_do_not_fit_the_model_are_refused() -> None:
    model = ScriptedModel(counting)
    kernels = ReferenceKernels(model.config.kernel_spec(DType.FP32))
    with pytest.raises(ConfigError, match="exceeds the model's 64 positions"):
        Engine(model, kernels, None, EngineConfig(max_model_len=65, dtype=DType.FP32))
    with pytest.raises(ConfigError, match="give all one dtype"):
        Engine(model, kernels, None, EngineConfig(dtype=DType.BF16))
    with pytest.raises(ConfigError, match="holds no KV block"):
        Engine(model, kernels, None, EngineConfig(kv_cache_bytes=100, dtype=DType.FP32))
    other = ReferenceKernels(kernels.spec.replace(q_heads=4))
    with pytest.raises(KernelError, match=r"compute fp32-d16-h4x2.*needs fp32-d16-h6x2.*pagegen tune"):
        Engine(model, other, None, EngineConfig(dtype=DType.FP32))


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "kv_cache_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_limit_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig(num_blocks=1, kv_cache_bytes=1)


def test_the_pool_is_no_larger_than_the_sequences_that_may_run() -> None:
    model = ScriptedModel(counting)
    kernels = ReferenceKernels(model.config.kernel_spec(DType.FP32, block_size=16))
    engine = Engine(model, kernels, None, EngineConfig(max_num_seqs=3, max_model_len=33, dtype=DType.FP32))
    assert engine.stats().num_blocks == 3 * 3


# --- what is survived ----------------------------------------------------------------------------------------------


def test_unusable_logits_end_their_own_request_alone() -> None:
    engine = make_engine(
        ScriptedModel(lambda position, token: float("nan") if token == 120 else counting(position, token))
    )
    engine.add_request("sick", [118], SamplingParams(max_tokens=9, temperature=0.0))
    engine.add_request("well", [97], SamplingParams(max_tokens=9, temperature=0.0))
    done = finish(engine)
    assert done["sick"].finish_reason is FinishReason.ERROR and "NaN" in (done["sick"].error or "")
    assert done["sick"].text == "wx"
    assert (done["well"].text, done["well"].error) == ("bcdefghij", None)


def test_a_failing_iteration_ends_its_requests_and_not_the_engine() -> None:
    def script(position: int, token: int) -> int:
        if token == 120:
            raise KernelError("made to fail")
        return counting(position, token)

    engine = make_engine(ScriptedModel(script), max_num_seqs=1)
    engine.add_request("bad", [119], GREEDY)
    engine.add_request("waiting", [97], GREEDY)
    done = finish(engine)
    assert done["bad"].error == "the iteration failed: made to fail" and done["bad"].text == "x"
    assert done["waiting"].text == "bcdefg"


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_after_any_step_leaves_the_others_alone(steps: int) -> None:
    engine = make_engine(num_blocks=5, budget=4)
    prompts = {"a": [97] * 6, "b": [98] * 6, "c": [99]}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=5, temperature=0.0))
    for _ in range(steps):
        engine.step()
    known = engine.abort("b")
    assert not engine.abort("b") and not engine.abort("nobody")
    done = finish(engine)
    assert ("b" in done) <= (not known)
    assert {done[name].text for name in ("a", "c") if name in done} <= {"bcdef", "defgh"}


def test_all_requests_can_be_aborted_at_once() -> None:
    engine = make_engine()
    for i in range(12):
        engine.add_request(str(i), [97] * 3, GREEDY)
    engine.step()
    assert all(engine.abort(str(i)) for i in range(12))
    assert not engine.has_work and finish(engine) == {} and engine.step() == []


# --- the real network ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return build_model(TINY.config, TINY.weights(), DType.FP32)


PROMPTS = ["x", "hello", "abcabcabc", "The quick brown fox", "zz", "o" * 31]


@pytest.fixture(scope="module")
def alone(tiny: CausalLM) -> list[RequestOutput]:
    params = dataclasses.replace(GREEDY, max_tokens=9, logprobs=2, prompt_logprobs=1)
    return [run_one(make_engine(tiny, num_blocks=99, budget=99), prompt, params) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("num_blocks", "budget", "max_num_seqs", "block_size", "preempts"),
    [(99, 99, 8, 4, False), (10, 12, 8, 4, True), (99, 1, 3, 1, False), (4, 16, 2, 16, False)],
    ids=["roomy", "small chunks and preemption", "one token a step", "large blocks"],
)
def test_tokens_and_logprobs_are_those_of_each_request_alone(
    tiny: CausalLM,
    alone: list[RequestOutput],
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    block_size: int,
    preempts: bool,
) -> None:
    engine = make_engine(tiny, num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs, block_size=block_size)
    for i, expected in enumerate(alone):
        params = dataclasses.replace(GREEDY, max_tokens=9, logprobs=2, prompt_logprobs=1)
        engine.add_request(str(i), list(expected.prompt_token_ids), params)
    done = finish(engine)
    for i, expected in enumerate(alone):
        assert done[str(i)].token_ids == expected.token_ids and done[str(i)].text == expected.text
        for mine, theirs in (
            (done[str(i)].logprobs, expected.logprobs),
            (done[str(i)].prompt_logprobs, expected.prompt_logprobs),
        ):
            assert mine is not None and theirs is not None
            assert [entry.logprob for entry in mine] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
    assert bool(engine.stats().num_preemptions) == preempts


def test_a_seeded_draw_does_not_depend_on_batch_mates_or_preemption(tiny: CausalLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)
    expected = run_one(make_engine(tiny), "hello", params).token_ids
    engine = make_engine(tiny, num_blocks=10)
    for i in range(4):
        engine.add_request(
            str(i), TINY.tokenizer().encode("hello"), params if i == 2 else dataclasses.replace(params, seed=None)
        )
    done = finish(engine)
    assert done["2"].token_ids == expected != done["1"].token_ids
    assert done["2"].num_preemptions > 0


def test_prompt_logprobs_score_every_prompt_token_but_the_first(tiny: CausalLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    whole = run_one(make_engine(tiny, budget=99), "hello", params).prompt_logprobs
    chunked = run_one(make_engine(tiny, budget=2), "hello", params).prompt_logprobs
    assert whole and chunked and [entry.token_id for entry in whole] == list(b"ello")
    assert [entry.logprob for entry in whole] == pytest.approx([entry.logprob for entry in chunked], abs=1e-5)
    assert all(len(entry.top) == 2 for entry in whole)
    assert run_one(make_engine(tiny), "x", params).prompt_logprobs == []


def test_stats_count_what_happened(tiny: CausalLM) -> None:
    engine = make_engine(tiny)
    run_one(engine, "hello", dataclasses.replace(GREEDY, max_tokens=4))
    stats = engine.stats()
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_generated_tokens) == (4, 8, 4)
    assert stats.kv_bytes_peak == 2 * engine.kv_cache.block_bytes and stats.num_preemptions == 0


# --- policies, on the real network ----------------------------------------------------------------------------------


SAMPLED = dataclasses.replace(GREEDY, max_tokens=7, temperature=1.2, seed=5, logprobs=0)


def add_mixed(engine: Engine) -> None:
    """Greedy, sampled, several samples of one prompt, and prompts that begin alike."""
    for i, text in enumerate(PROMPTS):
        params = dataclasses.replace(GREEDY, max_tokens=9, logprobs=2)
        engine.add_request(str(i), TINY.tokenizer().encode(text), params)
    engine.add_request("three", TINY.tokenizer().encode("abcabcabcx"), dataclasses.replace(SAMPLED, n=3))
    engine.add_request("two", TINY.tokenizer().encode("The quick brown bird"), dataclasses.replace(SAMPLED, n=2))


@pytest.fixture(scope="module")
def undisturbed(tiny: CausalLM) -> dict[tuple[str, int], RequestOutput]:
    engine = make_engine(tiny, num_blocks=400, budget=400, max_num_seqs=16, prefix_cache=False)
    add_mixed(engine)
    done = finish_all(engine)
    assert engine.stats().num_preemptions == 0 and len(done) == len(PROMPTS) + 5
    return done


@pytest.mark.parametrize(
    ("policy", "memory_policy", "preemption", "num_blocks"),
    [
        *[(policy, "paged", way, 14) for policy in ("default", "vllm-paper") for way in ("recompute", "swap", "auto")],
        ("orca", "paged", "recompute", 16),
        ("request", "paged", "recompute", 16),
        *[("default", memory, "recompute", 48) for memory in MEMORY_POLICIES if memory != "paged"],
        *[("orca", memory, "recompute", 48) for memory in MEMORY_POLICIES if memory != "paged"],
        ("request", "orca-max", "recompute", 48),
    ],
)
def test_no_policy_changes_a_token(
    tiny: CausalLM,
    undisturbed: dict[tuple[str, int], RequestOutput],
    policy: str,
    memory_policy: str,
    preemption: str,
    num_blocks: int,
) -> None:
    engine = make_engine(
        tiny,
        num_blocks=num_blocks,
        budget=20 if policy == "default" else None,
        max_model_len=48,
        policy=policy,
        memory_policy=memory_policy,
        preemption=preemption,
    )
    add_mixed(engine)
    done = finish_all(engine)
    assert {key: output.token_ids for key, output in done.items()} == {
        key: output.token_ids for key, output in undisturbed.items()
    }
    for key, output in done.items():
        mine, theirs = output.logprobs or [], undisturbed[key].logprobs or []
        assert [entry.logprob for entry in mine] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
    stats = engine.stats()
    assert bool(stats.num_preemptions) == (num_blocks == 14)
    assert (stats.num_swaps > 0) == (preemption == "swap") or preemption == "auto"
    assert (stats.preemption_costs is not None) == (preemption == "auto")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    combination=st.sampled_from([(policy, way) for policy in POLICIES for way in ("recompute", "swap")]),
    num_blocks=st.integers(14, 40),
    budget=st.sampled_from([3, 7, 20, 64]),
    max_num_seqs=st.integers(3, 9),
    prefix_cache=st.booleans(),
)
def test_no_pool_budget_or_cache_changes_a_token(
    tiny: CausalLM,
    undisturbed: dict[tuple[str, int], RequestOutput],
    combination: tuple[str, str],
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    prefix_cache: bool,
) -> None:
    policy, preemption = combination
    engine = make_engine(
        tiny,
        num_blocks=num_blocks,
        budget=budget if policy == "default" else None,
        max_num_seqs=max_num_seqs,
        max_model_len=48,
        policy=policy,
        preemption=preemption,
        prefix_cache=prefix_cache,
    )
    add_mixed(engine)
    done = finish_all(engine)
    assert {key: output.token_ids for key, output in done.items()} == {
        key: output.token_ids for key, output in undisturbed.items()
    }


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_a_recorded_run_repeats_on_a_scheduler_without_a_model(tiny: CausalLM, preemption: str) -> None:
    log: list[SchedulerEvent] = []
    engine = make_engine(tiny, num_blocks=14, budget=20, preemption=preemption, recorder=log.append)
    add_mixed(engine)
    stop = TINY.tokenizer().encode("x")
    engine.add_request("stops", stop, SamplingParams(max_tokens=12, temperature=1.5, seed=3, stop=tuple("aeiou ")))
    for _ in range(5):
        engine.step()
    engine.abort("two")
    finish_all(engine)
    memory = make_memory_policy("paged", 14, 4, max_model_len=64, num_host_blocks=engine.config.num_host_blocks(14, 1))
    repeated = Scheduler(engine.scheduler.config, memory)
    for event in log:
        repeated.apply(event)
    assert not repeated.has_work and memory.num_used_blocks == 0
    mine, theirs = repeated.pool, engine.scheduler.pool
    assert (mine.num_preemptions, mine.num_swaps) == (theirs.num_preemptions, theirs.num_swaps)
    assert mine.num_preemptions > 0


# --- several outputs of one prompt -----------------------------------------------------------------------------------


def test_n_samples_differ_and_the_first_is_that_of_a_request_for_one(tiny: CausalLM) -> None:
    prompt = TINY.tokenizer().encode("hello")
    alone = run_one(make_engine(tiny), "hello", SAMPLED)
    engine = make_engine(tiny)
    engine.add_request("r", prompt, dataclasses.replace(SAMPLED, n=3))
    done = finish_all(engine)
    assert [done["r", index].index for index in range(3)] == [0, 1, 2]
    assert done["r", 0].token_ids == alone.token_ids
    assert len({done["r", index].token_ids for index in range(3)}) == 3
    usage = next(output.usage for output in done.values() if output.usage)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.saved_blocks) == (5, 3 * 7, 2 * (5 // 4))
    assert engine.stats().num_saved_blocks == 2


def test_samples_without_a_seed_differ_from_each_other_and_from_run_to_run(tiny: CausalLM) -> None:
    params = dataclasses.replace(SAMPLED, seed=None, n=2, max_tokens=20)
    tokens = set()
    for _ in range(2):
        engine = make_engine(tiny)
        engine.add_request("r", [97], params)
        tokens |= {output.token_ids for output in finish_all(engine).values()}
    assert len(tokens) == 4


def test_best_of_gives_the_likeliest_first_and_only_at_the_end(tiny: CausalLM) -> None:
    prompt = TINY.tokenizer().encode("hello")
    engine = make_engine(tiny)
    engine.add_request("all", prompt, dataclasses.replace(SAMPLED, n=5))
    samples = list(finish_all(engine).values())

    def mean(output: RequestOutput) -> float:
        assert output.logprobs is not None
        return sum(entry.logprob for entry in output.logprobs) / len(output.logprobs)

    best = sorted(samples, key=mean, reverse=True)[:2]
    engine.add_request("best", prompt, dataclasses.replace(SAMPLED, n=2, best_of=5, logprobs=None))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.index for output in outputs] == [0, 1]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in best]
    assert outputs[0].logprobs is None and outputs[1].usage and outputs[1].usage.completion_tokens == 5 * 7


def test_each_sample_ends_by_itself_and_a_stop_text_ends_only_its_own(tiny: CausalLM) -> None:
    """The first tokens of samples differ; from them on the script counts."""
    params = SamplingParams(max_tokens=9, temperature=9.0, seed=1, n=4)
    free = make_engine()
    free.add_request("r", [97], params)
    texts = {index: output.text for (_, index), output in finish_all(free).items()}
    stop = texts[1][2:4]
    engine = make_engine()
    engine.add_request("r", [97], dataclasses.replace(params, stop=(stop,)))
    for (_, index), output in finish_all(engine).items():
        assert output.text == texts[index].split(stop)[0]
        assert output.finish_reason is (FinishReason.STOP if stop in texts[index] else FinishReason.LENGTH)


def test_a_failure_before_the_samples_part_is_told_for_each_of_them() -> None:
    engine = make_engine(ScriptedModel(lambda position, token: float("nan")))
    engine.add_request("r", [97], SamplingParams(n=3))
    engine.add_request("best", [97], SamplingParams(n=2, best_of=3))
    done = finish_all(engine)
    assert {key for key in done} == {("r", 0), ("r", 1), ("r", 2), ("best", 0), ("best", 1)}
    assert all(output.finish_reason is FinishReason.ERROR and "NaN" in (output.error or "") for output in done.values())


# --- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_computed_before_is_found_and_says_so(tiny: CausalLM) -> None:
    engine = make_engine(tiny)
    cold = run_one(engine, "abcdefghijk", GREEDY)
    warm = run_one(engine, "abcdefghijk", GREEDY)
    longer = run_one(engine, "abcdefghijkl", GREEDY)
    assert cold.usage and warm.usage and longer.usage
    assert [output.usage.cached_tokens for output in (cold, warm, longer) if output.usage] == [0, 8, 8]
    assert warm.token_ids == cold.token_ids and engine.stats().num_cached_tokens == 16
    assert run_one(make_engine(tiny), "abcdefghijkl", GREEDY).token_ids == longer.token_ids


def test_salts_and_the_switch_keep_requests_apart(tiny: CausalLM) -> None:
    engine = make_engine(tiny)
    cached = []
    for i, salt in enumerate(["", "a", "a", "b"]):
        engine.add_request(str(i), list(range(97, 109)), GREEDY, cache_salt=salt)
        (usage,) = [output.usage for output in finish_all(engine).values()]
        assert usage
        cached.append(usage.cached_tokens)
    assert cached == [0, 0, 8, 0]
    off = make_engine(tiny, prefix_cache=False)
    assert [run_one(off, "abcdefghijk", GREEDY).usage for _ in range(2)][1] == run_one(off, "abcdefghijk", GREEDY).usage
    assert off.stats().num_cached_tokens == 0


def test_prompt_logprobs_are_complete_whatever_is_cached(tiny: CausalLM) -> None:
    engine, params = make_engine(tiny), dataclasses.replace(GREEDY, prompt_logprobs=0)
    run_one(engine, "abcdefghijk", GREEDY)
    first, second = (run_one(engine, "abcdefghijk", params).prompt_logprobs for _ in range(2))
    assert first and second and len(first) == len(second) == 10


# --- moves that fail -------------------------------------------------------------------------------------------------


def test_blocks_that_were_on_the_move_when_an_iteration_failed_belong_to_nobody_afterwards() -> None:
    failing = False

    def script(position: int, token: int) -> int:
        if failing:
            raise KernelError("made to fail")
        return counting(position, token)

    engine = make_engine(ScriptedModel(script), num_blocks=6, preemption="swap")
    for name in ("a", "b", "c"):
        engine.add_request(name, [97] * 6, SamplingParams(max_tokens=12, temperature=0.0))
    failed: dict[str, str | None] = {}
    while not failed:
        before = engine.stats().num_swaps
        failing = lacks_blocks(engine)
        failed = {output.request_id: output.error for output in engine.step() if output.error}
    assert engine.stats().num_swaps > before, "the iteration that failed was one that swapped"
    assert set(failed) == {"a", "b"} and not engine.stats().num_swapped
    failing = False
    engine.add_request("after", [97], SamplingParams(max_tokens=2, temperature=0.0))
    done = finish(engine)
    assert done["after"].text == "bc" and done["c"].text == "bcdefghijklm"


def lacks_blocks(engine: Engine) -> bool:
    """Whether the next iteration's growth finds no block."""
    decoding = [sequence for group in engine.scheduler.running if group.decoding for sequence in group.active]
    missing = [s.num_tokens - engine.memory.num_tokens(s.seq_id) for s in decoding]
    return not all(engine.memory.can_append(s.seq_id, n) for s, n in zip(decoding, missing, strict=True))
