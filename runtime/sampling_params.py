"""How one request is sampled and when it ends."""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from pagegen.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; bounds the text that streaming may hold back
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_SEQUENCES = 128  # of one request
MAX_LENGTH_PENALTY = 10.0  # either way: lengths to its power stay finite numbers


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request; validates itself and raises RequestError with `param` set.

    `temperature` 0 is greedy. `top_k` 0 (or -1) and `top_p` 1 are off; the order is temperature, top-k, top-p.
    `seed` None draws one per request. `stop` strings never appear in the text; `stop_token_ids` end a request even
    with `ignore_eos`. `n` outputs are sampled from the one prompt, with seeds of their own that come from `seed`; with
    `best_of` that many are, and the n whose tokens have the highest mean log-probability are given, the best first.
    `logprobs` n asks for the sampled token's log-probability and the n likeliest, of the raw
    logits; `prompt_logprobs` the same for the prompt's tokens from the second on.

    `beam_width` asks for a beam search (`beam_search` has the rules, those of transformers' num_beams; 1 is greedy) and
    the n best of what it finds, by the sum of log-probabilities over (output tokens ** `length_penalty`), told at the
    end. `early_stopping` True ends it when beam_width outputs have ended, False when the best beam at its present
    length would not be among them, "never" when none could be.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the one way to normalise a frozen value
        self._check_int("max_tokens", 1, 2**31 - 1)
        self._check_int("top_k", -1, 2**63 - 1)
        set_field(self, "top_k", max(self.top_k, 0))
        set_field(self, "temperature", self._float("temperature"))
        if not self.temperature >= 0:
            raise RequestError(
                f"temperature={self.temperature} is negative; allowed: 0 (greedy) and above", "temperature"
            )
        set_field(self, "top_p", self._float("top_p"))
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p} is out of range; allowed: above 0, up to 1 (off)", "top_p")
        if self.seed is not None:
            self._check_int("seed", -(2**63), 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={_shown(self.ignore_eos)} is not true or false", "ignore_eos")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0, MAX_LOGPROBS)
        self._check_int("n", 1, MAX_SEQUENCES)
        if self.best_of is not None:
            self._check_int("best_of", self.n, MAX_SEQUENCES)
        set_field(self, "stop", self._stop_strings())
        set_field(self, "stop_token_ids", self._stop_ids())
        self._check_beams()

    @property
    def num_sequences(self) -> int:
        """Sequences that are sampled, or live beams."""
        return self.beam_width or self.best_of or self.n

    @property
    def beam_search(self) -> bool:
        """Whether beams are kept; a single one is what greedy decoding keeps."""
        return self.num_sequences > 1 and self.beam_width is not None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0 or self.beam_width is not None

    def validate_for(self, vocab_size: int) -> None:
        """Checks what depends on the model. Raises RequestError naming the field."""
        for token in self.stop_token_ids:
            if token >= vocab_size:
                raise RequestError(f"stop_token_ids holds {token}; allowed: 0 to {vocab_size - 1}", "stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise RequestError(f"{name}={count} is more than the vocabulary of {vocab_size} tokens", name)
        if self.beam_search and self.n > vocab_size:
            raise RequestError(f"n={self.n} beams may end with their first token, of which there are {vocab_size}", "n")

    def _check_beams(self) -> None:
        object.__setattr__(self, "length_penalty", self._float("length_penalty"))
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty={self.length_penalty} is out of range; allowed: -{MAX_LENGTH_PENALTY:g} to "
                f"{MAX_LENGTH_PENALTY:g}",
                "length_penalty",
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(
                f'early_stopping={_shown(self.early_stopping)} is not known; allowed: true, false, "never"',
                "early_stopping",
            )
        if self.beam_width is None:
            for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != off:
                    raise RequestError(f"{name} is for a beam search and none is asked for; leave it out", name)
            return
        self._check_int("beam_width", self.n, MAX_SEQUENCES)
        for name, allowed, why in (
            ("temperature", (0.0, 1.0), "a beam search draws nothing"),
            ("top_k", (0,), "a beam search draws nothing"),
            ("top_p", (1.0,), "a beam search draws nothing"),
            ("best_of", (None,), "beam_width says how many are kept"),
            ("stop", ((),), "beams are not watched for texts, but stop_token_ids end them"),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise RequestError(f"{name}={_shown(value)} does not go with beam_width: {why}; leave it out", name)

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name}={_shown(value)} is not a whole number", name)
        if not low <= value <= high:
            raise RequestError(f"{name}={_shown(value)} is out of range; allowed: {low} to {high}", name)

    def _float(self, name: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name}={_shown(value)} is not a number", name)
        if not abs(value) <= sys.float_info.max:  # false for NaN too; a huge int would overflow float()
            raise RequestError(f"{name}={_shown(value)} is not a finite number", name)
        return float(value)

    def _stop_strings(self) -> tuple[str, ...]:
        stop: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(text, str) for text in stop):
            raise RequestError(f"stop={_shown(self.stop)} is not a string or a list of strings", "stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(stop)} strings; allowed: up to {MAX_STOP_STRINGS}", "stop")
        for text in stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop holds a string of {len(text)} characters; allowed: 1 to {MAX_STOP_LENGTH}",
                    "stop",
                )
        return tuple(stop)

    def _stop_ids(self) -> tuple[int, ...]:
        ids: object = self.stop_token_ids
        if not isinstance(ids, tuple | list) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids is not a list of up to {MAX_STOP_TOKEN_IDS} token ids", "stop_token_ids"
            )
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"stop_token_ids holds {_shown(token)}, which is not a token id", "stop_token_ids")
        return tuple(ids)


def _shown(value: object) -> str:
    """A value for a message: one short line. Python refuses to print integers of thousands of digits."""
    return "a huge number" if isinstance(value, int) and abs(value) >= 2**64 else repr(value)[:80]
