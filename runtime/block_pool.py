"""One memory's blocks, on the device or on the host: how often each is referred to, and by whose tables."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from pagegen.runtime.policies import AuditError
from pagegen.runtime.prefix_cache import Prefix, PrefixCache

LONGEST_RUN = 8  # blocks: longer ones are read little faster and leave others less room (benchmarks/block_runs.py)
CLAIMS = 64  # that the pool has room for at least, so that a small one is not taken up by a few

Key = TypeVar("Key")
_NOTHING = range(0)


class BySize(Generic[Key]):
    """Things of sizes 1 to `most`. Every operation is O(1)."""

    def __init__(self, most: int) -> None:
        self._keys: list[OrderedDict[Key, None]] = [OrderedDict() for _ in range(most + 1)]
        self._sizes = 0  # a bit for each size that something has

    def move(self, key: Key, size: int, to: int) -> None:
        """0 is not to be listed."""
        if size:
            del self._keys[size][key]
            if not self._keys[size]:
                self._sizes ^= 1 << size
        if to:
            self._keys[to][key] = None
            self._sizes |= 1 << to

    def largest(self) -> Key | None:
        """Among equals the one that has had its size for longest."""
        return next(iter(self._keys[self._sizes.bit_length() - 1])) if self._sizes else None

    def sizes(self) -> dict[Key, int]:
        return {key: size for size, keys in enumerate(self._keys) for key in keys}


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, each with as many references as tables list it. Every change is O(1).

    Memory is read faster in its order, so a table grows in runs: its next block comes from a claim of up to `run`
    consecutive blocks that others leave alone while they find some elsewhere. Claimed blocks are free all the same:
    who finds no other takes the upper half of the longest claim. An empty block that nobody claims is handed out
    before one that still keeps a prefix, and no more of those are evicted than are wanted.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None, run: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.run = run or max(1, min(LONGEST_RUN, num_blocks // CLAIMS))
        self.ref_counts = [0] * num_blocks
        self.num_held = 0  # blocks with a reference
        self.num_references = 0
        self._cache = cache
        self._claims: dict[Holding, range] = {}  # none is empty
        self._owners: BySize[Holding] = BySize(self.run)  # by the length of their claims
        self._num_claimed, self._num_empty = 0, num_blocks
        self._empty = bytearray(b"\1") * num_blocks  # 1: neither held nor claimed nor keeping a prefix
        self._empty_in = [min(self.run, num_blocks - start) for start in range(0, num_blocks, self.run)]  # number, by run
        self._runs: BySize[int] = BySize(self.run)  # by that number
        for index, count in enumerate(self._empty_in):
            self._runs.move(index, 0, count)

    @property
    def num_free(self) -> int:
        return self._num_empty + self._num_claimed + (self._cache.num_idle if self._cache else 0)

    def take(self, holding: Holding, num_blocks: int = 1) -> int:
        """A block with its first reference, to follow `holding`'s last, the first of `num_blocks`. Needs `num_free`."""
        claim = self._claims.get(holding, _NOTHING) or self._claim(holding, num_blocks)
        self._set_claim(holding, claim[1:])
        block = claim[0]
        self.ref_counts[block] = 1
        self.num_held += 1
        self.num_references += 1
        return block

    def unclaim(self, holding: Holding) -> None:
        """What the table would have grown into is for everybody."""
        claim = self._claims.get(holding, _NOTHING)
        self._set_claim(holding, _NOTHING)
        self.put_back(claim)

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
            self.put_back((block,))
        return True

    def put_back(self, blocks: Iterable[int]) -> None:
        """Takes blocks that are empty from now on."""
        for block in blocks:
            run = block // self.run
            self._empty[block] = 1
            self._count_empty(run, self._empty_in[run] + 1)

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
        counts = Counter(block for table in tables for block in table)
        for block, ref_count in enumerate(self.ref_counts):
            if ref_count != counts[block]:
                raise AuditError(f"block {block} has ref count {ref_count} and is in {counts[block]} tables")
        if (len(counts), counts.total()) != (self.num_held, self.num_references):
            raise AuditError(f"{self.num_references} references to {self.num_held} blocks counted, tables differ")
        if self._cache:
            self._cache.audit(self.ref_counts)
        published = self._cache.published if self._cache else ()
        empty = [block for block, is_empty in enumerate(self._empty) if is_empty]
        claimed = [block for claim in self._claims.values() for block in claim]
        free = {*empty, *claimed}
        if len(free) != len(empty) + len(claimed) or any(self.ref_counts[block] or block in published for block in free):
            raise AuditError("a block is free twice, or free and in use")
        in_runs = Counter(block // self.run for block in empty)
        if in_runs != +Counter(dict(enumerate(self._empty_in))) or in_runs != self._runs.sizes():
            raise AuditError("the runs have other empty blocks than is written down")
        lengths = {holding: len(claim) for holding, claim in self._claims.items()}
        if (len(empty), len(claimed)) != (self._num_empty, self._num_claimed) or lengths != self._owners.sizes():
            raise AuditError(f"{self._num_empty} empty and {self._num_claimed} claimed blocks counted, lists differ")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _claim(self, holding: Holding, num_blocks: int) -> range:
        """Up to a run of consecutive blocks, of which `num_blocks` are wanted at once; they are nobody's as yet."""
        after = holding.table[-1] + 1 if holding.table else self.num_blocks
        if self.run > 1 and after < self.num_blocks and self._empty[after]:
            return self._take_empty(after)
        run = self._runs.largest()
        if run is not None:
            return self._take_empty(self._longest_gap(run))
        if self._cache and self._cache.num_idle:
            return self._evict(num_blocks)
        owner = self._owners.largest()
        assert owner, "a block is free"
        claim = self._claims[owner]
        half = len(claim) // 2
        self._set_claim(owner, claim[:half])
        return claim[half:]

    def _take_empty(self, start: int) -> range:
        """The empty blocks from `start` to the end of its run or to one that is not empty."""
        run = start // self.run
        end = min((run + 1) * self.run, self.num_blocks)
        found = self._empty.find(0, start, end)
        claim = range(start, end if found < 0 else found)
        self._empty[start : claim.stop] = bytes(len(claim))
        self._count_empty(run, self._empty_in[run] - len(claim))
        return claim

    def _longest_gap(self, run: int) -> int:
        """Where most consecutive blocks are empty, of a run in which some are."""
        flags = bytes(self._empty[run * self.run : (run + 1) * self.run])
        return run * self.run + flags.index(max(flags.split(b"\0")))

    def _evict(self, num_blocks: int) -> range:
        """The least recently used block, and of the `num_blocks` that are wanted those whose turn is next while each lies before the
        last: so a sequence leaves a run that it had for itself.
        """
        assert self._cache
        first = last = self._cache.evict()
        while last - first + 1 < min(num_blocks, self.run) and first % self.run and self._cache.next_evicted == first - 1:
            first = self._cache.evict()
        return range(first, last + 1)

    def _set_claim(self, holding: Holding, claim: range) -> None:
        before = self._claims.pop(holding, _NOTHING)
        self._owners.move(holding, len(before), len(claim))
        self._num_claimed += len(claim) - len(before)
        if claim:
            self._claims[holding] = claim

    def _count_empty(self, run: int, count: int) -> None:
        self._runs.move(run, self._empty_in[run], count)
        self._num_empty += count - self._empty_in[run]
        self._empty_in[run] = count


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

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None = None, run: int | None = None) -> None:
        self.pool = BlockPool(num_blocks, cache, run)
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
        self.pool.unclaim(holding)
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
            holding = self.remove(seq_id)
            blocks, holding.table = holding.table, array("i")
            for i, (block, filled) in enumerate(zip(blocks, holding.filled(self.block_size), strict=True)):
                if block in moved:
                    other.pool.share(moved[block])
                else:
                    moved[block] = other.pool.take(holding, len(blocks) - i)
                    other.num_filled += filled
                holding.table.append(moved[block])
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
            for block, number in zip(holding.table, tokens, strict=True):
                if filled.setdefault(block, number) != number:
                    raise AuditError(
                        f"block {block} holds {filled[block]} tokens for one sequence, {number} for another"
                    )
        if sum(filled.values()) != self.num_filled:
            raise AuditError(f"{self.num_filled} slots counted as filled, tables fill {sum(filled.values())}")
        self.pool.audit_full(holding.table for holding in self.holdings.values())
