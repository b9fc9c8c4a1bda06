"""Which beams go on where there is no model to ask: drawn as real searches went.

A child's rank says much of its parent's: the best beam's best token makes the best child. So parents are drawn child by
child from shares that were counted, PARENTS[width][rank of the child][rank of the parent]: SmolLM2-135M-Instruct in fp32
on eight instructions of Alpaca's kind, 57 steps of each search (scripts/beam_parents.py). Two simplifications: a child's parent does not depend on
the other children's, and another model or text has other shares.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

from pagegen.errors import ConfigError

PARENTS: Mapping[int, tuple[tuple[float, ...], ...]] = MappingProxyType(
    {
        2: (
            (0.868, 0.132),
            (0.362, 0.638),
        ),
        4: (
            (0.795, 0.138, 0.042, 0.025),
            (0.263, 0.489, 0.194, 0.054),
            (0.219, 0.248, 0.355, 0.179),
            (0.194, 0.237, 0.219, 0.350),
        ),
        6: (
            (0.779, 0.141, 0.051, 0.022, 0.004, 0.002),
            (0.219, 0.455, 0.199, 0.078, 0.033, 0.016),
            (0.165, 0.203, 0.339, 0.147, 0.107, 0.038),
            (0.158, 0.163, 0.156, 0.292, 0.154, 0.076),
            (0.152, 0.167, 0.118, 0.167, 0.223, 0.172),
            (0.132, 0.154, 0.154, 0.163, 0.174, 0.223),
        ),
    }
)


class SimulatedBeams:
    """The search of one request: a beam's place is its sequence's index, and ranks are kept here."""

    def __init__(self, request_id: str, width: int) -> None:
        self._rng = random.Random(f"beams of {request_id}")
        self._shares = PARENTS[check_width(width)]
        self._places = list(range(width))  # by rank
        self.parents = list(range(width))  # by place, in the step taken last

    def step(self) -> None:
        """The best child of a beam takes its place, the others those of beams without any."""
        ranks = range(len(self._places))
        parents = [self._places[self._rng.choices(ranks, self._shares[rank])[0]] for rank in ranks]
        spare = [place for place in ranks if place not in parents]
        self._places = [spare.pop() if parent in parents[:rank] else parent for rank, parent in enumerate(parents)]
        for place, parent in zip(self._places, parents, strict=True):
            self.parents[place] = parent


def check_width(width: int) -> int:
    """Raises ConfigError for a number of beams of which nothing was counted."""
    if width not in PARENTS:
        raise ConfigError(f"trace: {width} beams cannot be simulated; allowed: {', '.join(map(str, PARENTS))}")
    return width
