"""The KV pool's memory: one (K, V) pair of tensors a layer, all addressed by the same block numbers.

The swap space is a second one on the host, addressed by host block numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pagegen.errors import ConfigError
from pagegen.kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    AttendExtras,
    KVScales,
    PagedKernels,
    WriteExtras,
    allocate_cache,
    allocate_scales,
)
from pagegen.memory import free_bytes
from pagegen.spec import KernelSpec, KVScale
from pagegen.transfer import block_bytes as layer_bytes

MAX_BLOCKS = 2**31 - 1  # block tables hold 32-bit numbers


def block_bytes(spec: KernelSpec, num_layers: int) -> int:
    """Bytes of one block over all layers: K, V, and the scales of its tokens where a quantised cache has such."""
    return num_layers * layer_bytes(spec)


class KVCache:
    """Zeroed K and V of `num_blocks` blocks for each layer. Raises ConfigError if there is no memory for them.

    A quantised cache has scales beside them (`scales`, by layer): those of tokens are filled by write_kv and go wherever
    their blocks go, coarser ones are 1.
    """

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
            self.scales = tuple(allocate_scales(spec, num_blocks, device) for _ in range(num_layers))
        except RuntimeError as error:  # torch's out of memory
            raise ConfigError(too_much) from error
        self.extras = tuple(map(_extras, self.scales))

    def copy_blocks(self, kernels: PagedKernels, copies: Iterable[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) in every layer, as if one after the other."""
        for pairs in _independent(copies):
            tensor = torch.tensor(pairs, dtype=torch.int64, device=self.layers[0][0].device)
            for (k_cache, v_cache), scales in zip(self.layers, self.scales, strict=True):
                kernels.copy_blocks(k_cache, v_cache, tensor, scales=scales)

    def copy_from(self, other: KVCache, moves: Iterable[tuple[int, int]]) -> None:
        """Copies `other`'s blocks into this cache's, (source, destination), in every layer: swapping, either way.

        A layer's blocks are gathered into one piece, which crosses over at once and is scattered. No destination twice.
        """
        pairs = torch.tensor(list(moves), dtype=torch.int64).reshape(-1, 2)
        if not len(pairs):
            return
        for destination, source in zip(self._by_block(), other._by_block(), strict=True):
            gathered = source.index_select(0, pairs[:, 0].to(source.device))
            destination.index_copy_(0, pairs[:, 1].to(destination.device), gathered.to(destination.device))

    def _by_block(self) -> Iterator[torch.Tensor]:
        """All that a block consists of, layer by layer: views [num_blocks, words] that copy fast, whatever the dtype."""
        for layer, scales in zip(self.layers, self.scales, strict=True):
            for cache in layer:  # head dims come in eights, of which int4 takes half the bytes
                yield cache.flatten(1).view(torch.int32 if cache.dtype == torch.uint8 else torch.int64)
            if scales is not None and self.spec.kv_scale is KVScale.TOKEN_HEAD:
                for scale in (scales.k_scale, scales.v_scale, scales.k_zero, scales.v_zero):
                    if scale is not None:
                        yield scale.flatten(1)


def _extras(scales: KVScales | None) -> tuple[AttendExtras, WriteExtras]:
    return (AttendExtras(scales), WriteExtras(scales)) if scales else (NO_ATTEND_EXTRAS, NO_WRITE_EXTRAS)


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
