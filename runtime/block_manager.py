"""Who holds which KV block: ref-counted blocks, block tables, copy-on-write, swapping, shared prefixes.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), sections 4.2 to 4.5. Knows sequences by their id and nothing else,
touches no tensor; allocation, release and the audit are O(blocks concerned).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagegen.errors import ConfigError
from pagegen.runtime.block_pool import BlockTables, Holding
from pagegen.runtime.policies import Allocation, Demand, MemorySplit
from pagegen.runtime.prefix_cache import Prefix, PrefixCache


class BlockManager:
    """The memory policy `paged`: `num_blocks` blocks of `block_size` tokens each, taken as tokens need them.

    A block that several tables list is copied before one of them writes into it; the last holder writes in place. With
    a `prefix_cache`, full blocks are found by later requests once `commit` has said that they are computed.
    `num_host_blocks` is the swap space, at most `num_blocks` as in the paper. Tables grow in runs of `run` consecutive
    blocks where such are free, by default as many as the pool's size allows; 1 takes each where it is. `debug` makes
    every audit a full one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: PrefixCache | None = None,
        num_host_blocks: int = 0,
        run: int | None = None,
        debug: bool = False,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing; both must be at least 1"
            )
        if not 0 <= num_host_blocks <= num_blocks:
            raise ConfigError(
                f"a swap space of {num_host_blocks} blocks does not serve a pool of {num_blocks}; "
                f"choose 0 to {num_blocks} blocks"
            )
        if run is not None and run < 1:
            raise ConfigError(f"runs of {run} blocks hold nothing; run must be at least 1, or None")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._debug = debug
        self._device = BlockTables(num_blocks, block_size, prefix_cache, run)
        self._host = BlockTables(num_host_blocks, block_size, run=run)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self._device.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._device.pool.num_free

    @property
    def num_pinned_blocks(self) -> int:
        return self.prefix_cache.num_pinned if self.prefix_cache else 0

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.pool.num_free

    def num_tokens(self, seq_id: int) -> int:
        """Slots that the sequence holds, here or on the host; 0 for one that holds nothing."""
        holding = self._device.holdings.get(seq_id) or self._host.holdings.get(seq_id)
        return holding.length if holding else 0

    def block_table(self, seq_id: int) -> array[int]:
        """The sequence's physical blocks in order (int32): to read, not to change."""
        return self._device.holdings[seq_id].table

    def filled(self, seq_id: int) -> list[int]:
        return self._device.holdings[seq_id].filled(self.block_size)

    def ref_count(self, block: int) -> int:
        return self._device.pool.ref_counts[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, demand: Demand) -> int:
        """All sequences of the demand at their longest: they share what the prompt fills and nothing more."""
        shared = len(demand.token_ids) // self.block_size
        longest = self.blocks_for(max(demand.max_tokens, len(demand.token_ids)))
        return shared + demand.num_sequences * (longest - shared)

    def can_allocate(self, demand: Demand, *, headroom: int = 0) -> Allocation:
        """Whether the demand's tokens can have slots, cached ones for nothing, while `headroom` blocks stay free.

        Never is what does not fit beside the pinned prefixes, its own among them: it might have to do without.
        """
        if self.blocks_needed(demand) > self.num_blocks - self.num_pinned_blocks:
            return Allocation.NEVER
        cached, _ = self._match(demand)
        missing = self.blocks_for(len(demand.token_ids)) - len(cached)
        return Allocation.OK if missing + headroom <= self._free_beside(cached) else Allocation.LATER

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        return self._blocks_to_append(self._device.holdings[seq_id], num_tokens) <= self._device.pool.num_free

    def can_fork(self, parent: int, num_children: int = 1) -> bool:
        """Whether the parent is on the device: a fork takes no block."""
        return parent in self._device.holdings

    # --- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, demand: Demand, num_tokens: int) -> int:
        """Gives a new sequence its first `num_tokens` slots, or those of the cached prefix if that is longer.

        Returns the tokens of that prefix: whole blocks, and of the demand's tokens at least one is left to compute.
        """
        self._check_new(seq_id)
        cached, prefix = self._match(demand)
        num_cached = len(cached) * self.block_size
        num_tokens = max(num_tokens, num_cached)
        missing = self.blocks_for(num_tokens) - len(cached)
        if missing > (free := self._free_beside(cached)):
            raise ValueError(f"sequence {seq_id} needs {missing} blocks for {num_tokens} tokens, {free} are free")
        holding = Holding(self.blocks_needed(demand), None)
        if self.prefix_cache and prefix:
            holding.root, holding.prefix = self.prefix_cache.root(demand), prefix
            holding.num_published = len(cached)
            self.prefix_cache.num_queried_tokens += len(demand.token_ids)
            self.prefix_cache.num_hit_tokens += num_cached
        for block in cached:  # before any is taken, or the prefix might be evicted for its own tail
            if self._device.pool.share(block):
                self._device.num_filled += self.block_size
        holding.table.extend(cached)
        self._device.insert(seq_id, holding)
        holding.length = num_cached
        self.append(seq_id, num_tokens - num_cached)
        return num_cached

    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Gives the sequence slots for its next `num_tokens` tokens; changes nothing if they cannot be had.

        Returns the (source, destination) block to copy before the write, at most one: the partial last block, if
        shared. Raises ValueError where `can_append` is False.
        """
        device, holding = self._device, self._device.holdings[seq_id]
        pool, copies = device.pool, list[tuple[int, int]]()
        if needed := self._blocks_to_append(holding, num_tokens):
            if needed > pool.num_free:
                raise ValueError(
                    f"sequence {seq_id} needs {needed} blocks for {num_tokens} tokens, {pool.num_free} are free"
                )
            table, num_partial = holding.table, holding.length % self.block_size
            if num_partial and pool.ref_counts[table[-1]] > 1:
                source, table[-1] = table[-1], pool.take(holding)
                pool.release(source)
                copies.append((source, table[-1]))
                device.num_filled += num_partial
                needed -= 1
            for missing in range(needed, 0, -1):
                table.append(pool.take(holding, missing))
            device.num_entries += needed
        holding.length += num_tokens
        device.num_filled += num_tokens
        return copies

    def extend(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        holdings, pool, size = self._device.holdings, self._device.pool, self.block_size
        ref_counts, num_free = pool.ref_counts, pool.num_free
        others, num_grown, num_taken = list[int](), 0, 0
        for i, (seq_id, wanted) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            holding = holdings[seq_id]
            length = holding.length
            if length + 1 != wanted:
                if length < wanted:
                    others.append(i)
                continue
            if not length % size:
                if others or num_taken == num_free:
                    others.append(i)
                    continue
                holding.table.append(pool.take(holding))
                num_taken += 1
            elif ref_counts[holding.table[-1]] != 1:
                others.append(i)
                continue
            holding.length = wanted
            num_grown += 1
        self._device.num_filled += num_grown
        self._device.num_entries += num_taken
        return others

    def fork(self, parent: int, child: int) -> list[tuple[int, int]]:
        """Makes `child` a new sequence with the parent's tokens, sharing every block; copies nothing."""
        self._check_new(child)
        holding = self._device.holdings[parent].fork()
        for block in holding.table:
            self._device.pool.share(block)
        self._device.insert(child, holding)
        return []

    def free(self, seq_id: int) -> int:
        """Gives the sequence's blocks back, here or on the host; returns how many became free here."""
        before = self._device.pool.num_free
        for tables in (self._device, self._host):
            if seq_id in tables.holdings:
                tables.remove(seq_id)
        return self._device.pool.num_free - before

    # --- swapping ----------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        return self._device.distinct_blocks(seq_ids) <= self._host.pool.num_free

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Moves sequences to the host; returns (device block, host block). What they share moves once and stays so.

        What they share with others stays here as well.
        """
        if not self.can_swap_out(seq_ids):
            raise ValueError(f"sequences {list(seq_ids)} do not fit {self._host.pool.num_free} free host blocks")
        return self._device.move_to(self._host, seq_ids)

    def can_swap_in(self, seq_ids: Sequence[int], *, headroom: int = 0) -> bool:
        return self._host.distinct_blocks(seq_ids) + headroom <= self._device.pool.num_free

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Brings swapped sequences back into new blocks; returns (host block, device block)."""
        if not self.can_swap_in(seq_ids):
            raise ValueError(f"sequences {list(seq_ids)} do not fit {self._device.pool.num_free} free blocks")
        moves = self._host.move_to(self._device, seq_ids)
        for seq_id in seq_ids:  # the cache may have lost their prefixes meanwhile: the next commit tells it again
            holding = self._device.holdings[seq_id]
            holding.prefix, holding.num_published = holding.root, 0
        return moves

    # --- shared prefixes ---------------------------------------------------------------------------------------------

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes the full blocks among the first `num_computed` of the sequence's tokens `token_ids`."""
        holding, size = self._device.holdings[seq_id], self.block_size
        if holding.prefix is None or self.prefix_cache is None:
            return
        if num_computed > holding.length:
            raise ValueError(f"sequence {seq_id} has {holding.length} slots, {num_computed} tokens cannot be in them")
        while (i := holding.num_published) < num_computed // size:
            holding.prefix = self.prefix_cache.extend(holding.prefix, token_ids[i * size : (i + 1) * size])
            self.prefix_cache.publish(holding.table[i], holding.prefix)
            holding.num_published += 1

    def pin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        """Keeps the full blocks of a prefix from eviction, from when some request has computed them until `unpin`.

        Raises ConfigError without a prefix cache, or if the rest of the pool were too small for a request at work.
        """
        cache, prefix = self._pinnable(token_ids, salt, extra_keys)
        num_pinned = cache.num_pinned + cache.num_new_pins(prefix)
        largest = max((holding.needed for holding in self._all_holdings()), default=1)
        if num_pinned + largest > self.num_blocks:
            raise ConfigError(
                f"pinning {len(token_ids)} tokens would keep {num_pinned} of {self.num_blocks} KV blocks, requests may "
                f"need {largest}; pin a shorter prefix or give the engine more KV memory"
            )
        cache.pin(prefix)

    def unpin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        """Takes one `pin` of the same prefix back. Raises ConfigError if there is none."""
        cache, prefix = self._pinnable(token_ids, salt, extra_keys)
        cache.unpin(prefix)

    def reset_prefix_cache(self, model_version: str | None = None) -> None:
        """Forgets every cached prefix; with a version, the model has other weights from now on.

        Sequences at work keep their blocks but publish no more: what they hold may be of two models.
        """
        if self.prefix_cache:
            self._device.pool.put_back(self.prefix_cache.reset(model_version))
            for holding in self._all_holdings():
                holding.root = holding.prefix = None

    # --- books -------------------------------------------------------------------------------------------------------

    def split(self, waiting: Demand | None = None) -> MemorySplit:
        """Nothing is reserved or cut off. What is given and empty is internal: less than a block for each table.

        Blocks that only keep a prefix are free, unless it is pinned: then they hold tokens.
        """
        num_kept = self.prefix_cache.num_parked if self.prefix_cache else 0
        return MemorySplit(
            token=self._device.num_filled + num_kept * self.block_size,
            reserved=0,
            internal=self._device.num_empty,
            external=0,
            free=self._device.pool.num_free * self.block_size,
        )

    def blocks_saved(self) -> int:
        return self._device.num_entries - self._device.pool.num_held

    def audit(self, *, full: bool = False) -> None:
        """Raises AuditError unless the books balance. O(1); `full` recounts everything."""
        for tables in (self._device, self._host):
            tables.audit()
            if full or self._debug:
                tables.audit_full()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _match(self, demand: Demand) -> tuple[list[int], Prefix | None]:
        return self.prefix_cache.match(demand) if self.prefix_cache else ([], None)

    def _free_beside(self, cached: list[int]) -> int:
        """Free blocks that are none of `cached`."""
        cache = self.prefix_cache
        return self._device.pool.num_free - (sum(cache.is_idle(block) for block in cached) if cache else 0)

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self._device.holdings or seq_id in self._host.holdings:
            raise ValueError(f"sequence {seq_id} already holds blocks")

    def _blocks_to_append(self, holding: Holding, num_tokens: int) -> int:
        length, size = holding.length, self.block_size
        writes_shared = num_tokens and length % size and self._device.pool.ref_counts[holding.table[-1]] > 1
        return -(-(length + num_tokens) // size) - len(holding.table) + bool(writes_shared)

    def _all_holdings(self) -> list[Holding]:
        return [*self._device.holdings.values(), *self._host.holdings.values()]

    def _pinnable(
        self, token_ids: Sequence[int], salt: str, extra_keys: tuple[tuple[str, str], ...]
    ) -> tuple[PrefixCache, Demand]:
        if self.prefix_cache is None:
            raise ConfigError("pinning a prefix needs the prefix cache; leave it switched on")
        return self.prefix_cache, Demand(tuple(token_ids), 0, salt=salt, extra_keys=extra_keys)
