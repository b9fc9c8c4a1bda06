"""When requests come and how long they are: synthetic traces by name and seed, and traces from a file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.simulation.beams import check_width

MIN_TOKENS = 4  # shorter prompts and outputs are drawn again, as vLLM's benchmark leaves them out of ShareGPT
_FIXED = re.compile(r"fixed:([1-9]\d{0,8})x([1-9]\d{0,8})", re.ASCII)


MAX_TOKENS = 1 << 24  # of a prompt or an output: the simulator holds a prompt's tokens


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """A request: it arrives after `arrival` seconds with `input` prompt tokens, and each of its `n` samples will have
    `output` tokens. It may ask for `max_tokens`, None being all that the model has room for. The first `prefix` tokens of
    the prompt are those of every other request too. With `beams` its n sequences are those of a beam search.
    """

    arrival: float
    input: int
    output: int
    max_tokens: int | None = None
    n: int = 1
    prefix: int = 0
    beams: bool = False

    def __post_init__(self) -> None:
        for name in ("input", "output", "n"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
                raise ConfigError(f"trace: {name}={value!r} is not a positive whole number up to {MAX_TOKENS}")
        arrival, cap = self.arrival, self.max_tokens
        if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < math.inf:
            raise ConfigError(f"trace: arrival={arrival!r} is not a number of seconds from 0 on")
        prefix = self.prefix
        if isinstance(prefix, bool) or not isinstance(prefix, int) or not 0 <= prefix < self.input:
            raise ConfigError(f"trace: prefix={prefix!r} is no whole number from 0 to below input={self.input}")
        if not isinstance(self.beams, bool):
            raise ConfigError(f"trace: beams={self.beams!r} is not true or false")
        if self.beams:
            check_width(self.n)
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < self.output):
            raise ConfigError(f"trace: max_tokens={cap!r} is no whole number from output={self.output} on")


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of (input, output) tokens; `draw` may give any, the trace takes what fits the model.

    `bounded` outputs are what the request asks for, as in Orca's trace: there is no other end to them.
    """

    summary: str
    draw: Callable[[random.Random], tuple[int, int]]
    bounded: bool = False


def _log_normal(median: float, sigma: float) -> Callable[[random.Random], int]:
    return lambda rng: round(rng.lognormvariate(math.log(median), sigma))


def _gamma(mean: float, shape: float) -> Callable[[random.Random], int]:
    return lambda rng: round(rng.gammavariate(shape, mean / shape))


def _both(
    num_input: Callable[[random.Random], int], num_output: Callable[[random.Random], int]
) -> Callable[[random.Random], tuple[int, int]]:
    return lambda rng: (num_input(rng), num_output(rng))


def _mean_of(mean: float, sigma: float) -> Callable[[random.Random], int]:
    """Log-normal by its mean."""
    return _log_normal(mean / math.exp(sigma * sigma / 2), sigma)


# Only means are printed (section 6.1 of the vLLM paper): input 161.31 and output 337.99 for ShareGPT, 19.31 and 58.45
# for Alpaca. These have them once totals above 2048 are drawn again. Their shapes are guesses: docs/papers.md says what
# hangs on them.
LENGTHS: Mapping[str, Lengths] = MappingProxyType(
    {
        "sharegpt": Lengths(
            "chat: input 161, output 338 tokens on average", _both(_log_normal(75, 1.4), _gamma(345, 1.25))
        ),
        "alpaca": Lengths(
            "instructions: input 19, output 58 tokens on average",
            _both(_log_normal(17.45, 0.45), _log_normal(40.8, 0.85)),
        ),
        # Section 6.4: the prefixes of one and of five examples have 80 and 341 tokens, so an example has 65. News
        # sentences have about as many words in both languages, and a German one of them 1.4 times the tokens: 27 and 38.
        "wmt16": Lengths(
            "translation: input 27, output 38 tokens on average, with --prefix",
            _both(_mean_of(27, 0.5), _mean_of(38, 0.5)),
        ),
        # The coding trace of Patel et al. 2023 (Splitwise, https://arxiv.org/abs/2311.18677): median prompt 1500, output 13.
        "code": Lengths(
            "code completion: long prompts, short outputs", _both(_log_normal(1500, 0.8), _log_normal(13, 0.8))
        ),
        "documents": Lengths(
            "long documents: input 6000, output 200 tokens", _both(_mean_of(6000, 0.4), _mean_of(200, 0.6))
        ),
        "orca": Lengths(
            "input uniform in 32..512, output in 1..128, all of it asked for",
            lambda rng: (rng.randint(32, 512), rng.randint(1, 128)),
            bounded=True,
        ),
    }
)


def synthesize(
    name: str,
    *,
    rate: float,
    num_requests: int,
    seed: int = 0,
    max_model_len: int = 2048,
    n: int = 1,
    prefix: int = 0,
    beams: bool = False,
) -> list[TraceRow]:
    """Poisson arrivals of `rate` requests a second (inf: all at once) with lengths of LENGTHS or `fixed:INxOUT`.

    All prompts have the same `prefix` tokens before those drawn. Prompt and output are at most `max_model_len` together,
    so no request is refused for its length. Raises ConfigError.
    """
    if not rate > 0 or num_requests < 1:
        raise ConfigError(f"a trace of {num_requests} requests at rate {rate} is empty; both must be positive")
    lengths, rng = lengths_of(name), random.Random(f"{name} {seed}")
    rows, arrival = list[TraceRow](), 0.0
    for _ in range(num_requests):
        arrival += rng.expovariate(rate) if rate < math.inf else 0.0
        num_input, num_output = _draw(lengths, rng, max_model_len, prefix)
        most = num_output if lengths.bounded else None
        rows.append(TraceRow(arrival, prefix + num_input, num_output, most, n, prefix, beams))
    return rows


def lengths_of(name: str) -> Lengths:
    """Of what lengths a synthetic trace is. Raises ConfigError for a name that is not known."""
    if match := _FIXED.fullmatch(name):
        num_input, num_output = int(match[1]), int(match[2])
        return Lengths("one length", lambda rng: (num_input, num_output), bounded=True)
    if name not in LENGTHS:
        raise ConfigError(
            f"trace {name!r} is neither a file nor known; allowed: {', '.join(LENGTHS)}, fixed:INxOUT such as fixed:32x32"
        )
    return LENGTHS[name]


def _draw(lengths: Lengths, rng: random.Random, max_model_len: int, prefix: int) -> tuple[int, int]:
    shortest = 1 if lengths.bounded else MIN_TOKENS
    for _ in range(10_000):
        num_input, num_output = lengths.draw(rng)
        if min(num_input, num_output) >= shortest and prefix + num_input + num_output <= max_model_len:
            return num_input, num_output
    beside = f" beside a prefix of {prefix} tokens" if prefix else ""
    raise ConfigError(
        f"hardly any request of this trace fits max_model_len={max_model_len}{beside}; raise max_model_len"
    )


def read_trace(
    path: Path, *, rate: float = math.inf, seed: int = 0, count: Callable[[str], int] | None = None
) -> list[TraceRow]:
    """A file's requests by arrival: lines of JSON objects with input, output and, if wanted, arrival (seconds),
    max_tokens, n and prefix; or one JSON list of conversations as ShareGPT has them.

    Of a conversation the first two turns are taken, whose tokens `count` counts, and what vLLM's benchmark leaves out is
    left out: turns under 4 tokens, prompts over 1024, totals over 2048. Where no line says when it arrives, they come at
    `rate` a second. Raises ConfigError naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if text.lstrip().startswith("["):
        values = _conversations(path, text, count)
    else:
        lines = enumerate(text.splitlines(), 1)
        values = [(f"{path}, line {number}", _object(path, number, line)) for number, line in lines if line.strip()]
    if not values:
        raise ConfigError(
            f"trace {path} holds no requests; a line is an object with input and output, and a conversation has two turns "
            f"of at least {MIN_TOKENS} tokens"
        )
    if not any("arrival" in value for _, value in values):
        rng, arrival = random.Random(f"arrivals {seed}"), 0.0
        for _, value in values:
            arrival += rng.expovariate(rate) if rate < math.inf else 0.0
            value["arrival"] = arrival
    return sorted((_row(where, value) for where, value in values), key=lambda row: row.arrival)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: a line is an object with arrival, input and output")
    return value


def _row(where: str, value: dict[str, Any]) -> TraceRow:
    known = [field.name for field in dataclasses.fields(TraceRow)]
    if unknown := [name for name in value if name not in known]:
        raise ConfigError(f"{where}: trace: field {unknown[0]!r} is not known; allowed: {', '.join(known)}")
    if missing := [name for name in ("input", "output", "arrival") if name not in value]:
        hint = "; give every line one, or none and a rate" if missing == ["arrival"] else ""
        raise ConfigError(f"{where}: trace: it has no {missing[0]}{hint}")
    try:
        return TraceRow(**value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _conversations(path: Path, text: str, count: Callable[[str], int] | None) -> list[tuple[str, dict[str, Any]]]:
    if count is None:
        raise ConfigError(f"trace {path} holds texts, and nothing counts their tokens; name a --model")
    try:
        conversations = json.loads(text)
        turns = [[turn["value"] for turn in each["conversations"][:2]] for each in conversations]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ConfigError(
            f"trace {path} is no list of objects with conversations of turns with a value: {type(error).__name__} {error}"
        ) from None
    rows = []
    for number, pair in enumerate(turns, 1):
        if len(pair) == 2 and all(isinstance(turn, str) for turn in pair):
            try:
                num_input, num_output = map(count, pair)
            except RequestError as error:  # text that is no Unicode
                raise ConfigError(f"{path}, conversation {number}: {error}") from None
            if min(num_input, num_output) >= MIN_TOKENS and num_input <= 1024 and num_input + num_output <= 2048:
                rows.append((f"{path}, conversation {number}", {"input": num_input, "output": num_output}))
    return rows


def write_trace(path: Path, rows: list[TraceRow]) -> None:
    """What `read_trace` reads."""
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows), encoding="utf-8")
