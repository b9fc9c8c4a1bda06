"""Claims about the network: equal to transformers', and blind to how tokens are batched, chunked and paged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagegen.errors import ModelError
from pagegen.reference import ReferenceKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.layers import Linear, LMHead, RMSNorm, RotaryEmbedding, silu_and_mul
from pagegen.runtime.models import MODELS, CausalLM, build_model
from pagegen.runtime.models.config import ModelConfig, RopeScaling
from pagegen.runtime.policies import Demand
from pagegen.runtime.scheduler import ScheduledBatch, ScheduledSequence
from pagegen.runtime.sequence import Request, SequenceGroup
from pagegen.spec import DType
from tests.runtime.oracle import oracle_of

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=40,
    num_heads=5,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=56,
    vocab_size=101,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
BIASED = dataclasses.replace(
    TINY, hidden_size=42, num_heads=6, num_kv_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
)
LLAMA3 = dataclasses.replace(
    TINY,
    hidden_size=42,
    num_heads=7,
    num_kv_heads=7,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
)
LINEAR = dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", 4.0), architecture="MistralForCausalLM")
VARIANTS = {"tied, group 5": TINY, "biases, untied": BIASED, "llama3 rope": LLAMA3, "linear rope": LINEAR}


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in config.weight_shapes().items()}


class Session:
    """A model with a cache of its own; `feed` computes tokens of any number of sequences in one batch."""

    def __init__(self, config: ModelConfig, dtype: DType = DType.FP32, block_size: int = 3) -> None:
        spec = config.kernel_spec(dtype, block_size)
        self.model: CausalLM = build_model(config, random_weights(config), dtype)
        self.kernels, self.cache = ReferenceKernels(spec), KVCache(spec, config.num_layers, 90)
        self.blocks = BlockManager(90, block_size)

    def feed(self, *rows: tuple[int, list[int]]) -> torch.Tensor:
        """Rows of (sequence id, its next tokens); logits of every token [T, vocab_size]."""
        made = []
        for seq_id, token_ids in rows:
            start = self.blocks.num_tokens(seq_id)
            if not start:
                self.blocks.allocate(seq_id, Demand(range(0), 0), 0)
            self.blocks.append(seq_id, len(token_ids))
            request = Request("", (*[0] * start, *token_ids), 99)
            (sequence,) = SequenceGroup(request, seq_id, (seq_id, seq_id)).sequences
            made.append(ScheduledSequence(sequence, start, len(token_ids)))
        batch = Batch.from_scheduled(ScheduledBatch(tuple(made)), self.blocks)
        batch = dataclasses.replace(batch, logits_rows=torch.arange(batch.num_tokens))
        with torch.inference_mode():
            return self.model.forward(batch, self.cache, self.kernels)


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(TINY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.mark.oracle
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str) -> None:
    config = VARIANTS[name]
    oracle = oracle_of(config, random_weights(config))
    token_ids = prompt(50)
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(Session(config).feed((0, token_ids)), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_give_what_the_whole_prompt_gives(chunk: int) -> None:
    token_ids = prompt(17)
    whole = Session(TINY).feed((0, token_ids))
    session = Session(TINY)
    chunks = [session.feed((0, token_ids[i : i + chunk])) for i in range(0, len(token_ids), chunk)]
    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-4, rtol=1e-4)


def test_prompts_and_decodes_in_one_batch_give_what_each_gives_alone() -> None:
    lengths = [1, 3, 4, 11]
    mixed = Session(BIASED)
    mixed.feed((0, prompt(5, 0)), (2, prompt(4, 2)))
    together = torch.split(mixed.feed(*((s, prompt(n, 10 + s)) for s, n in enumerate(lengths))), lengths)
    for s, n in enumerate(lengths):
        alone = Session(BIASED)
        if s in (0, 2):
            alone.feed((s, prompt(5 if s == 0 else 4, s)))
        torch.testing.assert_close(together[s], alone.feed((s, prompt(n, 10 + s))), atol=1e-4, rtol=1e-4)


def test_bf16_stays_near_fp32_and_gives_float32_logits() -> None:
    exact, rounded = Session(TINY).feed((0, prompt(9))), Session(TINY, DType.BF16).feed((0, prompt(9)))
    assert rounded.dtype == torch.float32
    assert (rounded.log_softmax(-1) - exact.log_softmax(-1)).abs().max() < 0.25


def test_the_likeliest_bf16_logits_are_as_exact_as_their_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = (
        torch.randn(201, 64, generator=generator).bfloat16(),
        2 * torch.randn(5, 64, generator=generator).bfloat16(),
    )
    exact = x.float() @ weight.float().T
    logits, rounded = LMHead(Linear(weight))(x), (x @ weight.T).float()
    best = exact.topk(20).indices
    assert (logits - exact).gather(-1, best).abs().max() < 1e-4 < (rounded - exact).gather(-1, best).abs().max()
    torch.testing.assert_close(logits, exact, atol=0.2, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.norm.weight": torch.ones(41)}, r"model.norm.weight has shape \(41,\), its config says \(40,\)"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(80)}, "q_proj.bias has no place"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(56, 40)}, "layers.2.mlp.up_proj.weight has no place"),
    ],
)
def test_weights_that_do_not_match_the_config_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    weights = {name: tensor for name, tensor in (random_weights(TINY) | change).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        build_model(TINY, weights, DType.FP32)


def test_a_stored_copy_of_tied_embeddings_is_no_error() -> None:
    build_model(TINY, random_weights(TINY) | {"lm_head.weight": torch.ones(101, 40)}, DType.FP32)


def test_every_row_of_the_table_names_a_class() -> None:
    for architecture in MODELS:
        config = dataclasses.replace(TINY, architecture=architecture)
        assert build_model(config, random_weights(config), DType.FP32).config is config


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(torch.tensor(TINY.inverse_frequencies()))
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(q_position: int, k_position: int) -> float:
        rotated = [
            RotaryEmbedding.rotate(x, rotary.angles(torch.tensor([position])))
            for x, position in ((q, q_position), (k, k_position))
        ]
        torch.testing.assert_close(rotated[0].norm(), q.norm())
        return float((rotated[0] * rotated[1]).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-3)
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_norm_and_gate_equal_their_formulas() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    weight = torch.arange(8.0)
    norm = RMSNorm(weight, 1e-5, torch.bfloat16)(x)
    assert norm.dtype == torch.bfloat16
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm.double(), expected, atol=1e-2, rtol=1e-2)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-5)
