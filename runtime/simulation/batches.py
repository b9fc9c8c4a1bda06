"""The ragged batches of a run as a workload file, for `pagegen tune` to time what was really there."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from pagegen.errors import ConfigError
from pagegen.records import phase_of
from pagegen.runtime.scheduler import ScheduledBatch
from pagegen.spec import Phase

WORKLOAD_FORMAT = 1  # of tuning/workloads.py, which the two meet in on disk
MAX_POINTS = 12  # of a phase
MAX_RUNS = 8  # of equal sequences in a point

Shape = list[tuple[int, int]]  # (query, context) of each sequence


class BatchSampler:
    """An observer of iterations that keeps one batch for each kind of them, drawn evenly, and how many there were.

    Batches are of one kind if phase, sequences, queries and contexts agree to the power of two.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._counts: dict[Phase, Counter[tuple[int, ...]]] = {phase: Counter() for phase in Phase}
        self._drawn: dict[tuple[Phase, tuple[int, ...]], Shape] = {}

    def __call__(self, batch: ScheduledBatch) -> None:
        rows = batch.rows
        queries = sum([row.num_tokens for row in rows])
        contexts = sum([row.start + row.num_tokens for row in rows])
        phase = phase_of(queries, len(rows), max([row.num_tokens for row in rows]))  # as a package dispatches it
        kind = (len(rows).bit_length(), (queries // len(rows)).bit_length(), (contexts // len(rows)).bit_length())
        self._counts[phase][kind] += 1
        if self._rng.random() * self._counts[phase][kind] < 1:  # each of them is kept with the same chance
            self._drawn[phase, kind] = [(row.num_tokens, row.start + row.num_tokens) for row in rows]

    def workload(self, phase: Phase | None = None) -> dict[str, Any]:
        """The commonest kinds of a phase, or of each, weighted by how many iterations they were.

        Raises ConfigError if there were none.
        """
        phases = [each for each in ([phase] if phase else Phase) if self._counts[each]]
        if not phases:
            seen = ", ".join(other for other in Phase if self._counts[other])
            raise ConfigError(f"the run has no {phase or 'single'} iteration; it has {seen or 'none at all'}")
        points = Counter[str]()
        for each in phases:
            for kind, count in self._counts[each].most_common(MAX_POINTS):
                points[point_name(self._drawn[each, kind])] += count
        named = {"phase": phase.value} if phase else {}
        return {"format": WORKLOAD_FORMAT, **named, "points": dict(points)}

    def write(self, path: Path, phase: Phase | None = None) -> None:
        """Writes the workload as YAML. Raises ConfigError."""
        text = yaml.safe_dump(self.workload(phase), sort_keys=False, width=10_000)
        head = "# Batches of a simulated or repeated run: SEQSxQUERY@CONTEXT, and how often there were such.\n"
        try:
            path.write_text(head + text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"workload {path} cannot be written: {error.strerror}") from None


def point_name(shape: Shape) -> str:
    """`SEQSxQUERY@CONTEXT` joined by `+`: sequences in order of query and context, in up to MAX_RUNS runs of theirs.

    A run stands for neighbours with the mean of their contexts; a query keeps its length, unless there are too many.
    """
    shape = sorted(shape)
    runs = [list(run) for _, run in itertools.groupby(shape, key=lambda pair: pair[0])]
    if len(runs) > MAX_RUNS:
        runs = _cut(shape, MAX_RUNS)
    each = MAX_RUNS // len(runs)
    pieces = [piece for run in runs for piece in _cut(run, min(each, len({context for _, context in run})))]
    means = [(len(piece), round(sum(q for q, _ in piece) / len(piece)), _mean_context(piece)) for piece in pieces]
    return "+".join(f"{seqs}x{query}@{max(query, context)}" for seqs, query, context in means)


def _cut(shape: Shape, pieces: int) -> list[Shape]:
    """Into `pieces` of nearly equal length."""
    bounds = [round(i * len(shape) / pieces) for i in range(pieces + 1)]
    return [shape[begin:end] for begin, end in itertools.pairwise(bounds) if end > begin]


def _mean_context(piece: Shape) -> int:
    return round(sum(context for _, context in piece) / len(piece))
