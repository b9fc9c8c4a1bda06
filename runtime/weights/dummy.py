"""Random weights in a known architecture: for measuring and testing without any download."""

from __future__ import annotations

import hashlib
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from pagegen.errors import ModelError
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.tokenizer import Tokenizer, byte_alphabet

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")  # ids 256, 257, 258
END_TOKEN_IDS = (257, 258)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "eos_token_id": list(END_TOKEN_IDS),
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        **more,
    }


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Hugging Face settings of published models; `tiny` is made for tests: three query heads a KV head, heads wider than
# the hidden size together, an untied head.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny": _llama(
        2, 40, 6, 2, 88, 259, head_dim=16, rope_theta=1e4, max_position_embeddings=512, tie_word_embeddings=False
    ),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, rope_theta=1e5),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, rope_theta=1e5),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, rope_theta=1.3e5),
    "llama-3.2-1b": _llama(
        16,
        2048,
        32,
        8,
        8192,
        128256,
        rope_theta=5e5,
        max_position_embeddings=131072,
        rope_scaling=_LLAMA3_SCALING,
    ),
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 32000, max_position_embeddings=2048, tie_word_embeddings=False),
}


class DummyModel:
    """`dummy:NAME`. The same name gives the same weights, in bf16 as published models have them, fp32 for `tiny`."""

    def __init__(self, name: str) -> None:
        if name not in ARCHITECTURES:
            raise ModelError(
                f"dummy:{name} is not known; allowed: {', '.join('dummy:' + key for key in ARCHITECTURES)}"
            )
        self.name = f"dummy:{name}"
        self.config = ModelConfig.from_hf(ARCHITECTURES[name])
        self._dtype = torch.float32 if name == "tiny" else torch.bfloat16

    def weights(self) -> dict[str, torch.Tensor]:
        """Norms of one, everything else normal with variance 1 / fan-in, so that activations keep their size."""
        return {name: self._weight(name, shape) for name, shape in self.config.weight_shapes().items()}

    def tokenizer(self) -> Tokenizer:
        """One token a byte (ids 0 to 255) and the three control tokens of ChatML; other ids have no text."""
        vocabulary = {character: byte for character, byte in byte_alphabet().items()}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in CONTROL_TOKENS])
        return Tokenizer(backend, eos_token_ids=self.config.eos_token_ids, chat_template=CHAT_TEMPLATE)

    def _weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        seed = int.from_bytes(hashlib.blake2b(f"{self.name}/{name}".encode(), digest_size=7).digest())
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=self._dtype).normal_(0, shape[-1] ** -0.5, generator=generator)
