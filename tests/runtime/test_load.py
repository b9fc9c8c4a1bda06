"""Claims about loads: metrics are those of `vllm bench serve`, arrivals keep their rate, an engine is seen as it is."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics

import httpx
import pytest

from pagegen.errors import ConfigError
from pagegen.runtime.load.client import Server, send
from pagegen.runtime.load.metrics import Timing, parse_goodput, parse_percentiles, summarise
from pagegen.runtime.load.offline import PHASES, TimedKernels, profile, run_engine
from pagegen.runtime.load.requests import LoadRequest, arrivals, token_prompts, word_prompts
from pagegen.runtime.simulation.traces import TraceRow, synthesize
from tests.runtime.engine_rig import make_engine

# --- metrics ---------------------------------------------------------------------------------------------------------

THREE = [
    Timing(10, sent=0.0, chunks=[0.1, 0.2, 0.4], output_tokens=3),
    Timing(20, sent=0.5, chunks=[1.5], output_tokens=1),
    Timing(30, sent=0.3, error="status 500: boom"),
]


def test_every_metric_is_what_its_formula_says() -> None:
    figures = summarise(THREE, 2.0, percentiles=(50, 99))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert (figures["request_throughput"], figures["output_throughput"], figures["total_token_throughput"]) == (1, 2, 17)
    assert figures["mean_ttft_ms"] == figures["median_ttft_ms"] == pytest.approx((100 + 1000) / 2)
    assert figures["std_ttft_ms"] == pytest.approx(450)
    assert figures["p99_ttft_ms"] == pytest.approx(100 + 0.99 * 900)
    assert figures["mean_tpot_ms"] == pytest.approx((400 - 100) / 2)  # a single token has none
    assert figures["mean_itl_ms"] == pytest.approx((100 + 200) / 2)
    assert figures["p50_e2el_ms"] == pytest.approx((400 + 1000) / 2)
    assert figures["request_goodput"] is None


def test_itl_is_pooled_over_requests_and_tpot_is_not() -> None:
    chatty = Timing(1, 0.0, [0.1 * i for i in range(1, 11)], 10)
    slow = Timing(1, 0.0, [1.0, 2.0], 2)
    figures = summarise([chatty, slow], 1.0)
    assert figures["mean_tpot_ms"] == pytest.approx((100 + 1000) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((9 * 100 + 1000) / 10)


def test_goodput_counts_who_met_every_limit_and_a_single_token_has_no_tpot_to_miss() -> None:
    assert summarise(THREE, 2.0, goodput={"ttft": 500})["request_goodput"] == 0.5
    assert summarise(THREE, 2.0, goodput={"tpot": 1})["request_goodput"] == 0.5
    assert summarise(THREE, 2.0, goodput={"ttft": 500, "tpot": 1})["request_goodput"] == 0
    assert summarise(THREE, 2.0, goodput={"ttft": 2000, "e2el": 2000})["request_goodput"] == 1


def test_peaks_are_of_seconds_and_of_moments() -> None:
    timings = [Timing(1, 0.0, [0.2, 0.9, 1.1], 3), Timing(1, 1.1, [1.2, 1.3], 2), Timing(1, 0.05, [0.1], 1)]
    figures = summarise(timings, 2.0)
    assert figures["max_output_tokens_per_s"] == 3
    assert figures["max_concurrent_requests"] == 2  # the first has ended when the second begins


def test_a_run_in_which_nothing_ended_has_no_latencies() -> None:
    figures = summarise([Timing(3, 0.0, error="gone")], 1.0)
    assert figures["failed"] == 1 and figures["request_throughput"] == 0
    assert figures["mean_ttft_ms"] is figures["p99_e2el_ms"] is None


@pytest.mark.parametrize("word", ["itl:3", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", ":5"])
def test_a_limit_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([word])


@pytest.mark.parametrize("text", ["", "101", "-1", "a", "50,", "nan"])
def test_percentiles_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--metric-percentiles"):
        parse_percentiles(text)


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, math.inf])
def test_arrivals_end_after_exactly_their_number_over_the_rate(burstiness: float) -> None:
    times = arrivals(2000, 4.0, burstiness, seed=1)
    assert times == sorted(times) and times[-1] == pytest.approx(500)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.15, abs=1e-9)  # of a gamma distribution


def test_without_a_rate_all_come_at_once_and_a_seed_repeats() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert arrivals(9, 2.0, 1.0, 5) == arrivals(9, 2.0, 1.0, 5) != arrivals(9, 2.0, 1.0, 6)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.nan)])
def test_rates_that_are_none_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="--request-rate"):
        arrivals(3, rate, burstiness, 0)


def test_prompts_have_their_lengths_and_share_their_prefix_alone() -> None:
    rows = synthesize("alpaca", rate=1, num_requests=20, prefix=7)
    for prompts in (token_prompts(rows, 300, seed=2), word_prompts(rows, seed=2)):
        pieces = [p.prompt.split() if isinstance(p.prompt, str) else list(p.prompt) for p in prompts]
        assert [(len(piece), p.num_output) for piece, p in zip(pieces, prompts, strict=True)] == [
            (row.input, row.output) for row in rows
        ]
        assert len({tuple(piece[:7]) for piece in pieces}) == 1 and len({tuple(piece[7:12]) for piece in pieces}) == 20
    tokens = [token for p in token_prompts(rows, 300, seed=2) for token in p.prompt]
    assert min(map(int, tokens)) >= 0 and max(map(int, tokens)) < 300


# --- a server's stream -----------------------------------------------------------------------------------------------


def answered(text: str, status: int = 200, *, chat: bool = False) -> Timing:
    """What is made of one request to a server that answers with this text."""

    async def ask() -> Timing:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
        async with httpx.AsyncClient(transport=transport, base_url="http://there") as asker:
            return await send(asker, Server("http://there", "m", chat=chat), LoadRequest("one two three", 9), [])

    return asyncio.run(ask())


def stream(*documents: object) -> str:
    return "".join(f"data: {json.dumps(document)}\n\n" for document in documents)


def test_a_server_that_sends_no_usage_has_a_token_a_chunk_with_text() -> None:
    texts = stream(*({"choices": [{"index": 0, "text": text}]} for text in ("a", "b", "")))
    timing = answered(": ping\n\n" + texts + "data: [DONE]\n\n")
    assert timing.completed and (timing.prompt_tokens, timing.output_tokens, len(timing.chunks)) == (3, 2, 3)
    deltas = stream({"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "a"}}]})
    timing = answered(deltas, chat=True)
    assert (timing.output_tokens, len(timing.chunks)) == (1, 2)


def test_usage_is_believed_wherever_it_comes() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 5}
    for last in ({"choices": [], "usage": usage}, {"choices": [{"text": "b"}], "usage": usage}):
        timing = answered(stream({"choices": [{"text": "a"}]}, last))
        assert (timing.prompt_tokens, timing.output_tokens) == (40, 5)


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("", 200, "the stream had no chunk"),
        ("data: [DONE]\n\n", 200, "the stream had no chunk"),
        ("<html>a proxy</html>", 200, "the stream had no chunk"),
        ("data: {broken\n\n", 200, "Expecting"),
        ("data: 5\n\n", 200, "'int'"),
        ("data: " + 100_000 * "[" + "\n\n", 200, "recursion"),
        (stream({"choices": ["text"]}), 200, "'str'"),
        (stream({"choices": [{"text": "a"}]}, {"error": {"message": "out of\nmemory"}}), 200, "out of memory"),
        (stream({"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}), 200, "completion_tokens"),
        ('{"error": {"message": "no such model"}}', 404, "status 404: no such model"),
        ('{"error": "gone"}', 410, "status 410: gone"),
        ("<html>\n bad gateway" + "x" * 9000, 502, "status 502: <html> bad gateway"),
        ("", 503, "status 503: nothing"),
    ],
)
def test_whatever_else_comes_is_a_failure_in_one_short_line(text: str, status: int, said: str) -> None:
    timing = answered(text, status)
    assert not timing.completed and said in (timing.error or "") and "\n" not in (timing.error or "")
    assert len(timing.error or "") < 400


# --- an engine -------------------------------------------------------------------------------------------------------


def test_an_engine_is_loaded_to_full_lengths_and_every_token_is_timed() -> None:
    engine, timings, told = make_engine(num_blocks=9), list[Timing](), list[int]()
    prompts = token_prompts([TraceRow(0.0, 5, 6), TraceRow(0.0, 3, 1), TraceRow(0.0, 9, 4)], 200, seed=0)
    duration = run_engine(engine, prompts, [0.0, 0.0, 0.05], timings, watch=told.append)
    assert [(t.prompt_tokens, t.output_tokens, len(t.chunks)) for t in timings] == [(5, 6, 6), (3, 1, 1), (9, 4, 4)]
    assert all(t.completed and t.sent < t.chunks[0] and t.chunks == sorted(t.chunks) for t in timings)
    assert timings[2].sent - timings[0].sent >= 0.049 and duration >= 0.05
    assert told[-1] == 3


def test_no_more_run_at_once_than_is_allowed() -> None:
    engine, timings = make_engine(), list[Timing]()
    prompts = [LoadRequest((1, 2), 5)] * 6
    run_engine(engine, prompts, [0.0] * 6, timings, max_concurrency=2)
    assert summarise(timings, 1.0)["max_concurrent_requests"] == 2 and len(timings) == 6


def test_what_an_engine_refuses_is_a_failure_with_its_reason_and_the_others_go_on() -> None:
    engine, timings = make_engine(num_blocks=2), list[Timing]()
    run_engine(engine, [LoadRequest((1,) * 30, 9), LoadRequest((1,), 2)], [0.0, 0.0], timings)
    assert "KV blocks" in (timings[0].error or "") and timings[1].completed


def test_the_phases_of_a_step_are_all_of_its_time() -> None:
    engine = make_engine()
    kernels = TimedKernels(engine.kernels)
    engine.kernels = kernels
    run_engine(engine, [LoadRequest((1,), 2)], [0.0], [])
    before, steps = dict(engine.seconds), engine.stats().num_steps
    duration = run_engine(engine, [LoadRequest((1, 2, 3), 30)] * 4, [0.0] * 4, [])
    rows = profile(engine, kernels, engine.stats().num_steps - steps, before)
    assert [row["phase"] for row in rows] == list(PHASES)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert 0.5 * duration < sum(row["seconds"] for row in rows) < duration
