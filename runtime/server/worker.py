"""The engine on a thread of its own, and asyncio streams of its outputs.

One thread calls the engine, so the engine needs no lock. The event loop sends it commands through a queue and gets
outputs back with `call_soon_threadsafe`. A stream holds the latest output of each of its requests, not a queue of them:
a reader that stalls finds less often and more, and its request goes on to its end; memory stays bounded by the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVarTuple

from pagegen.errors import PagegenError
from pagegen.runtime.engine import EngineStats, RequestOutput
from pagegen.runtime.sampling_params import SamplingParams

Ts = TypeVarTuple("Ts")

logger = logging.getLogger("pagegen.server")

STALL_SECONDS = 120.0  # an iteration that takes longer makes /health say so
JOIN_SECONDS = 10.0  # for the iteration in flight; a thread that hangs then dies with the process


class EngineLike(Protocol):
    """What the worker needs of an engine; the tests have a scripted one."""

    @property
    def has_work(self) -> bool: ...
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...


class WorkerError(Exception):
    """The worker, not the request, is the reason that a request gets no (further) answer."""


class QueueFullError(WorkerError):
    """As many requests as allowed are open."""


class StoppedError(WorkerError):
    """The server is draining or has stopped."""


class EngineFailedError(WorkerError):
    """The engine raised something that is no PagegenError; the log has the traceback."""


class AbortedError(WorkerError):
    """The stream was aborted, most likely because its client went away."""


class Stream:
    """The outputs of one or more requests that were submitted together, `n` of each; read by one task."""

    def __init__(self, request_ids: Sequence[str], n: int = 1) -> None:
        self.request_ids = list(request_ids)
        self.num_outputs = len(request_ids) * n
        self._places = {request_id: i * n for i, request_id in enumerate(request_ids)}
        self._latest: dict[int, RequestOutput] = {}  # not yet read
        self._open = set(request_ids)
        self._accepting = set(request_ids)
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the engine has no more work for it."""
        return not self._open or self._failure is not None

    async def accepted(self) -> None:
        """Waits until the engine has taken every request; raises what it refused one with."""
        while self._accepting and not self._failure:
            await self._wait(None)
        if self._failure:
            raise self._failure

    async def updates(self, silence: float | None = None) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """Yields (place, output so far), outputs that piled up merged into the latest one. The first request's n outputs
        have the first n places, and so on.

        Yields None after each `silence` seconds without any. Ends when every request has finished; raises WorkerError.
        """
        while True:
            if self._failure:
                raise self._failure
            if self._latest:
                for place in sorted(self._latest):
                    yield place, self._latest.pop(place)
            elif not self._open:
                return
            elif not await self._wait(silence):
                yield None

    async def _wait(self, seconds: float | None) -> bool:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # Called on the event loop by the worker.

    def accept(self, request_id: str) -> None:
        self._accepting.discard(request_id)
        self._changed.set()

    def put(self, output: RequestOutput) -> None:
        self._latest[self._places[output.request_id] + output.index] = output
        if output.usage is not None:
            self._open.discard(output.request_id)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EngineWorker:
    """Runs an engine; a context manager that owns the thread. `max_open` bounds accepted, unfinished requests."""

    def __init__(self, engine: EngineLike, max_open: int = 320, stall_seconds: float = STALL_SECONDS) -> None:
        self._engine = engine
        self._max_open = max_open
        self._stall_seconds = stall_seconds
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # open requests; touched on the event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pagegen-engine", daemon=True)
        self._live: set[str] = set()  # what the engine has; touched on its thread only
        self._stopping = False
        self._busy_since: float | None = None  # begin of the iteration in flight
        self.stats = engine.stats()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(JOIN_SECONDS)

    # --- on the event loop ---

    @property
    def num_open(self) -> int:
        """Accepted, unfinished requests."""
        return len(self._streams)

    @property
    def status(self) -> str:
        """`ok`, `draining`, `stalled` (an iteration makes no progress) or `dead`."""
        busy_since = self._busy_since
        if not self._thread.is_alive():
            return "dead"
        if busy_since is not None and time.monotonic() - busy_since > self._stall_seconds:
            return "stalled"
        return "draining" if self._stopping else "ok"

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Stream:
        """Hands prompts to the engine, all or none, and returns their stream once it has taken them.

        Raises RequestError for a prompt it refuses, QueueFullError, StoppedError or EngineFailedError.
        """
        if self._stopping:
            raise StoppedError("the server is shutting down")
        if not self._thread.is_alive():
            raise EngineFailedError("the engine has stopped")
        if self.num_open + len(prompts) > self._max_open:
            raise QueueFullError(
                f"{self.num_open} requests are open and {self._max_open} is the limit; try again later"
            )
        self._loop = asyncio.get_running_loop()
        stream = Stream([uuid.uuid4().hex for _ in prompts], params.n)
        for request_id, prompt in zip(stream.request_ids, prompts, strict=True):
            self._streams[request_id] = stream
            self._inbox.put(_Add(request_id, prompt, params, priority, cache_salt))
        try:
            await stream.accepted()
        except BaseException:
            self.abort(stream)
            raise
        return stream

    def abort(self, stream: Stream) -> None:
        """Ends a stream and frees what its requests hold; does nothing for one that has finished."""
        for request_id in stream.request_ids:
            if self._streams.pop(request_id, None):
                self._inbox.put(_Abort(request_id))
        if not stream.finished:
            stream.fail(AbortedError("the request was aborted"))

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits up to `seconds` for the open ones, then ends those that are left."""
        self._stopping = True
        give_up = time.monotonic() + seconds
        while self._streams and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        self.cut()

    def cut(self) -> None:
        """Ends every open stream with StoppedError."""
        self._stopping = True
        self._fail_streams(StoppedError("the server is shutting down"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream:
                stream.put(output)
                if output.usage is not None:
                    del self._streams[output.request_id]

    def _accept(self, request_id: str) -> None:
        if stream := self._streams.get(request_id):
            stream.accept(request_id)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if stream := self._streams.pop(request_id, None):
            stream.fail(error)

    def _fail_streams(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
            self.abort(stream)

    # --- on the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._step()
                self.stats = self._engine.stats()
        except Exception:  # the thread's outermost frame: told to the log, to every open request and to /health
            logger.exception("the engine has stopped")
            self._post(self._fail_streams, EngineFailedError("the engine has stopped"))

    def _take_commands(self) -> bool:
        """Carries out what has been asked; waits for something if there is nothing else to do. False ends the thread."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            match command:
                case None:
                    return False
                case _Add():
                    self._add(command)
                case _Abort():
                    self._live.discard(command.request_id)
                    self._engine.abort(command.request_id)

    def _add(self, command: _Add) -> None:
        try:
            self._engine.add_request(
                command.request_id,
                command.prompt_token_ids,
                command.params,
                priority=command.priority,
                cache_salt=command.cache_salt,
            )
        except PagegenError as error:
            self._post(self._refuse, command.request_id, error)
        except Exception:  # a defect met by one request must not end the others
            logger.exception("request %s could not be added", command.request_id)
            self._post(self._refuse, command.request_id, EngineFailedError("the engine failed"))
        else:
            self._live.add(command.request_id)
            self._post(self._accept, command.request_id)

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception:  # the engine isolates what belongs to one request; this belongs to all that are open
            logger.exception("an iteration failed; every open request ends")
            for request_id in self._live:
                self._engine.abort(request_id)
            self._live.clear()
            self._post(self._fail_streams, EngineFailedError("the engine failed"))
        else:
            self._live.difference_update(output.request_id for output in outputs if output.usage is not None)
            self._post(self._deliver, outputs)
        finally:
            self._busy_since = None

    def _post(self, call: Callable[[*Ts], None], *arguments: *Ts) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(call, *arguments)
