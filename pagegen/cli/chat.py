"""`pagegen chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pagegen.cli._common import ModelArgument, note
from pagegen.cli._models import EngineOptions, engine_options, load
from pagegen.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pagegen.runtime.engine import Engine
    from pagegen.runtime.sampling_params import SamplingParams

EXAMPLE = "pagegen chat smollm2-135m --system 'Answer in one sentence.'"


@engine_options
def command(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the likeliest tokens up to this mass; 1 is off.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    *,
    options: EngineOptions,
) -> None:
    """Chat with a model in the terminal."""
    from pagegen.runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = load(model, options)
    note(f"kernels: {llm.message}")
    note("/new forgets the conversation, ctrl-C ends an answer, ctrl-D the chat")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (text := _read()) is not None:
        if text.strip() == "/new":
            messages = list(opening)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            try:
                answer = reply(llm.engine, llm.tokenizer.encode_chat(messages), params)
            except RequestError as error:
                messages.pop()
                note(f"{error}; /new forgets the conversation")
            else:
                messages.append({"role": "assistant", "content": answer})


def _read() -> str | None:
    if sys.stdin is None:  # closed by whoever started this process
        return None
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text in {error.encoding}: {error.reason}; send UTF-8") from None


def reply(engine: Engine, prompt_token_ids: list[int], params: SamplingParams) -> str:
    """Prints the answer as it comes; an interrupt ends it and keeps what there is."""
    engine.add_request("chat", prompt_token_ids, params)
    text = ""
    try:
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise RequestError(output.error)
                typer.echo(output.text_delta, nl=False)
                sys.stdout.flush()
                text = output.text
    except KeyboardInterrupt:
        engine.abort("chat")
    typer.echo()
    return text
