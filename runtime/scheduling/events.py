"""What a scheduler is told, as values: applied in order to a fresh one, they repeat a run without a model."""

from __future__ import annotations

import dataclasses

from pagegen.runtime.scheduling.preemption import PreemptionCosts
from pagegen.runtime.sequence import FinishReason, Request


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A beam has no child of its own: from now on it is sequence `parent` of its group with this token after it."""

    parent: int
    token_id: int


# What a row sampled: nothing, a token, one token for each sequence that is forked there, or another beam's.
Sampled = int | tuple[int, ...] | Branch | None


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """A request arrived, and was accepted."""

    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """An iteration was planned; `digest` tells whether a repeated run plans the same."""

    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Updated:
    """The iteration planned last was computed; what each of its rows sampled."""

    sampled: tuple[Sampled, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """One sequence was ended from outside: a stop string."""

    request_id: str
    index: int
    reason: FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A whole request was ended from outside: aborted, or failed."""

    request_id: str
    reason: FinishReason
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix is kept from now on, or if not `keep`, one pin of it was taken back."""

    token_ids: tuple[int, ...]
    salt: str
    keep: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The costs of preemption were asked for, and this was the answer."""

    costs: PreemptionCosts


SchedulerEvent = Added | Planned | Updated | Finished | Ended | Pinned | Measured
