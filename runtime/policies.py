"""What the scheduler asks of KV memory, whoever hands it out.

One protocol for paging (Kwon et al. 2023, https://arxiv.org/abs/2309.06180) and for the reserving allocators that the
paper measures it against: a reservation is a run of consecutive blocks, so all of them feed the same kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from pagegen.errors import ConfigError

MEMORY_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "paged": "blocks as tokens need them, shared and copied on write (vLLM)",
        "orca-max": "a run of max_model_len slots, from a buddy allocator",
        "orca-pow2": "a run of the prompt and the next power of two of the output, from a buddy allocator",
        "orca-oracle": "a run of exactly what the request will have needed, from a buddy allocator",
        "contiguous-first-fit": "a run of the prompt and max_tokens, in the lowest hole that has room",
        "reserve-on-paged": "blocks for the prompt and max_tokens at once, wherever they are (TGI)",
    }
)


class Allocation(StrEnum):
    """Whether blocks can be had: now, once others give theirs back, or never in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AuditError(RuntimeError):
    """The books do not balance: a defect of the memory policy, not of its user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for at admission.

    `token_ids` are the tokens to compute now: the prompt, or everything so far after a preemption, of which the first
    `prompt_len` are the prompt. `max_tokens` counts the slots that a sequence needs at its longest, prompt included;
    `final_tokens` those that it will really have needed, which only an oracle knows. `num_sequences` samples or beams
    grow from the one prompt. `salt` and the tagged `extra_keys` (adapter, adapter id, image digest...) keep equal
    tokens with different K and V apart.
    """

    token_ids: Sequence[int]
    max_tokens: int
    final_tokens: int | None = None
    salt: str = ""
    extra_keys: tuple[tuple[str, str], ...] = ()
    num_sequences: int = 1
    prompt_len: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySplit:
    """Where the pool's token slots are, as in figure 2 of the vLLM paper; the five sum to the pool.

    `token` slots hold a token's K and V. `reserved` ones are empty and will be filled by their owner, `internal` ones
    are its as well and will not be. `external` ones no request can have: cut off between reservations, or lost to the
    allocator's rounding. `free` is what is left to give.
    """

    token: int
    reserved: int
    internal: int
    external: int
    free: int

    def fractions(self) -> tuple[float, float, float, float]:
        """Token, reserved, internal and external as shares of what is not free: they sum to 1, or are all 0."""
        taken = self.token + self.reserved + self.internal + self.external
        if not taken:
            return (0.0, 0.0, 0.0, 0.0)
        return (self.token / taken, self.reserved / taken, self.internal / taken, self.external / taken)


class MemoryPolicy(Protocol):
    """Owner of `num_blocks` blocks of `block_size` tokens; knows sequences by their id and touches no tensor.

    Every operation costs O(blocks concerned). A change that cannot be made raises ValueError and changes nothing.
    Pairs are (source, destination) blocks whose contents the caller moves, in the order in which it got them, before
    the next kernel reads or writes either.
    """

    num_blocks: int
    block_size: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, with those that only keep a prefix for whoever asks for it again."""

    @property
    def num_used_blocks(self) -> int: ...

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pins keep, or will once they are computed; 0 where nothing can be pinned."""

    @property
    def num_free_host_blocks(self) -> int:
        """Free blocks of the swap space; 0 where there is none."""

    def num_tokens(self, seq_id: int) -> int:
        """Slots given to the sequence's tokens; 0 for one that holds nothing."""

    def block_table(self, seq_id: int) -> Sequence[int]:
        """The sequence's physical blocks in order: to read, not to change."""

    def filled(self, seq_id: int) -> list[int]:
        """Tokens in each block of the sequence's table."""

    def ref_count(self, block: int) -> int:
        """Tables that list the block."""

    def blocks_needed(self, demand: Demand) -> int:
        """Blocks that the demand takes at its largest."""

    def can_allocate(self, demand: Demand, *, headroom: int = 0) -> Allocation:
        """Whether `allocate` would succeed while `headroom` blocks stay free for others."""

    def allocate(self, seq_id: int, demand: Demand, num_tokens: int) -> int:
        """Gives a new sequence slots for its first `num_tokens` tokens.

        Returns how many leading tokens are already computed, because a cached prefix holds them; slots for these are
        given in any case, and of the demand's tokens at least one is left to compute.
        """

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether `append` would succeed."""

    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Gives the sequence slots for its next `num_tokens` tokens; returns the copy-on-write pair, if one is due."""

    def extend(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Brings each sequence to `num_tokens[i]` slots where that takes no more than its next slot, without a copy;
        returns the positions of the others, which are for `append`. One call for all that decode.

        A free block is only taken while nobody before is among the others: who comes first does not find it gone.
        """

    def can_fork(self, parent: int, num_children: int = 1) -> bool:
        """Whether that many calls of `fork` would succeed."""

    def fork(self, parent: int, child: int) -> list[tuple[int, int]]:
        """Makes `child` a new sequence with the parent's tokens; returns what must be copied, where nothing is shared.

        Children of a demand for several sequences find their memory waiting.
        """

    def free(self, seq_id: int) -> int:
        """Gives everything of the sequence back; returns how many blocks became free. Holding nothing is no error."""

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tells that K and V of the first `num_computed` tokens are in the cache, for others to share."""

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has room for all blocks of these sequences."""

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Moves sequences to the host; returns (device block, host block). What they share moves once, and stays so."""

    def can_swap_in(self, seq_ids: Sequence[int], *, headroom: int = 0) -> bool:
        """Whether the device has room for all blocks of these swapped sequences."""

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Brings swapped sequences back; returns (host block, device block)."""

    def pin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        """Keeps the full blocks of a prefix from eviction, from when some request has computed them until `unpin`.

        Raises ConfigError where nothing is cached, or if it would leave a request at work too little.
        """

    def unpin(self, token_ids: Sequence[int], salt: str = "", extra_keys: tuple[tuple[str, str], ...] = ()) -> None:
        """Takes one `pin` of the same prefix back. Raises ConfigError if there is none."""

    def reset_prefix_cache(self, model_version: str | None = None) -> None:
        """Forgets every cached prefix; with a version, the model has other weights from now on."""

    def split(self, waiting: Demand | None = None) -> MemorySplit:
        """Where the slots are. With a demand that waits for a run of blocks, the free slots that cannot give it one
        are external.
        """

    def blocks_saved(self) -> int:
        """Blocks that the tables would need beyond those in use if nothing were shared."""

    def audit(self, *, full: bool = False) -> None:
        """Raises AuditError unless the books balance. O(1); `full` recounts everything."""


def make_memory_policy(
    name: str,
    num_blocks: int,
    block_size: int,
    *,
    max_model_len: int,
    prefix_cache: bool = True,
    model_version: str = "",
    num_host_blocks: int = 0,
    debug: bool = False,
) -> MemoryPolicy:
    """The policy of that name. Prefix cache and swap space (`num_host_blocks`) are for `paged`; the others share nothing
    and never give anything up. Raises ConfigError.
    """
    from pagegen.runtime.block_manager import BlockManager
    from pagegen.runtime.prefix_cache import PrefixCache
    from pagegen.runtime.reservations import RESERVATIONS, ReservingPolicy

    if name == "paged":
        cache = PrefixCache(block_size, model_version=model_version) if prefix_cache else None
        return BlockManager(num_blocks, block_size, prefix_cache=cache, num_host_blocks=num_host_blocks, debug=debug)
    if name not in RESERVATIONS:
        raise ConfigError(f"memory policy {name!r} is unknown; choose one of {', '.join(MEMORY_POLICIES)}")
    if num_host_blocks:
        raise ConfigError(f"memory policy {name!r} never swaps; leave the swap space at 0 or choose 'paged'")
    return ReservingPolicy(RESERVATIONS[name], num_blocks, block_size, max_model_len=max_model_len, debug=debug)
