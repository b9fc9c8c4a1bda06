"""What clients get: OpenAI's response objects, built from engine outputs."""

from __future__ import annotations

import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from pagegen.runtime.engine import RequestOutput
from pagegen.runtime.sampler import TokenLogprobs
from pagegen.runtime.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks; OpenAI's own number


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens in and out, summed over the requests, each prompt counted once; a sampled end-of-sequence token counts.

    `prompt_tokens_details.shared_blocks`, beyond the OpenAI API, are KV blocks that sharing saved.
    """
    found = [output.usage for output in outputs if output.usage is not None]
    prompt = sum(one.prompt_tokens for one in found)
    completion = sum(one.completion_tokens for one in found)
    details = {
        "cached_tokens": sum(one.cached_tokens for one in found),
        "shared_blocks": sum(one.saved_blocks for one in found),
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


class ResponseFormat(ABC):
    """The shape of one endpoint's answers."""

    prefix: str
    whole: str
    part: str

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return self._envelope(self.whole, choices) | {"usage": usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return self._envelope(self.part, choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def delta(self, index: int, sent: RequestOutput | None, output: RequestOutput) -> dict[str, Any] | None:
        """The choice that carries what `output` has beyond `sent`; None while there is nothing to show."""
        text = output.text[len(sent.text) if sent else 0 :]
        if not text and output.finish_reason is None:
            return None
        return self.part_choice(index, text, self._logprobs(output, sent), output.finish_reason)

    def _logprobs(self, output: RequestOutput, sent: RequestOutput | None = None) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        return self.logprobs(output.logprobs[len(sent.token_ids) if sent else 0 :], len(sent.text) if sent else 0)

    @abstractmethod
    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """One finished choice."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if there is one before the text."""

    @abstractmethod
    def part_choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """One choice of a chunk."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Log-probabilities of `tokens`, whose text begins at character `offset` of the output."""


class CompletionFormat(ResponseFormat):
    """POST /v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self.part_choice(index, output.text, self._logprobs(output), output.finish_reason)

    def opening(self, index: int) -> None:
        return None

    def part_choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        text = self.tokenizer.token_text
        offsets = itertools.accumulate((len(text(token.token_id)) for token in tokens), initial=offset)
        return {
            "tokens": [text(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{text(other): _finite(value) for other, value in token.top} for token in tokens],
            "text_offset": list(offsets)[:-1],
        }


class ChatFormat(ResponseFormat):
    """POST /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text}
        logprobs = self._logprobs(output)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part_choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(other, value) for other, value in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self.tokenizer.token_text(token_id), self.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
