"""Who holds which KV block: ref-counted blocks, block tables, copy-on-write.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), sections 4.2 to 4.4. Knows sequences by their id and nothing else,
touches no tensor; allocation, release and the audit are O(blocks concerned).
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import StrEnum

from pagegen.errors import ConfigError


class Allocation(StrEnum):
    """Whether blocks can be had: now, once others give theirs back, or never in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AuditError(RuntimeError):
    """The books do not balance: a defect of the block manager, not of its user."""


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

    def ref_count(self, block: int) -> int:
        """Tables that list the block."""
        return self._ref_counts[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int, headroom: int = 0) -> Allocation:
        """Whether a new sequence can have `num_tokens` slots while `headroom` blocks stay free for others."""
        needed = self.blocks_for(num_tokens)
        if needed > self.num_blocks:
            return Allocation.NEVER
        return Allocation.OK if needed + headroom <= len(self._free) else Allocation.LATER

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether `append` would succeed."""
        return self._blocks_to_append(seq_id, num_tokens) <= len(self._free)

    # --- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Gives a new sequence its first `num_tokens` slots. Needs `can_allocate`."""
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} already holds blocks")
        self._tables[seq_id], self._lengths[seq_id] = array("i"), 0
        try:
            self.append(seq_id, num_tokens)
        except ValueError:
            del self._tables[seq_id], self._lengths[seq_id]
            raise

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

    def fork(self, parent: int, child: int) -> None:
        """Makes `child` a new sequence with the parent's tokens, sharing every block."""
        if child in self._tables:
            raise ValueError(f"sequence {child} already holds blocks")
        table = self._tables[parent]
        self._tables[child], self._lengths[child] = table[:], self._lengths[parent]
        self._num_table_entries += len(table)
        for block in table:
            self._ref_counts[block] += 1
        self._num_references += len(table)

    def free(self, seq_id: int) -> int:
        """Gives the sequence's blocks back; returns how many became free. A sequence that holds none is no error."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return 0
        del self._lengths[seq_id]
        self._num_table_entries -= len(table)
        return sum(self._release(block) for block in reversed(table))  # a prefix outlives its tail on the free list

    # --- books -------------------------------------------------------------------------------------------------------

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
