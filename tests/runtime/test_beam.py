"""Claims about beam search: transformers' outputs and scores, whatever else runs, and whatever happens to the blocks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import RequestError
from pagegen.kernel import PagedKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.beam_search import BeamSearch
from pagegen.runtime.engine import Engine, RequestOutput
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.launcher import default_kernels
from pagegen.runtime.llm import LLM
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Scheduler
from pagegen.runtime.scheduling import find_policy
from pagegen.runtime.scheduling.events import Branch, Sampled, SchedulerEvent, Updated
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.simulation.log import decode, encode
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType
from tests.runtime.engine_rig import GREEDY, TINY, ScriptedModel, finish_all, make_engine
from tests.runtime.oracle import oracle_of
from tests.runtime.scheduling_rig import Rig

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


QUICK = [(1.0, True), (0.0, "never"), (-1.5, False), (2.0, "never")]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.long)
        for each in itertools.product((1.0, 0.0, -1.5, 2.0), (True, False, "never"))
    ],
)
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


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.oracle
@pytest.mark.model
@pytest.mark.compiler
def test_smollm2_gives_the_outputs_and_scores_of_transformers() -> None:
    """On generated kernels in fp32; the chat ends by its stop token."""
    source = resolve_model("smollm2-135m")
    oracle, tokenizer = oracle_of(source.config, source.weights()), source.tokenizer()
    kernels = default_kernels(source.config.kernel_spec(DType.FP32))
    llm = LLM("smollm2-135m", kernels=kernels, dtype=DType.FP32, kv_cache_bytes=2**28)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}]),
        tokenizer.encode("The tide comes in, and"),
    ]
    ends = tuple(sorted({*source.config.eos_token_ids, *tokenizer.eos_token_ids}))
    searches: list[tuple[int, float, Early]] = [(2, 1.0, False), (4, 2.0, "never")]
    for width, penalty, early_stopping in searches:
        params = SamplingParams(
            max_tokens=12, beam_width=width, n=width, length_penalty=penalty, early_stopping=early_stopping
        )
        outputs = llm.generate(prompts, params)
        for i, prompt in enumerate(prompts):
            mine = outputs[i * width : (i + 1) * width]
            theirs = expected(oracle, prompt, dataclasses.replace(params, stop_token_ids=ends))
            assert [list(output.token_ids) for output in mine] == [tokens for tokens, _ in theirs]
            assert [output.score for output in mine] == pytest.approx([score for _, score in theirs], abs=1e-3)


# --- the rules, on models whose every probability is known -----------------------------------------------------------


class Chances(ScriptedModel):
    """Next-token probabilities by the newest token; what is not named gets none."""

    def __init__(self, table: dict[int, dict[int, float]]) -> None:
        super().__init__(lambda position, token: 0)
        self.table = table
        self.config = dataclasses.replace(self.config, vocab_size=3, eos_token_ids=())

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        logits = torch.full((len(batch.logits_rows), self.config.vocab_size), -30.0)
        for row, token in enumerate(batch.logits_rows.tolist()):
            for chosen, chance in self.table[int(batch.input_ids[token])].items():
                logits[row, chosen] = math.log(chance)
        return logits


A, B, END = 0, 1, 2


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 3])
def test_the_best_output_begins_with_what_greedy_passes_over(width: int, logprobs: int | None) -> None:
    """Start: A .6, B .4; after A: END .4, A .3, B .3; after B: END .9. Width 4 is more than the vocabulary has."""
    table = {B: {END: 0.9, A: 0.05, B: 0.05}, A: {END: 0.4, A: 0.3, B: 0.3}, END: {A: 0.6, B: 0.4}}
    params = SamplingParams(
        max_tokens=2, n=2, beam_width=width, length_penalty=0.0, stop_token_ids=(END,), logprobs=logprobs
    )
    engine = make_engine(Chances(table))
    for request_id in "xy":
        engine.add_request(request_id, [END], params)
    engine.add_request("greedy", [END], dataclasses.replace(params, n=1, beam_width=1))
    done = finish_all(engine)
    assert done["greedy", 0].token_ids == (A, END)
    for request_id in "xy":
        first, second = outputs_of(done, request_id)
        assert (first.token_ids, second.token_ids) == ((B, END), (A, END))
        assert (first.score, second.score) == pytest.approx((-1.021651, -1.427116), abs=1e-5)
        assert first.finish_reason is second.finish_reason is FinishReason.STOP
        if logprobs is None:
            assert first.logprobs is None
        else:
            assert first.logprobs is not None
            assert [(entry.token_id, entry.rank, len(entry.top)) for entry in first.logprobs] == [
                (B, 2, logprobs),
                (END, 1, logprobs),
            ]
            assert sum(entry.logprob for entry in first.logprobs) == pytest.approx(first.score)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best"),
    [(True, 2.0, (A, END)), (False, 2.0, (B,) * 8), (False, 1.0, (A, END)), ("never", 1.0, (B,) * 8)],
)
def test_early_stopping_says_who_waits_for_a_beam_that_may_be_better_later(
    early_stopping: Early, length_penalty: float, best: tuple[int, ...]
) -> None:
    """After two steps two outputs have ended; B costs next to nothing a token, and its mean gets better and better."""
    table = {END: {END: 0.5, A: 0.4, B: 0.1}, A: {END: 0.9, A: 0.06, B: 0.04}, B: {B: 0.999, END: 0.001}}
    params = SamplingParams(
        max_tokens=8,
        n=2,
        beam_width=2,
        stop_token_ids=(END,),
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    engine = make_engine(Chances(table))
    engine.add_request("r", [END], params)
    first, second = outputs_of(finish_all(engine), "r")
    assert first.token_ids == best and (first.score or 0) > (second.score or 0)
    assert engine.stats().num_steps == (2 if best == (A, END) else 8)


def test_a_vocabulary_of_nothing_but_ends_ends_at_once() -> None:
    engine = make_engine(Chances({A: {A: 0.5, B: 0.3, END: 0.2}}))
    engine.add_request("r", [A], SamplingParams(n=3, beam_width=5, stop_token_ids=(A, B, END)))
    assert [output.token_ids for output in outputs_of(finish_all(engine), "r")] == [(A,), (B,), (END,)]
    with pytest.raises(RequestError, match="n=4 beams may end with their first token, of which there are 3"):
        engine.add_request("r", [A], SamplingParams(n=4, beam_width=5))


def test_unusable_logits_of_one_beam_end_its_request_alone(tiny: CausalLM) -> None:
    engine = make_engine(ScriptedModel(lambda position, token: float("nan") if token == 120 else token + 1))
    engine.add_request("sick", [118], beams(2))
    engine.add_request("well", [97], beams(2))
    done = finish_all(engine)
    assert all("NaN" in (output.error or "") for output in outputs_of(done, "sick"))
    assert len(outputs_of(done, "sick")) == len(outputs_of(done, "well")) == 2
    assert outputs_of(done, "well")[0].text == "bcdefghijklm"


# --- in company ------------------------------------------------------------------------------------------------------


REQUESTS = {
    "three": (PROMPTS[1], beams(3, stop_token_ids=STOPS, length_penalty=0.5, logprobs=2)),
    "two": (PROMPTS[2], beams(2, n=1)),
    "four": (PROMPTS[1][:7], beams(4, n=2, early_stopping="never")),
    "greedy": (PROMPTS[0], GREEDY),
    "sampled": (PROMPTS[1], dataclasses.replace(GREEDY, temperature=1.2, seed=5, n=3)),
    "one": (PROMPTS[2], beams(1)),
}


@pytest.fixture(scope="module")
def alone(tiny: CausalLM) -> dict[tuple[str, int], RequestOutput]:
    done: dict[tuple[str, int], RequestOutput] = {}
    for request_id, (prompt, params) in REQUESTS.items():
        engine = make_engine(tiny, num_blocks=200, budget=200, prefix_cache=False)
        engine.add_request(request_id, prompt, params)
        done |= finish_all(engine)
        assert engine.stats().num_preemptions == 0
    return done


@pytest.mark.parametrize(
    ("policy", "memory_policy", "preemption", "num_blocks", "prefix_cache"),
    [
        ("default", "paged", "recompute", 22, True),
        ("default", "paged", "recompute", 22, False),
        ("default", "paged", "swap", 22, True),
        ("vllm-paper", "paged", "swap", 22, False),
        ("vllm-paper", "paged", "auto", 22, False),
        ("orca", "paged", "recompute", 40, False),
        ("request", "orca-max", "recompute", 64, False),
    ],
)
def test_company_preemption_and_caches_change_nothing_and_the_run_repeats(
    tiny: CausalLM,
    alone: dict[tuple[str, int], RequestOutput],
    policy: str,
    memory_policy: str,
    preemption: str,
    num_blocks: int,
    prefix_cache: bool,
) -> None:
    log: list[SchedulerEvent] = []
    engine = make_engine(
        tiny,
        num_blocks=num_blocks,
        max_num_seqs=12,
        budget=16 if policy == "default" else None,
        max_model_len=32,
        policy=policy,
        memory_policy=memory_policy,
        preemption=preemption,
        prefix_cache=prefix_cache,
        recorder=log.append,
    )
    for request_id, (prompt, params) in REQUESTS.items():
        engine.add_request(request_id, prompt, params)
    done = finish_all(engine)
    assert {key: output.token_ids for key, output in done.items()} == {
        key: output.token_ids for key, output in alone.items()
    }
    for key, output in done.items():
        assert output.score == pytest.approx(alone[key].score, abs=1e-4)
        assert output.text == alone[key].text and output.finish_reason is alone[key].finish_reason
    assert bool(engine.stats().num_preemptions) == (num_blocks == 22)
    assert (engine.stats().num_swaps > 0) == (preemption == "swap") or preemption == "auto"
    branches = [row for event in log if isinstance(event, Updated) for row in event.sampled if isinstance(row, Branch)]
    assert branches, "beams that nobody replaces test nothing"
    repeat(engine, log)


def repeat(engine: Engine, log: list[SchedulerEvent]) -> None:
    """Runs the events again, as they are in a file: `apply` compares every iteration to the last block."""
    config = engine.config
    memory = make_memory_policy(
        config.memory_policy,
        engine.memory.num_blocks,
        engine.memory.block_size,
        max_model_len=engine.max_model_len,
        prefix_cache=config.prefix_cache and find_policy(config.policy).prefix_cache,
        num_host_blocks=engine.swap_space.num_blocks if engine.swap_space else 0,
    )
    scheduler = Scheduler(engine.scheduler.config, memory)
    for event in log:
        scheduler.apply(decode(json.loads(json.dumps(encode(event)))))
    assert not scheduler.has_work and memory.num_used_blocks == 0
    assert scheduler.num_preemptions == engine.scheduler.num_preemptions


@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_an_abort_at_any_moment_frees_every_beam(tiny: CausalLM, steps: int) -> None:
    engine = make_engine(tiny, num_blocks=30)
    engine.add_request("beams", PROMPTS[1], beams(3))
    engine.add_request("other", PROMPTS[1], beams(2))
    for _ in range(steps):
        engine.step()
        engine.memory.audit(full=True)
    assert engine.abort("beams") == (steps < 12)
    finish_all(engine)


@pytest.mark.parametrize("params", [beams(2), dataclasses.replace(GREEDY, temperature=1.0, n=2, best_of=3)])
def test_outputs_of_requests_that_end_in_one_step_are_all_told_at_the_end(
    tiny: CausalLM, params: SamplingParams
) -> None:
    engine = make_engine(tiny, num_blocks=60, max_num_seqs=9)
    for request_id in ("a", "b", "c"):
        engine.add_request(request_id, PROMPTS[0], params)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert not any(steps[:-1]) and len(steps[-1]) == 6
    assert [output.usage is not None for output in steps[-1]] == [False, True] * 3


def test_usage_has_the_blocks_that_livesaved(tiny: CausalLM) -> None:
    """Of 16 prompt tokens in blocks of 4, three beams list four blocks each and hold four; outputs share more."""
    engine = make_engine(tiny, num_blocks=60, prefix_cache=False)
    engine.add_request("r", PROMPTS[2], beams(3, n=2))
    outputs = outputs_of(finish_all(engine), "r")
    usage = outputs[-1].usage
    assert usage and usage.prompt_tokens == 16 and usage.saved_blocks >= 8
    assert usage.completion_tokens == sum(len(output.token_ids) for output in outputs) == 24
    assert engine.stats().num_saved_blocks == usage.saved_blocks
    assert engine.stats().num_generated_tokens == usage.completion_tokens


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_a_step_of_liveis_figure_9_of_the_vllm_paper() -> None:
    """Candidates 1, 1, 2, 2 of four go on: their own blocks are freed or shared, and four new ones taken."""
    rig = Rig(num_blocks=17, block_size=1)
    group = rig.add(1, 5, n=4, beams=True)
    rig.step()
    rig.step()
    before = [list(rig.memory.block_table(beam.seq_id)) for beam in group.live]
    batch = rig.scheduler.schedule()
    sampled: list[Sampled] = [Branch(1, 7), 8, 9, Branch(2, 10)]
    rig.scheduler.update(batch, sampled)
    grown = [list(rig.memory.block_table(beam.seq_id)) for beam in group.live]
    assert [table[:-1] for table in grown] == [before[1], before[1], before[2], before[2]]
    assert [rig.memory.ref_count(table[-1]) for table in grown] == [2] * 4
    assert not rig.scheduler.pool.transfers and [beam.token_ids[-1] for beam in group.live] == [7, 8, 9, 10]
    batch = rig.scheduler.schedule()
    assert not batch.transfers, "at the end of a block nothing is copied"
    tables = [list(rig.memory.block_table(beam.seq_id)) for beam in group.live]
    assert len({table[-1] for table in tables}) == 4
    rig.memory.audit(full=True)


def test_children_copy_the_block_that_they_share_but_for_the_last_who_writes_in_place() -> None:
    rig = Rig(num_blocks=40, block_size=4)
    group = rig.add(5, 6, n=4, beams=True)
    rig.step()
    assert sum(len(transfer.pairs) for transfer in rig.step().transfers) == 3  # the prompt's partial block
    batch = rig.scheduler.schedule()
    rig.scheduler.update(batch, [5, Branch(0, 6), Branch(0, 7), 8])
    copies = [pair for transfer in rig.scheduler.schedule().transfers for pair in transfer.pairs]
    assert len(copies) == 2 and len({source for source, _ in copies}) == 1
    assert group.num_saved_blocks == 3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 is out of range; allowed: 1 to 128"),
        ({"beam_width": 2, "n": 3}, "beam_width=2 is out of range; allowed: 3 to 128"),
        ({"beam_width": 2.0}, "beam_width=2.0 is not a whole number"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7 does not go with beam_width: a beam search draws"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p=0.9 does not go with beam_width"),
        ({"beam_width": 2, "top_k": 5}, "top_k=5 does not go with beam_width"),
        ({"beam_width": 2, "best_of": 4}, "best_of=4 does not go with beam_width: beam_width says how many"),
        ({"beam_width": 2, "stop": "x"}, "does not go with beam_width: beams are not watched for texts"),
        ({"beam_width": 2, "early_stopping": "maybe"}, "early_stopping='maybe' is not known; allowed: true, false"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping=1 is not known"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty=11.0 is out of range; allowed: -10 to 10"),
        ({"beam_width": 2, "length_penalty": "long"}, "length_penalty='long' is not a number"),
        ({"length_penalty": 2.0}, "length_penalty is for a beam search and none is asked for"),
        ({"early_stopping": True}, "early_stopping is for a beam search"),
    ],
)
def test_options_that_make_no_search_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value) and caught.value.param in options


def test_livethat_could_never_have_their_blocks_are_refused() -> None:
    """Four times 5 blocks less what the prompt's two full ones are shared: 2 + 4 * 3."""
    engine = make_engine(num_blocks=13)
    with pytest.raises(RequestError, match="for each of 4 sequences need 14 KV blocks, the pool has 13"):
        engine.add_request("r", PROMPTS[1], beams(4))
    with pytest.raises(RequestError, match="its 9 sequences run together, max_num_seqs is 8"):
        engine.add_request("r", PROMPTS[1], beams(9))
    fits = make_engine(num_blocks=14)
    fits.add_request("r", PROMPTS[1], beams(4))
    assert len(finish_all(fits)) == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(2, 5),
    vocab_size=st.integers(1, 12),
    num_stops=st.integers(0, 12),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([-3.0, 0.0, 1.0, 10.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_any_search_ends_with_its_best_outputs_first(
    seed: int,
    width: int,
    vocab_size: int,
    num_stops: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: Early,
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens, beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping
    )
    stops = frozenset(range(min(num_stops, vocab_size)))
    search = BeamSearch(params, stops, max_tokens, vocab_size)
    chance, live = random.Random(seed), list[list[int | None]]([[]])
    for step in range(max_tokens):
        rows = []
        for _ in live:
            tokens = chance.sample(range(vocab_size), search.num_candidates)
            rows.append(list(zip(tokens, sorted((-chance.expovariate(1) for _ in tokens), reverse=True), strict=True)))
        outcomes = search.advance(rows)
        if search.done:
            break
        if len(outcomes) == 1:
            (children,) = outcomes
        else:
            children = tuple(child for (child,) in outcomes)
        live = [[*live[child.parent or 0], child.token_id] for child in children]
        assert len(live) == search.num_beams == len({tuple(beam) for beam in live}), "no beam twice"
        assert all(not stops.intersection(beam) and len(beam) == step + 1 for beam in live)
    assert search.done
    scores = [hypothesis.score for hypothesis in search.hypotheses]
    assert scores == sorted(scores, reverse=True) and min(width, vocab_size) <= len(scores) <= width
    for hypothesis in search.hypotheses:
        entries = hypothesis.beam.tokens()
        assert (entries[-1].token_id in stops) == hypothesis.stopped and len(entries) <= max_tokens
        total = sum(entry.logprob for entry in entries)
        assert hypothesis.score == pytest.approx(total / len(entries) ** length_penalty)
