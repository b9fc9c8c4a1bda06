"""Claims about how large a cache may be: indices are computed before anything runs, and one block too many is refused."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagegen.abi import cache_strides
from pagegen.catalog import variant
from pagegen.errors import KernelError, SpecError
from pagegen.kernel import allocate_cache, allocate_scales
from pagegen.offsets import Index, index_bits, indices, max_blocks
from pagegen.reference import ReferenceKernels
from pagegen.render import render
from pagegen.spec import KernelSpec, KVLayout, Op, parse_slug
from pagegen.target import TARGETS, parse_target

INT4 = KernelSpec.from_dict({"q_heads": 6, "kv_heads": 2, "head_dim": 16, "block_size": 4, "kv_dtype": "int4"})
SPECS = [
    parse_slug("bf16-d64-h9x3-b16-NHD")[0],
    parse_slug("fp32-d40v24-h7x7-b3-HDN8_HDN")[0],
    parse_slug("fp16-d128-h8x1-b1024-HND")[0],
    INT4,
    KernelSpec(5, 1, 40, head_dim_v=32, block_size=7, v_in_k=True),
]


def test_an_offset_past_31_bits_is_a_positive_number() -> None:
    """vLLM issue 50427: block 2066 of stride 1039680."""
    assert Index("K element", 64, 1039680, 0).largest(2067) == 2147978880
    assert Index("K element", 32, 1039680, 0).max_blocks == 2066


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_every_index_is_that_of_the_last_element_of_the_last_block(spec: KernelSpec) -> None:
    blocks = 5
    found = {index.name: index.largest(blocks) for index in indices(spec)}
    k, v = allocate_cache(spec, blocks, "meta")  # dense, as on a GPU
    strides = cache_strides(spec.kv_layout, k, v)
    assert found["block id"] == blocks - 1
    assert found["slot"] == blocks * spec.block_size - 1
    assert found["K element"] == sum((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True)) == k.numel() - 1
    assert found["K byte"] == k.element_size() * k.numel() - 1
    assert strides[0] * (blocks - 1) <= found["K element"]
    assert ("V element" in found) != spec.v_in_k
    if not spec.v_in_k:
        assert found["V element"] == v.numel() - 1
    scales = allocate_scales(spec, blocks)
    assert found.get("scale") == (scales.k_scale.numel() - 1 if scales else None)


@given(st.sampled_from(SPECS), st.sampled_from([32, 64]))
def test_the_limit_is_exact(spec: KernelSpec, bits: int) -> None:
    limit = max_blocks(spec, bits)
    assert all(index.largest(limit) < 2 ** (index.bits - 1) for index in indices(spec, bits))
    assert any(index.largest(limit + 1) >= 2 ** (index.bits - 1) for index in indices(spec, bits))


def test_narrow_indices_are_for_pools_that_they_reach() -> None:
    spec = SPECS[0]
    limit = 2**31 // (16 * 3 * 64)
    assert max_blocks(spec, 32) == limit
    assert [index_bits(spec, blocks) for blocks in (1, limit, limit + 1, 2**31)] == [32, 32, 64, 64]


def test_the_limit_of_64_bits_is_that_of_the_block_table() -> None:
    assert {max_blocks(spec) for spec in SPECS} == {2**31}


def endless(spec: KernelSpec, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches of any number of blocks, all of which lie at one place."""
    return tuple(cache.expand(blocks, *cache.shape[1:]) for cache in allocate_cache(spec, 1))  # type: ignore[return-value]


def test_kernels_outside_a_package_refuse_blocks_that_no_table_can_name() -> None:
    spec = SPECS[0]
    with pytest.raises(KernelError, match=r"k_cache: got 2147483649 blocks, expected at most 2147483648"):
        ReferenceKernels(spec).copy_blocks(*endless(spec, 2**31 + 1), torch.zeros(0, 2, dtype=torch.int64))


# --- what the rendered texts do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [target.name for target in TARGETS if target.kind != "cpu"][:1])
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN8_HDN"])
@pytest.mark.parametrize("op", [Op.ATTEND, Op.WRITE_KV, Op.COPY_BLOCKS])
def test_triton_widens_a_block_before_it_multiplies(op: Op, layout: str, target: str) -> None:
    """Every factor of a cache's block stride is int64: a loaded slot or pair is, a loaded block id is made so."""
    spec = SPECS[0].replace(layout=KVLayout.parse(layout))
    try:
        tree = ast.parse(render(variant(op, spec, parse_target(target))).text)
    except SpecError as error:
        pytest.skip(str(error))
    factors = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in itertools.permutations((node.left, node.right)):
                if isinstance(one, ast.Name) and one.id.endswith("stride_block"):
                    factors.add(ast.unparse(other))
    assert factors
    wide = {"slot // BLOCK_SIZE", "source", "target"}  # of int64 tensors: slot_mapping and pairs
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = ast.unparse(node.value)
            if text.endswith(".to(tl.int64)") or text in wide:
                wide.add(node.targets[0].id)
    assert factors <= wide
