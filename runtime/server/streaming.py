"""Outputs as they leave the server: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pagegen.runtime.engine import RequestOutput
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.server.errors import CLIENT_GONE, ApiError, internal_error
from pagegen.runtime.server.responses import ResponseFormat, usage
from pagegen.runtime.server.worker import AbortedError, EngineWorker, QueueFullError, StoppedError, Stream, WorkerError

logger = logging.getLogger("pagegen.server")

PING_SECONDS = 15.0  # of silence, after which a comment goes out: proxies keep the connection, dead clients show
RETRY_AFTER_SECONDS = 1
FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called however the response ends: sent, cancelled, or never begun."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def event(document: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def events(
    stream: Stream, form: ResponseFormat, *, include_usage: bool, request_id: str, ping_seconds: float = PING_SECONDS
) -> AsyncIterator[str]:
    """The chunks of a stream, then `[DONE]`; an error after the begin is an event of its own with no `[DONE]`."""
    shared = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    sent: dict[int, RequestOutput] = {}  # what has been sent of each choice
    finished: list[RequestOutput] = []  # the last output of each request
    try:
        async for update in stream.updates(ping_seconds):
            if update is None:
                yield ": ping\n\n"
                continue
            index, output = update
            finished += [output] if output.usage else []
            failed = output.finish_reason in FAILED
            if index not in opened and (opening := form.opening(index)):
                yield event(form.chunk([opening]) | shared)
            opened.add(index)
            shown = dataclasses.replace(output, finish_reason=None) if failed else output
            delta = form.delta(index, sent.get(index), shown)
            if delta is not None:
                yield event(form.chunk([delta]) | shared)
                sent[index] = shown
            if failed:
                raise _failure(output, request_id)
    except (WorkerError, ApiError) as error:
        yield event(api_error(error, request_id).body())
        return
    if include_usage:
        yield event(form.chunk([]) | {"usage": usage(finished)})
    yield "data: [DONE]\n\n"


async def collect(request: Request, worker: EngineWorker, stream: Stream, request_id: str) -> list[RequestOutput]:
    """The finished outputs in order; a client that goes away meanwhile aborts them. Raises ApiError."""
    watcher = asyncio.create_task(_disconnected(request))
    watcher.add_done_callback(lambda _: worker.abort(stream))
    outputs: dict[int, RequestOutput] = {}
    try:
        async for update in stream.updates():
            if update is not None:
                index, output = update
                if output.finish_reason in FAILED:
                    raise _failure(output, request_id)
                outputs[index] = output
    except WorkerError as error:
        raise api_error(error, request_id) from None
    finally:
        watcher.cancel()  # calls abort too: it passes over what has finished
    return [outputs[place] for place in range(stream.num_outputs)]


def api_error(error: WorkerError | ApiError, request_id: str) -> ApiError:
    """The HTTP error for a worker's."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        case StoppedError():
            return ApiError(503, str(error), code="shutting_down")
        case AbortedError():
            return ApiError(CLIENT_GONE, str(error), code="aborted")
        case _:
            return internal_error(request_id)


def _failure(output: RequestOutput, request_id: str) -> ApiError:
    logger.error("request %s ended with %s: %s", request_id, output.finish_reason, output.error)
    return internal_error(request_id)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
