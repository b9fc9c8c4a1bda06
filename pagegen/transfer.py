"""The calling convention of what moves a cache: gather_blocks and scatter_blocks for swapping, relayout between caches.

None of it is in `PagedKernels`: whoever wants one builds it, `build(render(variant(Op.GATHER_BLOCKS, spec, target)))`.

============= ================================== ========================================================
tensor        shape, dtype                       meaning
============= ================================== ========================================================
blocks        [R], int64                         block of each row of staging
staging       [R, block_bytes(spec)], uint8      any row stride; on the cache's device
slots         [P, 2], int64                      (slot in the source, slot in this cache); -1 skips the pair
============= ================================== ========================================================

A row of staging is one block of one layer: K, then V unless that lies in K, then, if each token has scales, k_scale,
v_scale and with zero points k_zero, v_zero; each dense, in its own order of dimensions (KVLayout; scales `[block_size,
kv_heads]`). What one cache's gather wrote, another's scatter reads if their specs are equal.

Vendored into every kernel package, as pagegen.kernel is.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from .abi import (
    CACHE_STRIDES,
    INT32,
    INT64,
    POINTER,
    SCALES,
    CppKernel,
    c_fields,
    c_struct,
    cache_strides,
    scale_arguments,
)
from .kernel import (
    Attend,
    CopyBlocks,
    KVScales,
    WriteKV,
    check_cache,
    check_rows,
    check_scales,
    length,
    require,
)
from .spec import KernelSpec, KVScale


class GatherBlocks(Protocol):
    """Copies whole blocks of the cache, with their scales, to rows of `staging` (swapping out)."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None: ...


class ScatterBlocks(Protocol):
    """Copies rows of `staging` to whole blocks of the cache, each at most once (swapping in)."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None: ...


class Relayout(Protocol):
    """Copies tokens out of a cache of spec `source`, which differs in layout and block size only; memory is not shared."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        source_k: torch.Tensor,
        source_v: torch.Tensor,
        slots: torch.Tensor,
        *,
        source: KernelSpec,
        scales: KVScales | None = None,
        source_scales: KVScales | None = None,
    ) -> None: ...


AnyKernel = Attend | WriteKV | CopyBlocks | GatherBlocks | ScatterBlocks | Relayout


def block_bytes(spec: KernelSpec) -> int:
    """Bytes of a row of staging: one block of one layer."""
    widths = spec.k_width + (0 if spec.v_in_k else spec.v_width)
    scales = 0 if spec.kv_scale is not KVScale.TOKEN_HEAD else 4 if spec.kv_zero else 2
    return spec.block_size * spec.kv_heads * (widths * spec.cache_dtype.itemsize + 4 * scales)


def allocate_staging(spec: KernelSpec, rows: int, *, pinned: bool = False) -> torch.Tensor:
    """Staging for `rows` blocks in host memory, which `pinned` makes fast to copy to a GPU and back."""
    return torch.empty(rows, block_bytes(spec), dtype=torch.uint8, pin_memory=pinned)


# --- argument checks -------------------------------------------------------------------------------------------------


def check_gather_blocks(
    spec: KernelSpec,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    scales: KVScales | None = None,
) -> int:
    """Shape, dtype, stride and device of gather_blocks' arguments; returns the number of blocks. Raises KernelError."""
    num_blocks = check_cache(spec, k_cache, v_cache)
    check_scales(spec, scales, num_blocks, k_cache.device)
    check_rows("blocks", blocks, (length(blocks),), torch.int64, k_cache.device)
    check_rows("staging", staging, (length(blocks), block_bytes(spec)), torch.uint8, k_cache.device)
    return num_blocks


def check_scatter_blocks(
    spec: KernelSpec,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    scales: KVScales | None = None,
) -> int:
    """The same for scatter_blocks; also refuses a block that is named twice."""
    num_blocks = check_gather_blocks(spec, k_cache, v_cache, blocks, staging, scales)
    require(_distinct(blocks), "blocks", "a block twice", "distinct blocks")
    return num_blocks


def check_relayout(
    spec: KernelSpec,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    source_k: torch.Tensor,
    source_v: torch.Tensor,
    slots: torch.Tensor,
    source: KernelSpec,
    scales: KVScales | None = None,
    source_scales: KVScales | None = None,
) -> tuple[int, int]:
    """The same for relayout; returns the blocks of this cache and of the source. Refuses a destination named twice."""
    alike = source.replace(layout=spec.layout, block_size=spec.block_size) == spec
    require(alike, "source", source.slug, f"{spec.slug} but for layout and block size")
    num_blocks, source_blocks = check_cache(spec, k_cache, v_cache), check_cache(source, source_k, source_v)
    check_scales(spec, scales, num_blocks, k_cache.device)
    check_scales(source, source_scales, source_blocks, k_cache.device)
    require(source_k.device == k_cache.device, "source_k device", source_k.device, k_cache.device)
    check_rows("slots", slots, (length(slots), 2), torch.int64, k_cache.device)
    require(slots.is_contiguous(), "slots", "strided", "contiguous")
    require(_distinct(slots[:, 1][(slots >= 0).all(1)]), "slots", "a destination twice", "distinct destinations")
    return num_blocks, source_blocks


def _distinct(ids: torch.Tensor) -> bool:
    ordered = ids.sort().values
    return bool((ordered[1:] != ordered[:-1]).all())


# --- the C ABI (templates/cpp/abi.h) ---------------------------------------------------------------------------------


GatherBlocksArgs = ScatterBlocksArgs = c_struct(
    "StageBlocksArgs",
    [
        *c_fields(POINTER, "k_cache v_cache blocks staging"),
        *c_fields(INT64, "num_rows num_blocks staging_stride"),
        *CACHE_STRIDES,
        *c_fields(INT32, "num_threads reserved"),
        *SCALES,
    ],
)
RelayoutArgs = c_struct(
    "RelayoutArgs",
    [
        *c_fields(POINTER, "k_cache v_cache source_k source_v slots"),
        *c_fields(INT64, "num_pairs num_blocks source_num_blocks source_block_size source_x"),
        *CACHE_STRIDES,
        *((f"source_{name}", kind) for name, kind in CACHE_STRIDES),
        *c_fields(INT32, "num_threads reserved"),
        *SCALES,
        *((f"source_{name}", kind) for name, kind in SCALES),
    ],
)


class _CppStageBlocks(CppKernel):
    def _stage(
        self,
        num_blocks: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        scales: KVScales | None,
    ) -> None:
        args = GatherBlocksArgs(
            ctypes.sizeof(GatherBlocksArgs),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            blocks.data_ptr(),
            staging.data_ptr(),
            len(blocks),
            num_blocks,
            staging.stride(0),
            *cache_strides(self.spec.kv_layout, k_cache, v_cache),
            torch.get_num_threads(),
            0,
            *scale_arguments(self.spec, scales),
        )
        self._check(self._run(ctypes.byref(args)))


class CppGatherBlocks(_CppStageBlocks):
    """`GatherBlocks` on a C++ library."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        num_blocks = check_gather_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        self._stage(num_blocks, k_cache, v_cache, blocks, staging, scales)


class CppScatterBlocks(_CppStageBlocks):
    """`ScatterBlocks` on a C++ library."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        num_blocks = check_scatter_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        self._stage(num_blocks, k_cache, v_cache, blocks, staging, scales)


class CppRelayout(CppKernel):
    """`Relayout` on a C++ library."""

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        source_k: torch.Tensor,
        source_v: torch.Tensor,
        slots: torch.Tensor,
        *,
        source: KernelSpec,
        scales: KVScales | None = None,
        source_scales: KVScales | None = None,
    ) -> None:
        num_blocks, source_blocks = check_relayout(
            self.spec, k_cache, v_cache, source_k, source_v, slots, source, scales, source_scales
        )
        args = RelayoutArgs(
            ctypes.sizeof(RelayoutArgs),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            source_k.data_ptr(),
            source_v.data_ptr(),
            slots.data_ptr(),
            len(slots),
            num_blocks,
            source_blocks,
            source.block_size,
            source.kv_layout.x,
            *cache_strides(self.spec.kv_layout, k_cache, v_cache),
            *cache_strides(source.kv_layout, source_k, source_v),
            torch.get_num_threads(),
            0,
            *scale_arguments(self.spec, scales),
            *scale_arguments(source, source_scales),
        )
        self._check(self._run(ctypes.byref(args)))
