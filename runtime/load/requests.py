"""What is sent, and when: lengths of a trace as prompts that share nothing but a stated prefix, and arrivals."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from itertools import accumulate

from pagegen.errors import ConfigError
from pagegen.runtime.simulation.traces import TraceRow

# Each is one token, with the blank before it, to most tokenizers of English.
WORDS = (  # noqa: SIM905  # read better than 90 literals
    "the of and to in for is on that by this with you it not or be are from at as your all have new more an was we will "
    "can us about if my has but our one other do no they he up may what which their out use any there see only so his "
    "when here who also now get first been would how were me some these its like than find people back time over after"
).split()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, and how many tokens to ask for."""

    prompt: str | tuple[int, ...]
    num_output: int


def token_prompts(rows: Sequence[TraceRow], vocab_size: int, seed: int) -> list[LoadRequest]:
    """Random token ids: prompts of exactly the rows' lengths."""
    return [
        LoadRequest(tuple(int(share * vocab_size) for share in shares), row.output)
        for row, shares in zip(rows, _draws(rows, seed), strict=True)
    ]


def word_prompts(rows: Sequence[TraceRow], seed: int) -> list[LoadRequest]:
    """Random words, as many as the rows have tokens: what they are in tokens is for the server to say."""
    return [
        LoadRequest(" ".join(WORDS[int(share * len(WORDS))] for share in shares), row.output)
        for row, shares in zip(rows, _draws(rows, seed), strict=True)
    ]


def _draws(rows: Sequence[TraceRow], seed: int) -> list[list[float]]:
    common, chance = random.Random(f"prefix {seed}"), random.Random(f"prompts {seed}")
    prefix = [common.random() for _ in range(max((row.prefix for row in rows), default=0))]
    return [[*prefix[: row.prefix], *(chance.random() for _ in range(row.input - row.prefix))] for row in rows]


def arrivals(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after which each request is sent, as `vllm bench serve` draws them. Raises ConfigError.

    Gaps are gamma of shape `burstiness` and mean 1 / rate: 1 is Poisson, less comes in bursts, inf is evenly. They are
    scaled so that the last request comes after exactly num_requests / rate. A rate of inf sends all at once.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"--request-rate {rate} and --burstiness {burstiness} must both be above 0")
    if rate == math.inf:
        return [0.0] * num_requests
    chance = random.Random(f"arrivals {seed}")
    even = burstiness == math.inf
    gaps = [1.0 if even else chance.gammavariate(burstiness, 1 / burstiness) for _ in range(num_requests)]
    times = list(accumulate(gaps))
    scale = num_requests / rate / times[-1] if times[-1] > 0 else 0.0
    return [scale * time for time in times]
