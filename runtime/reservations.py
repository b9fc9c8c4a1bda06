"""Memory policies that give a request everything it may need when it is admitted, and take it back when it ends.

As Orca is modelled in section 6.1 of the vLLM paper (Kwon et al. 2023, https://arxiv.org/abs/2309.06180): `max`, `pow2`
and `oracle` reserve runs from a buddy allocator. Orca itself only counts slots (Yu et al. 2022), as `reserve-on-paged`
does. No sequence shares a block with another: a fork is a copy.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pagegen.errors import ConfigError
from pagegen.runtime.extents import Allocator, BuddyAllocator, FirstFitAllocator, ScatterAllocator
from pagegen.runtime.policies import Allocation, AuditError, Demand, MemorySplit


def _promised(demand: Demand) -> int:
    """Slots of one sequence at its longest, as far as anyone may know."""
    return max(demand.max_tokens, len(demand.token_ids))


def _final(demand: Demand) -> int:
    """Slots that one sequence will have needed; without an oracle, those promised."""
    return _promised(demand) if demand.final_tokens is None else max(demand.final_tokens, len(demand.token_ids))


def _max(demand: Demand, max_model_len: int) -> int:
    return max(max_model_len, _promised(demand))


def _pow2(demand: Demand, max_model_len: int) -> int:
    """25 output tokens reserve 32, however many of them there are already; never more than the model's length."""
    num_prompt, final = demand.prompt_len or len(demand.token_ids), _final(demand)
    output = 1 << (final - num_prompt - 1).bit_length() if final > num_prompt else 0
    return min(num_prompt + output, max(max_model_len, final))


def _oracle(demand: Demand, max_model_len: int) -> int:
    return _final(demand)


def _request(demand: Demand, max_model_len: int) -> int:
    return _promised(demand)


@dataclasses.dataclass(frozen=True, slots=True)
class ReservationRule:
    """Where a reservation comes from, and how many slots it has: `size(demand, max_model_len)`."""

    allocator: Callable[[int], Allocator]
    size: Callable[[Demand, int], int]


RESERVATIONS: Mapping[str, ReservationRule] = MappingProxyType(
    {
        "orca-max": ReservationRule(BuddyAllocator, _max),
        "orca-pow2": ReservationRule(BuddyAllocator, _pow2),
        "orca-oracle": ReservationRule(BuddyAllocator, _oracle),
        "contiguous-first-fit": ReservationRule(FirstFitAllocator, _request),
        "reserve-on-paged": ReservationRule(ScatterAllocator, _request),
    }
)


class _Reservation:
    """A table, the slots of it that hold a token, and the slots that once will."""

    __slots__ = ("expected", "group", "length", "table")

    def __init__(self, table: array[int], expected: int, group: _Group) -> None:
        self.table = table
        self.length = 0
        self.expected = expected
        self.group = group


class _Group:
    """The reservations of one demand: those of living sequences, and those that wait for a fork."""

    __slots__ = ("num_living", "spares")

    def __init__(self) -> None:
        self.num_living = 1
        self.spares: list[_Reservation] = []


class ReservingPolicy:
    """Every sequence of a demand gets its whole reservation at admission, so that growth never fails.

    A demand's reservations go back together, when its last sequence ends: until then a sequence that ends leaves its
    own for the next fork. `headroom` has no meaning here, nothing grows into what is free.
    """

    num_free_host_blocks = num_pinned_blocks = 0

    def __init__(
        self, rule: ReservationRule, num_blocks: int, block_size: int, *, max_model_len: int, debug: bool = False
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._rule = rule
        self._max_model_len = max_model_len
        self._debug = debug
        self._allocator = rule.allocator(num_blocks)
        self._reservations: dict[int, _Reservation] = {}
        self._ref_counts = bytearray(num_blocks)
        self._num_given_blocks = self._num_expected_slots = self._num_filled_slots = 0

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._allocator.num_free

    def num_tokens(self, seq_id: int) -> int:
        reservation = self._reservations.get(seq_id)
        return reservation.length if reservation else 0

    def block_table(self, seq_id: int) -> array[int]:
        """The whole reservation, filled or not."""
        return self._reservations[seq_id].table

    def filled(self, seq_id: int) -> list[int]:
        length, size = self._reservations[seq_id].length, self.block_size
        return [min(max(length - i * size, 0), size) for i in range(len(self._reservations[seq_id].table))]

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def blocks_needed(self, demand: Demand) -> int:
        return demand.num_sequences * self._size(demand)

    def can_allocate(self, demand: Demand, *, headroom: int = 0) -> Allocation:
        size, count = self._size(demand), demand.num_sequences
        if not self._allocator.fits(size, count, empty=True):
            return Allocation.NEVER
        return Allocation.OK if self._allocator.fits(size, count) else Allocation.LATER

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        reservation = self._reservations[seq_id]
        return reservation.length + num_tokens <= len(reservation.table) * self.block_size

    def can_fork(self, parent: int, num_children: int = 1) -> bool:
        if parent not in self._reservations:
            return False
        reservation = self._reservations[parent]
        missing = num_children - len(reservation.group.spares)
        return missing <= 0 or self._allocator.fits(len(reservation.table), missing)

    # --- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, demand: Demand, num_tokens: int) -> int:
        """Reserves for all sequences of the demand, and fills the first `num_tokens` slots of this one; returns 0."""
        self._check_new(seq_id)
        size, count = self._size(demand), demand.num_sequences
        if num_tokens > size * self.block_size or not self._allocator.fits(size, count):
            raise ValueError(
                f"sequence {seq_id} needs {count} times {size} blocks for {num_tokens} tokens, "
                f"{self._allocator.num_free} are free and {self._allocator.usable(size)} in runs of that length"
            )
        expected, group = min(_final(demand), size * self.block_size), _Group()
        self._reservations[seq_id] = self._reserve(size, expected, group)
        group.spares.extend(self._reserve(size, expected, group) for _ in range(count - 1))
        self.append(seq_id, num_tokens)
        return 0

    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Fills the next `num_tokens` slots of the reservation; ValueError beyond its end. Nothing is ever copied."""
        reservation = self._reservations[seq_id]
        length = reservation.length + num_tokens
        if length > len(reservation.table) * self.block_size:
            raise ValueError(
                f"sequence {seq_id} reserved {len(reservation.table) * self.block_size} slots, {length} are asked for"
            )
        reservation.length = length
        self._num_filled_slots += num_tokens
        if length > reservation.expected:
            self._expect(reservation, length)
        return []

    def extend(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        others = []
        for i, (seq_id, wanted) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            reservation = self._reservations[seq_id]
            if wanted > len(reservation.table) * self.block_size:
                others.append(i)
            elif wanted > reservation.length:
                self.append(seq_id, wanted - reservation.length)
        return others

    def fork(self, parent: int, child: int) -> list[tuple[int, int]]:
        """Gives `child` a reservation like the parent's; returns the pairs that copy the parent's filled blocks."""
        self._check_new(child)
        if not self.can_fork(parent):
            raise ValueError(f"sequence {parent} cannot fork: no second reservation of its size is free")
        source = self._reservations[parent]
        group = source.group
        copy = group.spares.pop() if group.spares else self._reserve(len(source.table), source.expected, group)
        copy.length = source.length
        self._expect(copy, max(source.expected, copy.expected))
        self._num_filled_slots += copy.length
        group.num_living += 1
        self._reservations[child] = copy
        num_blocks = -(-source.length // self.block_size)
        return list(zip(source.table[:num_blocks], copy.table[:num_blocks], strict=True))

    def free(self, seq_id: int) -> int:
        """Ends a sequence; returns the blocks that became free: all of its demand's if it was the last, or none."""
        reservation = self._reservations.pop(seq_id, None)
        if reservation is None:
            return 0
        before, group = self._allocator.num_free, reservation.group
        self._num_filled_slots -= reservation.length
        reservation.length = 0
        self._expect(reservation, 0)
        group.spares.append(reservation)
        group.num_living -= 1
        if not group.num_living:
            for spare in group.spares:
                self._give_back(spare)
        return self._allocator.num_free - before

    # --- what reserving policies do not do ---------------------------------------------------------------------------

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Nothing: no block outlives its owner."""

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        return False

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        raise ValueError(f"sequences {list(seq_ids)} cannot be swapped out: reservations stay where they are")

    def can_swap_in(self, seq_ids: Sequence[int], *, headroom: int = 0) -> bool:
        return False

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        raise ValueError(f"sequences {list(seq_ids)} are not swapped out")

    def pin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        raise ConfigError("a memory policy that reserves shares no prefix; choose memory policy 'paged' to pin one")

    def unpin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        raise ConfigError("a memory policy that reserves pins no prefix; there is nothing to unpin")

    def reset_prefix_cache(self, model_version: str | None = None) -> None:
        """Nothing: there is none."""

    # --- books -------------------------------------------------------------------------------------------------------

    def split(self, waiting: Demand | None = None) -> MemorySplit:
        """`reserved` up to the final length, as far as the demand told it, `internal` beyond; what the allocator rounds
        up is `external`, as are free runs too short for the waiting demand, or for any.
        """
        size, allocator = self.block_size, self._allocator
        usable = allocator.usable(self._size(waiting or Demand((), 0)))
        return MemorySplit(
            token=self._num_filled_slots,
            reserved=self._num_expected_slots - self._num_filled_slots,
            internal=self._num_given_blocks * size - self._num_expected_slots,
            external=(allocator.num_lost + allocator.num_free - usable) * size,
            free=usable * size,
        )

    def blocks_saved(self) -> int:
        return 0

    def audit(self, *, full: bool = False) -> None:
        """Raises AuditError unless the books balance. O(1); `full` recounts everything."""
        allocator = self._allocator
        if self._num_given_blocks + allocator.num_lost + allocator.num_free != self.num_blocks:
            raise AuditError(
                f"{self._num_given_blocks} blocks given, {allocator.num_lost} lost and {allocator.num_free} free make "
                f"not {self.num_blocks}"
            )
        if not 0 <= self._num_filled_slots <= self._num_expected_slots <= self._num_given_blocks * self.block_size:
            raise AuditError(
                f"{self._num_filled_slots} slots filled, {self._num_expected_slots} expected, "
                f"{self._num_given_blocks} blocks given"
            )
        if full or self._debug:
            self._audit_full()

    def _audit_full(self) -> None:
        living = self._reservations.values()
        groups = {id(reservation.group): reservation.group for reservation in living}.values()
        everything = [*living, *(spare for group in groups for spare in group.spares)]
        given = [block for reservation in everything for block in reservation.table]
        free = self._allocator.free_blocks()
        if len(set(given) | set(free)) != len(given) + len(free) or len(free) != self._allocator.num_free:
            raise AuditError("a block is in two tables, or in a table and free")
        if sum(self._ref_counts) != len(given) or not all(self._ref_counts[block] for block in given):
            raise AuditError("the blocks with an owner are not those in tables")
        found = (
            len(given),
            sum(reservation.expected for reservation in everything),
            sum(reservation.length for reservation in everything),
        )
        if found != (self._num_given_blocks, self._num_expected_slots, self._num_filled_slots):
            raise AuditError(f"blocks given, slots expected and filled are {found}, not as counted")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _size(self, demand: Demand) -> int:
        """Blocks of one reservation."""
        return max(1, -(-self._rule.size(demand, self._max_model_len) // self.block_size))

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self._reservations:
            raise ValueError(f"sequence {seq_id} already holds blocks")

    def _expect(self, reservation: _Reservation, num_slots: int) -> None:
        self._num_expected_slots += num_slots - reservation.expected
        reservation.expected = num_slots

    def _reserve(self, num_blocks: int, expected: int, group: _Group) -> _Reservation:
        table = self._allocator.take(num_blocks)
        for block in table:
            if self._ref_counts[block]:
                raise AuditError(f"block {block} is given to a second owner")
            self._ref_counts[block] = 1
        self._num_given_blocks += num_blocks
        self._num_expected_slots += expected
        return _Reservation(table, expected, group)

    def _give_back(self, reservation: _Reservation) -> None:
        for block in reservation.table:
            self._ref_counts[block] = 0
        self._num_given_blocks -= len(reservation.table)
        self._expect(reservation, 0)
        self._allocator.release(reservation.table)
