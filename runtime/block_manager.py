"""Who holds which KV block: ref-counted blocks, block tables, copy-on-write.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), sections 4.2 to 4.4. Knows sequences by their id and nothing else,
touches no tensor; allocation, release and the audit are O(blocks concerned).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from pagegen.errors import ConfigError
from pagegen.runtime.policies import Allocation, AuditError, Demand, MemorySplit


class BlockManager:
    """Owner of `num_blocks` blocks of `block_size` tokens each.

    A sequence's table lists the blocks of its tokens in order; every block but the last is full. A block that several
    tables list (after `fork`) is copied before one of them writes into it; the last holder writes in place.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))  # the longest free is taken first
        self._ref_counts = [0] * num_blocks
        self._tables: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        # Kept by different lines than the counts above, so that `audit` compares two independent books.
        self._num_references = 0
        self._num_table_entries = 0

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def num_tokens(self, seq_id: int) -> int:
        """Slots that the sequence holds, which is what its tokens fill; 0 for one that holds nothing."""
        return self._lengths.get(seq_id, 0)

    def block_table(self, seq_id: int) -> array[int]:
        """The sequence's physical blocks in order (int32): to read, not to change."""
        return self._tables[seq_id]

    def filled(self, seq_id: int) -> list[int]:
        """Tokens in each block of the sequence's table."""
        length = self._lengths[seq_id]
        return [min(length - start, self.block_size) for start in range(0, length, self.block_size)]

    def ref_count(self, block: int) -> int:
        """Tables that list the block."""
        return self._ref_counts[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, demand: Demand) -> int:
        """All sequences of the demand at their longest: they share what the prompt fills and nothing more."""
        shared = len(demand.token_ids) // self.block_size
        longest = self.blocks_for(max(demand.max_tokens, len(demand.token_ids)))
        return shared + demand.num_sequences * (longest - shared)

    def can_allocate(self, demand: Demand, *, headroom: int = 0) -> Allocation:
        """Whether the demand's tokens can have slots while `headroom` blocks stay free for others."""
        if self.blocks_needed(demand) > self.num_blocks:
            return Allocation.NEVER
        needed = self.blocks_for(len(demand.token_ids))
        return Allocation.OK if needed + headroom <= len(self._free) else Allocation.LATER

    def can_fork(self, parent: int, num_children: int = 1) -> bool:
        """Always: a fork takes no block."""
        return parent in self._tables

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether `append` would succeed."""
        return self._blocks_to_append(seq_id, num_tokens) <= len(self._free)

    # --- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, demand: Demand, num_tokens: int) -> int:
        """Gives a new sequence its first `num_tokens` slots; returns how many hold cached tokens."""
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} already holds blocks")
        self._tables[seq_id], self._lengths[seq_id] = array("i"), 0
        try:
            self.append(seq_id, num_tokens)
        except ValueError:
            del self._tables[seq_id], self._lengths[seq_id]
            raise
        return 0

    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Gives the sequence slots for its next `num_tokens` tokens; changes nothing if they cannot be had.

        Returns the (source, destination) block to copy before the write, at most one: the partial last block, if
        shared. Raises ValueError where `can_append` is False.
        """
        needed = self._blocks_to_append(seq_id, num_tokens)
        if needed > len(self._free):
            raise ValueError(
                f"sequence {seq_id} needs {needed} blocks for {num_tokens} tokens, {len(self._free)} are free"
            )
        table, copies = self._tables[seq_id], []
        if num_tokens and self._writes_shared_block(seq_id):
            source, table[-1] = table[-1], self._take()
            self._release(source)
            copies.append((source, table[-1]))
            needed -= 1
        table.extend(self._take() for _ in range(needed))
        self._num_table_entries += needed
        self._lengths[seq_id] += num_tokens
        return copies

    def fork(self, parent: int, child: int) -> list[tuple[int, int]]:
        """Makes `child` a new sequence with the parent's tokens, sharing every block; copies nothing."""
        if child in self._tables:
            raise ValueError(f"sequence {child} already holds blocks")
        table = self._tables[parent]
        self._tables[child], self._lengths[child] = table[:], self._lengths[parent]
        self._num_table_entries += len(table)
        for block in table:
            self._ref_counts[block] += 1
        self._num_references += len(table)
        return []

    def free(self, seq_id: int) -> int:
        """Gives the sequence's blocks back; returns how many became free. A sequence that holds none is no error."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return 0
        del self._lengths[seq_id]
        self._num_table_entries -= len(table)
        return sum(self._release(block) for block in reversed(table))  # a prefix outlives its tail on the free list

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Nothing: no block outlives its owner."""

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Never: there is no swap space."""
        return False

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        raise ValueError(f"sequences {list(seq_ids)} cannot be swapped out: there is no swap space")

    def can_swap_in(self, seq_ids: Sequence[int], *, headroom: int = 0) -> bool:
        return False

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        raise ValueError(f"sequences {list(seq_ids)} are not swapped out")

    # --- books -------------------------------------------------------------------------------------------------------

    def split(self, waiting: Demand | None = None) -> MemorySplit:
        """All that is given and empty is internal: at most one block less a slot for each table."""
        last = {table[-1]: self._lengths[seq_id] for seq_id, table in self._tables.items() if table}
        empty = sum(-length % self.block_size for length in last.values())
        used = self.num_used_blocks * self.block_size
        return MemorySplit(used - empty, 0, empty, 0, self.num_free_blocks * self.block_size)

    def blocks_saved(self) -> int:
        return self._num_table_entries - self.num_used_blocks

    def audit(self, *, full: bool = False) -> None:
        """Raises AuditError unless the books balance. O(1); `full` recounts everything."""
        if self._num_references != self._num_table_entries or self._num_references < self.num_used_blocks:
            raise AuditError(
                f"{self._num_references} references, {self._num_table_entries} table entries, "
                f"{self.num_used_blocks} used blocks"
            )
        if full:
            self._audit_full()

    def _audit_full(self) -> None:
        counts = [0] * self.num_blocks
        for seq_id, table in self._tables.items():
            if len(table) != self.blocks_for(self._lengths[seq_id]):
                raise AuditError(f"sequence {seq_id}: {len(table)} blocks for {self._lengths[seq_id]} tokens")
            if len(set(table)) != len(table):
                raise AuditError(f"sequence {seq_id} lists a block twice: {list(table)}")
            for block in table:
                counts[block] += 1
        if counts != self._ref_counts:
            raise AuditError(f"ref counts {self._ref_counts}, tables say {counts}")
        unreferenced = [block for block, count in enumerate(counts) if not count]
        if sorted(self._free) != unreferenced:
            raise AuditError(f"free list {sorted(self._free)}, unreferenced blocks {unreferenced}")
        if sum(counts) != self._num_references or self._tables.keys() != self._lengths.keys():
            raise AuditError(f"{self._num_references} references counted, {sum(counts)} found")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _blocks_to_append(self, seq_id: int, num_tokens: int) -> int:
        grown = self.blocks_for(self._lengths[seq_id] + num_tokens) - len(self._tables[seq_id])
        return grown + bool(num_tokens and self._writes_shared_block(seq_id))

    def _writes_shared_block(self, seq_id: int) -> bool:
        partial = self._lengths[seq_id] % self.block_size
        return partial > 0 and self._ref_counts[self._tables[seq_id][-1]] > 1

    def _take(self) -> int:
        block = self._free.popleft()
        self._ref_counts[block] = 1
        self._num_references += 1
        return block

    def _release(self, block: int) -> bool:
        if self._ref_counts[block] < 1:
            raise AuditError(f"block {block} is released but nobody holds it")
        self._ref_counts[block] -= 1
        self._num_references -= 1
        if self._ref_counts[block]:
            return False
        self._free.append(block)
        return True
