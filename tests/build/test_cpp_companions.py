"""Claims about the C++ companions of attend: what write_kv stores equals the reference, and moving blocks moves every bit.

Quantised bits are the reference's, given the same fp32 rows. A rotated row is fp32 here and float64 there, so a stored
number may be the neighbour where the two sit on different sides of a rounding border, and its scale an ulp or two off.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagegen.build import build
from pagegen.build.cpp import compile_library
from pagegen.catalog import variant
from pagegen.check import check_library, quick_suite
from pagegen.errors import KernelError
from pagegen.kernel import (
    TORCH_DTYPES,
    KVScales,
    WriteExtras,
    allocate_cache,
    allocate_scales,
)
from pagegen.reference import ReferenceKernels, scale_tensors
from pagegen.render import render
from pagegen.spec import DType, KernelSpec, KVLayout, Op, parse_slug
from pagegen.target import Target, best_cpu
from pagegen.transfer import allocate_staging, block_bytes
from tests.conftest import cpu_targets

pytestmark = pytest.mark.compiler

BASE = parse_slug("bf16-d40v24-h6x3-b5-NHD")[0]
MLA = KernelSpec(4, 1, 72, head_dim_v=64, block_size=3, v_in_k=True)
BLOCKS, TOKENS, POSITIONS = 9, 23, 31
TARGETS = cpu_targets(long=lambda target: target.arch != "scalar" and target != best_cpu())


def specs(*changes: dict[str, Any]) -> Iterator[Any]:
    for change in changes:
        change = change | ({"layout": KVLayout.parse(change["layout"])} if "layout" in change else {})
        spec = BASE.replace(**change)
        yield pytest.param(
            spec, id=" ".join(f"{name}={getattr(value, 'name', value)}" for name, value in change.items())
        )


QUANTISED = [
    *specs(
        {"kv_dtype": "fp8_e4m3"},
        {"kv_dtype": "fp8_e5m2", "kv_scale": "head"},
        {"kv_dtype": "fp8_e4m3", "kv_scale": "token_head", "layout": "HDN8"},
        {"dtype": "fp16", "kv_dtype": "fp8_e5m2", "kv_scale": "token_head", "layout": "HDN_HDN"},
        {"kv_dtype": "int8"},
        {"dtype": "fp32", "kv_dtype": "int8", "kv_zero": True, "layout": "HND"},
        {"kv_dtype": "int4"},
        {"dtype": "fp16", "kv_dtype": "int4", "kv_zero": True, "layout": "HND_NHD"},
    )
]
ROTATED = [
    *specs(
        {"rope": "neox"},
        {"rope": "interleaved", "rotary_dim": 18, "qk_norm": True},
        {"dtype": "fp32", "kv_dtype": "bf16", "rope": "neox", "layout": "HDN4_HDN"},
        {"dtype": "fp16", "rope": "neox", "rotary_dim": 24, "layout": "HND"},
        {"rope": "neox", "kv_dtype": "int4", "qk_norm": True},
        {"rope": "interleaved", "kv_dtype": "int8", "kv_zero": True},
        {"rope": "neox", "kv_dtype": "fp8_e4m3"},
    ),
    pytest.param(MLA.replace(rope="neox", rotary_dim=8), id="MLA"),
]
RUNS = [
    *specs(
        {"layout": "HDN_HDN", "block_size": 16},
        {"layout": "HDN2", "block_size": 24},
        {"layout": "HDN8_HDN", "dtype": "fp32", "block_size": 8},
        {"layout": "HDN4_HDN", "kv_dtype": "int8", "kv_zero": True, "block_size": 4},
        {"layout": "HDN", "kv_dtype": "fp8_e4m3", "block_size": 17},
        {"layout": "HDN2_HDN", "dtype": "fp16", "rope": "neox", "block_size": 16},
    ),
]
MOVED = [
    *specs(
        {},
        {"layout": "HND"},
        {"layout": "HDN8_HDN"},
        {"kv_dtype": "fp8_e4m3", "layout": "HDN"},
        {"kv_dtype": "int8", "kv_zero": True},
        {"kv_dtype": "int4"},
        {"dtype": "fp32", "kv_heads": 1},
    ),
    pytest.param(MLA, id="MLA"),
]


def kernel(op: Op, spec: KernelSpec, target: Target) -> Callable[..., None]:
    return build(render(variant(op, spec, target)))


@dataclasses.dataclass
class Cache:
    """Both tensors and the scales, holding random bytes, in room of their own or with gaps everywhere."""

    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None

    def tensors(self) -> list[torch.Tensor]:
        return [self.k, self.v, *(scale_tensors(self.scales) if self.scales else [])]


def spread(tensor: torch.Tensor, packed: int) -> torch.Tensor:
    """The same values with a gap after each dimension but the last `packed` + 1."""
    room = torch.zeros(
        [n + 2 if 0 < i < tensor.dim() - packed else n for i, n in enumerate(tensor.shape)], dtype=tensor.dtype
    )
    return room[tuple(slice(n) for n in tensor.shape)].copy_(tensor)


def cache(spec: KernelSpec, blocks: int = BLOCKS, seed: int = 0, strided: bool = False) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    k, v = allocate_cache(spec, blocks)
    made = Cache(k, v, allocate_scales(spec, blocks))
    for tensor in (k,) if spec.v_in_k else (k, v):
        tensor.view(torch.uint8).random_(0, 128, generator=generator)
    for scale in scale_tensors(made.scales) if made.scales else []:
        scale.uniform_(0.01, 0.1, generator=generator)
    if strided:
        made.k = spread(k, packed=k.dim() == 5)
        made.v = made.k[..., : spec.dim_v] if spec.v_in_k else spread(v, packed=0)
        if made.scales and made.scales.k_scale.dim() == 3:
            made.scales = KVScales(*(spread(t, 0) for t in scale_tensors(made.scales)))
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(a: Cache, b: Cache) -> None:
    for mine, other in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(bits(mine), bits(other))


# --- write_kv --------------------------------------------------------------------------------------------------------


def new_tokens(spec: KernelSpec, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, WriteExtras]:
    """k, v, slots and the extras but for scales: ordinary rows, zeros, tiny ones, large ones, a row of one sign."""
    generator = torch.Generator().manual_seed(seed)
    raw = spec.rope is not None or spec.cache_dtype.quantised
    dtype = TORCH_DTYPES[spec.dtype if raw else spec.cache_dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    k, v = 3 * normal(TOKENS, spec.kv_heads, spec.head_dim), normal(TOKENS, spec.kv_heads, spec.dim_v)
    k[3], v[4], k[5], v[6], v[7] = 0.0, 1e-30, 3e4, 5e-41, v[7].abs() + 1
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.randperm(BLOCKS * spec.block_size, generator=generator)[:TOKENS]
    slots[2] = slots[9] = -1
    if spec.rope is None:
        return k, v, slots, WriteExtras()
    angles = 6 * torch.rand(POSITIONS, (spec.rotary_dim or 0) // 2, generator=generator)
    q_weight, k_weight = (0.5 + torch.rand(spec.head_dim, generator=generator) if spec.qk_norm else None for _ in "qk")
    q = normal(TOKENS, spec.q_heads, spec.head_dim).to(dtype)
    positions = torch.randint(0, POSITIONS, (TOKENS,), generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    extras = WriteExtras(None, q, torch.empty_like(q), positions, cos_sin, q_weight, k_weight)
    return k, v, slots, extras


def written(
    write_kv: Callable[..., None], spec: KernelSpec, strided: bool = False
) -> tuple[Cache, torch.Tensor | None]:
    """The cache after a call, and q_out."""
    made = cache(spec, strided=strided)
    k, v, slots, extras = new_tokens(spec)
    write_kv(k, v, made.k, made.v, slots, extras=dataclasses.replace(extras, scales=made.scales))
    return made, extras.q_out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", QUANTISED)
def test_quantised_bits_and_scales_are_the_references(spec: KernelSpec, target: Target) -> None:
    for strided in (False, True):
        got, _ = written(kernel(Op.WRITE_KV, spec, target), spec, strided)
        want, _ = written(ReferenceKernels(spec).write_kv, spec, strided)
        assert_same_bits(got, want)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", ROTATED)
def test_rotated_rows_are_the_references_up_to_one_rounding(spec: KernelSpec, target: Target) -> None:
    got, q = written(kernel(Op.WRITE_KV, spec, target), spec)
    want, q_want = written(ReferenceKernels(spec).write_kv, spec)
    assert q is not None and q_want is not None
    torch.testing.assert_close(q, q_want, rtol=2 * torch.finfo(q.dtype).eps, atol=1e-6)
    if not spec.v_in_k:
        assert torch.equal(bits(got.v), bits(want.v)), "V is not rotated"
    if not spec.cache_dtype.quantised:
        torch.testing.assert_close(got.k, want.k, rtol=2 * torch.finfo(got.k.dtype).eps, atol=1e-6)
        return
    for mine, other in zip(got.tensors()[2:], want.tensors()[2:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-4)  # a zero point is a difference of large numbers
    mine, other = bits(got.k), bits(want.k)
    assert (mine != other).float().mean() < 0.01
    halves = (
        [(mine & 15, other & 15), (mine >> 4, other >> 4)]
        if spec.cache_dtype == "int4"
        else [(mine.view(torch.int8), other.view(torch.int8))]
    )
    assert all((a.short() - b.short()).abs().max() <= 1 for a, b in halves), "neighbours at most"


@pytest.mark.parametrize("spec", [ROTATED[0].values[0], ROTATED[1].values[0]], ids=["neox", "interleaved"])
def test_q_may_be_rotated_in_place(spec: KernelSpec) -> None:
    write_kv = kernel(Op.WRITE_KV, spec, best_cpu())
    made = cache(spec)
    k, v, slots, extras = new_tokens(spec)
    write_kv(k, v, made.k, made.v, slots, extras=extras)
    assert extras.q is not None
    in_place = dataclasses.replace(extras, q_out=extras.q)
    write_kv(k, v, made.k, made.v, slots, extras=in_place)
    assert extras.q_out is not None and torch.equal(extras.q, extras.q_out)


def test_a_position_outside_the_table_is_refused_before_anything_is_written() -> None:
    spec = BASE.replace(rope="neox")
    write_kv = kernel(Op.WRITE_KV, spec, best_cpu())
    for bad in (-1, POSITIONS):
        made, untouched = cache(spec), cache(spec)
        k, v, slots, extras = new_tokens(spec)
        assert extras.positions is not None
        extras.positions[-1] = bad
        with pytest.raises(KernelError, match="positions lie outside cos_sin"):
            write_kv(k, v, made.k, made.v, slots, extras=extras)
        assert_same_bits(made, untouched)


@pytest.mark.parametrize("target", cpu_targets(long=lambda target: target != best_cpu()))
@pytest.mark.parametrize("spec", RUNS)
def test_tokens_side_by_side_are_stored_as_each_alone(spec: KernelSpec, target: Target) -> None:
    write_kv = kernel(Op.WRITE_KV, spec, target)
    k, v, _, extras = new_tokens(spec)
    whole_block, borders = [*range(16, 32), -1, *range(5, 9), 2, 1], [*range(5, 20), -1, *range(20, 23), 3, 2, 1, 0]
    for slots, strided in itertools.product((torch.tensor(whole_block), torch.tensor(borders)), (False, True)):
        together, alone = (cache(spec, strided=strided) for _ in range(2))
        extras = dataclasses.replace(extras, scales=together.scales)
        write_kv(k, v, together.k, together.v, slots, extras=extras)
        for t in range(TOKENS):
            cut = {name: getattr(extras, name)[t : t + 1] for name in ("q", "q_out", "positions")} if spec.rope else {}
            one = dataclasses.replace(extras, scales=alone.scales, **cut)
            write_kv(k[t : t + 1], v[t : t + 1], alone.k, alone.v, slots[t : t + 1], extras=one)
        assert_same_bits(together, alone)


@pytest.mark.parametrize("target", TARGETS)
def test_a_tail_narrower_than_a_vector_is_not_read_past(target: Target) -> None:
    """GCC 12 loads whole where a masked load's other lanes are not used; the gate's guard pages tell."""
    spec = KernelSpec(14, 2, 128, DType.FP32, kv_dtype=DType.INT4, head_dim_v=8, block_size=3)
    library = compile_library(render(variant(Op.WRITE_KV, spec, target)).text, target)
    assert check_library(library, Op.WRITE_KV, target, quick_suite(spec)).reason == ""


def test_a_row_of_zeros_reads_back_as_zeros_and_large_fp8_saturates() -> None:
    spec = BASE.replace(kv_dtype="fp8_e4m3", kv_scale="tensor")
    made = cache(spec)
    assert made.scales is not None
    k, v = torch.full((1, 3, 40), 1e4).bfloat16(), torch.zeros(1, 3, 24).bfloat16()
    write_kv = kernel(Op.WRITE_KV, spec, best_cpu())
    write_kv(k, v, made.k, made.v, torch.tensor([6]), extras=WriteExtras(scales=made.scales))
    assert (made.k[1, 1].float() == 448).all() and (made.v[1, 1].float() == 0).all()


# --- moving blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("spec", MOVED)
def test_copied_blocks_are_equal_and_nothing_else_changes(spec: KernelSpec, strided: bool) -> None:
    pairs = torch.tensor([[0, 5], [0, 3], [8, 1], [2, 7], [6, 4]])
    got, want = (cache(spec, strided=strided) for _ in range(2))
    kernel(Op.COPY_BLOCKS, spec, best_cpu())(got.k, got.v, pairs, scales=got.scales)
    ReferenceKernels(spec).copy_blocks(want.k, want.v, pairs, scales=want.scales)
    assert_same_bits(got, want)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("spec", MOVED)
def test_gathered_rows_are_the_references_and_scatter_is_the_inverse(spec: KernelSpec, strided: bool) -> None:
    blocks = torch.tensor([7, 0, 3, 8, 2])
    source = cache(spec, strided=strided)
    rows, want = allocate_staging(spec, 5), torch.zeros(5, block_bytes(spec) + 8, dtype=torch.uint8)[:, :-8]
    kernel(Op.GATHER_BLOCKS, spec, best_cpu())(source.k, source.v, blocks, rows, scales=source.scales)
    ReferenceKernels(spec).gather_blocks(source.k, source.v, blocks, want, scales=source.scales)
    assert torch.equal(rows, want)
    assert bytes(rows[0])[: bits(source.k[7]).numel()] == bytes(bits(source.k[7]).flatten()), (
        "a row begins with K as it lies"
    )

    got, reference = (cache(spec, seed=5, strided=not strided) for _ in range(2))
    elsewhere = torch.tensor([1, 8, 0, 4, 6])
    kernel(Op.SCATTER_BLOCKS, spec, best_cpu())(got.k, got.v, elsewhere, rows, scales=got.scales)
    ReferenceKernels(spec).scatter_blocks(reference.k, reference.v, elsewhere, want, scales=reference.scales)
    assert_same_bits(got, reference)
    assert torch.equal(bits(got.k[elsewhere]), bits(source.k[blocks]))


@pytest.mark.parametrize("theirs", ["NHD 7", "HND 1", "HDN8_HDN 24", "HDN_HND 3"])
@pytest.mark.parametrize("spec", MOVED)
def test_relayout_moves_every_token_to_its_slot(spec: KernelSpec, theirs: str) -> None:
    layout, size = theirs.split()
    parsed = KVLayout.parse(layout)
    if spec.cache_dtype == "int4" or spec.v_in_k:  # these layouts split what must stay together
        parsed = KVLayout.parse("HND")
    source_spec = spec.replace(layout=parsed, block_size=int(size))
    blocks = -(-BLOCKS * spec.block_size // int(size))
    for strided in (False, True):
        source = cache(source_spec, blocks, seed=3, strided=strided)
        order = torch.randperm(BLOCKS * spec.block_size, generator=torch.Generator().manual_seed(2))
        slots = torch.stack((torch.arange(len(order)), order), dim=1)[:-2]
        slots[4, 0] = slots[6, 1] = -1
        got, want = (cache(spec, strided=not strided) for _ in range(2))
        arguments = (source.k, source.v, slots)
        scales: dict[str, Any] = {"source": source_spec, "source_scales": source.scales}
        kernel(Op.RELAYOUT, spec, best_cpu())(got.k, got.v, *arguments, scales=got.scales, **scales)
        ReferenceKernels(spec).relayout(want.k, want.v, *arguments, scales=want.scales, **scales)
        assert_same_bits(got, want)


def test_relayout_there_and_back_is_the_identity() -> None:
    spec = BASE.replace(kv_dtype="int8", kv_zero=True)
    other = spec.replace(layout=KVLayout.parse("HDN4_HDN"), block_size=9)
    mine, theirs, back = cache(spec, seed=1), cache(other, 5, seed=2), cache(spec, seed=3)
    slots = torch.stack((torch.arange(45), torch.arange(45).flip(0)), dim=1)
    kernel(Op.RELAYOUT, other, best_cpu())(
        theirs.k, theirs.v, mine.k, mine.v, slots, source=spec, scales=theirs.scales, source_scales=mine.scales
    )
    again = slots.flip(1).contiguous()
    kernel(Op.RELAYOUT, spec, best_cpu())(
        back.k, back.v, theirs.k, theirs.v, again, source=other, scales=back.scales, source_scales=theirs.scales
    )
    assert_same_bits(mine, back)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_would_move_outside_the_cache_or_onto_itself_is_refused() -> None:
    made, rows, ids = cache(BASE), allocate_staging(BASE, 2), torch.tensor([0, 1])
    gather, scatter, relayout = (
        kernel(op, BASE, best_cpu()) for op in (Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS, Op.RELAYOUT)
    )
    for bad in (-1, BLOCKS):
        for move in (gather, scatter):
            with pytest.raises(KernelError, match="outside the cache"):
                move(made.k, made.v, torch.tensor([0, bad]), rows)
    with pytest.raises(KernelError, match="block twice"):
        scatter(made.k, made.v, torch.tensor([1, 1]), rows)
    with pytest.raises(KernelError, match=r"staging shape: got \(2, 1919\), expected \(2, 1920\)"):
        gather(made.k, made.v, ids, rows[:, :-1])
    with pytest.raises(KernelError, match="scales: got one, expected none"):
        gather(made.k, made.v, ids, rows, scales=KVScales(torch.ones(1), torch.ones(1)))
    other = cache(BASE, seed=1)
    for slot in ([45, 0], [0, 45], [-2, 0], [0, -2]):
        with pytest.raises(KernelError, match="outside the cache"):
            relayout(made.k, made.v, other.k, other.v, torch.tensor([slot]), source=BASE)
    with pytest.raises(KernelError, match="destination twice"):
        relayout(made.k, made.v, other.k, other.v, torch.tensor([[0, 4], [1, 4]]), source=BASE)
    with pytest.raises(KernelError, match=r"source: got .*h6x6.* but for layout and block size"):
        relayout(made.k, made.v, other.k, other.v, torch.tensor([[0, 4]]), source=BASE.replace(kv_heads=6))


def test_tokens_of_a_dim_major_cache_must_lie_side_by_side() -> None:
    spec = BASE.replace(layout=KVLayout.parse("HDN8"))
    made = cache(spec)
    apart = torch.zeros(BLOCKS, 3, 5, 10, 8).bfloat16()[:, :, :, ::2]
    with pytest.raises(KernelError, match="k_cache token stride: got 16, expected 8"):
        kernel(Op.GATHER_BLOCKS, spec, best_cpu())(apart, made.v, torch.tensor([0]), allocate_staging(spec, 1))
