"""`pagegen bench`: a kernel package against its own default and torch, and loads on an engine or a server."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from pagegen.cli import INTERRUPTED, NO
from pagegen.cli._bench_load import (
    Asked,
    BurstinessOption,
    ConcurrencyOption,
    GoodputOption,
    NumPromptsOption,
    PercentilesOption,
    PrefixOption,
    RateOption,
    SeedOption,
    TraceOption,
    show,
)
from pagegen.cli._common import JsonOption, ModelArgument, as_path, note, print_json, print_table, progress
from pagegen.cli._models import EngineOptions, engine_options, load
from pagegen.errors import ConfigError
from pagegen.runtime.load.metrics import Timing
from pagegen.spec import Phase

PEERS = ("default", "sdpa")

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Time what was built."""


@app.command(
    "kernel",
    short_help="Time attend against the default and torch SDPA.",
    epilog="Example: pagegen bench kernel PACKAGE --against default,sdpa",
)
def kernel(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", parser=as_path, help="The package's folder.", show_default=False)],
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="PEERS", help="default (untuned), sdpa (torch, three forms), or both by a comma."
        ),
    ] = ",".join(PEERS),
    phase: Annotated[
        Phase | None, typer.Option("--phase", help="Only batches of this phase.", show_default=False)
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, help="Time for one batch, all contenders together.")
    ] = 0.5,
    json: JsonOption = False,
) -> None:
    """Time a package's attend on ragged batches, with cold KV in scattered blocks.

    The roofline is measured first; a share of it is the least time that it allows over the time taken. A ratio is a
    contender's time over the package's: above 1 the package is faster. sdpa_gather makes the paged KV contiguous in every
    call; sdpa_gqa and sdpa_folded are given contiguous KV for nothing.
    """
    peers = [word for word in against.split(",") if word]
    unknown = next((word for word in peers if word not in PEERS), None)
    if unknown is not None:
        raise ConfigError(f"--against {unknown!r} is not known; allowed: {', '.join(PEERS)}, joined by commas")
    import torch

    from pagegen.package import load_package
    from pagegen.target import detect
    from pagegen.tuning.contest import bench, limit_notes, table
    from pagegen.tuning.machine import openmp_settings
    from pagegen.tuning.roofline import measure_roofline
    from pagegen.tuning.workloads import select

    loaded = load_package(package)
    torch.set_num_threads(detect().threads)
    selection = select(None, loaded.spec, loaded.target)
    workloads = list((selection.only(phase) if phase else selection).workloads.values())
    contenders = {"package": loaded, "default": loaded.default_kernels()}
    if "default" not in peers:
        del contenders["default"]
    done = 0
    with progress("timing", sum(len(workload.points) for workload in workloads)) as advance:

        def watch(point: str) -> None:
            nonlocal done
            done += 1
            advance(done, point)

        roofline = measure_roofline(loaded.target) if loaded.target.kind == "cpu" else None
        with_sdpa = "sdpa" in peers
        rows, conditions = bench(
            contenders, loaded.target, workloads, with_sdpa=with_sdpa, seconds=seconds, roofline=roofline, watch=watch
        )
    if json:
        shape = {"package": loaded.name, "spec": loaded.spec.to_dict(), "target": loaded.target.name}
        limits = {"roofline": roofline.to_dict() if roofline else None}
        plain = {"conditions": conditions.to_dict() if conditions else None, "rows": [row.to_dict() for row in rows]}
        print_json({**shape, "threads": torch.get_num_threads(), "openmp": openmp_settings(os.environ), **limits, **plain})
        return
    note(f"{loaded.spec.slug} on {loaded.target.name}; a batch is SEQUENCESxQUERIES@CONTEXT")
    if conditions:
        note(conditions.line)
        if conditions.disturbance.line:
            note(conditions.disturbance.line)
    for line in limit_notes(rows, [roofline.to_dict()] if roofline else []):
        note(line)
    print_table(f"{loaded.name}: time of the others over the package's", *table(rows))


@app.command(
    "engine",
    short_help="Load an engine in this process; what it serves, and where its time goes.",
    epilog="Example: pagegen bench engine smollm2-135m --trace fixed:128x64 --num-prompts 32 --profile",
)
@engine_options
def engine(
    model: ModelArgument,
    trace: TraceOption = "sharegpt",
    num_prompts: NumPromptsOption = 100,
    request_rate: RateOption = math.inf,
    burstiness: BurstinessOption = 1.0,
    max_concurrency: ConcurrencyOption = None,
    prefix: PrefixOption = 0,
    seed: SeedOption = 0,
    goodput: GoodputOption = None,
    metric_percentiles: PercentilesOption = "99",
    profile: Annotated[bool, typer.Option("--profile", help="Also say where the time of a step goes.")] = False,
    json: JsonOption = False,
    *,
    options: EngineOptions,
) -> None:
    """Serve prompts of random token ids offline, each to its full length, and measure as `vllm bench serve` does.

    One request runs before, which is not counted. Exit status 1 if any request failed.
    """
    from pagegen.cli.generate import memory_of
    from pagegen.runtime.load import offline
    from pagegen.runtime.load.requests import LoadRequest, token_prompts

    asked = Asked(
        trace, num_prompts, request_rate, burstiness, max_concurrency, prefix, seed, goodput or [], metric_percentiles
    )
    llm = load(model, options)
    engine = llm.engine
    room = min(engine.max_model_len, engine.memory.num_blocks * engine.kernels.spec.block_size)
    prompts = token_prompts(asked.rows(room), engine.model.config.vocab_size, seed)
    note(f"kernels: {llm.message}")
    offline.run_engine(engine, [LoadRequest((0,), min(2, room))], [0.0], [])
    kernels = offline.TimedKernels(engine.kernels)
    if profile:
        engine.kernels = kernels
    before, num_steps = dict(engine.seconds), engine.stats().num_steps
    timings, interrupted, begin = list[Timing](), False, time.perf_counter()
    with progress("serving", len(prompts)) as advance:
        try:
            duration = offline.run_engine(
                engine, prompts, asked.arrivals(), timings, max_concurrency=max_concurrency, watch=lambda n: advance(n, "")
            )
        except KeyboardInterrupt:
            duration, interrupted = time.perf_counter() - begin, True
    figures = {"model": llm.name, "kernels": llm.message, **asked.figures(timings, duration), "memory": memory_of(engine)}
    if profile:
        figures["profile"] = offline.profile(engine, kernels, engine.stats().num_steps - num_steps, before)
    if json:
        print_json(figures)
    else:
        show(f"{llm.name}, {trace}, {num_prompts} requests", figures)
        if profile:
            rows = [
                (row["phase"], f"{row['seconds']:.3f}", f"{100 * row['share']:.1f}%", f"{row['ms_per_step']:.3f}")
                for row in figures["profile"]
            ]
            print_table("\nwhere the time of a step goes", ("phase", "seconds", "share", "ms/step"), rows)
    if interrupted or figures["failed"]:
        raise typer.Exit(INTERRUPTED if interrupted else NO)


@app.command(
    "serve",
    short_help="Load any OpenAI-compatible server over HTTP.",
    epilog="Example: pagegen bench serve --url http://127.0.0.1:8000 --request-rate 4 --goodput ttft:500",
)
def serve(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server, as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Default: the first that it names.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="MODEL",
            help="Send token ids of this model's vocabulary, exactly as many; default: English words, about as many.",
            show_default=False,
        ),
    ] = None,
    trace: TraceOption = "sharegpt",
    num_prompts: NumPromptsOption = 100,
    request_rate: RateOption = math.inf,
    burstiness: BurstinessOption = 1.0,
    max_concurrency: ConcurrencyOption = None,
    prefix: PrefixOption = 0,
    seed: SeedOption = 0,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for outputs of full length: an extension of vLLM that pagegen has.")
    ] = False,
    goodput: GoodputOption = None,
    metric_percentiles: PercentilesOption = "99",
    json: JsonOption = False,
) -> None:
    """Send streamed requests to a server, and measure as `vllm bench serve` does.

    One request goes before, which is not counted: if it fails, nothing else is sent. Tokens are counted by the server's
    usage. Exit status 1 if any request failed.
    """
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("`pagegen bench serve` needs httpx; pip install 'pagegen[bench]'")
    from pagegen.runtime.load import client
    from pagegen.runtime.load.requests import token_prompts, word_prompts

    asked = Asked(
        trace, num_prompts, request_rate, burstiness, max_concurrency, prefix, seed, goodput or [], metric_percentiles
    )
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature} is out of range; allowed: 0 (greedy) and above")
    if chat and tokenizer is not None:
        raise ConfigError("--tokenizer is for token ids, which a chat cannot carry; leave out --chat or --tokenizer")
    where = client.Server(client.parse_url(url), model, api_key, chat, temperature, ignore_eos)
    found = asyncio.run(client.find_model(where))
    where = client.Server(where.url, found["id"], api_key, chat, temperature, ignore_eos)
    limit = found.get("max_model_len")
    rows = asked.rows(limit if isinstance(limit, int) and limit > 0 else 2048)
    prompts = word_prompts(rows, seed) if tokenizer is None else token_prompts(rows, _vocab_size(tokenizer), seed)
    timings, interrupted, begin = list[Timing](), False, time.perf_counter()
    with progress("serving", len(prompts)) as advance:
        try:
            asyncio.run(client.warm_up(where, prompts[0]))
            begin = time.perf_counter()
            duration = asyncio.run(
                client.run_server(
                    where, prompts, asked.arrivals(), timings, max_concurrency=max_concurrency, watch=lambda n: advance(n, "")
                )
            )
        except KeyboardInterrupt:
            duration, interrupted = time.perf_counter() - begin, True
    figures = {"url": where.url, "model": where.model, **asked.figures(timings, duration)}
    if json:
        print_json(figures)
    else:
        show(f"{where.model} at {where.url}, {trace}, {num_prompts} requests", figures)
    if interrupted or figures["failed"]:
        raise typer.Exit(INTERRUPTED if interrupted else NO)


def _vocab_size(model: str) -> int:
    from pagegen.runtime.weights.resolve import resolve_model

    return resolve_model(model).config.vocab_size
