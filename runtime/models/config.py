"""What a Llama-family model is made of: sizes, rotary scaling, biases, end tokens; and the weights that follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pagegen.errors import ModelError
from pagegen.runtime.models import architecture_of, check_architecture
from pagegen.spec import DType, KernelSpec, KVLayout

MAX_LAYERS = 1024  # a damaged file must not make us list a billion weights


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`. `llama3` does so for wavelengths above
    `original_max_position / low_freq_factor`, leaves those below `original_max_position / high_freq_factor` alone
    and blends in between (Llama 3.1 model card); `linear` ignores the last three fields.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear"):
            raise ModelError(f"rope scaling type {self.kind!r} is not supported; allowed: llama3, linear, default")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ModelError(f"rope scaling factor={self.factor} is not a positive finite number")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelError(
                f"rope scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"found {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_max_position < 1:
            raise ModelError(f"rope scaling original_max_position={self.original_max_position} is not positive")

    def scale(self, inv_freq: float) -> float:
        """The stretched frequency, in radians a token."""
        if self.kind == "linear":
            return inv_freq / self.factor
        turns = self.original_max_position * inv_freq / (2 * math.pi)  # within the trained context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return inv_freq * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder with RMSNorm, rotary embedding, grouped-query attention and a SiLU-gated MLP.

    `attention_bias` puts a bias on q, k, v and o alike, as Hugging Face's Llama does. `eos_token_ids` is the union
    over all files that name one. Raises ModelError, naming the field, for anything outside the family.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        for name in _SIZES.values():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise ModelError(f"model config: {name}={value!r} is not a positive whole number")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(f"model config: num_layers={self.num_layers} is too many; allowed: up to {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"model config: {name}={value!r} is not a positive finite number")
        for token in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if not 0 <= token < self.vocab_size:
                raise ModelError(
                    f"model config: special token id {token} is outside the vocabulary of {self.vocab_size}"
                )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`. A stated head_dim wins over hidden_size / heads.

        Raises ModelError naming an unknown architecture, rotary type or activation, a missing or mistyped field,
        and every feature that would silently change the numbers (sliding window, partial rotary, quantisation).
        """
        architecture = _architecture(values)
        _refuse_features(values)
        sizes: dict[str, int] = {}
        for hf_name, name in _SIZES.items():
            if values.get(hf_name) is not None:
                sizes[name] = values[hf_name]
        sizes.setdefault("num_kv_heads", sizes.get("num_heads", 0))
        sizes.setdefault("max_position_embeddings", 2048)
        missing = [hf for hf, name in _SIZES.items() if name not in sizes and name != "head_dim"]
        if missing:
            raise ModelError(f"model config: field {missing[0]!r} is missing; config.json has to state it")
        if "head_dim" not in sizes:
            hidden, heads = sizes["hidden_size"], sizes["num_heads"]
            if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1 or hidden % heads:
                raise ModelError(
                    f"model config: hidden_size={hidden} over num_attention_heads={heads} gives no whole head_dim"
                )
            sizes["head_dim"] = hidden // heads
        theta, scaling = _rope(values)
        return cls(
            architecture=architecture,
            **sizes,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            attention_bias=_flag(values, "attention_bias"),
            mlp_bias=_flag(values, "mlp_bias"),
            bos_token_id=next(iter(token_ids(values.get("bos_token_id"), "bos_token_id")), None),
            eos_token_ids=token_ids(values.get("eos_token_id"), "eos_token_id"),
        )

    def kernel_spec(self, dtype: DType, block_size: int = 16, layout: KVLayout | None = KVLayout()) -> KernelSpec:  # noqa: B008
        """The attention this model needs. Raises SpecError if no kernel covers it."""
        return KernelSpec(self.num_heads, self.num_kv_heads, self.head_dim, dtype, block_size=block_size, layout=layout)

    def inverse_frequencies(self) -> list[float]:
        """Rotary frequencies in radians a token, scaling included, one for each of the head_dim / 2 rotated pairs."""
        frequencies = [self.rope_theta ** (-2 * pair / self.head_dim) for pair in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        return [scaling.scale(frequency) for frequency in frequencies] if scaling else frequencies

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its Hugging Face name; `lm_head.weight` only if it is not tied to the embedding."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q_size, hidden, self.attention_bias),
            "self_attn.k_proj": (kv_size, hidden, self.attention_bias),
            "self_attn.v_proj": (kv_size, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, q_size, self.attention_bias),
            "mlp.gate_proj": (ffn, hidden, self.mlp_bias),
            "mlp.up_proj": (ffn, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, ffn, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """One id, a list of ids or null, as config files write them. Raises ModelError naming the field."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(f"model config: {field}={value!r} is not a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _architecture(values: Mapping[str, Any]) -> str:
    stated = values.get("architectures")
    if isinstance(stated, list) and stated:
        return str(stated[0])[:100]
    return architecture_of(values.get("model_type"))


def _refuse_features(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; allowed: silu")
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"quantised weights ({method!r}) are not supported; use the original weights or a .gguf file")
    window, limit = values.get("sliding_window"), values.get("max_position_embeddings", 0)
    narrow = not isinstance(window, int) or not isinstance(limit, int) or window < limit
    if window is not None and values.get("use_sliding_window", True) and narrow:
        raise ModelError(f"sliding_window={window!r} is not supported; use a model with full attention")
    rotary = values.get("partial_rotary_factor", 1.0)
    if rotary not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor={rotary} is not supported; allowed: 1.0 (the whole head)")


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes `rope_parameters`; 4 `rope_theta` and `rope_scaling`; older ones `type` for `rope_type`."""
    block = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(block, Mapping):
        raise ModelError(f"rope scaling {block!r} is not a mapping")
    theta = _number(block if "rope_theta" in block else values, "rope_theta", 10000.0)
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(block, "factor"))
    if kind != "llama3":
        raise ModelError(f"rope scaling type {kind!r} is not supported; allowed: llama3, linear, default")
    original = block.get("original_max_position_embeddings")
    if isinstance(original, bool) or not isinstance(original, int):
        raise ModelError(f"rope scaling original_max_position_embeddings={original!r} is not a whole number")
    low, high = _number(block, "low_freq_factor"), _number(block, "high_freq_factor")
    return theta, RopeScaling("llama3", _number(block, "factor"), low, high, original)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"model config: {name}={value!r} is not a number")
    return float(value)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"model config: {name}={value!r} is not true or false")
    return value
