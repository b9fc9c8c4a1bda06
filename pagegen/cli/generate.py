"""`pagegen generate`: prompts in, text out, all as one continuous batch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pagegen.cli import INTERRUPTED, NO
from pagegen.cli._common import JsonOption, ModelArgument, format_size, note, print_json, progress
from pagegen.cli._models import EngineOptions, engine_options, load
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
    """What came of the jobs: the latest of each one's outputs by index, none of one that has none (`errors` says why)."""

    outputs: list[dict[int, RequestOutput]]
    errors: dict[int, str]
    seconds: float = 0.0
    interrupted: bool = False


@engine_options
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
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the K likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the likeliest tokens up to this mass; 1 is off.")
    ] = 1.0,
    n: Annotated[int, typer.Option("--n", help="Outputs of each prompt; they share its KV blocks.")] = 1,
    best_of: Annotated[int | None, typer.Option("--best-of", help="Sample as many, and give the N likeliest.")] = None,
    beam: Annotated[
        int | None, typer.Option("--beam", metavar="K", help="Search with K beams, and give the N best outputs.")
    ] = None,
    length_penalty: Annotated[
        float, typer.Option("--length-penalty", help="Of beams: scores are over the length to this power.")
    ] = 1.0,
    early_stopping: Annotated[
        str,
        typer.Option("--early-stopping", metavar="WHEN", help="Of beams, as in transformers: true, false or never."),
    ] = "false",
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model has ended.")] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities of the K likeliest tokens.")
    ] = None,
    json: JsonOption = False,
    *,
    options: EngineOptions,
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
        n=n,
        best_of=best_of,
        beam_width=beam,
        length_penalty=length_penalty,
        early_stopping=_early_stopping(early_stopping),
    )
    lines = _lines(input) if input is not None else []
    llm = load(model, options)
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


def _early_stopping(when: str) -> bool | Literal["never"]:
    match when.lower():
        case "true" | "false":
            return when.lower() == "true"
        case "never":
            return "never"
    raise ConfigError(f"--early-stopping {when} is not known; allowed: true, false, never")


# --- the lines -------------------------------------------------------------------------------------------------------


def _lines(name: str) -> list[tuple[int, str]]:
    if name == "-" and sys.stdin is None:  # closed by whoever started this process
        raise ConfigError("--input - reads standard input, which is closed; name a file of JSON lines")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--input {name} cannot be read: {why}; name a file of JSON lines, or - for stdin") from None
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
    except json.JSONDecodeError as error:
        return Job(error=f"line {number}: it is no JSON object ({error.msg} at character {error.pos + 1})")
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
    run = Run([{} for _ in jobs], {index: job.error for index, job in enumerate(jobs) if job.error})
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
                    run.outputs[int(output.request_id)][output.index] = output
                    finished += output.usage is not None
                    tokens += len(output.new_token_ids)
                advance(finished, f"{tokens / (time.perf_counter() - begin):.1f} tokens/s")
    except KeyboardInterrupt:
        run.interrupted = True
    run.seconds = time.perf_counter() - begin
    run.errors |= {
        job: output.error
        for job, outputs in enumerate(run.outputs)
        for output in outputs.values()
        if output.error is not None
    }


# --- the answer ------------------------------------------------------------------------------------------------------


def report(model: str, kernels: str, engine: Engine, run: Run, as_json: bool) -> None:
    """Prints texts, speed and KV use, or the JSON document."""
    usage = usage_of(run)
    speed = {
        "seconds": run.seconds,
        "output_tokens_per_second": usage["completion_tokens"] / run.seconds if run.seconds else 0.0,
        "total_tokens_per_second": usage["total_tokens"] / run.seconds if run.seconds else 0.0,
    }
    memory = memory_of(engine)
    if as_json:
        rows = [
            output_row(job, outputs.get(index), run.errors.get(job))
            for job, outputs in enumerate(run.outputs)
            for index in sorted(outputs) or [0]
        ]
        print_json(
            {"model": model, "kernels": kernels, "outputs": rows, "usage": usage, "speed": speed, "memory": memory}
        )
        return
    num_rows = sum(max(len(outputs), 1) for outputs in run.outputs)
    for job, outputs in enumerate(run.outputs):
        if job in run.errors:
            if num_rows > 1:
                note(f"--- {job + 1}")
            note(f"error: {run.errors[job]}")
            continue
        for output in by_index(outputs):
            if num_rows > 1:
                note(f"--- {job + 1}" + (f".{output.index + 1}" if len(outputs) > 1 else ""))
            typer.echo(output.text)
    note(
        f"{usage['completion_tokens']} tokens in {run.seconds:.2f} s: "
        f"{speed['output_tokens_per_second']:.1f} tokens/s; "
        f"KV cache at its peak {format_size(memory['kv_bytes_peak'])} of {format_size(memory['kv_bytes_total'])}"
    )


def by_index(outputs: dict[int, RequestOutput]) -> list[RequestOutput]:
    """One job's outputs in order."""
    return [outputs[index] for index in sorted(outputs)]


def usage_of(run: Run) -> dict[str, Any]:
    """Tokens in and out of all jobs; of those that an interrupt left unfinished, as far as they got."""
    prompt_tokens = completion_tokens = cached_tokens = saved_blocks = 0
    for outputs in filter(None, map(by_index, run.outputs)):
        usage = next((output.usage for output in outputs if output.usage), None)
        prompt_tokens += len(outputs[0].prompt_token_ids)
        completion_tokens += usage.completion_tokens if usage else sum(len(o.token_ids) for o in outputs)
        cached_tokens += usage.cached_tokens if usage else 0
        saved_blocks += usage.saved_blocks if usage else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "blocks_saved_by_sharing": saved_blocks,
    }


def memory_of(engine: Engine) -> dict[str, Any]:
    """The KV cache in bytes, and when the most blocks were in use what they held, split as in Kwon et al. 2023, figure 2
    (https://arxiv.org/abs/2309.06180)."""
    stats, block_bytes = engine.stats(), engine.kv_cache.block_bytes
    slot_bytes, split = block_bytes // engine.kernels.spec.block_size, engine.peak.split
    parts = {
        "token_states": split.token,
        "reserved": split.reserved,
        "internal_fragmentation": split.internal,
        "external_fragmentation": split.external,
    }
    return {
        "block_size": engine.kernels.spec.block_size,
        "num_blocks": stats.num_blocks,
        "kv_bytes_total": stats.num_blocks * block_bytes,
        "kv_bytes_peak": stats.kv_bytes_peak,
        "split": {name: slots * slot_bytes for name, slots in parts.items()},
        "num_preemptions": stats.num_preemptions,
    }


def output_row(job: int, output: RequestOutput | None, error: str | None) -> dict[str, Any]:
    """One entry of `outputs`: `index` is the prompt's, `choice` tells its n outputs apart."""
    return {
        "index": job,
        "choice": output.index if output else 0,
        "prompt_token_ids": list(output.prompt_token_ids) if output else [],
        "text": output.text if output else "",
        "token_ids": list(output.token_ids) if output else [],
        "score": output.score if output else None,
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
