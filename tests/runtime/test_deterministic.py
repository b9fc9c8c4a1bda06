"""`deterministic`: a request's tokens and logprobs have the bits that they have when it is alone, whatever else is so."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from pagegen.errors import ConfigError, KernelError
from pagegen.kernel import PagedKernels
from pagegen.runtime.engine import Engine, EngineConfig, RequestOutput
from pagegen.runtime.engine_config import KV_DTYPES
from pagegen.runtime.launcher import default_kernels, find_kernels
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.quantised import WEIGHT_DTYPES
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Preemption
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType
from tests.runtime.engine_rig import finish_all

pytestmark = pytest.mark.compiler

BLOCK_SIZE = 8
MAX_MODEL_LEN = 120
NUM_JOBS = 40
TINY = ModelConfig(  # sizes at which products do depend on the number of rows
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=136,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=264,
    vocab_size=300,
    max_position_embeddings=MAX_MODEL_LEN,
)
PARTS = [range(begin, begin + 50) for begin in range(0, 300, 50)]
SEEDS = range(1, 6)  # of every run; what a scenario may come upon is among them
GAP = 1e-3  # tokens that are nearer to each other than this may change places where bits may differ


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model on real kernels."""

    model: CausalLM
    kernels: PagedKernels

    @property
    def deterministic(self) -> bool:
        return self.kernels.spec.deterministic

    def engine(self, **limits: object) -> Engine:
        config = EngineConfig(
            dtype=self.model.dtype,
            max_model_len=MAX_MODEL_LEN,
            kv_dtype=None if self.kernels.spec.kv_scale is None else self.kernels.spec.kv_dtype,
            deterministic=self.deterministic,
            **limits,  # type: ignore[arg-type]
        )
        return Engine(self.model, self.kernels, None, config)


@functools.cache
def tiny(
    dtype: DType, deterministic: bool, kv_dtype: DType | None = None, weight_dtype: DType | None = None
) -> Loaded:
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(shape, generator=generator) * (1 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in TINY.weight_shapes().items()
    }
    spec = TINY.kernel_spec(dtype, BLOCK_SIZE).replace(deterministic=deterministic, kv_dtype=kv_dtype)
    return Loaded(build_model(TINY, weights, dtype, deterministic, weight_dtype), default_kernels(spec))


@functools.cache
def smollm2(dtype: DType, deterministic: bool) -> Loaded:
    source = resolve_model("smollm2-135m")
    spec = source.config.kernel_spec(dtype, BLOCK_SIZE).replace(deterministic=deterministic)
    return Loaded(build_model(source.config, source.weights(), dtype, deterministic), default_kernels(spec))


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt with its params: number `index` of those of a model."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def num_blocks(self) -> int:
        """That it takes to have all its sequences to itself."""
        return len(self.prompt) // BLOCK_SIZE + self.params.num_sequences * (2 + self.params.max_tokens // BLOCK_SIZE)


@functools.cache
def job(index: int, vocab_size: int, greedy: bool) -> Job:
    """Prompts of 1 to 80 tokens, half of which begin as others do; greedy ones show the two likeliest tokens."""
    chance = random.Random(index)
    shared = [random.Random(index % 3).randrange(vocab_size) for _ in range(chance.choice([0, 8, 21, 40]))]
    prompt = [*shared, *(chance.randrange(vocab_size) for _ in range(chance.choice([1, 2, 7, 8, 9, 30, 40])))]
    params = SamplingParams(
        max_tokens=chance.choice([1, 12, 30, 40]), temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=None
    )
    if not greedy:
        params = dataclasses.replace(
            params,
            logprobs=chance.choice([None, 0, 2, 20]),
            prompt_logprobs=chance.choice([None, None, 3]),
        )
        if chance.random() < 0.6:
            n = chance.choice([1, 2, 3])
            params = dataclasses.replace(
                params,
                temperature=chance.choice([0.5, 1.0, 1.7]),
                top_k=chance.choice([0, 0, 5, 299]),
                top_p=chance.choice([1.0, 0.9, 0.4]),
                seed=index,
                n=n,
                best_of=chance.choice([None, n + 1]),
            )
    return Job(tuple(prompt), params)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Who runs together, when each comes, and in what engine."""

    arrivals: tuple[tuple[int, int], ...]  # (steps before it comes, job)
    budget: int
    policy: str
    preemption: str
    prefix_cache: bool
    num_blocks: int
    max_num_seqs: int

    @classmethod
    def random(cls, seed: int, jobs: list[Job]) -> Scenario:
        """Chunks of 1 token up to whole prompts; a pool that holds the largest of `jobs` taken, and perhaps no more."""
        chance = random.Random(seed)
        budget = chance.choice([1, 7, 64, 512])
        able = [index for index, job in enumerate(jobs) if job.params.num_sequences <= budget]
        taken = chance.sample(able, chance.randrange(3, 10))
        minimum = max(jobs[index].num_blocks for index in taken)
        return cls(
            tuple((chance.choice([0, 0, 0, 1, 4]), index) for index in taken),
            budget,
            chance.choice(["default", "default", "vllm-paper"]),
            chance.choice(["recompute", "swap", "none"]),
            chance.random() < 0.5,
            minimum + chance.choice([0, 0, 0, 1, 5, 100]),
            chance.choice([4, 8, 32]),
        )

    def engine(self, loaded: Loaded) -> Engine:
        chunked = self.policy == "default"
        return loaded.engine(
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget if chunked else None,
            policy=self.policy,
            preemption=Preemption(self.preemption),
            prefix_cache=self.prefix_cache,
        )


Outputs = dict[int, RequestOutput]


class Trial:
    """Scenarios of one model against each job alone, and a count of what they came upon."""

    def __init__(self, loaded: Loaded, *, greedy: bool = False) -> None:
        self.loaded = loaded
        self.jobs = [job(index, loaded.model.config.vocab_size, greedy) for index in range(NUM_JOBS)]
        self.counts: Counter[str] = Counter()
        self._alone: dict[int, Outputs] = {}

    def alone(self, index: int) -> Outputs:
        """A job in an engine of its own, its prompt at once."""
        if index not in self._alone:
            engine = self.loaded.engine(num_blocks=200, prefix_cache=False, max_num_batched_tokens=512)
            self._alone |= run(engine, ((0, index),), self.jobs)
        return self._alone[index]

    def play(self, seed: int) -> Iterator[tuple[RequestOutput, RequestOutput]]:
        """(output, output alone) of what a random scenario did not end for want of blocks."""
        scenario = Scenario.random(seed, self.jobs)
        engine = scenario.engine(self.loaded)
        for index, outputs in run(engine, scenario.arrivals, self.jobs).items():
            for output in outputs.values():
                if output.error is None:
                    self.counts["outputs"] += 1
                    yield output, self.alone(index)[output.index]
                else:
                    assert scenario.preemption == "none", output.error
        stats = engine.stats()
        self.counts["preemptions"] += stats.num_preemptions
        self.counts["swaps"] += stats.num_swaps
        self.counts["cached tokens"] += stats.num_cached_tokens


def run(engine: Engine, arrivals: tuple[tuple[int, int], ...], jobs: list[Job]) -> dict[int, Outputs]:
    """Outputs of each job by its index among its n."""
    done: dict[int, Outputs] = {index: {} for _, index in arrivals}
    for steps, index in arrivals:
        for _ in range(steps):
            take(engine.step(), done)
        engine.add_request(str(index), list(jobs[index].prompt), jobs[index].params)
    for output in finish_all(engine, 20_000).values():
        take([output], done)
    return done


def take(outputs: list[RequestOutput], done: dict[int, Outputs]) -> None:
    for output in outputs:
        if output.finish_reason:
            done[int(output.request_id)][output.index] = output


def bits(output: RequestOutput) -> tuple[object, ...]:
    return output.token_ids, output.text, output.finish_reason, output.logprobs, output.prompt_logprobs


def assert_bits(trial: Trial, seeds: range) -> None:
    for seed in seeds:
        for output, alone in trial.play(seed):
            assert bits(output) == bits(alone), f"scenario {seed}, request {output.request_id}.{output.index}"
    assert trial.counts["preemptions"] and trial.counts["swaps"] and trial.counts["cached tokens"]
    print(f"\n{len(seeds)} scenarios, bit-equal: {dict(trial.counts)}")


def assert_tokens(trial: Trial, seeds: range) -> None:
    """Greedy tokens are those of each alone up to where its two likeliest are nearer than GAP to each other."""
    gaps = list[float]()
    for seed in seeds:
        for output, alone in trial.play(seed):
            if output.token_ids != alone.token_ids:
                gaps.append(gap_where_they_part(output, alone))
    print(f"\n{len(seeds)} scenarios, {len(gaps)} outputs parted at a near tie: {dict(trial.counts)}")
    assert all(gap < GAP for gap in gaps), max(gaps)


def gap_where_they_part(output: RequestOutput, alone: RequestOutput) -> float:
    pairs = zip(output.token_ids, alone.token_ids, strict=True)
    step = next(step for step, (mine, theirs) in enumerate(pairs) if mine != theirs)
    assert alone.logprobs is not None
    (_, best), (_, second) = alone.logprobs[step].top
    return best - second


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_a_model_or_kernels_that_are_not_deterministic_are_refused_and_more_than_asked_for_is_taken() -> None:
    plain, kept = tiny(DType.FP32, False), tiny(DType.FP32, True)
    config = EngineConfig(dtype=DType.FP32, num_blocks=4, deterministic=True)
    with pytest.raises(ConfigError, match="the model is not; build it with deterministic=True"):
        Engine(plain.model, kept.kernels, None, config)
    with pytest.raises(KernelError, match="the model needs fp32-d24-h6x2-b8-NHD-det"):
        Engine(kept.model, plain.kernels, None, config)
    Engine(plain.model, kept.kernels, None, dataclasses.replace(config, deterministic=False))


def test_without_a_package_deterministic_kernels_are_built_and_named_in_one_line() -> None:
    spec = TINY.kernel_spec(DType.FP32, BLOCK_SIZE).replace(deterministic=True)
    kernels, message = find_kernels(spec)
    assert kernels.spec == spec
    assert message.startswith(f"default config, {spec.slug} on ") and "\n" not in message


# --- bit-equal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_deterministic_outputs_have_the_bits_of_each_alone(dtype: DType) -> None:
    assert_bits(Trial(tiny(dtype, True)), SEEDS)


@pytest.mark.parametrize("kv_dtype", [pytest.param(each, marks=[] if each is DType.INT4 else pytest.mark.long) for each in KV_DTYPES])
def test_with_a_quantised_cache_too(kv_dtype: DType) -> None:
    """Copied, swapped and shared blocks keep their scales: else they would mean other numbers."""
    assert_bits(Trial(tiny(DType.BF16, True, kv_dtype)), SEEDS)


@pytest.mark.parametrize("weight_dtype", [pytest.param(each, marks=[] if each is DType.INT4 else pytest.mark.long) for each in WEIGHT_DTYPES])
def test_with_quantised_weights_too(weight_dtype: DType) -> None:
    assert_bits(Trial(tiny(DType.BF16, True, None, weight_dtype)), SEEDS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_deterministic_outputs_have_the_bits_of_each_alone_at_length(dtype: DType, seeds: range) -> None:
    assert_bits(Trial(tiny(dtype, True)), seeds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_deterministic_outputs_have_the_bits_of_each_alone_on_two_threads(dtype: DType) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_bits(Trial(tiny(dtype, True)), range(300, 312))
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.model
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_smollm2s_deterministic_outputs_have_the_bits_of_each_alone(dtype: DType) -> None:
    assert_bits(Trial(smollm2(dtype, True)), range(5))


def test_without_it_bits_differ_which_these_tests_would_notice() -> None:
    trial = Trial(tiny(DType.FP32, False))
    if all(bits(output) == bits(alone) for seed in range(6) for output, alone in trial.play(seed)):
        pytest.skip("this machine's products do not depend on their rows' number")


# --- without it ------------------------------------------------------------------------------------------------------


def test_without_it_fp32_tokens_are_those_of_each_alone_but_for_near_ties() -> None:
    assert_tokens(Trial(tiny(DType.FP32, False), greedy=True), SEEDS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_without_it_fp32_tokens_are_those_of_each_alone_but_for_near_ties_at_length(seeds: range) -> None:
    assert_tokens(Trial(tiny(DType.FP32, False), greedy=True), seeds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.model
def test_without_it_smollm2s_fp32_tokens_are_those_of_each_alone_but_for_near_ties() -> None:
    assert_tokens(Trial(smollm2(DType.FP32, False), greedy=True), range(5))
