"""A load on any server that speaks the OpenAI API, over HTTP, with every request streamed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from pagegen.errors import ConfigError
from pagegen.runtime.load.metrics import Timing
from pagegen.runtime.load.requests import LoadRequest

CONNECT_SECONDS = 30.0
MAX_ERROR = 300  # characters of an answer that are shown


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and what each asks for beside its prompt. `url` is without /v1. `model` None is the first
    that the server names."""

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    temperature: float = 0.0
    ignore_eos: bool = False

    def client(self) -> httpx.AsyncClient:
        """For any number of requests at once, each of which may take as long as it does."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        more = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            **asked,
            "max_tokens": request.num_output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }


def parse_url(text: str) -> str:
    """A server's address without a /v1 at its end. Raises ConfigError for what is none."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"--url {text!r} is no address of a server; write it as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


async def find_model(server: Server) -> dict[str, Any]:
    """What the server says of its model: `id`, and where it tells, `max_model_len`. Raises ConfigError."""
    try:
        async with server.client() as client:
            answer = await client.get("/v1/models")
            found = answer.json() if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"--url {server.url}: /v1/models cannot be read: {_said(error)}; is a server there?") from None
    if found is None:
        raise ConfigError(f"--url {server.url}: /v1/models answers {answer.status_code}: {_error_of(answer.text)}")
    models = found.get("data") if isinstance(found, dict) else None
    if not isinstance(models, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in models):
        raise ConfigError(f"--url {server.url}: /v1/models answers what is no list of models; is it an OpenAI server?")
    chosen = next((model for model in models if server.model in (None, model["id"])), None)
    if chosen is None:
        names = ", ".join(model["id"] for model in models) or "none"
        raise ConfigError(f"--model {server.model} is not served there; it serves: {names}")
    return dict(chosen)


async def warm_up(server: Server, request: LoadRequest) -> None:
    """Sends one request and forgets how long it took. Raises ConfigError if it fails: the others would, too."""
    async with server.client() as client:
        timing = await send(client, server, request, [])
    if timing.error is not None:
        raise ConfigError(f"--url {server.url}: the first request failed: {timing.error}")


async def run_server(
    server: Server,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    timings: list[Timing],
    *,
    max_concurrency: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> float:
    """Sends each request after its `times` seconds; returns the seconds until the last has ended.

    `timings` gets one for each that was sent, so that an interrupt leaves what was measured; those beyond
    `max_concurrency` wait, and are sent when they no longer do. `watch` is told how many have ended.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    ended = 0
    begin = time.perf_counter()

    async def one(client: httpx.AsyncClient, request: LoadRequest, after: float) -> None:
        nonlocal ended
        await asyncio.sleep(max(begin + after - time.perf_counter(), 0.0))
        async with gate:
            await send(client, server, request, timings)
        ended += 1
        if watch:
            watch(ended)

    async with server.client() as client, asyncio.TaskGroup() as group:
        for request, after in zip(requests, times, strict=True):
            group.create_task(one(client, request, after))
    return time.perf_counter() - begin


async def send(client: httpx.AsyncClient, server: Server, request: LoadRequest, timings: list[Timing]) -> Timing:
    """One request to its end; whatever goes wrong becomes the timing's error.

    Tokens are what the server's usage says; without one, a chunk with text is a token, and a prompt's are those asked for.
    """
    prompt = request.prompt
    timing = Timing(len(prompt.split()) if isinstance(prompt, str) else len(prompt), time.perf_counter())
    timing.error = "interrupted"
    timings.append(timing)
    try:
        async with client.stream("POST", server.path, json=server.body(request)) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                timing.error = f"status {response.status_code}: {_error_of(text)}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:") and (payload := line.removeprefix("data:").strip()) != "[DONE]":
                    _take(json.loads(payload), timing)
        timing.error = None if timing.chunks else "the stream had no chunk"
    except (
        *(httpx.HTTPError, httpx.StreamError, OSError),
        *(ValueError, TypeError, LookupError, AttributeError, RecursionError),  # what is no such stream
    ) as error:
        timing.error = _said(error)
    return timing


def _take(document: Any, timing: Timing) -> None:
    """One event of a stream. Raises ValueError for an error that the server reports in it."""
    if document.get("error"):
        raise ValueError(_error_of(json.dumps(document)))
    if choices := document.get("choices"):
        timing.chunks.append(time.perf_counter())
        delta = choices[0].get("delta")
        timing.output_tokens += bool(choices[0].get("text") if delta is None else delta.get("content"))
    if usage := document.get("usage"):
        timing.output_tokens, timing.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])


def _error_of(text: str) -> str:
    """The message of an error document, or the text itself, in one short line."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        error = json.loads(text)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    return " ".join(text.split())[:MAX_ERROR] or "nothing"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR] or type(error).__name__
