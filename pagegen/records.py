"""The values that tuning fills and packages carry. Plain JSON in and out. Vendored into every kernel package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from .errors import PackageError
from .spec import Phase


class Status(StrEnum):
    """How an evaluation ended. Only PASSED carries a timing; NOT_MEASURED is what a static model found worth one."""

    PASSED = "PASSED"
    INCORRECT = "INCORRECT"
    BUILD_ERROR = "BUILD_ERROR"
    RUN_ERROR = "RUN_ERROR"
    TIMEOUT = "TIMEOUT"
    PRUNED = "PRUNED"
    NOT_MEASURED = "NOT_MEASURED"


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median over rounds, and an interval for that median."""

    median: float
    low: float
    high: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """One candidate's result. `score` is what the search minimises: time relative to the anchor measured beside it."""

    status: Status
    config: Mapping[str, Any]
    reason: str = ""
    score: float | None = None
    timings: Mapping[str, Timing] = dataclasses.field(default_factory=dict)  # workload point -> timing
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the timing was given, what disturbed it
    seconds: float = 0.0  # what the evaluation itself took
    gate_seconds: float = 0.0  # of these the gate's, after compilation
    source: str = ""  # hash of the source that was built; empty if it did not render
    kernels: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of an absent device: what each binary uses
    estimate: Mapping[str, float] = dataclasses.field(default_factory=dict)  # workload point -> seconds, by a model
    noise: float | None = None  # half-width of the score's interval, over the score
    roofline: float | None = None  # share of what the machine's limits allow, geometric mean over the batches
    partial: float | None = None  # of a candidate that was not timed to its end: its score on the batches that it was timed on

    def __post_init__(self) -> None:
        if (self.status is Status.PASSED) != (self.score is not None):
            raise ValueError(f"a score goes with PASSED and only with it, not with {self.status}")
        if self.partial is not None and self.status is not Status.PRUNED:
            raise ValueError(f"a partial score goes with PRUNED only, not with {self.status}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Reads what `to_dict` wrote."""
        timings = {name: Timing(**timing) for name, timing in values["timings"].items()}
        return cls(**{**values, "status": Status(values["status"]), "timings": timings})


def ranked(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Those that passed, best first; equals in the order of their configs' text."""
    passed = [found for found in evaluations if found.status is Status.PASSED]
    return sorted(passed, key=lambda found: (found.score, json.dumps(dict(found.config), sort_keys=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch is dispatched by: sequences, the longest context and the longest query, both in tokens.

    A context that is not known (None) is that of a GPU batch whose caller did not say it.
    """

    phase: Phase
    seqs: int
    context: int | None
    query: int

    @classmethod
    def of_batch(cls, num_tokens: int, num_seqs: int, max_query_len: int | None, max_context_len: int | None) -> BatchShape:
        """From what a call knows. Without `max_query_len`, rows beyond one a sequence are taken to be one sequence's."""
        query = longest_query(num_tokens, num_seqs) if max_query_len is None else max_query_len
        return cls(phase_of(num_tokens, num_seqs, query), num_seqs, max_context_len, query)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchRow:
    """A bucket of batches and the kernel (by its name in the package) that serves it. Bounds are inclusive, None is none."""

    phase: Phase
    kernel: str
    min_seqs: int | None = None
    max_seqs: int | None = None
    min_context: int | None = None
    max_context: int | None = None
    min_query: int | None = None
    max_query: int | None = None

    def holds(self, shape: BatchShape) -> bool:
        """Whether a batch falls into this bucket. A bound on the context excludes a batch whose context is not known."""
        if shape.phase is not self.phase or not _within(self.min_seqs, shape.seqs, self.max_seqs):
            return False
        if not _within(self.min_query, shape.query, self.max_query):
            return False
        if shape.context is None:
            return self.min_context is None and self.max_context is None
        return _within(self.min_context, shape.context, self.max_context)

    @property
    def bounds(self) -> Mapping[str, tuple[int | None, int | None]]:
        """(lowest, highest) of each measure, by what it counts."""
        return {
            "sequences": (self.min_seqs, self.max_seqs),
            "tokens of context": (self.min_context, self.max_context),
            "tokens of query": (self.min_query, self.max_query),
        }


def _within(low: int | None, value: int, high: int | None) -> bool:
    return (low is None or low <= value) and (high is None or value <= high)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchTable:
    """Rows tried in order. They cover the shapes that were measured; what no row holds goes to the fallback, the untuned default."""

    rows: tuple[DispatchRow, ...]
    fallback: str

    def find(self, shape: BatchShape) -> DispatchRow | None:
        """The row that serves a batch; None if none holds it."""
        return next((row for row in self.rows if row.holds(shape)), None)

    def select(self, shape: BatchShape) -> str:
        """The name of the kernel for a batch."""
        row = self.find(shape)
        return row.kernel if row else self.fallback

    def outside(self, shape: BatchShape) -> tuple[str, ...]:
        """How a batch that no row holds lies outside all rows of its phase, a few words for each measure that does."""
        rows = [row for row in self.rows if row.phase is shape.phase]
        if not rows:
            return (f"no {shape.phase} batch was measured",)
        words = []
        for measure, value in zip(rows[0].bounds, (shape.seqs, shape.context, shape.query), strict=True):
            lows, highs = zip(*(row.bounds[measure] for row in rows), strict=True)
            if value is None:
                words.append(f"{measure} not said")
            elif None not in lows and value < min(lows):
                words.append(f"less than {min(lows)} {measure}")
            elif None not in highs and value > max(highs):
                words.append(f"more than {max(highs)} {measure}")
        return tuple(words) or ("between rows of the table",)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Every kernel named, the fallback first, each once."""
        return tuple(dict.fromkeys([self.fallback, *(row.kernel for row in self.rows)]))

    @property
    def is_uniform(self) -> bool:
        """Whether every batch gets the same kernel: two configs round differently, so a deterministic spec needs it."""
        everywhere = {row.phase for row in self.rows if row == DispatchRow(row.phase, row.kernel)}
        reached = {row.kernel for row in self.rows} | ({self.fallback} if set(Phase) - everywhere else set())
        return len(reached) == 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, bounds that bound nothing left out; `from_dict` is the inverse."""
        rows = [{name: value for name, value in dataclasses.asdict(row).items() if value is not None} for row in self.rows]
        return {"rows": [{**row, "phase": row["phase"].value} for row in rows], "fallback": self.fallback}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DispatchTable:
        """Reads what `to_dict` wrote. Raises PackageError on anything else."""
        try:
            rows: Sequence[Mapping[str, Any]] = values["rows"]
            return cls(tuple(DispatchRow(**{**row, "phase": Phase(row["phase"])}) for row in rows), values["fallback"])
        except (KeyError, TypeError, ValueError) as error:
            raise PackageError(f"dispatch table is malformed ({error}); rebuild the package with `pagegen tune`") from None


def phase_of(num_tokens: int, num_seqs: int, max_query_len: int | None) -> Phase:
    """DECODE if no sequence has more than one row; MIXED if most but the longest have one; else PREFILL.

    From counts alone: the longest query's rows are set aside, and the others are decoding if they have less than two
    rows each on average. Without `max_query_len`, rows beyond one a sequence are taken to be one sequence's.
    """
    if max_query_len is None:
        max_query_len = longest_query(num_tokens, num_seqs)
    if max_query_len <= 1:
        return Phase.DECODE
    return Phase.MIXED if num_tokens - max_query_len < 2 * (num_seqs - 1) else Phase.PREFILL


def longest_query(num_tokens: int, num_seqs: int) -> int:
    """The longest query that a batch can have: all rows beyond one a sequence belong to one sequence."""
    return max(0, num_tokens - num_seqs) + 1
