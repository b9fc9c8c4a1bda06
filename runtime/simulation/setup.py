"""A scheduler over a memory policy, as values: what a simulation runs, and what a recorded run was made with."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any

from pagegen.errors import ConfigError
from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.scheduler import Preemption, PreemptionCosts, Scheduler, SchedulerConfig
from pagegen.runtime.scheduling import find_policy
from pagegen.runtime.scheduling.events import SchedulerEvent

if TYPE_CHECKING:
    from pagegen.runtime.engine import Engine, EngineConfig

MAX_BLOCKS = 2**24  # books of more take gigabytes


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The defaults are the vLLM paper's OPT-13B on one A100-40GB: 12 GiB of KV, 15,728 slots, sequences up to 2048.

    `max_num_batched_tokens` None is 512, or what a longest prompt beside the others takes where it is computed whole.
    Raises ConfigError.
    """

    policy: str = "vllm-paper"
    memory_policy: str = "paged"
    preemption: Preemption = Preemption.RECOMPUTE
    num_blocks: int = 983
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    num_host_blocks: int = 0
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive whole number; change {name}")
        if self.num_blocks > MAX_BLOCKS:
            raise ConfigError(f"num_blocks={self.num_blocks} is too many; allowed: up to {MAX_BLOCKS}")

    def scheduler(
        self,
        *,
        costs: Callable[[], PreemptionCosts] | None = None,
        recorder: Callable[[SchedulerEvent], None] | None = None,
    ) -> Scheduler:
        """A fresh one, over a fresh pool. Raises ConfigError."""
        policy = find_policy(self.policy)
        memory = make_memory_policy(
            self.memory_policy,
            self.num_blocks,
            self.block_size,
            max_model_len=self.max_model_len,
            prefix_cache=self.prefix_cache and policy.prefix_cache,
            num_host_blocks=self.num_host_blocks,
        )
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = 512 if policy.chunked else self.max_model_len + self.max_num_seqs
        config = SchedulerConfig(self.max_num_seqs, budget, self.policy, self.preemption)
        return Scheduler(config, memory, costs=costs if self.num_host_blocks else None, recorder=recorder)

    @classmethod
    def of(cls, engine: Engine, config: EngineConfig) -> Setup:
        """What an engine made from `config` schedules with."""
        memory, limits = engine.memory, engine.scheduler.config
        return cls(
            policy=limits.policy,
            memory_policy=config.memory_policy,
            preemption=limits.preemption,
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            max_model_len=engine.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_host_blocks=engine.swap_space.num_blocks if engine.swap_space else 0,
            prefix_cache=config.prefix_cache,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return {**dataclasses.asdict(self), "preemption": self.preemption.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setup:
        """Raises ConfigError for fields that are none, or values that serve nobody."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(map(str, values.keys() - known)):
            raise ConfigError(f"setup fields {', '.join(unknown)} are not known; allowed: {', '.join(sorted(known))}")
        way = values.get("preemption", Preemption.RECOMPUTE)
        if way not in tuple(Preemption):
            raise ConfigError(f"preemption={way!r} is not known; allowed: {', '.join(Preemption)}")
        values = {**values, "preemption": Preemption(way)}
        try:
            check_types(values, typing.get_type_hints(cls))
        except TypeError as error:
            raise ConfigError(f"setup: {error}") from None
        return cls(**values)


def check_types(values: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    """Raises TypeError naming the first value that is not what its hint says. Whole numbers have at most 64 bits."""
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise TypeError(f"{name}={value!r:.80} is no {getattr(hints[name], '__name__', hints[name])}")


def _fits(value: object, hint: Any) -> bool:
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind in (tuple, frozenset):
        return isinstance(value, kind) and all(_fits(item, parts[0]) for item in value)
    if hint is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return isinstance(value, hint)


NUM_SLOTS = 15_728  # of the vLLM paper's OPT-13B: 12 GiB of 800 KiB each

# Its systems. Orca as section 6.1 models it reserves slots, not blocks: its pool is one of blocks of a single token.
SYSTEMS: Mapping[str, Setup] = MappingProxyType(
    {
        "Orca (Max)": Setup("orca", "orca-max", num_blocks=NUM_SLOTS, block_size=1),
        "Orca (Pow2)": Setup("orca", "orca-pow2", num_blocks=NUM_SLOTS, block_size=1),
        "Orca (Oracle)": Setup("orca", "orca-oracle", num_blocks=NUM_SLOTS, block_size=1),
        "vLLM": Setup("vllm-paper", "paged"),
    }
)
