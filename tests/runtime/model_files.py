"""Writes tiny model files by hand, independently of the readers under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from pagegen.runtime.models.config import ModelConfig

NUMBERS = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}
F32, F16, Q8_0 = 0, 1, 8

Tagged = tuple[str, Any]  # ("u32", 5), ("str", "x"), ("[str]", [...]), ("[i32]", [...])
StoredTensor = tuple[int, tuple[int, ...], bytes]  # type code, shape outermost first, bytes


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(tag: str, item: Any) -> bytes:
    """Type code and payload of a metadata value."""
    if tag == "str":
        return struct.pack("<I", 8) + string(item)
    if tag == "[str]":
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    if tag.startswith("["):
        code, letter = NUMBERS[tag[1:-1]]
        return struct.pack(f"<IIQ{len(item)}{letter}", 9, code, len(item), *item)
    code, letter = NUMBERS[tag]
    return struct.pack(f"<I{letter}", code, item)


def gguf_bytes(metadata: Mapping[str, Tagged], tensors: Mapping[str, StoredTensor], *, version: int = 3) -> bytes:
    """A whole file with the default alignment of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(*tagged) for key, tagged in metadata.items())
    body = b""
    for name, (code, shape, data) in tensors.items():
        body += b"\0" * (-len(body) % 32)
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], code, len(body))
        body += data
    return head + b"\0" * (-len(head) % 32) + body


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row what llama.cpp's conversion does: the two halves of a head become neighbours."""
    dim = weight.shape[0] // heads
    rows = [head * dim + half * dim // 2 + pair for head in range(heads) for pair in range(dim // 2) for half in (0, 1)]
    return weight[rows]


def stored(tensor: torch.Tensor) -> StoredTensor:
    return F32, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def stored_q8_0(tensor: torch.Tensor) -> StoredTensor:
    """Quantised to blocks of 32 with their largest value at 127."""
    blocks = tensor.reshape(-1, 32).numpy()
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.round(blocks / np.maximum(scale.astype(np.float32), 1e-8)).astype(np.int8)
    return Q8_0, tuple(tensor.shape), np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], 1).tobytes()


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ", "hi"]
MERGES = ["h i"]

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

GGUF_METADATA: dict[str, Tagged] = {
    "general.architecture": ("str", "llama"),
    "llama.block_count": ("u32", 2),
    "llama.context_length": ("u32", 128),
    "llama.embedding_length": ("u32", 32),
    "llama.feed_forward_length": ("u32", 64),
    "llama.attention.head_count": ("u32", 4),
    "llama.attention.head_count_kv": ("u32", 2),
    "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
    "llama.rope.freq_base": ("f32", 10000.0),
    "tokenizer.ggml.model": ("str", "gpt2"),
    "tokenizer.ggml.pre": ("str", "smollm"),
    "tokenizer.ggml.tokens": ("[str]", TOKENS),
    "tokenizer.ggml.token_type": ("[i32]", [3, 3, 3] + [1] * (len(TOKENS) - 3)),
    "tokenizer.ggml.merges": ("[str]", MERGES),
    "tokenizer.ggml.bos_token_id": ("u32", 1),
    "tokenizer.ggml.eos_token_id": ("u32", 2),
}

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def hf_weights(config: dict[str, Any] = HF_CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ModelConfig.from_hf(config).weight_shapes()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gguf_tensors(weights: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """The same weights as llama.cpp stores them: other names, q and k permuted; the embedding quantised."""
    tensors = {}
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weight = permute(weight, 4 if "q_proj" in name else 2)
        for hf_name, gguf_name in GGUF_NAMES.items():
            name = name.replace(hf_name, gguf_name)
        tensors[name] = stored_q8_0(weight) if name == "token_embd.weight" else stored(weight)
    return tensors


def write_gguf(
    path: Path, metadata: dict[str, Tagged] | None = None, tensors: dict[str, StoredTensor] | None = None
) -> Path:
    """A complete tiny model; `metadata` adds to and overrides GGUF_METADATA, `tensors` replaces the weights."""
    path.write_bytes(
        gguf_bytes(GGUF_METADATA | (metadata or {}), gguf_tensors(hf_weights()) if tensors is None else tensors)
    )
    return path


def tiny_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, [("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in TOKENS[:3]])
    return backend


def write_hf(
    folder: Path, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """A complete folder with one safetensors file; `config` adds to and overrides HF_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    values = HF_CONFIG | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    tiny_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    safetensors.torch.save_file(hf_weights(values) if weights is None else weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> Path:
    """The same model in three shards with an index."""
    write_hf(folder)
    weights = hf_weights()
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for shard in range(3):
        name = f"model-0000{shard + 1}-of-00003.safetensors"
        part = {key: weights[key] for index, key in enumerate(sorted(weights)) if index % 3 == shard}
        safetensors.torch.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
