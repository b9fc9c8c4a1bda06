"""`pagegen bench engine` and `pagegen bench serve`, the latter against this very server on a port of its own."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest

from pagegen.reference import ReferenceKernels
from pagegen.runtime.engine import Engine, EngineConfig
from pagegen.runtime.models import build_model
from pagegen.runtime.weights.dummy import END_TOKEN_IDS
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType
from tests.cli.helpers import Result, run
from tests.documented import documented
from tests.server.scripted import ERROR_TOKEN, NAME, Live, ScriptedEngine, live

METRICS = {
    f"{word}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for word in ("mean", "median", "std", "p99")
}
BOTH = "bench engine --json and bench serve --json"
QUICK = ("--trace", "fixed:6x4", "--num-prompts", "5")


# --- an engine -------------------------------------------------------------------------------------------------------


def engine(*words: str) -> Result:
    return run("bench", "engine", "dummy:tiny", "--dtype", "fp32", *words)


@pytest.mark.usefixtures("reference_kernels")
def test_an_engine_serves_a_trace_to_its_full_lengths() -> None:
    document = engine(*QUICK, "--profile", "--goodput", "ttft:1e9", "--json").document
    assert document.keys() == METRICS | documented(BOTH, "bench engine --json") - {"<figure>_<metric>_ms"}
    assert (document["completed"], document["failed"], document["errors"]) == (5, 0, [])
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (30, 20)
    assert document["output_throughput"] == pytest.approx(20 / document["duration"])
    assert document["request_goodput"] == document["request_throughput"]
    assert document["request_rate"] == "inf"  # JSON has no such number
    assert {row["phase"] for row in document["profile"]} >= {"schedule", "attend", "sample"}


@pytest.mark.usefixtures("reference_kernels")
def test_people_see_each_metric_with_its_formula() -> None:
    result = engine(*QUICK, "--profile", "--metric-percentiles", "50,90")
    assert result.status == 0
    for word in ("requests/s", "TTFT", "TPOT", "ITL", "E2EL", "p50", "p90", "first chunk - sent", "ms/step"):
        assert word in result.stdout, word


@pytest.mark.usefixtures("reference_kernels")
def test_a_load_that_a_pool_cannot_hold_is_refused_and_lengths_keep_to_it() -> None:
    result = engine("--trace", "fixed:60x60", "--kv-blocks", "3")
    assert result.status == 2 and "max_model_len=48" in result.stderr
    assert engine("--trace", "fixed:20x20", "--num-prompts", "3", "--kv-blocks", "3", "--json").document["completed"] == 3


BAD = [
    (("--num-prompts", "0"), "--num-prompts 0"),
    (("--request-rate", "0"), "--request-rate 0"),
    (("--request-rate", "2", "--burstiness", "nan"), "--burstiness nan"),
    (("--max-concurrency", "0"), "--max-concurrency 0"),
    (("--prefix", "-1"), "--prefix -1"),
    (("--goodput", "ttft:soon"), "--goodput 'ttft:soon'"),
    (("--metric-percentiles", "half"), "--metric-percentiles 'half'"),
    (("--trace", "nobody"), "'nobody'"),
    (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(("words", "said"), BAD)
def test_what_is_no_load_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    result = engine(*words)
    assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


# --- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    """The real engine on a model of random weights."""
    source = resolve_model("dummy:tiny")
    kernels = ReferenceKernels(source.config.kernel_spec(DType.FP32))
    config = EngineConfig(dtype=DType.FP32, num_blocks=40, max_num_seqs=8)
    model = build_model(source.config, source.weights(), DType.FP32)
    with live(cast("ScriptedEngine", Engine(model, kernels, source.tokenizer(), config))) as server:
        yield server


def bench(server: Live, *words: str) -> Result:
    return run("bench", "serve", "--url", f"http://127.0.0.1:{server.port}", *words)


def test_token_ids_arrive_exactly_as_many_and_full_lengths_come_back(served: Live) -> None:
    document = bench(served, *QUICK, "--tokenizer", "dummy:tiny", "--ignore-eos", "--json").document
    assert document.keys() == METRICS | documented(BOTH, "bench serve --json") - {"<figure>_<metric>_ms"} and document["model"] == NAME
    assert (document["completed"], document["failed"]) == (5, 0)
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (30, 20)
    assert 0 < document["mean_ttft_ms"] <= document["mean_e2el_ms"] <= 1e3 * document["duration"]
    assert 2 <= document["max_concurrent_requests"] <= 5


@pytest.mark.parametrize("more", [(), ("--chat",)], ids=["completions", "chat"])
def test_words_are_counted_by_the_server(served: Live, more: tuple[str, ...]) -> None:
    document = bench(served, *QUICK, "--ignore-eos", *more, "--json").document
    assert document["completed"] == 5 and document["total_output_tokens"] == 20
    assert document["total_input_tokens"] > 5 * 6  # a token is a byte here


def test_a_rate_spreads_requests_and_a_bound_holds_them_back(served: Live) -> None:
    words = ("--trace", "fixed:3x2", "--num-prompts", "6", "--ignore-eos", "--tokenizer", "dummy:tiny", "--json")
    spread = bench(served, *words, "--request-rate", "12", "--burstiness", "inf").document
    assert spread["duration"] >= 0.5 and spread["burstiness"] == "inf"
    assert bench(served, *words, "--max-concurrency", "1").document["max_concurrent_requests"] == 1


def test_an_address_may_end_in_v1_and_people_see_a_table(served: Live) -> None:
    result = run("bench", "serve", "--url", f"http://127.0.0.1:{served.port}/v1/", *QUICK)
    assert result.status == 0 and "requests completed" in result.stdout and "TTFT" in result.stdout


def test_what_fails_in_a_stream_is_counted_with_its_reason_and_exits_1() -> None:
    asked = 0

    def script(prompt: list[int]) -> list[int]:
        nonlocal asked
        asked += 1
        return [65, 66, ERROR_TOKEN if asked % 2 == 0 else 67, 68]  # the first one is the warm-up

    with live(ScriptedEngine(script)) as server:
        result = bench(server, *QUICK, "--json")
    assert result.status == 1
    assert (result.document["completed"], result.document["failed"]) == (2, 3)
    assert len(result.document["errors"]) == 3  # each has the id under which the server's log has it
    assert all("internal" in error and "\n" not in error for error in result.document["errors"])


def test_a_full_queue_is_a_failure_with_its_status() -> None:
    with live(ScriptedEngine(lambda _: [65] * 40, step_seconds=0.01), max_open=2) as server:
        document = bench(server, "--trace", "fixed:3x30", "--num-prompts", "5", "--json").document
    assert (document["completed"], document["failed"]) == (2, 3)
    assert document["errors"][0].startswith("status 429: 2 requests are open")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_reports_what_was_measured_and_exits_130() -> None:
    steps, lengths = 0, itertools.chain([1, 2], itertools.repeat(1_000))  # the first is the warm-up

    def interrupt() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            os.kill(os.getpid(), signal.SIGINT)

    engine = ScriptedEngine(lambda _: [*[65] * next(lengths), END_TOKEN_IDS[0]], step_seconds=0.005, on_step=interrupt)
    with live(engine, max_model_len=20_000) as server:
        words = ("--trace", "fixed:2x1000", "--num-prompts", "9", "--max-concurrency", "2", "--json")
        result = bench(server, *words)
    assert result.status == 130
    assert result.document["failed"] == 2 and result.document["errors"] == ["interrupted"]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_what_is_no_load_for_a_server_is_refused_in_one_line(
    served: Live, words: tuple[str, ...], said: str
) -> None:
    result = bench(served, *words)
    assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "http://127.0.0.1:1"), "is a server there?"),
        (("--url", "ftp://host"), "'ftp://host' is no address"),
        (("--url", ""), "'' is no address"),
        (("--url", "http://"), "is no address"),
        (("--url", "http://127.0.0.1:1", "--temperature", "-1"), "--temperature -1"),
        (("--url", "http://127.0.0.1:1", "--chat", "--tokenizer", "dummy:tiny"), "--tokenizer is for token ids"),
    ],
)
def test_a_server_that_is_none_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    result = run("bench", "serve", *words)
    assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_a_server_that_refuses_is_asked_nothing_more(served: Live) -> None:
    result = bench(served, *QUICK, "--model", "other")
    assert result.status == 2 and f"it serves: {NAME}" in result.stderr
    with live(api_key="secret") as server:
        result = bench(server, *QUICK)
        assert result.status == 2 and "answers 401" in result.stderr
        assert bench(server, *QUICK, "--api-key", "secret", "--json").document["completed"] == 5
        assert not any(json.dumps("secret") in json.dumps(seen[0]) for seen in server.engine.seen)
    with live(max_model_len=8) as server:
        seen: list[Any] = server.engine.seen
        result = bench(server, "--trace", "fixed:6x2", "--num-prompts", "9")  # words of several tokens each
        assert result.status == 2 and "the first request failed: status 400" in result.stderr and not seen
