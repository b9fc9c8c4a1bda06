"""What `generate`, `chat` and `serve` share: the options that make an engine, and making it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagegen.errors import ConfigError
from pagegen.spec import DType

if TYPE_CHECKING:
    from pagegen.runtime.launcher import Launched

KernelsOption = Annotated[
    Path | None,
    typer.Option(
        "--kernels", metavar="PACKAGE", help="Kernel package; default: a fitting one of the cache, or a new build."
    ),
]
DTypeOption = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.")]
KvBlocksOption = Annotated[int | None, typer.Option("--kv-blocks", metavar="N", help="Blocks of the KV cache.")]


def load(
    model: str,
    *,
    kernels: Path | None,
    dtype: str,
    num_blocks: int | None,
    kv_cache_bytes: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
) -> Launched:
    """The model with its engine, from the options' values. Raises PagegenError."""
    from pagegen.runtime.engine import EngineConfig
    from pagegen.runtime.launcher import launch
    from pagegen.spec import FLOATS

    if dtype not in FLOATS:
        raise ConfigError(f"--dtype {dtype} is not known; allowed: {', '.join(FLOATS)}")
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        kv_cache_bytes=kv_cache_bytes,
        dtype=DType(dtype),
    )
    return launch(model, kernels, config)
