"""`pagegen generate`: prompts in, text out, all as one continuous batch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli import INTERRUPTED, NO
from pagegen.cli._common import JsonOption, ModelArgument, format_size, note, print_json, progress
from pagegen.cli._models import DTypeOption, KernelsOption, KvBlocksOption, load
from pagegen.errors import ConfigError, PagegenError, RequestError

if TYPE_CHECKING:
    from pagegen.runtime.engine import Engine, RequestOutput
    from pagegen.runtime.sampler import TokenLogprobs
    from pagegen.runtime.sampling_params import SamplingParams
    from pagegen.runtime.tokenizer import Tokenizer

EXAMPLE = "pagegen generate smollm2-135m --chat 'Who are you?' --max-tokens 64"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A prompt that can be run, or `error`: why it cannot. Stands in its place among the outputs."""

    where: str = ""  # goes before the errors of this job
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    params: SamplingParams | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class Run:
    """What came of the jobs: an output each, None for one that has none (`errors` says why)."""

    outputs: list[RequestOutput | None]
    errors: dict[int, str]
    seconds: float = 0.0
    interrupted: bool = False
    peak: tuple[int, int] = (0, 0)  # blocks in use, and the tokens in them, when the most blocks were


def command(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Continue this text.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", metavar="TEXT", help="Answer this message.")] = None,
    input: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE.jsonl",
            help="Run every line: prompt, prompt_token_ids or messages, and any sampling option. - is stdin.",
        ),
    ] = None,
    kernels: KernelsOption = None,
    dtype: DTypeOption = "bf16",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the K likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the likeliest tokens up to this mass; 1 is off.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model has ended.")] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities of the K likeliest tokens.")
    ] = None,
    kv_blocks: KvBlocksOption = None,
    json: JsonOption = False,
) -> None:
    """Generate text offline, all prompts as one continuous batch."""
    from pagegen.runtime.sampling_params import SamplingParams

    if sum(option is not None for option in (prompt, chat, input)) != 1:
        raise ConfigError("name one source of prompts: --prompt TEXT, --chat TEXT or --input FILE.jsonl")
    defaults = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    lines = _lines(input) if input is not None else []
    llm = load(model, kernels=kernels, dtype=dtype, num_blocks=kv_blocks)
    if input is not None:
        jobs = [parse_line(number, line, defaults, llm.tokenizer) for number, line in lines]
    else:
        values = {"prompt": prompt} if prompt is not None else {"messages": [{"role": "user", "content": chat}]}
        jobs = [Job("", _encode(values, llm.tokenizer), defaults)]
    run = add_jobs(llm.engine, jobs)
    if input is None and run.errors:  # the one prompt was refused: no answer holds it
        raise RequestError(run.errors[0])
    note(f"kernels: {llm.message}")
    run_jobs(llm.engine, run)
    report(llm.name, llm.message, llm.engine, run, json)
    if run.interrupted:
        raise typer.Exit(INTERRUPTED)
    if run.errors:
        raise typer.Exit(NO)


# --- the lines -------------------------------------------------------------------------------------------------------


def _lines(name: str) -> list[tuple[int, str]]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--input {name} cannot be read: {error}; name a file of JSON lines, or - for stdin"
        ) from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--input {name} holds no lines; each is an object with prompt, prompt_token_ids or messages")
    return lines


def parse_line(number: int, line: str, defaults: SamplingParams, tokenizer: Tokenizer) -> Job:
    """One line as a job; whatever is wrong with it becomes the job's error."""
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            raise RequestError("it is not an object with prompt, prompt_token_ids or messages")
        known = {field.name for field in dataclasses.fields(defaults)}
        changes = {name: values.pop(name) for name in known & values.keys()}
        return Job(f"line {number}: ", _encode(values, tokenizer), dataclasses.replace(defaults, **changes))
    except (ValueError, RecursionError, PagegenError) as error:
        return Job(error=f"line {number}: {error}")


_SOURCES = {"prompt": "text", "prompt_token_ids": "list of token ids", "messages": "list of messages"}


def _encode(values: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    for name in values.keys() - _SOURCES.keys():
        raise RequestError(
            f"field {name!r} is not known; allowed: {', '.join(_SOURCES)} and the sampling options", name
        )
    if len(values) != 1:
        raise RequestError(f"it has {len(values)} of {', '.join(_SOURCES)}; exactly one is allowed")
    ((name, value),) = values.items()
    if name == "prompt" and isinstance(value, str):
        return tokenizer.encode(value)
    if name == "prompt_token_ids" and isinstance(value, list) and all(type(token) is int for token in value):
        return value
    if name == "messages" and isinstance(value, list):
        return tokenizer.encode_chat(value)
    raise RequestError(f"{name} is not a {_SOURCES[name]}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# --- the run ---------------------------------------------------------------------------------------------------------


def add_jobs(engine: Engine, jobs: Sequence[Job]) -> Run:
    """Queues every job that can be run; `errors` says why the others cannot."""
    run = Run([None] * len(jobs), {index: job.error for index, job in enumerate(jobs) if job.error})
    for index, job in enumerate(jobs):
        if job.params is not None:
            try:
                engine.add_request(str(index), job.prompt_token_ids, job.params)
            except RequestError as error:
                run.errors[index] = f"{job.where}{error}"
    return run


def run_jobs(engine: Engine, run: Run) -> None:
    """Runs what is queued, together; an interrupt keeps what is finished and what there is of the rest."""
    begin = time.perf_counter()
    finished, tokens = 0, 0
    try:
        with progress("generating", len(run.outputs) - len(run.errors)) as advance:
            while engine.has_work:
                for output in engine.step():
                    run.outputs[int(output.request_id)] = output
                    finished += output.finish_reason is not None
                    tokens += len(output.new_token_ids)
                run.peak = max(run.peak, _in_use(engine))
                advance(finished, f"{tokens / (time.perf_counter() - begin):.1f} tokens/s")
    except KeyboardInterrupt:
        run.interrupted = True
    run.seconds = time.perf_counter() - begin
    run.errors |= {
        index: out.error for index, out in enumerate(run.outputs) if out is not None and out.error is not None
    }


def _in_use(engine: Engine) -> tuple[int, int]:
    return engine.block_manager.num_used_blocks, sum(
        sequence.num_computed_tokens for sequence in engine.scheduler.running
    )


# --- the answer ------------------------------------------------------------------------------------------------------


def report(model: str, kernels: str, engine: Engine, run: Run, as_json: bool) -> None:
    """Prints texts, speed and KV use, or the JSON document."""
    outputs = [output for output in run.outputs if output is not None]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    speed = {
        "seconds": run.seconds,
        "output_tokens_per_second": completion_tokens / run.seconds if run.seconds else 0.0,
        "total_tokens_per_second": usage["total_tokens"] / run.seconds if run.seconds else 0.0,
    }
    memory = memory_of(engine, run.peak)
    if as_json:
        rows = [output_row(index, output, run.errors.get(index)) for index, output in enumerate(run.outputs)]
        print_json(
            {"model": model, "kernels": kernels, "outputs": rows, "usage": usage, "speed": speed, "memory": memory}
        )
        return
    for index, output in enumerate(run.outputs):
        if len(run.outputs) > 1:
            note(f"--- {index + 1}")
        if index in run.errors:
            note(f"error: {run.errors[index]}")
        elif output is not None:
            typer.echo(output.text)
    note(
        f"{completion_tokens} tokens in {run.seconds:.2f} s: {speed['output_tokens_per_second']:.1f} tokens/s; "
        f"KV cache at its peak {format_size(memory['kv_bytes_peak'])} of {format_size(memory['kv_bytes_total'])}"
    )


def memory_of(engine: Engine, peak: tuple[int, int]) -> dict[str, Any]:
    """The KV cache in bytes, and when the most blocks were in use what they held, split as in Kwon et al. 2023, figure 2
    (https://arxiv.org/abs/2309.06180). Paged allocation reserves nothing ahead and leaves no block unusable."""
    stats, block_bytes = engine.stats(), engine.kv_cache.block_bytes
    blocks, tokens = peak
    token_states = tokens * block_bytes // engine.kernels.spec.block_size
    split = {
        "token_states": token_states,
        "reserved": 0,
        "internal_fragmentation": blocks * block_bytes - token_states,
        "external_fragmentation": 0,
    }
    return {
        "block_size": engine.kernels.spec.block_size,
        "num_blocks": stats.num_blocks,
        "kv_bytes_total": stats.num_blocks * block_bytes,
        "kv_bytes_peak": stats.kv_bytes_peak,
        "split": split,
    }


def output_row(index: int, output: RequestOutput | None, error: str | None) -> dict[str, Any]:
    """One entry of `outputs`."""
    return {
        "index": index,
        "prompt_token_ids": list(output.prompt_token_ids) if output else [],
        "text": output.text if output else "",
        "token_ids": list(output.token_ids) if output else [],
        "finish_reason": "error" if error else output.finish_reason if output else None,
        "logprobs": _logprobs(output.logprobs if output else None),
        "prompt_logprobs": _logprobs(output.prompt_logprobs if output else None),
        "error": error,
    }


def _logprobs(tokens: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    if tokens is None:
        return None
    return [
        {
            "token_id": t.token_id,
            "logprob": _finite(t.logprob),
            "rank": t.rank,
            "top": [[i, _finite(p)] for i, p in t.top],
        }
        for t in tokens
    ]


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None  # JSON has no minus infinity
