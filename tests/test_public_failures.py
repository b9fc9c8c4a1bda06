"""Mistakes that were shipped elsewhere, each with the input that showed it and the right answer.

The reference answers in every run, a built C++ kernel in long ones. `ANSWERS` says where each row of the list of them is
answered; every planted fault of docs/mutants.md that has a *public* entry is one, too.
"""

from __future__ import annotations

import importlib
import math
import mmap
import re
from pathlib import Path

import pytest
import torch

from pagegen.build import build, build_kernels
from pagegen.catalog import variant
from pagegen.errors import KernelError
from pagegen.kernel import AttendExtras, KVScales, PagedKernels, WriteExtras, allocate_cache
from pagegen.reference import ReferenceKernels, token_view
from pagegen.render import render
from pagegen.spec import KernelSpec, Op
from pagegen.target import parse_target
from pagegen.transfer import GatherBlocks, ScatterBlocks, allocate_staging
from tests.test_reference import INF, NAN, Cache, Maker, fp32, make

__all__ = ["make"]  # the fixture: reference, and C++ in long runs

# Rows of kernels: group A, and what kernels have to do with B (memory) and G (models); whose mistake it was, and the tests.
ANSWERS: dict[str, tuple[str, ...]] = {
    "A01 block offsets in 32 bits, ids in 16 (vLLM issue 50427, PR 47671; xformers issue 719)": (
        "test_offsets.test_an_offset_past_31_bits_is_a_positive_number",
        "test_offsets.test_triton_widens_a_block_before_it_multiplies",
        "test_public_failures.test_a_block_two_gibibytes_from_the_start_is_found",
        "test_reference.test_block_ids_past_65536_are_told_apart",
        "test_reference.test_positions_past_32768_are_seen",
    ),
    "A02 unused slots of the last page leak (flash-attention issues 1745, 2374)": (
        "test_reference.test_unused_slots_of_the_last_page_do_not_leak",
    ),
    "A03 empty parts merge to NaN (flashinfer issue 4051, vLLM PR 39148, rocMLIR PR 2371)": (
        "test_reference.test_no_key_at_all_gives_zero_and_minus_infinity",
        "test_public_failures.test_cutting_a_context_into_parts_changes_nothing",
        "test_public_failures.test_a_part_that_sees_nothing_weighs_nothing",
    ),
    "A04 a second sequence within one page is zeros (flashinfer issue 725)": ("test_reference.test_a_second_sequence_shorter_than_a_page",),
    "A05 a window one key too wide (transformers issue 39408, zml PR 763)": ("test_public_failures.test_a_window_counts_the_own_key",),
    "A06 groups that are no power of two, or do not divide (tvm PR 17074, vLLM PR 40792)": (
        "test_reference.test_any_number_of_query_heads_shares_a_kv_head",
        "test_reference.test_heads_that_do_not_divide_are_refused_before_there_is_a_kernel",
    ),
    "A07 the scale of a padded head dim (ipex-llm PR 12619, cudnn-frontend PR 493)": (
        "test_reference.test_the_scale_is_that_of_the_stated_head_dim",
    ),
    "A08 the causal mask from the top left (flash-attention issue 282, sparkinfer issue 3)": (
        "test_reference.test_chunked_prefill_aligns_the_mask_to_the_last_key",
        "test_reference.test_chunkings_of_a_prompt_agree",
    ),
    "A09 sequences without a query (flash-attention issues 1537, 1619)": ("test_reference.test_sequences_without_a_query_are_passed_over",),
    "A10 a slot of -1 is the last one (vLLM PR 43869, issue 57156)": (
        "test_reference.test_padding_slots_write_nothing",
        "test_public_failures.test_padding_rows_neither_change_an_answer_nor_a_block",
    ),
    "A11 scales of an fp8 cache lost on a path (flashinfer issues 1023, 4979; imp PR 1189)": (
        "test_public_failures.test_both_scales_count_on_every_path",
        "test_public_failures.test_a_block_that_went_out_and_came_back_is_the_same",
        "test_public_failures.test_a_scale_that_is_no_scale_is_refused",
    ),
    "B08 children write into a shared block (xllm PR 1984, llama.cpp issue 3802)": (
        "test_public_failures.test_one_source_copied_to_several_destinations_keeps_each",
        "runtime.test_public_failures_b.test_b08_beams_that_part_write_into_blocks_of_their_own",
    ),
    "G01 rotary rows in another order (llama.cpp PR 3364, transformers PR 31788)": (
        "test_public_failures.test_the_two_styles_of_rotation_pair_other_dims",
        "runtime.test_gguf.test_unpermute_restores_the_halves_of_each_head",
        "runtime.test_gguf.test_quantised_q_and_k_and_their_biases_are_unpermuted",
    ),
    "G04 partial rotation of the whole width (pie PR 603, maxtext PR 4742)": (
        "test_public_failures.test_partial_rotation_has_the_angles_of_its_own_width",
    ),
    "G05 a head size that is stated and computed all the same (TensorRT-LLM issue 5912)": (
        "test_reference.test_the_scale_is_that_of_the_stated_head_dim",
        "runtime.test_gguf.test_the_stated_head_size_wins",
    ),
}
LIST = Path(__file__).parents[2] / "shared" / "cases" / "public_failures.md"


def assert_answered(names: tuple[str, ...]) -> None:
    """Whether these tests exist."""
    for name in names:
        module, test = name.rsplit(".", 1)
        assert callable(getattr(importlib.import_module(f"tests.{module}"), test, None)), name


@pytest.mark.parametrize("row", ANSWERS)
def test_a_row_is_answered_by_tests_that_exist(row: str) -> None:
    assert_answered(ANSWERS[row])


@pytest.mark.skipif(not LIST.exists(), reason="needs the list of public failures beside the repository")
def test_every_row_about_kernels_is_answered() -> None:
    listed = set(re.findall(r"^### (A\d+)", LIST.read_text(), re.MULTILINE))
    assert listed
    assert listed <= {row.split()[0] for row in ANSWERS}


# --- softmax in parts (flashinfer issue 4051, vLLM PR 39148, rocMLIR PR 2371) ----------------------------------------


@pytest.mark.parametrize("context", [0, 1, 3, 255, 256, 257, 511, 513, 1025])
def test_cutting_a_context_into_parts_changes_nothing(make: Maker, context: int) -> None:
    """A context shorter than a part, one part and one token, several: the plain mean of V, and the log of their number."""
    spec = fp32(block_size=2)
    blocks = -(-context // 2)
    cache = Cache(spec, blocks + 1)
    values = [float(i % 7) for i in range(context)]
    cache.put(list(range(blocks)), values)
    out, lse = cache.attend(make(spec), [list(range(blocks))], [context], [1])
    mean = sum(values) / context if context else 0.0
    assert out.flatten().tolist() == pytest.approx([mean] * 8, abs=1e-5)
    assert lse.item() == pytest.approx(math.log(context) if context else -INF, rel=1e-6)


def test_a_part_that_sees_nothing_weighs_nothing(make: Maker) -> None:
    """A window behind the first parts: they carry -inf, and V that nobody may look at."""
    spec = fp32(window=3)
    cache = Cache(spec, 300)
    for position in (1197, 1198, 1199):
        token_view(spec.kv_layout.k_order, cache.k)[position // 4, position % 4] = 0.0
        token_view(spec.kv_layout.v_order, cache.v)[position // 4, position % 4] = float(position - 1196)
    out, lse = cache.attend(make(spec), [list(range(300))], [1200], [1])
    assert out.flatten().tolist() == pytest.approx([2.0] * 8, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(3), rel=1e-6)


# --- sliding windows (transformers issue 39408, zml PR 763) ----------------------------------------------------------


@pytest.mark.parametrize(("window", "want"), [(1, 5.0), (2, 4.5), (3, 4.0), (4, 3.5), (5, 3.0), (6, 3.0), (1000, 3.0)])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_window_counts_the_own_key(make: Maker, window: int, want: float, queries: int) -> None:
    spec = fp32(window=window)
    cache = Cache(spec, 2)
    cache.put([1, 0], [1, 2, 3, 4, 5])
    out, _ = cache.attend(make(spec), [[1, 0]], [5], [queries])
    assert out[-1].flatten().tolist() == pytest.approx([want] * 8, abs=1e-6)


# --- padded batches (vLLM PR 43869 and issue 57156) ------------------------------------------------------------------


def test_padding_rows_neither_change_an_answer_nor_a_block(make: Maker) -> None:
    """Fifty steps of three sequences, once padded to eight rows with slots of -1: same outputs, foreign blocks untouched."""
    spec = fp32(q_heads=2, kv_heads=2, block_size=16, lse=False)
    generator = torch.Generator().manual_seed(1)
    kernels = make(spec)
    tables = torch.tensor([[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]], dtype=torch.int32)
    plain, padded = (allocate_cache(spec, 14) for _ in range(2))
    for cache in (*plain, *padded):
        cache[12:] = 3.25
    for step in range(50):
        k, v, q = (torch.randn(8, 2, 8, generator=generator) for _ in range(3))
        slots = torch.tensor([int(row[step // 16]) * 16 + step % 16 for row in tables] + [-1] * 5)
        kernels.write_kv(k[:3], v[:3], *plain, slots[:3])
        kernels.write_kv(k, v, *padded, slots)
        outs = [torch.full((rows, 2, 8), NAN) for rows in (3, 8)]
        lens = torch.full((3,), step + 1, dtype=torch.int32)
        kernels.attend(outs[0], q[:3], *plain, tables, lens, torch.arange(4, dtype=torch.int32))
        kernels.attend(outs[1], q, *padded, tables, lens, torch.arange(4, dtype=torch.int32))
        assert torch.equal(outs[0], outs[1][:3]) and outs[1][3:].isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(plain, padded, strict=True))
    assert all((cache[12:] == 3.25).all() for cache in padded)


# --- scales of an fp8 cache (flashinfer issues 1023 and 4979, imp PR 1189) --------------------------------------------

FP8 = KernelSpec.from_dict(
    {"q_heads": 1, "kv_heads": 1, "head_dim": 16, "block_size": 1, "dtype": "fp32", "kv_dtype": "fp8_e4m3", "scale": 1.0, "lse": True}
)


def fp8_cache(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored K 4 and 0, stored V 2 and 0, in the first two blocks and the first dim; poison elsewhere."""
    k, v = allocate_cache(FP8, blocks)
    for cache, value in ((k, 4.0), (v, 2.0)):
        cache.view(torch.uint8)[:] = 0x7F  # NaN
        cache.view(torch.uint8)[:2] = 0
        cache[0, 0, 0, 0] = value
    return k, v


def scales(k: float = 0.25, v: float = 0.5) -> KVScales:
    return KVScales(torch.tensor([k]), torch.tensor([v]))


def ask(kernels: PagedKernels, caches: tuple[torch.Tensor, torch.Tensor], table: list[int], queries: int, prefix: int = 0) -> float:
    q = torch.zeros(queries, 1, 16)
    q[:, 0, 0] = 1.0
    out, lse = torch.full((queries, 1, 16), NAN), torch.full((queries, 1), NAN)
    lens, cu = torch.tensor([len(table)], dtype=torch.int32), torch.tensor([0, queries], dtype=torch.int32)
    extras = AttendExtras(scales(), shared_prefix_len=prefix)
    kernels.attend(out, q, *caches, torch.tensor([table], dtype=torch.int32), lens, cu, lse=lse, extras=extras)
    assert (out[-1, 0, 1:] == 0).all()
    return float(out[-1, 0, 0])


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_both_scales_count_on_every_path(make: Maker, queries: int, prefix: int) -> None:
    """0.982014 without the scale of K, 1.462117 without that of V; in decode, prefill, and with a shared prefix."""
    assert ask(make(FP8), fp8_cache(4), [0, 1], queries, prefix) == pytest.approx(0.731059, abs=1e-6)


def test_a_block_that_went_out_and_came_back_is_the_same(make: Maker) -> None:
    kernels, staging = make(FP8), allocate_staging(FP8, 2)
    gather: GatherBlocks
    scatter: ScatterBlocks
    if isinstance(kernels, ReferenceKernels):
        gather, scatter = kernels.gather_blocks, kernels.scatter_blocks
    else:
        made = [build(render(variant(op, FP8, parse_target("cpu")))) for op in (Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS)]
        gather, scatter = made  # type: ignore[assignment]  # by their ops
    gather(*fp8_cache(4), torch.tensor([0, 1]), staging, scales=scales())
    elsewhere = fp8_cache(4)
    for cache in elsewhere:
        cache.view(torch.uint8)[:] = 0x7F
    scatter(*elsewhere, torch.tensor([3, 2]), staging, scales=scales())
    assert ask(kernels, elsewhere, [3, 2], 1) == pytest.approx(0.731059, abs=1e-6)


@pytest.mark.parametrize("wrong", [0.0, -1.0, NAN, INF])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_scale_that_is_no_scale_is_refused(make: Maker, wrong: float, which: str) -> None:
    kernels, bad = make(FP8), scales(**{which: wrong})
    row = torch.zeros(1, 1, 16)
    with pytest.raises(KernelError, match="positive, finite"):
        kernels.write_kv(row, row, *fp8_cache(4), torch.tensor([2]), extras=WriteExtras(bad))
    arguments = (torch.tensor([[0]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(KernelError, match="positive, finite"):
        kernels.attend(row.clone(), row, *fp8_cache(4), *arguments, lse=torch.zeros(1, 1), extras=AttendExtras(bad))


# --- offsets past 31 bits (vLLM issue 50427 and PR 47671) ------------------------------------------------------------


@pytest.mark.long
def test_a_block_two_gibibytes_from_the_start_is_found() -> None:
    """Block 2097152 of 1024 one-byte elements; memory that is not touched costs nothing."""
    spec = KernelSpec.from_dict({"q_heads": 1, "kv_heads": 1, "head_dim": 64, "block_size": 16, "dtype": "fp32", "kv_dtype": "int8"})
    blocks = 2097152 + 1
    k, v = (torch.frombuffer(mmap.mmap(-1, blocks * 1024, mmap.MAP_PRIVATE), dtype=torch.int8).view(blocks, 16, 1, 64) for _ in "kv")
    v[-1, 0, 0] = torch.arange(64, dtype=torch.int8)
    one = torch.ones(1, 1, 1).expand(blocks, 16, 1)
    out, q = torch.full((1, 1, 64), NAN), torch.ones(1, 1, 64)
    lens = torch.tensor([1], dtype=torch.int32)
    kernels = build_kernels(spec, parse_target("cpu"))
    table, cu = torch.tensor([[blocks - 1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    kernels.attend(out, q, k, v, table, lens, cu, extras=AttendExtras(KVScales(one, one)))
    assert out.flatten().tolist() == [float(i) for i in range(64)]


# --- copies of a shared block (xllm PR 1984, llama.cpp issue 3802) ---------------------------------------------------


def test_one_source_copied_to_several_destinations_keeps_each(make: Maker) -> None:
    """A parent of six tokens forked to three children: each gets the half-filled block, the full one stays where it is."""
    spec = fp32(block_size=4)
    cache = Cache(spec, 6)
    cache.put([0, 1], [1, 2, 3, 4, 5, 6])
    before = cache.v[0].clone()
    make(spec).copy_blocks(cache.k, cache.v, torch.tensor([[1, 2], [1, 3], [1, 5]]))
    for block in (1, 2, 3, 5):
        assert cache.v[block, :2, 0, 0].tolist() == [5.0, 6.0]
    assert torch.equal(cache.v[0], before) and cache.v[4].isnan().all()


# --- rotary embeddings (pie PR 603, maxtext PR 4742, transformers PR 48652) ------------------------------------------


def test_partial_rotation_has_the_angles_of_its_own_width(make: Maker) -> None:
    """Head dim 8 of which 4 are rotated, position 100: the angle of the second pair is 100 * 10000 ** (-2 / 4) = 1."""
    spec = fp32(rope="neox", rotary_dim=4, lse=False)
    angles = torch.tensor([[100 * 1.0, 100 * 0.01]])
    table = torch.full((101, 4), NAN)
    table[100] = torch.cat((angles.cos(), angles.sin()), -1)
    row = torch.tensor([0.0, 1, 0, 0, 9, 9, 9, 9]).view(1, 1, 8)
    turned = torch.full((1, 1, 8), NAN)
    cache = Cache(spec, 1, filler=0.0)
    extras = WriteExtras(None, row, turned, torch.tensor([100]), table)
    make(spec).write_kv(row, row, cache.k, cache.v, torch.tensor([2]), extras=extras)
    for found in (turned[0, 0], cache.k[0, 2, 0]):
        assert found[:4].tolist() == pytest.approx([0.0, 0.540302, 0.0, 0.841471], abs=1e-6)
        assert torch.equal(found[4:], row[0, 0, 4:])  # bit for bit
    assert torch.equal(cache.v[0, 2, 0], row[0, 0])


@pytest.mark.parametrize(
    ("style", "want"), [("neox", [-5, -6, -7, -8, 1, 2, 3, 4]), ("interleaved", [-2, 1, -4, 3, -6, 5, -8, 7])]
)
def test_the_two_styles_of_rotation_pair_other_dims(make: Maker, style: str, want: list[float]) -> None:
    """Cosines of 0 and sines of 1 turn every pair (a, b) into (-b, a)."""
    spec = fp32(rope=style, lse=False)
    row = torch.arange(1.0, 9.0).view(1, 1, 8)
    quarter = torch.cat((torch.zeros(1, 4), torch.ones(1, 4)), -1)
    turned, cache = torch.full((1, 1, 8), NAN), Cache(spec, 1, filler=0.0)
    kernels = make(spec)
    extras = WriteExtras(None, row, turned, torch.tensor([0]), quarter)
    kernels.write_kv(row, row, cache.k, cache.v, torch.tensor([2]), extras=extras)
    back = torch.full((1, 1, 8), NAN)
    kernels.write_kv(turned, row, cache.k, cache.v, torch.tensor([3]), extras=WriteExtras(None, turned, back, torch.tensor([0]), quarter))
    for found in (turned[0, 0], cache.k[0, 2, 0]):
        assert found.tolist() == want
    assert torch.equal(back, -row) and torch.equal(cache.k[0, 3], -row[0])  # twice a quarter: a half turn
