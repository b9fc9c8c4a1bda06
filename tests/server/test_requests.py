"""What is refused, how, and that the server goes on: the OpenAI contract's error side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagegen.runtime.weights.dummy import DummyModel
from tests.server.scripted import MAX_MODEL_LEN, NAME, Live, live

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "abc"}]}
COMPLETION = {"model": NAME, "prompt": "abc"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_body_bytes=100_000) as running:
        yield running


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


BAD_VALUES: list[tuple[str, Any]] = [
    *[("n", value) for value in (100000, 0, -1, 1.5, "1", True)],
    *[("max_tokens", value) for value in (0, -5, 0.5, 10**12, "3", True)],
    *[("temperature", value) for value in (-0.1, "hot", True, 10**400)],
    *[("top_p", value) for value in (0, 1.1, -1, "1")],
    *[("top_k", value) for value in (-2, 0.5, "5")],
    *[("seed", value) for value in (0.5, "x", 2**70)],
    *[("stop", value) for value in ("", [""], ["x", ""], 5, [5], ["x"] * 100, "x" * 2000)],
    *[("stop_token_ids", value) for value in (5, [-1], ["a"])],
    *[("ignore_eos", value) for value in (1, "yes")],
    *[("presence_penalty", value) for value in (0.5, "0")],
    *[("priority", value) for value in (1.5, "1", 10**6, True)],
    *[("cache_salt", value) for value in (5, "x" * 2000)],
    ("frequency_penalty", 1),
    ("logit_bias", {"5": 1}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 7),
    ("tools", []),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bad_value_is_400_and_names_its_field(server: Live, path: str, field: str, value: object) -> None:
    body = (COMPLETION if path == "/v1/completions" else CHAT) | {field: value}
    error = refused(server.client.post(path, json=body))
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


BAD_PROMPTS: list[Any] = [
    "",
    [],
    [""],
    ["a", ""],
    [[]],
    [[1], []],
    5,
    None,
    {},
    ["a", 5],
    [1, "a"],
    [1.5],
    [True],
    [-1],
    [300],
]
BAD_COMPLETIONS: list[tuple[str, Any]] = [
    *[("prompt", value) for value in (*BAD_PROMPTS, ["a"] * 10000, "\ud800")],
    *[("logprobs", value) for value in (-1, 21, "2", True)],
    ("echo", True),
    *[("best_of", value) for value in (0, 1000, "2")],
    ("suffix", "end"),
    ("max_completion_tokens", 5),
    ("prompt_logprobs", -1),
]


def test_priority_and_salt_reach_the_engine(server: Live) -> None:
    server.complete("a", priority=3, cache_salt="mine")
    server.complete("a")
    assert server.engine.scheduling[-2:] == [(3, "mine"), (0, "")]


def test_the_best_of_several_cannot_be_streamed_nor_be_fewer_than_are_given(server: Live) -> None:
    few = {"best_of": 2, "n": 3}
    for more in ({"best_of": 2, "stream": True}, few, few | {"use_beam_search": True}):
        error = refused(server.client.post("/v1/completions", json=COMPLETION | more))
        assert error["param"] == "best_of"


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETIONS)
def test_a_completion_that_cannot_be_served_is_400(server: Live, field: str, value: object) -> None:
    body = COMPLETION | {field: value}
    error = refused(server.client.post("/v1/completions", content=json.dumps(body)))
    assert error["param"] == field


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages.0.tool_calls"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_a_chat_that_cannot_be_served_is_400(server: Live, more: dict[str, object], param: str) -> None:
    error = refused(server.client.post("/v1/chat/completions", content=json.dumps(CHAT | more)))
    assert str(error["param"]).startswith(param)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"model": "scripted", "prompt": "a", "temperature": NaN}',
        b'{"model": "scripted", "prompt": "a", "temperature": Infinity}',
        b'{"model": "scripted", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "scripted", "prompt": "\xff\xfe"}',
        b"[" * 50000,
        b'{"model": "scripted", "prompt": ' + b"[" * 40000 + b"]" * 40000 + b"}",
    ],
    ids=lambda content: content[:60],
)
def test_a_body_that_is_not_json_is_400(server: Live, content: bytes) -> None:
    refused(server.client.post("/v1/completions", content=content))


def test_neutral_values_of_unsupported_fields_are_taken(server: Live) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "stream": False}
    off = {
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "stop": None,
        "seed": None,
        "logprobs": None,
        "temperature": None,
    }
    assert server.complete(**neutral, **off).json()["choices"][0]["text"] == "ABC"
    assert server.complete(stop=[]).status_code == 200


def test_a_missing_field_is_named(server: Live) -> None:
    assert refused(server.client.post("/v1/completions", json={"prompt": "a"}))["param"] == "model"
    assert refused(server.client.post("/v1/completions", json={"model": NAME}))["param"] == "prompt"
    assert refused(server.client.post("/v1/chat/completions", json={"model": NAME}))["param"] == "messages"


def test_an_unknown_model_is_404_and_says_which_one_is_served(server: Live) -> None:
    error = refused(server.complete(model="gpt-9"), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found" and NAME in error["message"]
    refused(server.client.get("/v1/models/gpt-9"), 404)


def test_unknown_routes_and_methods_have_the_same_shape(server: Live) -> None:
    refused(server.client.get("/v2/nothing"), 404)
    refused(server.client.get("/v1/completions"), 405)


def test_a_body_that_is_too_large_is_413(server: Live) -> None:
    refused(server.client.post("/v1/completions", content=b" " * 3_000_000), 413)
    refused(server.client.post("/v1/completions", content=(b" " * 1000 for _ in range(200))), 413)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"),
    [(MAX_MODEL_LEN - 1, 1, 200), (MAX_MODEL_LEN - 1, 5, 400), (MAX_MODEL_LEN, 1, 400), (MAX_MODEL_LEN + 1, 1, 400)],
)
def test_prompt_and_max_tokens_share_the_models_limit(
    server: Live, num_prompt: int, max_tokens: int, status: int
) -> None:
    response = server.complete([97] * num_prompt, max_tokens=max_tokens)
    assert response.status_code == status
    if status == 400:
        error = refused(response)
        assert error["code"] == "context_length_exceeded"
        assert str(num_prompt) in error["message"] and str(MAX_MODEL_LEN) in error["message"]


def test_the_default_of_max_tokens_never_breaks_the_limit(server: Live) -> None:
    assert server.complete([97] * (MAX_MODEL_LEN - 3)).json()["usage"]["completion_tokens"] == 3
    assert server.complete("a" * 40).json()["usage"]["completion_tokens"] == 16


def test_what_the_engine_refuses_is_400_with_its_own_words(server: Live) -> None:
    assert refused(server.complete([97, 99999]))["message"] == "the prompt holds an id outside the vocabulary"


def test_one_bad_prompt_refuses_the_whole_list_and_leaves_nothing_running(server: Live) -> None:
    refused(server.complete([[97] * 50, [99999], [98] * 50], max_tokens=100))
    server.wait_idle()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        (None, "no chat template"),
        ("{{ x.y.z }}", "chat template"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(template: str | None, said: str) -> None:
    tokenizer = DummyModel("tiny").tokenizer()
    tokenizer._chat_template = template
    with live(tokenizer=tokenizer) as server:
        error = refused(server.chat("a"))
        assert said in error["message"] and error["param"] == "messages"
        assert server.complete().status_code == 200


def test_a_header_that_is_too_large_harms_nobody(server: Live) -> None:
    with contextlib.suppress(httpx.TransportError):  # closed on us while we still send
        assert server.client.get("/health", headers={"X-Request-Id": "a" * 1_000_000}).status_code in (400, 431)
    assert server.client.get("/health").status_code == 200


def test_a_field_with_a_huge_name_gets_a_short_answer(server: Live) -> None:
    assert len(server.complete(**{"x" * 50_000: 1}).content) < 2000


def test_the_server_goes_on(server: Live) -> None:
    assert server.complete().json()["choices"][0]["text"] == "ABC"
    assert server.client.get("/health").json()["status"] == "ok"


def test_an_api_key_guards_v1_and_only_v1() -> None:
    with live(api_key="s3cret-ü") as server:
        for given in (b"", b"Bearer wrong", b"s3cret", b"Bearer \xff"):
            response = server.client.get("/v1/models", headers={b"Authorization": given})
            assert refused(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        refused(server.complete(), 401)
        good = {b"Authorization": "Bearer s3cret-ü".encode()}
        assert server.client.get("/v1/models", headers=good).status_code == 200
        assert server.client.get("/health").status_code == 200
