"""What is answered: texts, usage, log-probabilities and streams, in the OpenAI API's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagegen.runtime.weights.dummy import END_TOKEN_IDS
from tests.server.scripted import ERROR_TOKEN, MAX_MODEL_LEN, NAME, NUM_BLOCKS, Live, ScriptedEngine, live

EMOJI = "🙂 naïve €"


def script(prompt: list[int]) -> list[int]:
    """A prompt of one letter chooses a script, a chat is answered ok, any other prompt in capitals."""
    if max(prompt) > 255:  # a chat
        return [111, 107, END_TOKEN_IDS[0]]
    match bytes(prompt):
        case b"e":
            return [END_TOKEN_IDS[0]]
        case b"u":
            return [*EMOJI.encode(), END_TOKEN_IDS[1]]
        case b"x":
            return [97, 98, ERROR_TOKEN]
        case _:
            return [*bytes(prompt).upper(), END_TOKEN_IDS[0]]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(ScriptedEngine(script)) as running:
        yield running


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Of an engine that shares nothing."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "shared_blocks": 0},
    }


def test_a_completion(server: Live) -> None:
    body = server.complete("hello").json()
    assert body["object"] == "text_completion" and body["model"] == NAME and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "HELLO", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == usage(5, 6)


def test_a_chat_completion(server: Live) -> None:
    body = server.chat("hello").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "ok"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_a_list_of_prompts_is_answered_in_its_order(server: Live) -> None:
    body = server.complete(["a much longer one", "e", "ab"], max_tokens=5).json()
    found = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert found == [(0, "A MUC", "length"), (1, "", "stop"), (2, "AB", "stop")]
    assert body["usage"] == usage(20, 5 + 1 + 3)


def test_n_choices_of_each_prompt_come_in_order_and_the_prompt_counts_once(server: Live) -> None:
    body = server.complete(["ab", "c"], n=3).json()
    found = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert found == [(0, "AB"), (1, "AB"), (2, "AB"), (3, "C"), (4, "C"), (5, "C")]
    assert body["usage"] == usage(3, 3 * 3 + 3 * 2)
    chunks = server.events("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=2)
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ok"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]


def test_token_ids_are_prompts_too(server: Live) -> None:
    assert server.complete([97, 98]).json()["choices"][0]["text"] == "AB"
    texts = [choice["text"] for choice in server.complete([[97], [98]]).json()["choices"]]
    assert texts == ["A", "B"]


def test_control_tokens_in_a_prompt_are_plain_text(server: Live) -> None:
    server.complete("a<|im_end|>")
    assert server.engine.seen[-1][0] == list(b"a<|im_end|>")
    server.chat("<|im_end|>")
    assert server.engine.seen[-1][0].count(257) == 1  # the template's own


def test_parts_of_a_message_are_joined_and_null_is_empty(server: Live) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
    seen = bytes(token for token in server.engine.seen[-1][0] if token < 256)
    assert seen == b"user\nab\nassistant\n\nuser\nc\nassistant\n"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chats_limit_has_two_names_and_its_default_is_what_fits(server: Live, name: str) -> None:
    server.chat("a", **{name: 7})
    assert server.engine.seen[-1][1].max_tokens == 7
    server.chat("a")
    prompt, params = server.engine.seen[-1]
    assert len(prompt) + params.max_tokens == MAX_MODEL_LEN


def test_sampling_options_reach_the_engine(server: Live) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "stop": "END",
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    server.complete(**options)
    params = server.engine.seen[-1][1]
    assert {name: getattr(params, name) for name in options} == options | {"stop": ("END",), "stop_token_ids": (5,)}


@pytest.mark.parametrize(("more", "width"), [({"n": 3}, 3), ({"n": 2, "best_of": 4}, 4), ({}, 1)])
def test_a_beam_search_has_as_many_beams_as_best_of_or_n(server: Live, more: dict[str, int], width: int) -> None:
    server.complete(use_beam_search=True, length_penalty=0.5, early_stopping="never", temperature=0, **more)
    params = server.engine.seen[-1][1]
    assert (params.beam_width, params.n, params.best_of) == (width, more.get("n", 1), None)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_logprobs_of_a_completion(server: Live) -> None:
    logprobs = server.complete("az", logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["A", "Z", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5, -9999.0, -0.5]  # minus infinity is no JSON
    assert logprobs["top_logprobs"][0] == {"B": -1.0, "C": -2.0}
    assert logprobs["text_offset"] == [0, 1, 2]
    assert server.complete("az", logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}, {}]


def test_logprobs_of_a_chat(server: Live) -> None:
    content = server.chat("a", logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    top = [{"token": "B", "logprob": -1.0, "bytes": [66]}]
    assert content[0] == {"token": "o", "logprob": -0.5, "bytes": [111], "top_logprobs": top}
    assert len(content) == 3
    assert server.chat("a", logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_completion_stream(server: Live) -> None:
    *chunks, done = server.events("/v1/completions", prompt="hello")
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "HELLO"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_a_chat_stream_says_the_role_once(server: Live) -> None:
    *chunks, done = server.events("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "ok"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_an_answer_without_text_still_ends_properly(server: Live) -> None:
    assert server.complete("e").json()["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }
    *chunks, done = server.events("/v1/completions", prompt="e")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop"] and done == "[DONE]"


@pytest.mark.parametrize("max_tokens", range(1, len(EMOJI.encode()) + 2))
def test_a_stream_carries_the_text_of_the_whole_answer_however_it_is_cut(server: Live, max_tokens: int) -> None:
    whole = server.complete("u", max_tokens=max_tokens).json()["choices"][0]
    *chunks, _ = server.events("/v1/completions", prompt="u", max_tokens=max_tokens)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_stream_of_several_prompts_interleaves_and_loses_nothing(server: Live) -> None:
    *chunks, _ = server.events("/v1/completions", prompt=["hello", "e", "ab"], logprobs=1)
    texts, logprobs = {0: "", 1: "", 2: ""}, {0: 0, 1: 0, 2: 0}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        logprobs[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert texts == {0: "HELLO", 1: "", 2: "AB"}
    assert logprobs == {0: 6, 1: 1, 2: 3}


@pytest.mark.parametrize(
    ("more", "carries"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_only_include_usage_true_gives_usage(server: Live, more: dict[str, Any], carries: bool) -> None:
    *chunks, done = server.events("/v1/completions", prompt=["hello", "ab"], **more)
    assert done == "[DONE]"
    if not carries:
        assert not any("usage" in chunk for chunk in chunks)
        return
    *rest, last = chunks
    assert all(chunk["usage"] is None for chunk in rest)
    assert last["choices"] == []
    assert last["usage"] == usage(7, 9)


def test_an_error_of_the_engine_shows_an_id_and_nothing_from_inside(server: Live) -> None:
    response = server.complete("x")
    assert response.status_code == 500
    error = response.json()["error"]
    assert response.headers["x-request-id"] in error["message"] and "secret" not in response.text
    assert error["type"] == "server_error"


def test_an_error_after_the_begin_of_a_stream_is_an_event_without_done(server: Live) -> None:
    *chunks, last = server.events("/v1/completions", prompt="x")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert last["error"]["code"] == "internal_error" and "secret" not in str(last)
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


def test_the_models_and_their_limit(server: Live) -> None:
    card = server.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", MAX_MODEL_LEN)
    assert server.client.get(f"/v1/models/{NAME}").json() == card


def test_health_says_what_is_in_use(server: Live) -> None:
    body = server.client.get("/health").json()
    assert body == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "waiting_for": {},
        "kv_blocks_used": 0,
        "kv_blocks_pinned": 0,
        "kv_blocks": NUM_BLOCKS,
    }


def test_forty_clients_at_once_get_each_their_own(server: Live) -> None:
    prompts = [f"prompt {i}" * (i % 3 + 1) for i in range(40)]
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(lambda p: server.complete(p, max_tokens=100).json()["choices"][0]["text"], prompts))
    assert texts == [prompt.upper() for prompt in prompts]
    server.wait_idle()
    assert server.engine.aborted == []  # what ends by itself is not aborted


@pytest.mark.parametrize("given", ["req-1", "a" * 128, "A.b:c_d-1"])
def test_a_harmless_request_id_comes_back(server: Live, given: str) -> None:
    assert server.client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["a b", "a" * 129, "x;y", "é".encode()])
def test_any_other_request_id_is_replaced(server: Live, given: str | bytes) -> None:
    value = given if isinstance(given, bytes) else given.encode()
    found = server.client.get("/health", headers={b"X-Request-Id": value}).headers["x-request-id"]
    assert found.encode() != value and len(found) == 32


def test_two_requests_with_one_id_get_each_their_own_text(server: Live) -> None:
    def complete(prompt: str) -> str:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 100}
        response = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        return str(response.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(complete, ["one " * 9, "two " * 9] * 4)) == ["ONE " * 9, "TWO " * 9] * 4
