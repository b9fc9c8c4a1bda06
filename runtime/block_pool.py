"""One memory's blocks, on the device or on the host: how often each is referred to, and by whose tables."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from pagegen.runtime.policies import AuditError
from pagegen.runtime.prefix_cache import Prefix, PrefixCache


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, each with as many references as tables list it. Every change is O(1).

    An empty block is handed out before one that still keeps a prefix, the longest free first.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_held = 0  # blocks with a reference
        self.num_references = 0
        self._cache = cache
        self._free = deque(range(num_blocks))  # neither held nor keeping a prefix

    @property
    def num_free(self) -> int:
        return len(self._free) + (self._cache.num_idle if self._cache else 0)

    def take(self) -> int:
        """A block with its first reference. Needs `num_free`."""
        block = self._cache.evict() if self._cache and not self._free else self._free.popleft()
        self.ref_counts[block] = 1
        self.num_held += 1
        self.num_references += 1
        return block

    def share(self, block: int) -> bool:
        """One more reference; whether it is the first, to a block that only kept a prefix."""
        first = not self.ref_counts[block]
        if first:
            if self._cache is None:
                raise AuditError(f"block {block} is shared but nobody holds it")
            self._cache.revive(block)
            self.num_held += 1
        self.ref_counts[block] += 1
        self.num_references += 1
        return first

    def release(self, block: int) -> bool:
        """One reference less; whether it was the last."""
        if self.ref_counts[block] < 1:
            raise AuditError(f"block {block} is released but nobody holds it")
        self.ref_counts[block] -= 1
        self.num_references -= 1
        if self.ref_counts[block]:
            return False
        self.num_held -= 1
        if not (self._cache and self._cache.retire(block)):
            self._free.append(block)
        return True

    def put_back(self, blocks: Iterable[int]) -> None:
        """Takes blocks whose prefix the cache has forgotten."""
        self._free.extend(blocks)

    def audit(self) -> None:
        """Raises AuditError unless every block is held, free, or kept for its prefix. O(1)."""
        kept = self._cache.num_parked if self._cache else 0
        if self.num_held + self.num_free + kept != self.num_blocks or self.num_references < self.num_held:
            raise AuditError(
                f"{self.num_held} blocks held by {self.num_references} references, {self.num_free} free, {kept} kept "
                f"of {self.num_blocks}"
            )

    def audit_full(self, tables: Iterable[array[int]]) -> None:
        """Recounts the references from the tables, and the free blocks from the references. O(blocks)."""
        counted = Counter(block for table in tables for block in table)
        counts = [counted[block] for block in range(self.num_blocks)]
        if counts != self.ref_counts or len(counted) != self.num_held or sum(counts) != self.num_references:
            raise AuditError(f"ref counts {self.ref_counts} of {self.num_held} held blocks, tables say {counts}")
        if self._cache:
            self._cache.audit(counts)
        published = self._cache.published if self._cache else ()
        empty = [block for block, count in enumerate(counts) if not count and block not in published]
        if sorted(self._free) != empty:
            raise AuditError(f"free list {sorted(self._free)}, empty blocks {empty}")


class Holding:
    """One sequence's blocks, in order: all but the last are full.

    `prefix` is what its first `num_published` blocks hold; None for a sequence that shares nothing with strangers.
    `needed` is what its demand may take at its largest.
    """

    __slots__ = ("length", "needed", "num_published", "prefix", "root", "table")

    def __init__(self, needed: int, root: Prefix | None) -> None:
        self.table: array[int] = array("i")
        self.length = 0
        self.needed = needed
        self.root = self.prefix = root
        self.num_published = 0

    def fork(self) -> Holding:
        child = Holding(self.needed, self.root)
        child.table, child.length = self.table[:], self.length
        child.prefix, child.num_published = self.prefix, self.num_published
        return child

    def filled(self, block_size: int) -> list[int]:
        """Tokens in each block."""
        return [min(self.length - start, block_size) for start in range(0, self.length, block_size)]


class BlockTables:
    """The tables over one pool.

    `num_entries` and `num_filled` (slots that hold a token, shared ones once) are kept by other lines than the pool's
    counts, so that `audit` compares independent books.
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None = None) -> None:
        self.pool = BlockPool(num_blocks, cache)
        self.block_size = block_size
        self.holdings: dict[int, Holding] = {}
        self.num_entries = self.num_filled = 0

    @property
    def num_empty(self) -> int:
        """Slots of held blocks that hold no token."""
        return self.pool.num_held * self.block_size - self.num_filled

    def insert(self, seq_id: int, holding: Holding) -> None:
        """Takes a table whose blocks are already referred to."""
        self.holdings[seq_id] = holding
        self.num_entries += len(holding.table)

    def remove(self, seq_id: int) -> Holding:
        """Releases a table's blocks; from the tail, so that a prefix is evicted later than what hangs on it."""
        holding = self.holdings.pop(seq_id)
        self.num_entries -= len(holding.table)
        filled = (holding.length - 1) % self.block_size + 1
        for block in reversed(holding.table):
            if self.pool.release(block):
                self.num_filled -= filled
            filled = self.block_size
        return holding

    def distinct_blocks(self, seq_ids: Sequence[int]) -> int:
        """Blocks of these sequences, shared ones once. Raises ValueError for one that is not here, or given twice."""
        if len(set(seq_ids)) != len(seq_ids) or not self.holdings.keys() >= set(seq_ids):
            raise ValueError(f"sequences {list(seq_ids)} cannot be moved: not all here, or one named twice")
        return len({block for seq_id in seq_ids for block in self.holdings[seq_id].table})

    def move_to(self, other: BlockTables, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Moves sequences to another memory, which has room; returns (block here, block there), shared ones once."""
        moved = dict[int, int]()
        for seq_id in seq_ids:
            holding, table = self.remove(seq_id), array("i")
            for block, filled in zip(holding.table, holding.filled(self.block_size), strict=True):
                if block in moved:
                    other.pool.share(moved[block])
                else:
                    moved[block] = other.pool.take()
                    other.num_filled += filled
                table.append(moved[block])
            holding.table = table
            other.insert(seq_id, holding)
        return list(moved.items())

    def audit(self) -> None:
        """O(1)."""
        self.pool.audit()
        if self.num_entries != self.pool.num_references:
            raise AuditError(f"{self.num_entries} table entries, {self.pool.num_references} references")
        if not 0 <= self.num_empty <= len(self.holdings) * (self.block_size - 1):
            raise AuditError(f"{len(self.holdings)} sequences leave {self.num_empty} slots of their blocks empty")

    def audit_full(self) -> None:
        """O(blocks)."""
        filled = dict[int, int]()
        for seq_id, holding in self.holdings.items():
            tokens = holding.filled(self.block_size)
            if len(holding.table) != len(tokens) or len(set(holding.table)) != len(tokens):
                raise AuditError(f"sequence {seq_id}: blocks {list(holding.table)} for {holding.length} tokens")
            filled.update(zip(holding.table, tokens, strict=True))
        if sum(filled.values()) != self.num_filled:
            raise AuditError(f"{self.num_filled} slots counted as filled, tables fill {sum(filled.values())}")
        self.pool.audit_full(holding.table for holding in self.holdings.values())
