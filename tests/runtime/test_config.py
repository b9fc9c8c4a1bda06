"""What config.json says is what the model and the kernel get, or a named refusal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagegen.errors import ModelError, SpecError
from pagegen.runtime.models.config import ModelConfig
from pagegen.spec import DType
from tests.runtime.model_files import HF_CONFIG

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(HF_CONFIG | changes)


def test_a_stated_head_dim_wins_over_hidden_size_by_heads() -> None:
    sizes = config(hidden_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert sizes.weight_shapes()["model.layers.0.self_attn.q_proj.weight"] == (32, 20)
    assert sizes.weight_shapes()["model.layers.0.self_attn.o_proj.weight"] == (20, 32)
    assert sizes.kernel_spec(DType.FP32).head_dim == 8


def test_hidden_size_need_not_divide_by_heads_when_head_dim_is_stated() -> None:
    sizes = config(hidden_size=20, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    assert sizes.weight_shapes()["model.layers.1.self_attn.q_proj.weight"] == (24, 20)


def test_without_head_dim_it_is_hidden_size_by_heads_and_the_spec_refuses_what_no_kernel_covers() -> None:
    sizes = config(hidden_size=20, num_attention_heads=4, head_dim=None)
    assert sizes.head_dim == 5
    with pytest.raises(SpecError, match="head_dim=5"):
        sizes.kernel_spec(DType.FP32)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_under_every_name_it_has_had(block: str, key: str) -> None:
    scaled = config(head_dim=8, rope_theta=500000.0, **{block: {key: "llama3", **LLAMA3}})
    assert scaled.inverse_frequencies() == pytest.approx([1, 0.0376060309, 0.000524846161, 6.64786987e-06], rel=1e-7)


def test_unscaled_frequencies_and_the_theta_of_transformers_5() -> None:
    plain = config(head_dim=8, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert plain.rope_scaling is None
    assert plain.inverse_frequencies() == pytest.approx([1, 0.0376060309, 0.00141421356, 5.3182959e-05], rel=1e-7)


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = config(rope_scaling={"type": "linear", "factor": 4.0})
    assert [4 * f for f in scaled.inverse_frequencies()] == pytest.approx(config().inverse_frequencies())


def test_kv_heads_default_to_heads_and_the_spec_carries_the_sizes() -> None:
    spec = config(num_key_value_heads=None).kernel_spec(DType.BF16, block_size=32)
    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.block_size, spec.dtype) == (4, 4, 8, 32, DType.BF16)


def test_weight_shapes_follow_biases_and_tying() -> None:
    shapes = config(attention_bias=True, mlp_bias=True, tie_word_embeddings=False).weight_shapes()
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (16,)
    assert shapes["model.layers.1.mlp.down_proj.bias"] == (32,)
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"]
    assert "lm_head.weight" not in config().weight_shapes()


def test_published_parameter_count_of_smollm2() -> None:
    shapes = config(
        num_hidden_layers=30,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
    ).weight_shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "'foo'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "factor"),
        ({"rope_scaling": "linear"}, "mapping"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"sliding_window": "wide"}, "sliding_window='wide'"),
        ({"sliding_window": 64, "max_position_embeddings": "long"}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_layers"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"vocab_size": "49152"}, "vocab_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"eos_token_id": 10**6}, "special token"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_a_window_as_wide_as_the_context_is_no_window() -> None:
    assert config(sliding_window=128).max_position_embeddings == 128


@pytest.mark.parametrize(("stated", "ids"), [(2, (2,)), ([2, 7, 2], (2, 7)), (None, ())])
def test_end_tokens_are_one_id_a_list_or_none(stated: Any, ids: tuple[int, ...]) -> None:
    assert config(eos_token_id=stated).eos_token_ids == ids
