"""The limits and policies of an engine."""

from __future__ import annotations

import dataclasses

from pagegen.errors import ConfigError
from pagegen.runtime.kv_cache import block_bytes
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.quantised import WEIGHT_DTYPES
from pagegen.runtime.scheduler import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    Preemption,
    SchedulerConfig,
)
from pagegen.runtime.scheduling import find_policy
from pagegen.spec import DType, KernelSpec

DEFAULT_KV_CACHE_BYTES = 2**30
KV_DTYPES = (DType.FP8_E4M3, DType.FP8_E5M2, DType.INT8, DType.INT4)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and policies of one engine; raises ConfigError for values that serve nobody.

    `max_model_len` bounds the positions that are computed, None being the model's own limit; the last sampled token is
    not computed, so a prompt of exactly that length gets one token. The KV pool has `num_blocks` blocks, or as many as
    fit into `kv_cache_bytes` (1 GiB if neither is given), but no more than `max_num_seqs` full-length sequences fill.
    `dtype` is that of weights and activations, and of the cache unless `kv_dtype` is one of KV_DTYPES: quantised, with
    scales that fp8 has one of a tensor (1) and int8 and int4 have for each token and head. `weight_dtype` int8 or int4 is
    that of the layers' linears in a model that is built for this engine. `max_num_batched_tokens` None is 512, or what one longest prompt
    beside the others' newest tokens takes where `policy` computes prompts whole.

    `policy` is a row of `scheduling.POLICIES`, `memory_policy` one of `policies.MEMORY_POLICIES`. `swap_bytes` is the
    swap space on the host; None is none, or as large as the pool where `preemption` may use it. `prefix_cache` keeps
    the KV of prompts for those that begin alike, where policy and memory policy allow.

    `deterministic` makes tokens and logprobs of a request the same to the bit whatever runs beside it, however its
    prompt is cut, whether it is preempted or finds its prefix cached, and however large the pool is: on one machine, with
    one number of threads. It needs a model and kernels that are.
    """

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    dtype: DType = DType.BF16
    kv_dtype: DType | None = None
    weight_dtype: DType | None = None
    policy: str = "default"
    memory_policy: str = "paged"
    preemption: Preemption = Preemption.RECOMPUTE
    swap_bytes: int | None = None
    prefix_cache: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive whole number; change {name}")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_bytes both size the KV pool; give one of them")
        if self.swap_bytes is not None and self.swap_bytes < 0:
            raise ConfigError(f"swap_bytes={self.swap_bytes} is negative; 0 is no swap space")
        if self.preemption not in tuple(Preemption):
            raise ConfigError(f"preemption={self.preemption!r} is not known; allowed: {', '.join(Preemption)}")
        find_policy(self.policy)
        if self.kv_dtype is not None and self.kv_dtype not in (self.dtype, *KV_DTYPES):
            allowed = ", ".join((self.dtype, *KV_DTYPES))
            raise ConfigError(f"kv_dtype={self.kv_dtype} is not possible with dtype={self.dtype}; allowed: {allowed}")
        if self.weight_dtype is not None and self.weight_dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(WEIGHT_DTYPES)
            raise ConfigError(f"weight_dtype={self.weight_dtype} is not known; allowed: {allowed}, or None for dtype")

    def kernel_spec(self, model: ModelConfig, block_size: int) -> KernelSpec:
        """What attention a model needs here, token-major. Raises SpecError for one outside the kernel family."""
        spec = model.kernel_spec(self.dtype, block_size)
        return spec.replace(kv_dtype=self.kv_dtype or self.dtype, deterministic=self.deterministic)

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part of it, for an engine that computes up to `max_model_len` positions."""
        budget = self.max_num_batched_tokens
        if budget is None:
            whole = max_model_len + self.max_num_seqs
            budget = DEFAULT_MAX_NUM_BATCHED_TOKENS if find_policy(self.policy).chunked else whole
        return SchedulerConfig(self.max_num_seqs, budget, self.policy, self.preemption)

    def num_host_blocks(self, num_blocks: int, size: int) -> int:
        """Blocks of the swap space beside a pool of `num_blocks` blocks of `size` bytes: never more than the pool's."""
        if self.swap_bytes is not None:
            return min(self.swap_bytes // size, num_blocks)
        swaps = self.preemption in (Preemption.SWAP, Preemption.AUTO) and self.memory_policy == "paged"
        return num_blocks if swaps and find_policy(self.policy).preempts else 0

    def pool_blocks(self, spec: KernelSpec, num_layers: int, max_model_len: int) -> int:
        """Blocks of the KV pool. Raises ConfigError if not a single one fits."""
        if self.num_blocks is not None:
            return self.num_blocks
        size = block_bytes(spec, num_layers)
        budget = self.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        if budget < size:
            raise ConfigError(
                f"kv_cache_bytes={budget} holds no KV block of {size} bytes; raise kv_cache_bytes or lower the block size"
            )
        useful = self.max_num_seqs * -(-max_model_len // spec.block_size)
        return min(budget // size, useful)
