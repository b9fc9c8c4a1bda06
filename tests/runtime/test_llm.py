"""Claims about offline generation: outputs in input order, errors in their place, nothing left behind."""

from __future__ import annotations

import pytest

from pagegen.errors import ConfigError, ModelError, RequestError
from pagegen.reference import ReferenceKernels
from pagegen.runtime.llm import LLM
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType


@pytest.fixture(scope="module")
def llm() -> LLM:
    spec = resolve_model("dummy:tiny").config.kernel_spec(DType.FP32, block_size=8)
    return LLM("dummy:tiny", kernels=ReferenceKernels(spec), dtype="fp32", max_model_len=40, num_blocks=12)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_outputs_come_in_input_order_call_after_call(llm: LLM) -> None:
    """Lengths are such that they finish in reverse; equal prompts are told apart by their place."""
    first = llm.generate(["a", "b"], [greedy(5), greedy(2)])
    second = llm.generate(["c", "d", "c"], [greedy(6), greedy(4), greedy(1)])
    assert [output.prompt_token_ids for output in first + second] == [(97,), (98,), (99,), (100,), (99,)]
    assert [len(output.token_ids) for output in first + second] == [5, 2, 6, 4, 1]
    assert len({output.request_id for output in first + second}) == 5
    assert second[0].token_ids[:1] == second[2].token_ids


def test_a_bad_prompt_has_its_error_in_its_place(llm: LLM) -> None:
    good, empty, long, foreign, fine = llm.generate([[97], [], [97] * 41, [97, 300], [97, 98]], greedy(2))
    assert good.error is None and len(good.token_ids) == len(fine.token_ids) == 2
    for output, message in ((empty, "no tokens"), (long, "max_model_len is 40"), (foreign, "not in the vocabulary")):
        assert output.finish_reason is FinishReason.ERROR and message in (output.error or "") and not output.token_ids


def test_one_text_is_a_batch_of_one(llm: LLM) -> None:
    (output,) = llm.generate("a", greedy(3))
    assert output.token_ids == llm.generate([[97]], greedy(3))[0].token_ids
    assert llm.generate([], greedy(3)) == []


def test_a_chat_is_one_conversation_or_several(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, greedy(2))
    assert list(one.prompt_token_ids) == llm.tokenizer.encode_chat(messages)
    several = llm.chat([messages, [], messages], greedy(2))
    assert [output.token_ids for output in several] == [one.token_ids, (), one.token_ids]
    assert "messages" in (several[1].error or "")


def test_params_and_prompts_must_pair_up(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        llm.generate(["a", "b"], [greedy(1)])


def test_a_prompt_of_another_kind_is_an_error_in_its_place(llm: LLM) -> None:
    (output,) = llm.generate([3], greedy(1))  # type: ignore[arg-type]
    assert "neither a text nor a list" in (output.error or "")


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], greedy(4))
    assert not llm.engine.has_work and llm.engine.stats().num_used_blocks == 0
    assert len(llm.generate("a", greedy(4))[0].token_ids) == 4


def test_a_model_or_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelError, match="dummy:nothing"):
        LLM("dummy:nothing")
    for dtype in ("fp8", "int8"):  # no dtype at all, and one of caches only
        with pytest.raises(ConfigError, match=f"dtype='{dtype}' is not known; allowed: fp32, bf16, fp16;"):
            LLM("dummy:tiny", dtype=dtype)
