"""What fits: a model's weights and the KV cache beside them in so much memory, by arithmetic and nothing else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pagegen.errors import ConfigError
from pagegen.runtime.engine_config import EngineConfig
from pagegen.runtime.kv_cache import block_bytes
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.quantised import weight_bytes
from pagegen.spec import DType


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The memory pie of one dtype, in bytes, and what its KV part holds.

    `full_length` sequences fit if every one grows to `max_model_len`; `reserved` if that much is set aside for each, in
    runs of a power of two as a buddy allocator has them; `typical` if they have `typical_len` tokens, paged.
    `fits` says whether one sequence of full length does.
    """

    dtype: str
    kv_dtype: str
    weights: str
    memory_bytes: int
    weight_bytes: int
    other_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    block_bytes: int
    num_blocks: int
    num_slots: int
    max_model_len: int
    typical_len: int
    full_length: int
    reserved: int
    typical: int
    fits: bool

    def shares(self) -> tuple[float, float, float]:
        """Weights, KV cache and the rest as shares of the memory; weights can be more than all of it."""
        kv = self.num_blocks * self.block_bytes
        rest = max(self.memory_bytes - self.weight_bytes - kv, 0)
        return (self.weight_bytes / self.memory_bytes, kv / self.memory_bytes, rest / self.memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        weights, kv, rest = self.shares()
        return {**dataclasses.asdict(self), "shares": {"weights": weights, "kv_cache": kv, "other": rest}}


def plan(
    config: ModelConfig,
    dtype: DType,
    memory_bytes: int,
    *,
    kv_dtype: DType | None = None,
    weight_dtype: DType | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    typical_len: int = 512,
    other_share: float = 0.05,
) -> Plan:
    """`other_share` of the memory is left for activations and the process. Raises ConfigError, SpecError."""
    length = config.max_position_embeddings if max_model_len is None else max_model_len
    if not 1 <= length <= config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={length} is not possible; allowed: 1 to the model's {config.max_position_embeddings}"
        )
    if not 0 <= other_share < 1 or typical_len < 1:
        raise ConfigError(f"other={other_share} and typical length={typical_len}; allowed: 0 up to 1, and 1 or more")
    spec = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, weight_dtype=weight_dtype).kernel_spec(config, block_size)
    size = block_bytes(spec, config.num_layers)
    num_bytes = sum(_bytes(name, shape, dtype, weight_dtype) for name, shape in config.weight_shapes().items())
    other_bytes = int(other_share * memory_bytes)
    kv_bytes = max(memory_bytes - num_bytes - other_bytes, 0)
    num_blocks = kv_bytes // size
    whole, typical = -(-length // block_size), -(-min(typical_len, length) // block_size)
    run = 1 << (whole - 1).bit_length()
    return Plan(
        dtype=dtype.value,
        kv_dtype=spec.cache_dtype.value,
        weights=(weight_dtype or dtype).value,
        memory_bytes=memory_bytes,
        weight_bytes=num_bytes,
        other_bytes=other_bytes,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=size // block_size,
        block_bytes=size,
        num_blocks=num_blocks,
        num_slots=num_blocks * block_size,
        max_model_len=length,
        typical_len=min(typical_len, length),
        full_length=num_blocks // whole,
        reserved=num_blocks // run,
        typical=num_blocks // typical,
        fits=num_blocks >= whole,
    )


def _bytes(name: str, shape: tuple[int, ...], dtype: DType, weight_dtype: DType | None) -> int:
    """Of one weight; those of the layers' linears alone are kept in `weight_dtype`."""
    if name.endswith("_proj.weight"):
        num_outputs, num_inputs = shape
        return weight_bytes(num_outputs, num_inputs, dtype, weight_dtype)
    return dtype.itemsize * math.prod(shape)
