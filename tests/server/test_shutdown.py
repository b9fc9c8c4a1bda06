"""Signals: a first one drains, a second one cuts, and the process ends cleanly either way."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pagegen.errors import ConfigError
from pagegen.runtime.server.app import ServedModel, create_app
from pagegen.runtime.server.run import listen, serve
from pagegen.runtime.server.worker import EngineWorker
from tests.server.scripted import NAME, TOKENIZER, ScriptedEngine, parse_events


class Client:
    """Talks to a server that runs in the main thread, where signals go."""

    def __init__(self, worker: EngineWorker, port: int) -> None:
        self.worker, self.url = worker, f"http://127.0.0.1:{port}"

    def stream(self, max_tokens: int) -> list[Any]:
        """All events of a stream."""
        body = {"model": NAME, "prompt": "a", "max_tokens": max_tokens, "stream": True}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, trust_env=False)
        return parse_events(response.read().decode())

    def until(self, status: str) -> None:
        """Waits until the worker says so; two signals sent at once would arrive as one."""
        while self.worker.status != status:
            time.sleep(0.005)

    def signal_when_open(self, num_open: int, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to this process once that many requests are open."""
        while self.worker.num_open < num_open:
            time.sleep(0.005)
        os.kill(os.getpid(), number)


def run_server(client: Any, shutdown_timeout: float) -> tuple[bool, float]:
    """Serves in this thread while `client(Client)` runs in another; (interrupted, seconds)."""
    begin = time.monotonic()
    with EngineWorker(ScriptedEngine(lambda prompt: [97] * 5000, step_seconds=0.005)) as worker:
        listener = listen("127.0.0.1", 0)
        thread = threading.Thread(target=client, args=[Client(worker, listener.getsockname()[1])])
        thread.start()
        interrupted = serve(create_app(worker, ServedModel(NAME, TOKENIZER, 5100)), worker, listener, shutdown_timeout)
        thread.join()
    return interrupted, time.monotonic() - begin


def test_sigterm_lets_open_streams_end_and_answers_503_meanwhile() -> None:
    results: list[Any] = []

    def scenario(client: Client) -> None:
        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(client.stream, 100) for _ in range(2)]
            client.signal_when_open(2)
            client.until("draining")
            refused = (
                httpx.get(f"{client.url}/health", trust_env=False),
                httpx.post(f"{client.url}/v1/completions", json={"model": NAME, "prompt": "a"}, trust_env=False),
            )
            results.extend([*(response.status_code for response in refused), *(stream.result() for stream in streams)])

    interrupted, _ = run_server(scenario, shutdown_timeout=20)
    health, completion, *streams = results
    assert (health, completion, interrupted) == (503, 503, False)
    for events in streams:
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "a" * 100


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_does_not_end_in_time_is_told_and_the_server_still_ends(second_signal: bool) -> None:
    results: list[Future[list[Any]]] = []

    def scenario(client: Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(client.stream, 5000))
            client.signal_when_open(1)
            if second_signal:
                client.until("draining")
                client.signal_when_open(0)

    _, seconds = run_server(scenario, shutdown_timeout=60 if second_signal else 0.1)
    *chunks, last = results[0].result()
    assert last["error"]["code"] == "shutting_down" and len(chunks) < 5000
    assert seconds < 30


def test_an_idle_server_ends_at_once_and_tells_ctrl_c_from_sigterm() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):

        def scenario(client: Client, number: signal.Signals = number) -> None:
            httpx.get(f"{client.url}/health", trust_env=False)  # it is up: the handlers are in place
            client.signal_when_open(0, number)

        interrupted, _ = run_server(scenario, shutdown_timeout=60)
        assert interrupted is (number is signal.SIGINT)


def test_a_port_that_is_taken_is_a_config_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("127.0.0.1", 70000), ("no.such.host.invalid", 0)):
            with pytest.raises(ConfigError, match="--port"):
                listen(host, port)
    assert json.dumps(listen("::1", 0).getsockname()[1]) != "0"
