"""One iteration: the rows that the model computes, and what must be moved in the cache before it does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from pagegen.runtime.sequence import Sequence, SequenceGroup

Pairs = tuple[tuple[int, int], ...]


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of one sequence, from position `start`. A tuple: a thousand of them are made a step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether all of the sequence's tokens are computed after this iteration, so that its next one is sampled."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_samples(self) -> int:
        """Tokens to sample from the last row's logits: one for each sequence that the group will have."""
        if not self.completes:
            return 0
        group = self.sequence.group
        return 1 if group.forked else group.request.num_sequences


_new_row = functools.partial(tuple.__new__, ScheduledSequence)  # what `_make` does, without a frame for each


class TransferKind(StrEnum):
    """Between which pools a block's content moves: device to host, device to device, host to device."""

    SWAP_OUT = "swap-out"
    COPY = "copy"
    SWAP_IN = "swap-in"


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks (source, destination) whose contents move together."""

    kind: TransferKind
    pairs: Pairs


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One iteration. `transfers` run one after the other, in the order the books were written, before the model.

    So a block is read before it is given to another, whoever that is: a victim's blocks are on their way to the host
    before an elder's copy lands in them, and what is swapped in lands before it is copied from. `preempted` lost their
    blocks or had them swapped out.
    """

    rows: tuple[ScheduledSequence, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    preempted: tuple[SequenceGroup, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])


class Iteration:
    """A ScheduledBatch in the making. `budget` is what is left of its tokens, `seats` of the sequences that may run."""

    def __init__(self, budget: int, seats: int, transfers: Iterable[Transfer] = ()) -> None:
        self.budget = budget
        self.seats = seats
        self.rows: list[ScheduledSequence] = []
        self.transfers = list(transfers)
        self.preempted: list[SequenceGroup] = []

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedules the sequence's next `num_tokens` tokens."""
        self.rows.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens))
        self.budget -= num_tokens

    def take_newest(self, sequences: list[Sequence]) -> None:
        """Schedules the next token of each; `take` for a thousand at a time."""
        starts = [sequence.num_computed_tokens for sequence in sequences]
        self.rows += map(_new_row, zip(sequences, starts, itertools.repeat(1)))
        self.budget -= len(sequences)

    def drop(self, group: SequenceGroup) -> None:
        """Takes back what was scheduled of a group."""
        kept = [row for row in self.rows if row.sequence.group is not group]
        if len(kept) < len(self.rows):
            self.budget += sum([row.num_tokens for row in self.rows]) - sum([row.num_tokens for row in kept])
            self.rows = kept

    def move(self, kind: TransferKind, pairs: Iterable[tuple[int, int]]) -> None:
        """Notes blocks to be moved after all that were noted before."""
        add_transfer(self.transfers, kind, pairs)

    def batch(self) -> ScheduledBatch:
        return ScheduledBatch(tuple(self.rows), tuple(self.transfers), tuple(self.preempted))


def add_transfer(transfers: list[Transfer], kind: TransferKind, pairs: Iterable[tuple[int, int]]) -> None:
    """Appends pairs, to the last transfer if that is of the same kind and fills none of the same blocks."""
    pairs = tuple(pairs)
    if not pairs:
        return
    if transfers and transfers[-1].kind is kind:
        before = transfers[-1].pairs
        if {filled for _, filled in before}.isdisjoint(filled for _, filled in pairs):
            pairs = transfers.pop().pairs + pairs
    transfers.append(Transfer(kind, pairs))
