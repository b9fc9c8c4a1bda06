"""An engine that follows a script, so that the server's tests say exactly when what happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import uvicorn

from pagegen.errors import RequestError
from pagegen.runtime.detokenizer import Detokenizer
from pagegen.runtime.engine import EngineStats, RequestOutput
from pagegen.runtime.outputs import RequestUsage
from pagegen.runtime.sampler import TokenLogprobs
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.server.app import ServedModel, create_app
from pagegen.runtime.server.run import listen
from pagegen.runtime.server.worker import EngineWorker
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.dummy import END_TOKEN_IDS, DummyModel

TOKENIZER = DummyModel("tiny").tokenizer()  # one token a byte
BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_MODEL_LEN = 256
NAME = "scripted"
ERROR_TOKEN = 256  # a script that comes to it ends with an error of the engine


def echo(prompt: list[int]) -> list[int]:
    """The default script: the prompt's own letters in capitals, then the end token."""
    return [*bytes(token for token in prompt if token < 256).upper(), END_TOKEN_IDS[0]]


@dataclasses.dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: SamplingParams
    script: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    text: Detokenizer = dataclasses.field(default_factory=lambda: Detokenizer(TOKENIZER))

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.prompt) + len(self.tokens)) // BLOCK_SIZE)

    def advance(self, request_id: str) -> RequestOutput:
        """The next token of the script, and what an engine says then."""
        token = self.script[len(self.tokens)]
        self.tokens.append(token)
        full = len(self.tokens) >= self.params.max_tokens
        reason = FinishReason.STOP if token in END_TOKEN_IDS else FinishReason.LENGTH if full else None
        reason = FinishReason.ERROR if token == ERROR_TOKEN else reason
        delta = self.text.push(token) + (self.text.flush() if reason else "")
        top = tuple((66 + i, -1.0 - i) for i in range(self.params.logprobs or 0))
        self.logprobs.append(TokenLogprobs(token, -0.5 if token != ord("Z") else float("-inf"), 1, top))
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.tokens),
            new_token_ids=(token,),
            text=self.text.text,
            text_delta=delta,
            finish_reason=reason,
            error="NaN in /secret/path" if reason is FinishReason.ERROR else None,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            usage=RequestUsage(len(self.prompt), completion_tokens=len(self.tokens) * self.params.n)
            if reason
            else None,
        )


class ScriptedEngine:
    """A token of its script for every request in every step, n times alike. `on_step` may wait, or raise."""

    def __init__(
        self,
        script: Callable[[list[int]], list[int]] = echo,
        *,
        step_seconds: float = 0.0,
        on_step: Callable[[], object] | None = None,
    ) -> None:
        self.script, self.step_seconds, self.on_step = script, step_seconds, on_step
        self.requests: dict[str, _Request] = {}
        self.aborted: list[str] = []
        self.scheduling: list[tuple[int, str]] = []  # priority and salt of each
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.num_steps = 0
        self.thread: int | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self._check_thread()
        self.scheduling.append((priority, cache_salt))
        if not prompt_token_ids:
            raise RequestError("the prompt has no tokens", "prompt")
        if prompt_token_ids[0] == ord("!"):
            raise RuntimeError("a defect met while adding")
        if max(prompt_token_ids) >= TOKENIZER.vocab_size or min(prompt_token_ids) < 0:
            raise RequestError("the prompt holds an id outside the vocabulary", "prompt")
        self.seen.append((prompt_token_ids, params))
        self.requests[request_id] = _Request(prompt_token_ids, params, self.script(prompt_token_ids))

    def abort(self, request_id: str) -> bool:
        self._check_thread()
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self) -> list[RequestOutput]:
        self._check_thread()
        self.num_steps += 1
        time.sleep(self.step_seconds)
        if self.on_step is not None:
            self.on_step()
        outputs = []
        for request_id, request in list(self.requests.items()):
            output = request.advance(request_id)
            n = request.params.n
            outputs += [dataclasses.replace(output, index=index, usage=None) for index in range(n - 1)]
            outputs.append(dataclasses.replace(output, index=n - 1))
            if output.finish_reason is not None:
                del self.requests[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return stats_of(self.requests.values())

    def _check_thread(self) -> None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "the engine was called from two threads"


def stats_of(requests: Iterable[_Request]) -> EngineStats:
    """The present, as far as the server shows it."""
    requests = list(requests)
    return EngineStats(
        num_running=len(requests),
        num_waiting=0,
        num_blocks=NUM_BLOCKS,
        num_used_blocks=sum(request.num_blocks for request in requests),
        num_preemptions=0,
        num_steps=0,
        num_computed_tokens=0,
        num_generated_tokens=0,
        kv_bytes_in_use=0,
        kv_bytes_peak=0,
    )


# --- a server around it ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """A server on a port of 127.0.0.1, with the engine behind it."""

    engine: ScriptedEngine
    worker: EngineWorker
    client: httpx.Client
    port: int

    def complete(self, prompt: object = "abc", **more: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.client.post("/v1/completions", json={"model": NAME, "prompt": prompt} | more)

    def chat(self, text: str = "abc", **more: Any) -> httpx.Response:
        """POST /v1/chat/completions with one user message."""
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages} | more)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, parsed; the last one may be the text [DONE]."""
        with self.client.stream("POST", path, json={"model": NAME, "stream": True} | body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(response.read().decode())

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Returns once nothing runs and nothing is open."""
        give_up = time.monotonic() + seconds
        while self.engine.requests or self.worker.num_open:
            assert time.monotonic() < give_up, "requests are left"
            time.sleep(0.01)


def parse_events(text: str) -> list[Any]:
    """The data of server-sent events; comments are passed over."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert text == "" or text.endswith("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]) for block in blocks]


@contextlib.contextmanager
def live(
    engine: ScriptedEngine | None = None,
    *,
    api_key: str | None = None,
    max_open: int = 100,
    max_model_len: int = MAX_MODEL_LEN,
    max_body_bytes: int = 1 << 20,
    stall_seconds: float = 60.0,
    tokenizer: Tokenizer = TOKENIZER,
) -> Iterator[Live]:
    """A server for the length of a `with` block."""
    engine = engine or ScriptedEngine()
    model = ServedModel(NAME, tokenizer, max_model_len)
    with EngineWorker(engine, max_open, stall_seconds) as worker:
        server = uvicorn.Server(
            uvicorn.Config(create_app(worker, model, api_key, max_body_bytes), log_level="critical", lifespan="off")
        )
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits, trust_env=False
            ) as client:
                yield Live(engine, worker, client, port)
        finally:
            server.should_exit = True
            thread.join()
