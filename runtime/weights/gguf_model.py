"""A GGUF file as a model: its configuration, its weights under Hugging Face names, its tokenizer."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers

from pagegen.errors import ModelError
from pagegen.runtime.models import architecture_of
from pagegen.runtime.models.config import ModelConfig, RopeScaling
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.gguf import GGUF, REMEDY, read_gguf

ROPE_FACTORS = "rope_freqs.weight"  # what llama3 scaling divides each frequency by; the file has no other trace of it

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Control tokens that end a turn or a text in some family; a file's eos key names only one of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>")

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is cut before merging; whether BOS is added unless the file says otherwise. `default`
# and a missing key mean that the converter did not know: guessing would give slightly wrong ids without an error.
PRE_TOKENIZERS: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]), False),
    "gpt-2": (_GPT2, False),
    "llama-bpe": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        True,
    ),
}


class GGUFModel:
    """A model in one GGUF file. Opening parses and checks everything except the numbers."""

    def __init__(self, path: Path, name: str | None = None, remedy: str = REMEDY) -> None:
        self.file = read_gguf(path, remedy)
        self.name = name or path.stem
        self._vocabulary = _Vocabulary(self.file)
        self.config = _config(self.file, self._vocabulary)
        self._names = _tensor_names(self.file, self.config)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight by its Hugging Face name; quantised ones as fp32, the others as stored."""
        config = self.config
        weights: dict[str, torch.Tensor] = {}
        for name, stored_name in self._names.items():
            weight = self.file.tensor(stored_name)
            if ".q_proj." in name:
                weight = unpermute(weight, config.num_heads)
            elif ".k_proj." in name:
                weight = unpermute(weight, config.num_kv_heads)
            weights[name] = weight
        return weights

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file. Raises ModelError for a kind or a pre-tokenizer that is not known for sure."""
        return self._vocabulary.tokenizer(self.config)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from llama.cpp's rotary order (pairs side by side) to Hugging Face's (halves of a head).

    The inverse of `permute` in llama.cpp's conversion; it is applied to q and k, weight and bias, of arch llama only.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


class _Vocabulary:
    """The tokenizer.ggml.* keys, checked."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.tokens = file.get("tokenizer.ggml.tokens", list)
        self.types = file.get("tokenizer.ggml.token_type", np.ndarray, np.ones(len(self.tokens), np.int32))
        if len(self.types) != len(self.tokens) or self.types.dtype.kind not in "iu":
            raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not type each of {len(self.tokens)} tokens")
        scores = file.metadata.get("tokenizer.ggml.scores")
        if scores is not None and not (isinstance(scores, np.ndarray) and scores.dtype.kind == "f"):
            raise ModelError(f"{file.path}: tokenizer.ggml.scores is not a list of floats")

    def token_id(self, key: str) -> int | None:
        """An id that the metadata may state, such as `bos`."""
        full_key = f"tokenizer.ggml.{key}_token_id"
        return self.file.get(full_key, int) if full_key in self.file.metadata else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The stated end tokens, then control tokens that end a turn in some family."""
        stated = [self.token_id(key) for key in ("eos", "eot", "eom")]
        known = [int(token) for token in np.flatnonzero(self.types == CONTROL) if self.tokens[token] in END_TOKENS]
        return tuple(dict.fromkeys([token for token in stated if token is not None] + known))

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """Byte-level BPE out of tokens, merges and the named pre-tokenizer."""
        file = self.file
        kind = file.get("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ModelError(
                f"{file.path}: tokenizer model {kind!r} is not read; allowed: gpt2; use a Hugging Face folder"
            )
        pre = file.get("tokenizer.ggml.pre", str, "default")
        if pre not in PRE_TOKENIZERS:
            raise ModelError(
                f"{file.path}: pre-tokenizer {pre!r} is not known; allowed: {', '.join(PRE_TOKENIZERS)}; "
                "convert the model again with a current llama.cpp, or use a Hugging Face folder"
            )
        pre_tokenizer, adds_bos = PRE_TOKENIZERS[pre]
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
        merges: list[tuple[str, str]] = []
        for merge in file.get("tokenizer.ggml.merges", list):
            left, _, right = merge.partition(" ")
            if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
                raise ModelError(f"{file.path}: tokenizer.ggml.merges holds {merge[:80]!r}, which the tokens lack")
            merges.append((left, right))
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
        backend.pre_tokenizer = pre_tokenizer
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens(self._added(USER_DEFINED))
        backend.add_special_tokens(self._added(CONTROL))
        bos, eos = self.token_id("bos"), self.token_id("eos")
        with_bos = file.get("tokenizer.ggml.add_bos_token", bool, adds_bos)
        named = {"bos_token": bos, "eos_token": eos}
        return Tokenizer(
            backend,
            eos_token_ids=config.eos_token_ids,
            prompt_prefix=(bos,) if with_bos and bos is not None else (),
            chat_template=file.get("tokenizer.chat_template", str, "") or None,
            template_tokens={name: self.tokens[token] for name, token in named.items() if token is not None},
        )

    def _added(self, type_: int) -> list[tokenizers.AddedToken]:
        special = type_ == CONTROL
        tokens = (self.tokens[index] for index in np.flatnonzero(self.types == type_))
        return [tokenizers.AddedToken(token, special=special, normalized=False) for token in tokens]


def _config(file: GGUF, vocabulary: _Vocabulary) -> ModelConfig:
    """The configuration, with every feature refused that would silently change the numbers."""
    arch = file.get("general.architecture", str)
    if arch != "llama":  # GGUF's name for Mistral, too
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported; allowed in GGUF files: llama")
    if file.get("llama.expert_count", int, 0) > 0:
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported; use a dense model")
    hidden, heads = file.get("llama.embedding_length", int), file.get("llama.attention.head_count", int)
    head_dim = file.get("llama.attention.key_length", int, hidden // max(heads, 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.get(key, int, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {key} differs from the head size {head_dim}, which is not supported")
    config = ModelConfig(
        architecture=architecture_of(arch),
        num_layers=file.get("llama.block_count", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=file.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        intermediate_size=file.get("llama.feed_forward_length", int),
        vocab_size=len(vocabulary.tokens),
        max_position_embeddings=file.get("llama.context_length", int),
        rope_theta=file.get("llama.rope.freq_base", float, 10000.0),
        rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=vocabulary.token_id("bos"),
        eos_token_ids=vocabulary.eos_token_ids,
    )
    return dataclasses.replace(config, rope_scaling=_rope_scaling(file, config))


def _rope_scaling(file: GGUF, config: ModelConfig) -> RopeScaling | None:
    """Scaling from the metadata, or recognised in the table of factors that Llama 3.1 and later files carry."""
    if ROPE_FACTORS in file.tensors:
        factors = file.tensor(ROPE_FACTORS).double().flatten().tolist()
        scaling = RopeScaling("llama3", max(factors))  # the other fields: what all published files were made with
        frequencies = config.inverse_frequencies()
        if len(factors) != len(frequencies) or not all(
            math.isclose(scaling.scale(frequency) * factor, frequency, rel_tol=1e-4)
            for frequency, factor in zip(frequencies, factors, strict=True)
        ):
            raise ModelError(f"{file.path}: {ROPE_FACTORS} holds factors of no known kind; allowed: llama3's")
        return scaling
    kind = file.get("llama.rope.scaling.type", str, "none")
    return None if kind == "none" else RopeScaling(kind, file.get("llama.rope.scaling.factor", float, 1.0))


def _tensor_names(file: GGUF, config: ModelConfig) -> dict[str, str]:
    """Hugging Face name -> name in the file, complete and of the right shapes. Raises ModelError naming the tensor."""
    shapes = config.weight_shapes()
    names: dict[str, str] = {}
    for stored in file.tensors:
        hf_name = hf_tensor_name(stored)
        if hf_name in shapes:
            names[hf_name] = stored
        elif stored != ROPE_FACTORS:
            raise ModelError(f"{file.path}: tensor {stored[:100]!r} has no place in a {config.architecture}")
    for hf_name, shape in shapes.items():
        if hf_name not in names:
            raise ModelError(f"{file.path}: the tensor for {hf_name} is missing; {REMEDY}")
        found = file.tensors[names[hf_name]].shape
        if found != shape:
            raise ModelError(
                f"{file.path}: tensor {names[hf_name]} has shape {list(found)}, the metadata says {list(shape)}"
            )
    return names


def hf_tensor_name(stored: str) -> str:
    """The Hugging Face name of a GGUF tensor; "" if the Llama family has no such weight."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _GLOBAL_NAMES.get(stored, "")
