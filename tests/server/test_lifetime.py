"""Clients that go away, stall or come in crowds; engines that fail; a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.server.worker import EngineFailedError, EngineWorker, StoppedError
from tests.server.scripted import NAME, Live, ScriptedEngine, live

LONG = 5000


def endless(prompt: list[int]) -> list[int]:
    """A letter again and again, longer than any test lasts; "b" asks for a short answer."""
    return [*b"bystander", 257] if bytes(prompt) == b"b" else [97] * (LONG + 1)


def send(server: Live, **body: object) -> socket.socket:
    """A completion request on a socket of its own, not read."""
    content = json.dumps({"model": NAME, "prompt": "a", "max_tokens": LONG} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head + content)
    return connection


def hang_up(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.mark.parametrize("leave", [hang_up, reset])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_generation(stream: bool, leave: Callable[[socket.socket], None]) -> None:
    with live(ScriptedEngine(endless, step_seconds=0.002), max_model_len=LONG + 99) as server:
        connection = send(server, stream=stream)
        if stream:
            assert connection.recv(64)
        until(lambda: server.engine.num_steps > 3)
        leave(connection)
        server.wait_idle()
        assert server.engine.num_steps < LONG / 2
        assert len(server.engine.aborted) == 1
        until(lambda: server.client.get("/health").json()["kv_blocks_used"] == 0)
        assert server.complete("b").json()["choices"][0]["text"] == "bystander"


def test_fifty_clients_go_away_and_a_bystander_does_not_notice() -> None:
    with live(ScriptedEngine(endless, step_seconds=0.01), max_model_len=LONG + 99) as server:
        with ThreadPoolExecutor(1) as pool:
            connections = [send(server, stream=index % 2 == 0, prompt=["a", "aa"]) for index in range(50 // 2)]
            until(lambda: server.worker.num_open == 50)
            bystander = pool.submit(server.complete, "b")
            for index, connection in enumerate(connections):
                (reset if index % 3 else hang_up)(connection)
            assert bystander.result().json()["choices"][0]["text"] == "bystander"
        server.wait_idle()
        assert sorted(server.engine.aborted) == sorted(set(server.engine.aborted))
        assert len(server.engine.aborted) == 50


def test_a_client_that_does_not_read_costs_its_own_text_and_no_more() -> None:
    engine = ScriptedEngine(endless)
    with live(engine, max_model_len=LONG + 99) as server:
        stalled = [send(server, stream=True, logprobs=0) for _ in range(5)]
        assert server.complete("b").json()["choices"][0]["text"] == "bystander"
        server.wait_idle(60)  # a stalled request runs to its end and gives its blocks back
        assert engine.aborted == []
        data = b""
        while not data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            data += stalled[0].recv(1 << 20)
        texts = [
            json.loads(line[6:])["choices"][0]["text"] for line in data.split(b"\n") if line.startswith(b"data: {")
        ]
        assert "".join(texts) == "a" * LONG  # nothing is lost
        for connection in stalled:
            connection.close()


def test_outputs_that_are_not_read_merge_into_the_latest() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(lambda prompt: [97] * 100)
        with EngineWorker(engine) as worker:
            stream = await worker.submit([[97], [98]], SamplingParams(max_tokens=50))
            while worker.num_open:
                await asyncio.sleep(0.01)
            updates = [update async for update in stream.updates()]
            assert [(u[0], u[1].text) for u in updates if u] == [(0, "a" * 50), (1, "a" * 50)]

    asyncio.run(scenario())


def test_a_silent_stream_pings() -> None:
    async def scenario() -> None:
        go = threading.Event()
        with EngineWorker(ScriptedEngine(lambda prompt: [257], on_step=lambda: go.wait(10))) as worker:
            stream = await worker.submit([[97]], SamplingParams())
            updates = stream.updates(silence=0.01)
            assert await anext(updates) is None
            go.set()
            found = [update async for update in updates]
            assert found[-1] is not None

    asyncio.run(scenario())


def test_a_full_queue_is_429_with_retry_after_and_counts_before_it_checks() -> None:
    with live(ScriptedEngine(endless, step_seconds=0.01), max_open=3, max_model_len=LONG + 99) as server:
        connections = [send(server, stream=True) for _ in range(3)]
        until(lambda: server.worker.num_open == 3)
        for prompt in ("b", ["b", "b"]):
            response = server.complete(prompt)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        connections[0].close()
        until(lambda: server.worker.num_open == 2)
        assert server.complete("b").status_code == 200
        for connection in connections:
            connection.close()


def test_an_iteration_that_fails_ends_what_is_open_and_the_next_request_is_served() -> None:
    def fail() -> None:
        if engine.num_steps == 5:
            raise RuntimeError("a defect")

    engine = ScriptedEngine(endless, on_step=fail, step_seconds=0.01)
    with live(engine, max_model_len=LONG + 99) as server:
        with ThreadPoolExecutor(4) as pool:
            responses = list(pool.map(lambda _: server.complete("a", max_tokens=LONG), range(4)))
        failed = [response for response in responses if response.status_code == 500]
        assert failed and all("a defect" not in response.text for response in failed)
        assert server.complete("b").json()["choices"][0]["text"] == "bystander"
        assert server.client.get("/health").status_code == 200


def test_a_defect_while_adding_ends_that_request_alone() -> None:
    with live(ScriptedEngine(endless, step_seconds=0.005)) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.complete, "a", max_tokens=100)
        assert server.complete("!").status_code == 500
        assert other.result().status_code == 200


def test_health_tells_a_stalled_iteration_from_an_idle_engine() -> None:
    go = threading.Event()
    engine = ScriptedEngine(endless, on_step=lambda: go.wait(10))
    with live(engine, stall_seconds=0.05) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.complete, "b")
        until(lambda: server.client.get("/health").status_code == 503)
        assert server.client.get("/health").json()["status"] == "stalled"
        go.set()
        assert waiting.result().status_code == 200
        assert server.client.get("/health").json()["status"] == "ok"


def test_an_engine_that_dies_is_reported_and_nobody_hangs() -> None:
    class Broken(ScriptedEngine):
        def abort(self, request_id: str) -> bool:
            raise RuntimeError("beyond repair")

        def step(self) -> list[object]:  # type: ignore[override]
            raise RuntimeError("a defect")

    with live(Broken(endless)) as server:
        assert server.complete("a").status_code == 500
        until(lambda: server.client.get("/health").json()["status"] == "dead")
        assert server.complete("a").status_code == 500


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = ScriptedEngine(endless, step_seconds=0.01)
    with live(engine, max_model_len=LONG + 99) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.complete, "a", max_tokens=40)
        until(lambda: server.worker.num_open == 1)
        drained = pool.submit(asyncio.run, server.worker.drain(10))
        until(lambda: server.worker.status == "draining")
        refused = server.complete("b")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert server.client.get("/health").status_code == 503
        assert running.result().json()["usage"]["completion_tokens"] == 40
        drained.result()


def test_a_worker_that_stopped_refuses() -> None:
    async def scenario() -> None:
        with EngineWorker(ScriptedEngine()) as worker:
            pass
        with pytest.raises(StoppedError):
            await worker.submit([[97]], SamplingParams())
        never_started = EngineWorker(ScriptedEngine())
        with pytest.raises(EngineFailedError):
            await never_started.submit([[97]], SamplingParams())

    asyncio.run(scenario())


def test_a_slow_upload_does_not_hold_others_up(caplog: pytest.LogCaptureFixture) -> None:
    with live() as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert server.complete().status_code == 200
        slow.close()  # in the middle of its body: no defect
        assert httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False).status_code == 200
    assert caplog.records == []
