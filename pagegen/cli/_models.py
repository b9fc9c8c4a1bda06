"""What `generate`, `chat` and `serve` share: the options that make an engine, and making it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli._common import KvDtypeOption, as_path, parse_size
from pagegen.errors import ConfigError
from pagegen.spec import DType

if TYPE_CHECKING:
    from pagegen.runtime.launcher import Launched


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that make an engine, each with its help; the values of one command line."""

    kernels: Annotated[
        Path | None,
        typer.Option(
            "--kernels", metavar="PACKAGE", parser=as_path, help="Kernel package; default: a fitting one of the cache, or a new build."
        ),
    ] = None
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.")] = "bf16"
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="DTYPE",
            help="Keep the layers' weights in int8 or int4, rounded as they are loaded; default: as --dtype.",
            show_default=False,
        ),
    ] = None
    kv_dtype: KvDtypeOption = None
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Tokens of prompt and output.")] = None
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Tokens of one iteration; default: 512, or a longest prompt where it is computed whole.",
        ),
    ] = None
    kv_blocks: Annotated[int | None, typer.Option("--kv-blocks", metavar="N", help="Blocks of the KV cache.")] = None
    kv_cache_memory: Annotated[
        str | None, typer.Option("--kv-cache-memory", metavar="SIZE", help="Bytes of the KV cache, such as 512M.")
    ] = None
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Scheduling: default, vllm-paper, orca or request.")
    ] = "default"
    memory_policy: Annotated[
        str,
        typer.Option(
            "--memory-policy",
            metavar="NAME",
            help="KV memory: paged, orca-max, orca-pow2, orca-oracle, contiguous-first-fit or reserve-on-paged.",
        ),
    ] = "paged"
    preemption: Annotated[
        str,
        typer.Option(
            "--preemption",
            metavar="WAY",
            help="When KV blocks run out: recompute, swap, auto (what is measured to be faster) or none.",
        ),
    ] = "recompute"
    swap_space: Annotated[
        str | None,
        typer.Option(
            "--swap-space",
            metavar="SIZE",
            help="Bytes for swapped KV blocks, 0 for none; default: as the KV cache where preemption may swap.",
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Keep the KV of prompts for those that begin alike."),
    ] = True
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Tokens and logprobs are bit-equal whatever the batch, chunks, preemption, cached prefix or pool.",
        ),
    ] = False
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="LOG",
            parser=as_path,
            help="Write what the scheduler is told, token ids too, for `pagegen simulate --replay`.",
            show_default=False,
        ),
    ] = None


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of EngineOptions; it receives their values as `options`."""
    hints = typing.get_type_hints(EngineOptions, include_extras=True)
    fields = dataclasses.fields(EngineOptions)

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        options = EngineOptions(**{field.name: values.pop(field.name) for field in fields})
        command(**values, options=options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "options"]
    parameters += [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields
    ]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def load(model: str, options: EngineOptions) -> Launched:
    """The model with its engine. Raises PagegenError."""
    from pagegen.runtime.engine import EngineConfig
    from pagegen.runtime.engine_config import KV_DTYPES
    from pagegen.runtime.launcher import launch
    from pagegen.runtime.quantised import WEIGHT_DTYPES
    from pagegen.runtime.scheduler import Preemption
    from pagegen.runtime.simulation.log import EventLog
    from pagegen.runtime.simulation.setup import Setup
    from pagegen.spec import FLOATS

    if options.dtype not in FLOATS:
        raise ConfigError(f"--dtype {options.dtype} is not known; allowed: {', '.join(FLOATS)}")
    if options.weights is not None and options.weights not in WEIGHT_DTYPES:
        raise ConfigError(f"--weights {options.weights} is not known; allowed: {', '.join(WEIGHT_DTYPES)}, or leave it out")
    if options.kv_dtype is not None and options.kv_dtype not in (options.dtype, *KV_DTYPES):
        allowed = ", ".join((options.dtype, *KV_DTYPES))
        raise ConfigError(f"--kv-dtype {options.kv_dtype} is not possible with --dtype {options.dtype}; allowed: {allowed}")
    if options.preemption not in set(Preemption):
        raise ConfigError(f"--preemption {options.preemption} is not known; allowed: {', '.join(Preemption)}")
    no_swap_space = options.swap_space is not None and options.swap_space.strip() == "0"
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        num_blocks=options.kv_blocks,
        kv_cache_bytes=parse_size(options.kv_cache_memory, "--kv-cache-memory"),
        dtype=DType(options.dtype),
        kv_dtype=DType(options.kv_dtype) if options.kv_dtype else None,
        weight_dtype=DType(options.weights) if options.weights else None,
        policy=options.policy,
        memory_policy=options.memory_policy,
        preemption=Preemption(options.preemption),
        swap_bytes=0 if no_swap_space else parse_size(options.swap_space, "--swap-space"),
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
    )
    if options.record is None:
        return launch(model, options.kernels, config)
    log = EventLog(options.record)
    launched = launch(model, options.kernels, config, recorder=log)
    log.begin(Setup.of(launched.engine, config))
    return launched
