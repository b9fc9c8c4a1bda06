"""Requests that wait, the lowest rank first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pagegen.runtime.sequence import SequenceGroup


class WaitingQueue:
    """A heap by rank. Taking one out of the middle marks its place, which is cleared when it comes to the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SequenceGroup]] = []  # ranks are unique: groups are never compared
        self._members: set[SequenceGroup] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """By rank."""
        return iter(sorted(self._members, key=lambda group: group.rank))

    @property
    def head(self) -> SequenceGroup | None:
        """The next in line."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def push(self, group: SequenceGroup) -> None:
        self._members.add(group)
        heapq.heappush(self._heap, (group.rank, group))

    def remove(self, group: SequenceGroup) -> None:
        """Takes a member out, wherever it stands."""
        self._members.remove(group)
        if self._heap[0][1] is group:
            heapq.heappop(self._heap)
