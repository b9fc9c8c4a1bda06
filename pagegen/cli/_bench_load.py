"""What `bench engine` and `bench serve` share: the options that make a load, and how its figures are shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli._common import note, print_table
from pagegen.errors import ConfigError
from pagegen.runtime.load.metrics import FORMULAS, Timing, parse_goodput, parse_percentiles, summarise

if TYPE_CHECKING:
    from pagegen.runtime.simulation.traces import TraceRow

ANY_LEN = 1 << 30  # tokens, of a request before its model is known
MAX_ERRORS = 20  # different ones that are told

TraceOption = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="T",
        help="Lengths: sharegpt, alpaca, wmt16, code, documents, orca, fixed:INxOUT, or a file of JSON lines with input "
        "and output.",
    ),
]
NumPromptsOption = Annotated[int, typer.Option("--num-prompts", metavar="N", help="Requests.")]
RateOption = Annotated[
    float, typer.Option("--request-rate", metavar="R", help="Requests a second that arrive; inf is all at once.")
]
BurstinessOption = Annotated[
    float, typer.Option("--burstiness", help="Shape of the gamma gaps: 1 is Poisson, less bursts, inf is even.")
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--max-concurrency", metavar="N", help="Requests at once at most.", show_default=False)
]
PrefixOption = Annotated[int, typer.Option("--prefix", metavar="N", help="Tokens that all prompts begin with, more.")]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Of lengths, prompts and arrivals; the same one finds a prefix cache warm.")
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="NAME:MS", help="A limit that a good request meets, as ttft:500; repeatable."),
]
PercentilesOption = Annotated[
    str, typer.Option("--metric-percentiles", metavar="P[,P...]", help="Percentiles of every metric.")
]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A load as it was asked for. Raises ConfigError for one that is none."""

    trace: str
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    prefix: int
    seed: int
    goodput: list[str]
    metric_percentiles: str

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts} is no load; it must be 1 or more")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency} lets none through; it must be 1 or more")
        if self.prefix < 0:
            raise ConfigError(f"--prefix {self.prefix} is negative; 0 is none")
        self._require_trace()
        self.arrivals()
        parse_goodput(self.goodput)
        parse_percentiles(self.metric_percentiles)

    def _require_trace(self) -> None:
        """Raises ConfigError for a trace that is none, whatever the model takes: it is told before one is loaded."""
        from pagegen.runtime.simulation.traces import lengths_of

        if self._is_file:
            self.rows(ANY_LEN)
        else:
            lengths_of(self.trace)

    @property
    def _is_file(self) -> bool:
        return Path(self.trace).is_file() or self.trace.endswith(".jsonl")

    def rows(self, max_len: int) -> list[TraceRow]:
        """The lengths, of at most `max_len` tokens together. Raises ConfigError."""
        from pagegen.runtime.simulation.traces import read_trace, synthesize

        file = Path(self.trace)
        if not self._is_file:
            return synthesize(
                self.trace, rate=1.0, num_requests=self.num_prompts, seed=self.seed, max_model_len=max_len, prefix=self.prefix
            )
        found = [row for row in read_trace(file) if row.input + row.output <= max_len][: self.num_prompts]
        if len(found) < self.num_prompts:
            raise ConfigError(
                f"trace {file} has {len(found)} requests of up to {max_len} tokens; --num-prompts {self.num_prompts} is more"
            )
        return [dataclasses.replace(row, input=row.input + self.prefix, prefix=self.prefix) for row in found]

    def arrivals(self) -> list[float]:
        from pagegen.runtime.load.requests import arrivals

        return arrivals(self.num_prompts, self.request_rate, self.burstiness, self.seed)

    def figures(self, timings: list[Timing], duration: float) -> dict[str, Any]:
        """What was asked and what came of it, for JSON."""
        rate = self.request_rate if self.request_rate < float("inf") else "inf"
        burstiness = self.burstiness if self.burstiness < float("inf") else "inf"
        measured = summarise(
            timings,
            duration,
            percentiles=parse_percentiles(self.metric_percentiles),
            goodput=parse_goodput(self.goodput),
        )
        asked = {"trace": self.trace, "num_prompts": self.num_prompts, "request_rate": rate, "burstiness": burstiness}
        errors = sorted({timing.error for timing in timings if timing.error})[:MAX_ERRORS]
        return {**asked, "max_concurrency": self.max_concurrency, "seed": self.seed, **measured, "errors": errors}


def show(title: str, figures: dict[str, Any]) -> None:
    """The figures for people: throughput, then a line a metric with its formula."""
    counts = (
        ("requests completed", f"{figures['completed']}"),
        ("failed", f"{figures['failed']}"),
        ("seconds", f"{figures['duration']:.2f}"),
        ("input tokens", f"{figures['total_input_tokens']}"),
        ("output tokens", f"{figures['total_output_tokens']}"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("good requests/s", "" if figures["request_goodput"] is None else f"{figures['request_goodput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.2f}"),
        ("tokens/s", f"{figures['total_token_throughput']:.2f}"),
        ("peak output tokens/s", f"{figures['max_output_tokens_per_s']}"),
        ("peak requests at once", f"{figures['max_concurrent_requests']}"),
    )
    print_table(title, ("", "figure"), [row for row in counts if row[1]])
    words = [key.removesuffix("_ttft_ms") for key in figures if key.endswith("_ttft_ms")]
    rows = [(name.upper(), *(_ms(figures[f"{word}_{name}_ms"]) for word in words), FORMULAS[name]) for name in FORMULAS]
    print_table("\nmilliseconds", ("metric", *words, "what"), rows)
    for error in figures["errors"][:5]:
        note(f"failed: {error}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
