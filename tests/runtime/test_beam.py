"""Claims about beam search: transformers' outputs and scores, whatever else runs, and whatever happens to the blocks."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import RequestError
from pagegen.runtime.beam_search import BeamSearch
from pagegen.runtime.engine import Engine, RequestOutput
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Scheduler
from pagegen.runtime.scheduling.events import Branch, SchedulerEvent
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.simulation.log import decode, encode
from pagegen.spec import DType
from tests.runtime.engine_rig import EOS, GREEDY, TINY, ScriptedModel, finish_all, make_engine
from tests.runtime.oracle import oracle_of

CONFIG = dataclasses.replace(TINY.config, hidden_size=48)  # transformers wants a multiple of the heads
VOCAB_SIZE = CONFIG.vocab_size
STOPS = tuple(random.Random(0).sample(range(VOCAB_SIZE), 25))  # every tenth token: some search meets one in each step
PROMPTS = [[97, 98, 99], list(range(100, 109)), [7] * 16]
Early = bool | Literal["never"]


def random_weights() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draws) * shape[-1] ** -0.5
        for name, shape in CONFIG.weight_shapes().items()
    }


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return build_model(CONFIG, random_weights(), DType.FP32)


def beams(width: int, n: int | None = None, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, beam_width=width, n=n or width, ignore_eos=True, **changes)


def outputs_of(done: dict[tuple[str, int], RequestOutput], request_id: str) -> list[RequestOutput]:
    """A request's outputs in order."""
    return [output for (owner, _), output in sorted(done.items()) if owner == request_id]


# --- transformers ----------------------------------------------------------------------------------------------------


def expected(oracle: Any, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    """Outputs with their scores, as `generate` gives them."""
    ends = list(params.stop_token_ids)
    found = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=ends or None,
        pad_token_id=-100,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [[token for token in row[len(prompt) :] if token != -100] for row in found.sequences.tolist()]
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


@pytest.mark.oracle
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5, 2.0])
def test_outputs_and_scores_are_those_of_transformers(
    tiny: CausalLM, early_stopping: Early, length_penalty: float
) -> None:
    """Widths 2 to 4, with stop tokens and without, all in one batch."""
    oracle = oracle_of(CONFIG, random_weights())
    engine = make_engine(tiny, num_blocks=600, max_num_seqs=64, budget=200)
    cases = dict[str, tuple[list[int], SamplingParams]]()
    for width in (2, 3, 4):
        for i, prompt in enumerate(PROMPTS):
            for stops in ((), STOPS):
                params = beams(
                    width,
                    n=1 + (width + i) % width,
                    stop_token_ids=stops,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                )
                cases[f"{width} beams, prompt {i}, {len(stops)} stops"] = prompt, params
    for name, (prompt, params) in cases.items():
        engine.add_request(name, prompt, params)
    done = finish_all(engine)
    reasons = {output.finish_reason for output in done.values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}
    for name, (prompt, params) in cases.items():
        outputs = outputs_of(done, name)
        theirs = expected(oracle, prompt, params)
        assert [list(output.token_ids) for output in outputs] == [tokens for tokens, _ in theirs], name
        assert [output.score for output in outputs] == pytest.approx([score for _, score in theirs], rel=1e-4), name
