"""transformers' network with our weights: what ours is compared with."""

from __future__ import annotations

from typing import Any

import torch

from pagegen.runtime.models.config import ModelConfig


def oracle_of(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    """A transformers LlamaForCausalLM in fp32. The caller's test is marked `oracle`."""
    import transformers

    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling and scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    oracle.train(False)
    oracle.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return oracle
