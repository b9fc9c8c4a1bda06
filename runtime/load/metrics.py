"""What a load run measured, named and defined as in `vllm bench serve`.

========== ==========================================================================================================
TTFT       from sending a request to its first chunk
TPOT       (E2EL - TTFT) / (output tokens - 1), of requests with two output tokens or more
ITL        the gaps between a request's chunks, pooled over all requests; a server may put several tokens in a chunk
E2EL       from sending a request to its last chunk
goodput    requests a second that met every limit asked for; the TPOT of a single token counts as 0
========== ==========================================================================================================
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagegen.errors import ConfigError

FORMULAS: Mapping[str, str] = {
    "ttft": "first chunk - sent",
    "tpot": "(E2EL - TTFT) / (output tokens - 1), requests of 2 tokens or more",
    "itl": "gaps between chunks, of all requests together",
    "e2el": "last chunk - sent",
}
LIMITED = ("ttft", "tpot", "e2el")  # what goodput may ask for


@dataclasses.dataclass(slots=True)
class Timing:
    """One request as it was seen from outside, in seconds of one monotonic clock. `chunks` has when each part came."""

    prompt_tokens: int
    sent: float
    chunks: list[float] = dataclasses.field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and bool(self.chunks)

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float:
        """0 for a single token, which has none."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def summarise(
    timings: Sequence[Timing],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run of `duration` seconds, under the names of vLLM's result file; times in milliseconds.

    `goodput` has limits in milliseconds by name (LIMITED); without it `request_goodput` is None, and so are figures of
    nothing, such as the TPOT of runs without a second token.
    """
    done = [timing for timing in timings if timing.completed]
    num_input, num_output = sum(t.prompt_tokens for t in done), sum(t.output_tokens for t in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    if goodput:
        good = [t for t in done if all(1e3 * getattr(t, name) <= limit for name, limit in goodput.items())]
        figures["request_goodput"] = len(good) / duration
    samples = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.output_tokens > 1],
        "itl": [after - before for t in done for before, after in itertools.pairwise(t.chunks)],
        "e2el": [t.e2el for t in done],
    }
    for name, seconds in samples.items():
        figures |= _spread(name, 1e3 * np.array(seconds), percentiles)
    return figures


def _spread(name: str, values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    names = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    if not len(values):
        return {f"{word}_{name}_ms": None for word in names}
    found = [values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles)]
    return {f"{word}_{name}_ms": float(value) for word, value in zip(names, found, strict=True)}


def _peak_tokens(done: Sequence[Timing]) -> int:
    """The most chunks of any second of the run; seconds are counted from when the first request was sent."""
    if not done:
        return 0
    begin = min(t.sent for t in done)
    return max(Counter(int(chunk - begin) for t in done for chunk in t.chunks).values())


def _peak_concurrency(done: Sequence[Timing]) -> int:
    changes = sorted([(t.sent, 1) for t in done] + [(t.chunks[-1], -1) for t in done])  # who ends at once ends first
    return max(itertools.accumulate(change for _, change in changes), default=0)


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from words such as `ttft:500`. Raises ConfigError."""
    limits = dict[str, float]()
    for word in words:
        name, _, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in LIMITED or not 0 < limit < math.inf:
            raise ConfigError(f"--goodput {word!r} is no limit; write {', '.join(LIMITED)} and milliseconds, as ttft:500")
        limits[name] = limit
    return limits


def parse_percentiles(text: str) -> list[float]:
    """Percentiles from words such as `50,99`. Raises ConfigError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= 100 for each in found):
        raise ConfigError(f"--metric-percentiles {text!r} are no percentiles; write numbers from 0 to 100, as 50,99")
    return found
