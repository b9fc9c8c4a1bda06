"""`pagegen plan`: what fits beside a model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pagegen.cli import NO
from pagegen.cli._common import (
    JsonOption,
    KvDtypeOption,
    ModelArgument,
    format_size,
    note,
    parse_size,
    print_json,
    print_table,
)
from pagegen.errors import ConfigError

if TYPE_CHECKING:
    from pagegen.runtime.simulation.capacity import Plan

EXAMPLE = "pagegen plan smollm2-135m --mem 1G"


def command(
    model: ModelArgument,
    mem: Annotated[
        str | None,
        typer.Option("--mem", metavar="SIZE", help="Memory for all of it, such as 40G; default: what is free here."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16; default: each.", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="DTYPE", help="Of the layers' weights: int8 or int4; default: as --dtype.", show_default=False
        ),
    ] = None,
    kv_dtype: KvDtypeOption = None,
    block_size: Annotated[int, typer.Option("--block-size", metavar="N", help="Tokens of a block.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of prompt and output; default: the model's.")
    ] = None,
    length: Annotated[int, typer.Option("--length", metavar="N", help="Tokens of a typical sequence.")] = 512,
    other: Annotated[
        float, typer.Option("--other", metavar="SHARE", help="Share of the memory for activations and the process.")
    ] = 0.05,
    json: JsonOption = False,
) -> None:
    """What fits: weights, KV bytes a token, blocks, sequences, for this machine or a stated memory size.

    Arithmetic on the model's config: no weight is read. Exit 1 if no dtype leaves room for one sequence of full length.
    """
    from pagegen.memory import free_bytes
    from pagegen.runtime.engine_config import KV_DTYPES
    from pagegen.runtime.quantised import WEIGHT_DTYPES
    from pagegen.runtime.simulation.capacity import plan
    from pagegen.runtime.weights.resolve import resolve_model
    from pagegen.spec import DType

    floats = [DType.FP32, DType.BF16, DType.FP16]
    if dtype is not None and dtype not in floats:
        raise ConfigError(f"--dtype {dtype} is not known; allowed: {', '.join(floats)}")
    if weights is not None and weights not in WEIGHT_DTYPES:
        raise ConfigError(f"--weights {weights} is not known; allowed: {', '.join(WEIGHT_DTYPES)}, or leave it out")
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype} is not known; allowed: {', '.join(KV_DTYPES)}, or leave it out")
    memory = parse_size(mem, "--mem") or free_bytes()
    if memory is None:
        raise ConfigError("this machine does not say how much memory is free; state it with --mem SIZE")
    source = resolve_model(model)
    plans = [
        plan(
            source.config,
            each,
            memory,
            kv_dtype=DType(kv_dtype) if kv_dtype else None,
            weight_dtype=DType(weights) if weights else None,
            block_size=block_size,
            max_model_len=max_model_len,
            typical_len=length,
            other_share=other,
        )
        for each in ([DType(dtype)] if dtype else floats)
    ]
    if json:
        print_json({"model": source.name, "memory_bytes": memory, "rows": [row.to_dict() for row in plans]})
    else:
        _show(source.name, memory, plans)
    if not any(row.fits for row in plans):
        raise typer.Exit(NO)


def _show(name: str, memory: int, plans: list[Plan]) -> None:
    first = plans[0]
    columns = (
        "dtype", "KV dtype", "weights in", "weights", "KV a token", "KV cache", "weights %", "KV %", "other %", "blocks", "tokens",
        f"sequences of {first.typical_len}", f"of {first.max_model_len}", f"{first.max_model_len} reserved",
    )  # fmt: skip
    rows = [
        (
            row.dtype,
            row.kv_dtype,
            row.weights,
            format_size(row.weight_bytes),
            format_size(row.kv_bytes_per_token),
            format_size(row.num_blocks * row.block_bytes),
            *(f"{100 * share:.1f}" for share in row.shares()),
            f"{row.num_blocks}",
            f"{row.num_slots}",
            f"{row.typical}",
            f"{row.full_length}",
            f"{row.reserved}",
        )
        for row in plans
    ]
    print_table(f"{name} in {format_size(memory)}", columns, rows)
    for row in plans:
        if not row.fits:
            note(f"{row.dtype}: no room for one sequence of {row.max_model_len} tokens; more --mem, or --max-model-len")
