"""The KV pool's memory: one (K, V) pair of tensors a layer, all addressed by the same block numbers.

The swap space is a second one on the host, addressed by host block numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pagegen.errors import ConfigError
from pagegen.kernel import PagedKernels, allocate_cache
from pagegen.memory import free_bytes
from pagegen.spec import KernelSpec

MAX_BLOCKS = 2**31 - 1  # block tables hold 32-bit numbers


def block_bytes(spec: KernelSpec, num_layers: int) -> int:
    """Bytes of one block over all layers, K and V."""
    return num_layers * spec.block_size * spec.kv_heads * (spec.head_dim + spec.dim_v) * spec.cache_dtype.itemsize


class KVCache:
    """Zeroed K and V of `num_blocks` blocks for each layer. Raises ConfigError if there is no memory for them."""

    def __init__(self, spec: KernelSpec, num_layers: int, num_blocks: int, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes(spec, num_layers)
        if num_blocks > MAX_BLOCKS:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks is not possible; allowed: up to {MAX_BLOCKS}; lower num_blocks"
            )
        too_much = (
            f"a KV pool of {num_blocks} blocks takes {num_blocks * self.block_bytes / 2**20:.0f} MiB, "
            f"more than {device} has free; lower num_blocks or kv_cache_bytes"
        )
        free = free_bytes() if str(device) == "cpu" else None  # a host lets a process take more, and then kills it
        if free is not None and num_blocks * self.block_bytes > free:
            raise ConfigError(too_much)
        try:
            self.layers = tuple(allocate_cache(spec, num_blocks, device) for _ in range(num_layers))
        except RuntimeError as error:  # torch's out of memory
            raise ConfigError(too_much) from error

    def copy_blocks(self, kernels: PagedKernels, copies: Iterable[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) in every layer, as if one after the other."""
        for pairs in _independent(copies):
            tensor = torch.tensor(pairs, dtype=torch.int64, device=self.layers[0][0].device)
            for k_cache, v_cache in self.layers:
                kernels.copy_blocks(k_cache, v_cache, tensor)

    def copy_from(self, other: KVCache, moves: Iterable[tuple[int, int]]) -> None:
        """Copies `other`'s blocks into this cache's, (source, destination), in every layer: swapping, either way.

        A layer's blocks are gathered into one piece, which crosses over at once and is scattered. No destination twice.
        """
        pairs = torch.tensor(list(moves), dtype=torch.int64).reshape(-1, 2)
        if not len(pairs):
            return
        for layer, other_layer in zip(self.layers, other.layers, strict=True):
            for destination, source in zip(layer, other_layer, strict=True):
                gathered = _words(source).index_select(0, pairs[:, 0].to(source.device))
                _words(destination).index_copy_(0, pairs[:, 1].to(destination.device), gathered.to(destination.device))


def _words(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 8-byte words of a block]: a view that copies fast, whatever the dtype; head dims come in eights."""
    return cache.flatten(1).view(torch.int64)


def _independent(copies: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Splits copies, in order, into launches whose pairs can run together: no destination twice or read from."""
    pairs: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in copies:
        if source in written or destination in written or destination in read:
            yield pairs
            pairs, read, written = [], set(), set()
        pairs.append((source, destination))
        read.add(source)
        written.add(destination)
    if pairs:
        yield pairs
