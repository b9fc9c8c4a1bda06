"""Runs of consecutive blocks, for policies that reserve: a buddy allocator, first fit, and any blocks at all."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from pagegen.runtime.policies import AuditError


class Allocator(Protocol):
    """Hands out `num_blocks` blocks in tables of a wanted length."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_lost(self) -> int:
        """Blocks given with a table but not listed in it, because the allocator rounds."""

    def fits(self, num_blocks: int, count: int = 1, *, empty: bool = False) -> bool:
        """Whether `count` tables of `num_blocks` blocks can be had, now or (`empty`) from the whole pool."""

    def take(self, num_blocks: int) -> array[int]:
        """A table of `num_blocks` blocks. Needs `fits`."""

    def release(self, table: array[int]) -> None: ...

    def usable(self, num_blocks: int) -> int:
        """Free blocks that can be handed out in tables of `num_blocks`."""

    def free_blocks(self) -> list[int]: ...


class BuddyAllocator:
    """Runs of 2^k blocks, aligned to their length; a freed run merges with its buddy (Knowlton 1965).

    A pool of any size starts as one run for each bit of it, the largest first. `take` and `release` are O(log blocks),
    the table apart.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.num_lost = 0
        self._runs: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]  # starts, by order
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._runs[order][start] = None
                start += 1 << order
        self._empty_pool = [len(runs) for runs in self._runs]

    def fits(self, num_blocks: int, count: int = 1, *, empty: bool = False) -> bool:
        order = _order(num_blocks)
        runs = self._empty_pool if empty else map(len, self._runs)
        return count <= sum(number << larger - order for larger, number in enumerate(runs) if larger >= order)

    def take(self, num_blocks: int) -> array[int]:
        order = _order(num_blocks)
        found = next(larger for larger in range(order, len(self._runs)) if self._runs[larger])
        start, _ = self._runs[found].popitem()
        for smaller in reversed(range(order, found)):  # keep the lower half, free the upper
            self._runs[smaller][start + (1 << smaller)] = None
        self.num_free -= 1 << order
        self.num_lost += (1 << order) - num_blocks
        return array("i", range(start, start + num_blocks))

    def release(self, table: array[int]) -> None:
        order, start = _order(len(table)), table[0]
        self.num_free += 1 << order
        self.num_lost -= (1 << order) - len(table)
        while order + 1 < len(self._runs) and (buddy := start ^ (1 << order)) in self._runs[order]:
            del self._runs[order][buddy]
            start, order = min(start, buddy), order + 1
        if start in self._runs[order]:
            raise AuditError(f"the run of {1 << order} blocks at {start} is released twice")
        self._runs[order][start] = None

    def usable(self, num_blocks: int) -> int:
        order = _order(num_blocks)
        return sum(len(runs) << larger for larger, runs in enumerate(self._runs) if larger >= order)

    def free_blocks(self) -> list[int]:
        return [block for order, runs in enumerate(self._runs) for start in runs for block in _run(start, 1 << order)]


class FirstFitAllocator:
    """Runs of any length, each from the lowest hole that has room. O(holes)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = self._num_blocks = num_blocks
        self.num_lost = 0
        self._holes = [(0, num_blocks)]  # (start, length), by start; no two touch

    def fits(self, num_blocks: int, count: int = 1, *, empty: bool = False) -> bool:
        lengths = [self._num_blocks] if empty else [length for _, length in self._holes]
        return count <= sum(length // num_blocks for length in lengths)

    def take(self, num_blocks: int) -> array[int]:
        index = next(i for i, (_, length) in enumerate(self._holes) if length >= num_blocks)
        start, length = self._holes[index]
        self._holes[index : index + 1] = [(start + num_blocks, length - num_blocks)] if length > num_blocks else []
        self.num_free -= num_blocks
        return array("i", range(start, start + num_blocks))

    def release(self, table: array[int]) -> None:
        start, length = table[0], len(table)
        index = bisect_left(self._holes, (start, 0))
        self.num_free += length
        before = self._holes[index - 1] if index else (-1, 0)
        after = self._holes[index] if index < len(self._holes) else (self._num_blocks + 1, 0)
        if sum(before) > start or start + length > after[0]:
            raise AuditError(f"the run of {length} blocks at {start} is released twice")
        first, last = index, index
        if sum(before) == start:
            first, start, length = index - 1, before[0], before[1] + length
        if start + length == after[0]:
            last, length = index + 1, length + after[1]
        self._holes[first:last] = [(start, length)]

    def usable(self, num_blocks: int) -> int:
        return sum(length // num_blocks * num_blocks for _, length in self._holes)

    def free_blocks(self) -> list[int]:
        return [block for start, length in self._holes for block in _run(start, length)]


class ScatterAllocator:
    """Any blocks, in any order: nothing is ever cut off."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.num_lost = 0
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def fits(self, num_blocks: int, count: int = 1, *, empty: bool = False) -> bool:
        return num_blocks * count <= (self._num_blocks if empty else len(self._free))

    def take(self, num_blocks: int) -> array[int]:
        return array("i", (self._free.popleft() for _ in range(num_blocks)))

    def release(self, table: array[int]) -> None:
        self._free.extend(table)

    def usable(self, num_blocks: int) -> int:
        return len(self._free)

    def free_blocks(self) -> list[int]:
        return list(self._free)


def _order(num_blocks: int) -> int:
    """The smallest k with 2^k >= num_blocks."""
    return max(num_blocks - 1, 0).bit_length()


def _run(start: int, length: int) -> Iterable[int]:
    return range(start, start + length)
