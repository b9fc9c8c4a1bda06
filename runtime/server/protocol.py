"""What clients may send: the OpenAI API's requests, as far as pagegen serves them.

A field that is not here is refused with its name. Fields of the API that pagegen has no code for are accepted at the
value that means "off". Sampling values are typed Any on purpose: SamplingParams checks them, here as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from pagegen.errors import RequestError
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.server.errors import ApiError

MAX_BODY_BYTES = 8 << 20
MAX_DISCARD_BYTES = 128 << 20  # read and thrown away, so that the client sees the 413 and not a reset
MAX_PROMPTS = 64  # of one completion request
MAX_MESSAGES = 1024
MAX_PRIORITY = 1000

_SAMPLING = (
    *("temperature", "top_p", "seed", "stop", "top_k", "stop_token_ids", "ignore_eos", "n", "best_of"),
    *("length_penalty", "early_stopping"),
)  # names that are SamplingParams' own

R = TypeVar("R", bound="ApiRequest")


def _only(*allowed: object) -> AfterValidator:
    def check(value: object) -> object:
        if value is not None and value not in allowed:
            raise ValueError(f"{value!r} is not supported; send {' or '.join(map(repr, allowed))}, or leave it out")
        return value

    return AfterValidator(check)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Model):
    include_usage: bool | None = None


class ApiRequest(_Model):
    """The fields that completions and chat completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # the client's own bookkeeping; not used
    # sampling; checked by SamplingParams
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    stop: Any = None
    # sampling beyond the OpenAI API, named as in vLLM
    top_k: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    n: Any = None
    use_beam_search: bool | None = None  # as many beams as best_of, or n
    length_penalty: Any = None
    early_stopping: Any = None
    # scheduling, named as in vLLM
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    cache_salt: Annotated[str | None, Field(max_length=1024)] = None
    # known, off
    presence_penalty: Annotated[float | None, _only(0)] = None
    frequency_penalty: Annotated[float | None, _only(0)] = None
    logit_bias: Annotated[dict[str, Any] | None, _only({})] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> ApiRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams; send stream: true or leave it out", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""
        raise NotImplementedError

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The sampling options; a field left out or null takes SamplingParams' default. Raises RequestError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        if self.use_beam_search:
            SamplingParams(**{name: given[name] for name in ("n", "best_of") if name in given})  # by the names asked with
            given["beam_width"] = given.pop("best_of", given.get("n", 1))
        max_tokens = default_max_tokens if self.max_tokens is None else self.max_tokens
        params = SamplingParams(max_tokens=max_tokens, logprobs=self.num_logprobs, **given)
        if self.stream and params.num_sequences > params.n and not params.beam_search:
            raise RequestError("best_of picks among whole texts, which cannot be streamed; leave out stream", "best_of")
        return params


class CompletionRequest(ApiRequest):
    """POST /v1/completions. A prompt's text is plain text: control tokens are given as token ids, never by spelling."""

    prompt: Any
    logprobs: Any = None
    best_of: Any = None
    echo: Annotated[bool | None, _only(False)] = None
    suffix: Annotated[str | None, _only("")] = None

    @property
    def num_logprobs(self) -> int | None:
        count: int | None = self.logprobs
        return count

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, texts or token ids. Raises RequestError."""
        prompt = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
        if not isinstance(prompts, list) or not (
            all(isinstance(p, str) for p in prompts) or all(map(_is_ids, prompts))
        ):
            raise RequestError("prompt is not a string, a list of token ids, or a list of either", "prompt")
        if not 0 < len(prompts) <= MAX_PROMPTS or not all(prompts):
            raise RequestError(
                f"prompt is empty or holds an empty one or over {MAX_PROMPTS}; send 1 to {MAX_PROMPTS}", "prompt"
            )
        return prompts


class TextPart(_Model):
    type: Literal["text"]
    text: str


def _as_parts(content: object) -> object:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_Model):
    """One message of a chat. A text is one part, null none."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: Annotated[str | None, Field(max_length=64)] = None  # for the client's bookkeeping; not used

    @property
    def text(self) -> str:
        """The content as one string."""
        return "".join(part.text for part in self.content)


class ChatRequest(ApiRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: Any = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise RequestError(
                    "max_tokens is the old name of max_completion_tokens; send one of them", "max_tokens"
                )
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        count: int | None = (0 if self.top_logprobs is None else self.top_logprobs) if self.logprobs else None
        return count

    def chat(self) -> list[dict[str, str]]:
        """The messages as the chat template takes them."""
        return [{"role": message.role, "content": message.text} for message in self.messages]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


async def read_request(request: Request, kind: type[R], max_body_bytes: int = MAX_BODY_BYTES) -> R:
    """The request's body as `kind`. Raises ApiError 413 or 400 naming the field."""
    body = await _read_body(request, max_body_bytes)
    try:
        values = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: malformed, not UTF-8, or NaN
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {what}"[:300]) from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, kind) from None


async def _read_body(request: Request, limit: int) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_DISCARD_BYTES:
            break
        if size <= limit:
            body += chunk
    if size > limit:
        raise ApiError(413, f"the body is over {limit} bytes; send a shorter prompt", headers={"Connection": "close"})
    return bytes(body)


def _refuse_constant(name: str) -> Callable[..., object]:
    raise ValueError(f"{name} is not a JSON number")


def _first_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"]))[:100] or None  # a field's name can be as long as the body
    match first["type"]:
        case "extra_forbidden":
            known = (
                ", ".join(sorted(kind.model_fields)) if len(first["loc"]) == 1 else "the OpenAI API's, as far as served"
            )
            message = f"{param} is not a field that is known here; allowed: {known}"
        case "missing":
            message = f"{param} is missing; it is a required field"
        case "value_error":
            message = f"{param}: {first['ctx']['error']}"
        case _:
            message = f"{param or 'the body'}: {first['msg']}"
    return ApiError(400, message[:1000], param=param)
