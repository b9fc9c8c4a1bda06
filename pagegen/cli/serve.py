"""`pagegen serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from pagegen.cli import INTERRUPTED
from pagegen.cli._common import ModelArgument, note, parse_size
from pagegen.cli._models import DTypeOption, KernelsOption, KvBlocksOption, load
from pagegen.errors import ConfigError

EXAMPLE = "pagegen serve smollm2-135m --port 8000"


def command(
    model: ModelArgument,
    kernels: KernelsOption = None,
    dtype: DTypeOption = "bf16",
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Ask for this key under /v1.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What clients call the model; default: MODEL.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Tokens of prompt and output.")] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens of one iteration.")
    ] = 512,
    max_queued_requests: Annotated[
        int, typer.Option("--max-queued-requests", help="Requests that wait; more get 429.")
    ] = 256,
    kv_cache_memory: Annotated[
        str | None, typer.Option("--kv-cache-memory", metavar="SIZE", help="Bytes of the KV cache, such as 512M.")
    ] = None,
    kv_blocks: KvBlocksOption = None,
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", help="Seconds that open requests get after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP with the OpenAI API."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("`pagegen serve` needs fastapi and uvicorn; pip install 'pagegen[serve]'")
    from pagegen.runtime.server.app import ServedModel, create_app
    from pagegen.runtime.server.run import listen, serve
    from pagegen.runtime.server.worker import EngineWorker

    if max_queued_requests < 0:
        raise ConfigError(f"--max-queued-requests {max_queued_requests} is negative; 0 queues none")
    if api_key == "":
        raise ConfigError("--api-key is empty; give a key, or leave it out to ask for none")
    if not host:  # to a socket it would mean every address
        raise ConfigError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for every one")
    if not shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout {shutdown_timeout} is not a number of seconds; 0 waits for none")
    listener = listen(host, port)  # before the model: a port that is taken is told at once, early clients wait
    llm = load(
        model,
        kernels=kernels,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=parse_size(kv_cache_memory, "--kv-cache-memory"),
        num_blocks=kv_blocks,
    )
    note(f"kernels: {llm.message}")
    pool = llm.engine.block_manager.num_blocks * llm.engine.kernels.spec.block_size  # tokens that fit the KV cache
    served = ServedModel(served_model_name or llm.name, llm.tokenizer, min(llm.engine.max_model_len, pool))
    with EngineWorker(llm.engine, max_num_seqs + max_queued_requests) as worker:
        app = create_app(worker, served, api_key)
        address = f"[{host}]" if ":" in host else host
        note(f"serving {served.name} on http://{address}:{listener.getsockname()[1]}/v1")
        interrupted = serve(app, worker, listener, shutdown_timeout)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
