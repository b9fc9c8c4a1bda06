"""A memory policy beside a model of what a kernel would find in its blocks.

The model knows each sequence's tokens and nothing of how blocks are managed. A slot holds what K and V depend on: the
key space and every token up to its own. So a lost, stale, foreign or uncopied slot shows as soon as it is read.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence

import pytest

from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import Allocation, Demand, MemoryPolicy

Cell = tuple[str, tuple[int, ...]]


class ModelledMemory:
    """Every change is tried where the policy says that it can be made, and must fail without a trace where not."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.num_computed: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.cells: dict[tuple[int, int], Cell] = {}
        self.host_cells: dict[tuple[int, int], Cell] = {}
        self.num_copies = 0

    @property
    def resident(self) -> list[int]:
        return [seq_id for seq_id in self.tokens if seq_id not in self.swapped]

    # --- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, demand: Demand) -> int | None:
        """Tokens found in the cache; None if there was no room."""
        policy, num_tokens = self.policy, len(demand.token_ids)
        answer = policy.can_allocate(demand)
        if answer is Allocation.LATER:
            self._must_fail(lambda: policy.allocate(seq_id, demand, num_tokens))
        if answer is not Allocation.OK:
            return None
        cached = policy.allocate(seq_id, demand, num_tokens)
        assert cached % policy.block_size == 0 and cached <= max(num_tokens - 1, 0)
        self.tokens[seq_id], self.salts[seq_id] = list(demand.token_ids), demand.salt
        self.num_computed[seq_id] = cached
        self._check_contents(seq_id)  # what the cache found is there and is ours
        return cached

    def append(self, seq_id: int, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        policy = self.policy
        if not policy.can_append(seq_id, len(token_ids)):
            self._must_fail(lambda: policy.append(seq_id, len(token_ids)))
            return None
        copies = policy.append(seq_id, len(token_ids))
        assert len(copies) <= 1
        self._move(copies, self.cells, self.cells)
        self.num_copies += len(copies)
        self.tokens[seq_id] += token_ids
        return copies

    def compute(self, seq_id: int, num_tokens: int | None = None) -> None:
        """Writes the next tokens' slots (None: all), as a kernel would, and tells the policy."""
        end = len(self.tokens[seq_id])
        end = end if num_tokens is None else min(end, self.num_computed[seq_id] + num_tokens)
        table = self.policy.block_table(seq_id)
        for position in range(self.num_computed[seq_id], end):
            block, offset = divmod(position, self.policy.block_size)
            self.cells[table[block], offset] = self._cell(seq_id, position)
        self.num_computed[seq_id] = end
        self.policy.commit(seq_id, self.tokens[seq_id], end)

    def fork(self, parent: int, child: int) -> bool:
        if not self.policy.can_fork(parent):
            self._must_fail(lambda: self.policy.fork(parent, child))
            return False
        self._move(self.policy.fork(parent, child), self.cells, self.cells)
        self.tokens[child], self.salts[child] = list(self.tokens[parent]), self.salts[parent]
        self.num_computed[child] = self.num_computed[parent]
        return True

    def free(self, seq_id: int) -> None:
        before = self.policy.num_free_blocks
        assert self.policy.free(seq_id) == self.policy.num_free_blocks - before
        assert self.policy.free(seq_id) == 0, "once is enough"
        del self.tokens[seq_id], self.salts[seq_id], self.num_computed[seq_id]
        self.swapped.discard(seq_id)

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        if not self.policy.can_swap_out(seq_ids):
            self._must_fail(lambda: self.policy.swap_out(seq_ids))
            return False
        self._move(self.policy.swap_out(seq_ids), self.cells, self.host_cells)
        self.swapped |= set(seq_ids)
        return True

    def swap_in(self, seq_ids: Sequence[int]) -> bool:
        if not self.policy.can_swap_in(seq_ids):
            self._must_fail(lambda: self.policy.swap_in(seq_ids))
            return False
        self._move(self.policy.swap_in(seq_ids), self.host_cells, self.cells)
        self.swapped -= set(seq_ids)
        return True

    # --- claims ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds after every change."""
        policy, size = self.policy, self.policy.block_size
        policy.audit(full=True)
        assert policy.num_free_blocks + policy.num_used_blocks == policy.num_blocks
        tables = {seq_id: list(policy.block_table(seq_id)) for seq_id in self.resident}
        for seq_id, table in tables.items():
            filled = policy.filled(seq_id)
            assert policy.num_tokens(seq_id) == len(self.tokens[seq_id]) == sum(filled)
            assert len(filled) == len(table)
            self._check_contents(seq_id)
        listed = [block for table in tables.values() for block in table]
        assert all(policy.ref_count(block) == listed.count(block) for block in set(listed))
        assert policy.blocks_saved() == len(listed) - len(set(listed))
        if not isinstance(policy, BlockManager):
            assert len(set(listed)) == len(listed), "only pages are shared"
        self._check_split(tables, size)

    def _check_split(self, tables: dict[int, list[int]], size: int) -> None:
        split = self.policy.split()
        parts = (split.token, split.reserved, split.internal, split.external, split.free)
        assert min(parts) >= 0 and sum(parts) == self.policy.num_blocks * size
        assert sum(split.fractions()) == pytest.approx(1 if sum(parts[:4]) else 0)
        written = {(t[i // size], i % size) for s, t in tables.items() for i in range(len(self.tokens[s]))}
        kept = 0
        if isinstance(self.policy, BlockManager):
            kept = self.policy.prefix_cache.num_parked if self.policy.prefix_cache else 0
            assert split.external == split.reserved == 0 and split.internal <= len(tables) * (size - 1)
        assert split.token == len(written) + kept * size

    def _check_contents(self, seq_id: int) -> None:
        table, size = self.policy.block_table(seq_id), self.policy.block_size
        for position in range(self.num_computed[seq_id]):
            found = self.cells.get((table[position // size], position % size))
            assert found == self._cell(seq_id, position), f"sequence {seq_id}, token {position}"

    # --- inside ------------------------------------------------------------------------------------------------------

    def _cell(self, seq_id: int, position: int) -> Cell:
        return self.salts[seq_id], tuple(self.tokens[seq_id][: position + 1])

    def _move(
        self, pairs: Iterable[tuple[int, int]], source: dict[tuple[int, int], Cell], to: dict[tuple[int, int], Cell]
    ) -> None:
        for old, new in pairs:
            for offset in range(self.policy.block_size):
                to.pop((new, offset), None)
                if (old, offset) in source:
                    to[new, offset] = source[old, offset]

    def _must_fail(self, change: Callable[[], object]) -> None:
        before = pickle.dumps(self.policy)
        with pytest.raises(ValueError):
            change()
        assert pickle.dumps(self.policy) == before, "a refused change left a trace"
