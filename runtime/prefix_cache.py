"""Which blocks hold the K and V of which prefix, so that a later request with the same tokens need not compute them.

A prefix is known by a chain of SHA-256 digests, one a full block, over (digest so far, token ids); the chain starts
from everything else that K and V depend on: model version, salt, adapter, images... each under its own tag and with its
length. Digests find, tokens decide: a block is only used again if its whole chain is equal, digest or no digest.

A published block that nobody refers to stays until its place is needed, least recently used first. Tables give their
blocks back from the tail, so a chain loses its tail before its head and what is left of it can still be found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, KeysView, Sequence

from pagegen.errors import ConfigError
from pagegen.runtime.policies import AuditError, Demand

_DOMAIN = b"pagegen prefix cache, version 1"
_TOKEN_BYTES = array("q").itemsize


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _field(tag: str, value: str) -> bytes:
    """Unambiguous, whatever either contains."""
    parts = (tag.encode(), value.encode("utf-8", "surrogatepass"))
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _encode(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


class Prefix:
    """Tokens up to the end of some block: the last block's `content`, what came before it, the digest of it all.

    The root holds no tokens; its content is what K and V depend on besides tokens.
    """

    __slots__ = ("content", "digest", "parent")

    def __init__(self, parent: Prefix | None, content: bytes, digest: bytes) -> None:
        self.parent = parent
        self.content = content
        self.digest = digest

    def equals(self, other: Prefix) -> bool:
        """By content, all the way to the root or to where the chains join."""
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.content != theirs.content:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class PrefixCache:
    """The published blocks of one pool, and among them the idle ones: published, unreferenced, free to be evicted.

    `model_version` names the weights: what one version computed is never found under another. `digest` is for tests
    that need collisions.
    """

    def __init__(self, block_size: int, *, model_version: str = "", digest: Callable[[bytes], bytes] = _sha256) -> None:
        self.block_size = block_size
        self.model_version = model_version
        self.num_queried_tokens = self.num_hit_tokens = self.num_evictions = 0
        self._digest = digest
        self._blocks: dict[bytes, int] = {}  # by digest
        self._prefixes: dict[int, Prefix] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._parked: set[int] = set()  # unreferenced as well, but pinned
        self._pins: list[Demand] = []
        self._wanted: Counter[bytes] = Counter()  # digests of pinned prefixes
        self._last_chain: tuple[bytes, list[Prefix]] = b"", [self.root(Demand((), 0))]

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_parked(self) -> int:
        """Blocks that nobody refers to but a pin keeps."""
        return len(self._parked)

    @property
    def num_pinned(self) -> int:
        """Blocks that pins keep, or will once they are computed."""
        return len(self._wanted)

    @property
    def next_evicted(self) -> int | None:
        """The block that `evict` would hand out."""
        return next(iter(self._idle), None)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    @property
    def published(self) -> KeysView[int]:
        """The blocks that can be found."""
        return self._prefixes.keys()

    def root(self, demand: Demand) -> Prefix:
        """The empty prefix in the demand's own key space."""
        fields = [_field("model", self.model_version), _field("salt", demand.salt)]
        fields += [_field("extra:" + tag, value) for tag, value in demand.extra_keys]
        content = b"".join(fields)
        return Prefix(None, content, self._digest(_DOMAIN + content))

    def extend(self, prefix: Prefix, token_ids: Sequence[int]) -> Prefix:
        """The prefix one block of tokens longer."""
        return self._extend(prefix, _encode(token_ids))

    def _extend(self, prefix: Prefix, content: bytes) -> Prefix:
        return Prefix(prefix, content, self._digest(prefix.digest + content))

    def match(self, demand: Demand) -> tuple[list[int], Prefix]:
        """The blocks that hold the demand's longest cached prefix, and that prefix; at least one token is left over.

        Hashes no further than one block beyond the prefix. Asking again for the same demand costs only the lookups.
        """
        content, prefixes = self._chain(demand)
        blocks, size = list[int](), self.block_size * _TOKEN_BYTES
        for i in range((len(demand.token_ids) - 1) // self.block_size):
            if i + 1 == len(prefixes):
                prefixes.append(self._extend(prefixes[i], content[i * size : (i + 1) * size]))
            block = self._blocks.get(prefixes[i + 1].digest)
            if block is None or not self._prefixes[block].equals(prefixes[i + 1]):
                break
            blocks.append(block)
            prefixes[i + 1] = self._prefixes[block]  # chains join, so that the next comparison is short
        return blocks, prefixes[len(blocks)]

    def _chain(self, demand: Demand) -> tuple[bytes, list[Prefix]]:
        """The demand's tokens, and its prefixes as far as they are known from the last time."""
        root, content = self.root(demand), _encode(demand.token_ids)
        if self._last_chain[0] != content or not self._last_chain[1][0].equals(root):
            self._last_chain = content, [root]
        return self._last_chain

    # --- changes -----------------------------------------------------------------------------------------------------

    def publish(self, block: int, prefix: Prefix) -> None:
        """From now on the block, which is referenced, is found under the prefix; the first block to hold one stays."""
        if prefix.digest not in self._blocks and block not in self._prefixes:
            self._blocks[prefix.digest] = block
            self._prefixes[block] = prefix

    def retire(self, block: int) -> bool:
        """Takes a block that lost its last reference; False if it holds no prefix, so that nobody will ask for it."""
        prefix = self._prefixes.get(block)
        if prefix is None:
            return False
        if prefix.digest in self._wanted:
            self._parked.add(block)
        else:
            self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Hands out an idle or parked block for what it holds."""
        if block in self._parked:
            self._parked.remove(block)
        else:
            del self._idle[block]

    def evict(self) -> int:
        """Hands out the least recently used idle block as an empty one. Needs `num_idle`."""
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        self.num_evictions += 1
        return block

    def pin(self, demand: Demand) -> None:
        """Keeps the full blocks of the demand's tokens, now and whenever they are published."""
        self._pins.append(demand)
        self._want(demand)

    def unpin(self, demand: Demand) -> None:
        """Takes one `pin` back. Raises ConfigError if there is none."""
        if demand not in self._pins:
            raise ConfigError(f"no prefix of these {len(demand.token_ids)} tokens is pinned; unpin what was pinned")
        self._pins.remove(demand)
        digests = self._full_digests(demand)
        self._wanted -= Counter(digests)
        for digest in reversed(digests):
            block = self._blocks.get(digest)
            if block is not None and digest not in self._wanted and block in self._parked:
                self._parked.remove(block)
                self._idle[block] = None

    def num_new_pins(self, demand: Demand) -> int:
        """How many blocks pinning the demand's tokens would add to `num_pinned`."""
        return sum(digest not in self._wanted for digest in self._full_digests(demand))

    def reset(self, model_version: str | None = None) -> list[int]:
        """Forgets every prefix; returns the blocks that are unreferenced and empty now.

        With a version: the model has other weights from now on. Pins stay, for prefixes that are computed from now on.
        """
        freed = [*self._idle, *self._parked]
        for index in (self._blocks, self._prefixes, self._idle, self._parked, self._wanted):
            index.clear()
        if model_version is not None:
            self.model_version = model_version
        for demand in self._pins:
            self._want(demand)
        return freed

    # --- inside ------------------------------------------------------------------------------------------------------

    def _forget(self, block: int) -> None:
        del self._blocks[self._prefixes.pop(block).digest]

    def _want(self, demand: Demand) -> None:
        for digest in self._full_digests(demand):
            self._wanted[digest] += 1
            block = self._blocks.get(digest)
            if block is not None and block in self._idle:
                del self._idle[block]
                self._parked.add(block)

    def _full_digests(self, demand: Demand) -> list[bytes]:
        prefix, digests = self.root(demand), list[bytes]()
        for start in range(0, len(demand.token_ids) // self.block_size * self.block_size, self.block_size):
            prefix = self.extend(prefix, demand.token_ids[start : start + self.block_size])
            digests.append(prefix.digest)
        return digests

    def audit(self, ref_counts: Sequence[int]) -> None:
        """Raises AuditError unless every index says the same as the others and as the reference counts. O(blocks)."""
        if len(self._blocks) != len(self._prefixes):
            raise AuditError(f"{len(self._blocks)} digests are published for {len(self._prefixes)} blocks")
        for digest, block in self._blocks.items():
            prefix = self._prefixes.get(block)
            if prefix is None or prefix.digest != digest:
                raise AuditError(f"block {block} is found under a digest that is not its own")
            kept = (block in self._idle, block in self._parked)
            wanted = digest in self._wanted
            if kept != ((False, False) if ref_counts[block] else (not wanted, wanted)):
                raise AuditError(
                    f"block {block} with {ref_counts[block]} references: idle {kept[0]}, parked {kept[1]}, "
                    f"pinned {wanted}"
                )
        if len(self._idle) + len(self._parked) > len(self._blocks):
            raise AuditError(
                f"{len(self._idle)} blocks idle, {len(self._parked)} parked, {len(self._blocks)} published"
            )
