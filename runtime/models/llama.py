"""The Llama family: RMSNorm before each block, rotary embedding, grouped-query attention, SiLU-gated MLP.

Touvron et al. 2023 (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2307.09288).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from pagegen.kernel import TORCH_DTYPES, PagedKernels
from pagegen.runtime.attention import PagedAttention
from pagegen.runtime.batch import Batch
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.layers import Checkpoint, Linear, LMHead, RotaryEmbedding, silu_and_mul
from pagegen.runtime.models.config import ModelConfig
from pagegen.spec import DType


class LlamaLayer:
    """One decoder layer; adds to the residual stream in place."""

    def __init__(self, index: int, config: ModelConfig, checkpoint: Checkpoint) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.input_norm = checkpoint.norm(f"{prefix}.input_layernorm", config.rms_norm_eps)
        self.qkv = checkpoint.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self.o = checkpoint.linear(f"{attention}.o_proj")
        self.post_attention_norm = checkpoint.norm(f"{prefix}.post_attention_layernorm", config.rms_norm_eps)
        self.gate_up = checkpoint.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self.down = checkpoint.linear(f"{mlp}.down_proj")
        self.deterministic = checkpoint.deterministic

    def forward(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: PagedAttention, batch: Batch
    ) -> None:
        """hidden [T, hidden_size] float32."""
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_dim)
        qk = RotaryEmbedding.rotate(qkv[:, : self.num_heads + self.num_kv_heads], angles)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, -self.num_kv_heads :]
        hidden += self.o(attention(self.index, q, k, v, batch))
        gate_up = self.gate_up(self.post_attention_norm(hidden))
        hidden += self.down(silu_and_mul(gate_up, self.deterministic))


class LlamaForCausalLM:
    """Raises ModelError if the weights are not what the config says."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: DType,
        deterministic: bool = False,
        weight_dtype: DType | None = None,
    ) -> None:
        checkpoint = Checkpoint(weights, config.weight_shapes(), TORCH_DTYPES[dtype], deterministic, weight_dtype)
        self.config = config
        self.dtype = dtype
        self.deterministic = deterministic
        self.embed_tokens = checkpoint.tensor("model.embed_tokens.weight")
        self.layers = [LlamaLayer(index, config, checkpoint) for index in range(config.num_layers)]
        self.norm = checkpoint.norm("model.norm", config.rms_norm_eps)
        head = self.embed_tokens if config.tie_word_embeddings else checkpoint.tensor("lm_head.weight")
        self.lm_head = LMHead(Linear(head, None, deterministic))
        self.rotary = RotaryEmbedding(torch.tensor(config.inverse_frequencies(), dtype=torch.float32))

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        """See CausalLM."""
        attention = PagedAttention(kernels, kv_cache)
        hidden = F.embedding(batch.input_ids, self.embed_tokens).float()
        angles = self.rotary.angles(batch.positions)
        for layer in self.layers:
            layer.forward(hidden, angles, attention, batch)
        return self.lm_head(self.norm(hidden[batch.logits_rows]))
