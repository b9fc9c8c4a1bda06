"""uvicorn around the application: a first signal drains, a second one cuts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from pagegen.errors import ConfigError
from pagegen.runtime.server.worker import EngineWorker

CLOSE_SECONDS = 5  # for responses that are finished but not yet read by their client


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT: new requests get 503, open ones have `shutdown_timeout` seconds to end. Again: at once."""

    def __init__(self, app: FastAPI, worker: EngineWorker, shutdown_timeout: float) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS)
        )
        self._worker = worker
        self._shutdown_timeout = shutdown_timeout
        self._draining: asyncio.Task[None] | None = None
        self.interrupted = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's own, which stops listening at the first signal and then dies of it."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.interrupted = self.interrupted or number is signal.SIGINT
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._worker.cut()

    async def _drain(self) -> None:
        await self._worker.drain(self._shutdown_timeout)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; change --host or --port (0 takes a free one)"
        ) from None


def serve(app: FastAPI, worker: EngineWorker, listener: socket.socket, shutdown_timeout: float) -> bool:
    """Serves until a signal ends it; returns whether that was an interrupt from the keyboard."""
    server = Server(app, worker, shutdown_timeout)
    server.run(sockets=[listener])
    return server.interrupted
