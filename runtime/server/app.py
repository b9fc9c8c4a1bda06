"""The HTTP application: OpenAI's completions, chat completions and models, and /health."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hmac
import re
import time
import uuid
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagegen.runtime.server.errors import ApiError, install_handlers
from pagegen.runtime.server.protocol import MAX_BODY_BYTES, ApiRequest, ChatRequest, CompletionRequest, read_request
from pagegen.runtime.server.responses import ChatFormat, CompletionFormat, ResponseFormat
from pagegen.runtime.server.streaming import EventStream, api_error, collect, events
from pagegen.runtime.server.worker import EngineWorker, WorkerError
from pagegen.runtime.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it; a chat's default is what fits


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server says and knows about its one model. `max_model_len` bounds prompt + output tokens: the model's
    limit, or the KV pool's if that is smaller."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, Any]:
        """An entry of GET /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "pagegen",
            "root": self.name,
            "max_model_len": self.max_model_len,
        }

    def require(self, name: str) -> None:
        """Raises ApiError 404 for any other model."""
        if name != self.name:
            message = f"model {name[:200]!r} is not served here; the served model is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def room(self, num_prompt_tokens: int, param: str) -> int:
        """Tokens that may be generated after a prompt. Raises ApiError 400 if there is not one."""
        if num_prompt_tokens >= self.max_model_len:
            message = (
                f"{param} has {num_prompt_tokens} tokens, which leaves none to generate within the limit of "
                f"{self.max_model_len} tokens; send a shorter one"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return self.max_model_len - num_prompt_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """The routes' one collaborator."""

    worker: EngineWorker
    model: ServedModel
    max_body_bytes: int = MAX_BODY_BYTES

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_request(request, CompletionRequest, self.max_body_bytes)
        self.model.require(body.model)
        prompts = await asyncio.to_thread(self._encode, body.prompts())
        form = CompletionFormat(self.model.name, self.model.tokenizer)
        return await self._answer(request, body, prompts, form, "prompt", DEFAULT_MAX_TOKENS)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_request(request, ChatRequest, self.max_body_bytes)
        self.model.require(body.model)
        prompt = await asyncio.to_thread(self.model.tokenizer.encode_chat, body.chat())
        form = ChatFormat(self.model.name, self.model.tokenizer)
        return await self._answer(request, body, [prompt], form, "messages", None)

    def _encode(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        encode = self.model.tokenizer.encode
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _answer(
        self,
        request: Request,
        body: ApiRequest,
        prompts: list[list[int]],
        form: ResponseFormat,
        param: str,
        default_max_tokens: int | None,
    ) -> Response:
        longest = max(map(len, prompts))
        room = self.model.room(longest, param)
        params = body.sampling_params(room if default_max_tokens is None else min(room, default_max_tokens))
        if params.max_tokens > room:
            message = (
                f"{param} has {longest} tokens and max_tokens is {params.max_tokens}: together over the limit of "
                f"{self.model.max_model_len} tokens; send a shorter one or max_tokens up to {room}"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        request_id: str = request.state.request_id
        try:
            stream = await self.worker.submit(
                prompts, params, priority=body.priority or 0, cache_salt=body.cache_salt or ""
            )
        except WorkerError as error:
            raise api_error(error, request_id) from None
        if body.stream:
            chunks = events(stream, form, include_usage=body.include_usage, request_id=request_id)
            return EventStream(chunks, functools.partial(self.worker.abort, stream))
        return JSONResponse(form.response(await collect(request, self.worker, stream, request_id)))


class RequestIds:
    """ASGI middleware: every request gets an id, the client's own if it is harmless, and every response names it.

    It is for logs and people; inside, requests go by names that no client chooses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_named)


def create_app(
    worker: EngineWorker, model: ServedModel, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application on a running worker. With an `api_key`, every route under /v1 asks for it."""
    service = Service(worker, model, max_body_bytes)

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")  # the header's own bytes
        if api_key is not None and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(authorize)])
    v1.add_api_route("/completions", service.completions, methods=["POST"], response_model=None)
    v1.add_api_route("/chat/completions", service.chat_completions, methods=["POST"], response_model=None)

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @v1.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.require(name)
        return model.card()

    # No documentation pages: they would load scripts from elsewhere.
    app = FastAPI(title="pagegen", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(v1)

    @app.get("/health")
    async def health() -> JSONResponse:
        status, stats = worker.status, worker.stats
        body = {
            "status": status,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "waiting_for": dict(stats.wait_reasons),
            "kv_blocks_used": stats.num_used_blocks,
            "kv_blocks_pinned": stats.num_pinned_blocks,
            "kv_blocks": stats.num_blocks,
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    install_handlers(app)
    app.add_middleware(RequestIds)
    return app
