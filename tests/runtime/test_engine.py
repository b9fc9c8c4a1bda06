"""Claims about the engine: what it refuses, what it survives, and that a request never notices its batch mates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from pagegen.errors import ConfigError, KernelError, RequestError
from pagegen.kernel import PagedKernels
from pagegen.reference import ReferenceKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.engine import Engine, EngineConfig, RequestOutput
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType

TINY = resolve_model("dummy:tiny")
EOS = TINY.config.eos_token_ids[0]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class ScriptedModel:
    """Its next token is `script(position, token)`; the cache is not touched."""

    def __init__(self, script: Callable[[int, int], int | float]) -> None:
        self.config: ModelConfig = dataclasses.replace(TINY.config, max_position_embeddings=64)
        self.dtype = DType.FP32
        self.script = script

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_rows), self.config.vocab_size)
        for row, token in enumerate(batch.logits_rows.tolist()):
            chosen = self.script(int(batch.positions[token]), int(batch.input_ids[token]))
            if isinstance(chosen, float):
                logits[row] = chosen
            else:
                logits[row, chosen] = 9.0
        return logits


def counting(position: int, token: int) -> int:
    """a -> b -> c: the next byte."""
    return (token + 1) % 256


def make_engine(
    model: CausalLM | None = None,
    *,
    block_size: int = 4,
    num_blocks: int = 32,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    model = model or ScriptedModel(counting)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        dtype=DType.FP32,
    )
    kernels = ReferenceKernels(model.config.kernel_spec(DType.FP32, block_size))
    return Engine(model, kernels, tokenizer or TINY.tokenizer(), config)


def finish(engine: Engine, max_steps: int = 500) -> dict[str, RequestOutput]:
    """Runs to the end; checks each request's stream against its last output, and that the pool is whole again."""
    done: dict[str, RequestOutput] = {}
    streamed: dict[str, tuple[list[int], str]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens, text = streamed.get(output.request_id, ([], ""))
            streamed[output.request_id] = (tokens + list(output.new_token_ids), text + output.text_delta)
            assert output.request_id not in done
            if output.finish_reason:
                done[output.request_id] = output
        engine.memory.audit(full=True)
    stats = engine.stats()
    assert (
        not engine.has_work
        and stats.num_running == stats.num_waiting == stats.num_used_blocks == stats.kv_bytes_in_use == 0
    )
    for request_id, output in done.items():
        tokens, text = streamed[request_id]
        if tokens == list(output.token_ids):  # outputs before this call are not seen here
            assert text == output.text
    return done


def run_one(engine: Engine, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
    token_ids = prompt if isinstance(prompt, list) else TINY.tokenizer().encode(prompt)
    engine.add_request("one", token_ids, params)
    return finish(engine)["one"]


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
