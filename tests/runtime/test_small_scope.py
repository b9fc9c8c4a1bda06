"""Every history of a small pool: 3 blocks of 2 tokens, 3 sequences, so many changes in a row, none left out.

Histories that lead to the same state (up to the names of blocks) are followed once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import MEMORY_POLICIES, Demand, make_memory_policy
from pagegen.runtime.prefix_cache import PrefixCache
from tests.runtime.memory_model import ModelledMemory

Change = tuple[str, tuple[object, ...]]
NUM_BLOCKS, BLOCK_SIZE, NUM_SEQUENCES, LONGEST = 3, 2, 3, 6


def changes(memory: ModelledMemory) -> Iterator[Change]:
    """Every change that makes sense in this state; a new sequence takes the lowest id, they are all alike."""
    unused = [seq_id for seq_id in range(NUM_SEQUENCES) if seq_id not in memory.tokens][:1]
    for new_id in unused:
        for num_tokens in range(1, 5):
            yield "allocate", (new_id, Demand([0] * num_tokens, LONGEST))
    for seq_id in memory.tokens:
        yield "free", (seq_id,)
    for seq_id in memory.resident:
        if len(memory.tokens[seq_id]) < LONGEST:
            yield "append", (seq_id, [seq_id])
        if memory.num_computed[seq_id] < len(memory.tokens[seq_id]):
            yield "compute", (seq_id,)
        for new_id in unused:
            yield "fork", (seq_id, new_id)
        yield "swap_out", ([seq_id],)
    for seq_id in memory.swapped:
        yield "swap_in", ([seq_id],)
    if len(memory.resident) > 1:
        yield "swap_out", (memory.resident,)
    if len(memory.swapped) > 1:
        yield "swap_in", (sorted(memory.swapped),)


def state_of(memory: ModelledMemory) -> object:
    """All that the future depends on, with blocks named in the order in which they are met."""
    names: dict[tuple[bool, int], int] = {}

    def name(block: int, on_host: bool = False) -> int:
        return names.setdefault((on_host, block), len(names))

    policy, tokens = memory.policy, sorted(memory.tokens.items())
    sequences = tuple((seq_id, tuple(t), memory.num_computed[seq_id]) for seq_id, t in tokens)
    if not isinstance(policy, BlockManager):
        tables = tuple(tuple(policy.block_table(seq_id)) for seq_id, _ in tokens)
        return sequences, tables, policy.num_free_blocks
    device, host = (
        [
            (seq_id, holding.num_published, tuple(name(block, tables is policy._host) for block in holding.table))
            for seq_id, holding in sorted(tables.holdings.items())
        ]
        for tables in (policy._device, policy._host)
    )
    cache = policy.prefix_cache or PrefixCache(BLOCK_SIZE)
    published = frozenset((name(block), cache._prefixes[block].digest) for block in cache.published)
    return sequences, tuple(device), tuple(host), tuple(map(name, cache._idle)), published


def explore(memory: ModelledMemory, depth: int) -> int:
    """Follows every history of `depth` changes and checks every state; returns the number of states."""
    seen = {state_of(memory)}
    frontier = [pickle.dumps(memory)]
    for _ in range(depth):
        found: list[bytes] = []
        for snapshot in frontier:
            for change, arguments in changes(pickle.loads(snapshot)):
                memory = pickle.loads(snapshot)
                getattr(memory, change)(*arguments)
                state = state_of(memory)
                if state not in seen:
                    seen.add(state)
                    memory.check()
                    found.append(pickle.dumps(memory))
        frontier = found
    return len(seen)


def paged(cache: bool) -> ModelledMemory:
    prefix_cache = PrefixCache(BLOCK_SIZE) if cache else None
    return ModelledMemory(BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=prefix_cache, num_host_blocks=2))


@pytest.mark.parametrize("cache", [False, True])
def test_every_history_of_five_changes(cache: bool) -> None:
    assert explore(paged(cache), depth=5) > 3_000


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cache", [False, True])
def test_every_history_of_eight_changes(cache: bool) -> None:
    assert explore(paged(cache), depth=8) > 30_000


@pytest.mark.parametrize("name", [name for name in MEMORY_POLICIES if name != "paged"])
def test_every_history_of_reservations(name: str) -> None:
    policy = make_memory_policy(name, 11, BLOCK_SIZE, max_model_len=LONGEST)  # a buddy's 8 + 2 + 1: room for two
    assert explore(ModelledMemory(policy), depth=5) > 300
