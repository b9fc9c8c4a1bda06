"""The gate kills planted faults: each is one edit of a rendered kernel, and the quick suite must notice it.

A mutant whose text no longer stands in the kernel fails its test: it has to be planted anew.
"""

from __future__ import annotations

import functools

import pytest

from pagegen.catalog import template_for, variant
from pagegen.check import CheckReport, check_library, quick_suite
from pagegen.records import Status
from pagegen.render import render
from pagegen.spec import PAGED_OPS, Op, parse_slug
from tests.check.conftest import SCALAR, Builder

SPECS = {
    Op.ATTEND: "fp32-d16-h6x2-b4-NHD-lse",
    Op.WRITE_KV: "bf16-d16v24-h2x2-b5-NHD",
    Op.COPY_BLOCKS: "bf16-d16v24-h2x2-b5-HND",
}
# Small tiles: many borders, and quick to compile.
CONFIG = {"tile_kv": 16, "tile_q": 4, "split_kv": 256, "row_block": 1, "row_block_packed": 2, "pack_rows": 8}

ATTEND = {
    "causal mask one key late": ("std::clamp<int64_t>(position + 1,", "std::clamp<int64_t>(position + 2,"),
    "causal mask one key early": ("std::clamp<int64_t>(position + 1,", "std::clamp<int64_t>(position,"),
    "causal mask from the top left": ("position = seq.context - seq.tokens + first + i;", "position = first + i;"),
    "no mask at the tail of a tile": ("if (seen - i < W) store(s + i, v = keep(v, seen - i, NONE));", ""),
    "weights of unseen tokens left over": ("for (; i < count; i += W) store(s + i, zero());", ""),
    "maximum starts at 0": ("w.m[row] = NONE;", "w.m[row] = 0.0f;"),
    "no guard against a sum of zero": ("set1(l == 0.0f ? 0.0f : 1.0f / l)", "set1(1.0f / l)"),
    "parts merged without their maxima": ("const V weight = exp2(set1(part[DVP] - m));", "const V weight = set1(1.0f);"),
    "last part not merged": ("m != NONE && p < seq.parts; ++p", "m != NONE && p < std::max<int64_t>(1, seq.parts - 1); ++p"),
    "one token lost at every split": ("std::min(from + SPLIT_KV, seq.context)", "std::min(from + SPLIT_KV - 1, seq.context)"),
    "sum not rescaled": ("w.l[row] * w.alpha[row] + sum(total)", "w.l[row] + sum(total)"),
    "output not rescaled": ("set1(w.alpha[row + r])) : zero();", "set1(1.0f)) : zero();"),
    "maximum not subtracted": ("exp2(add(load(s + i), set1(-m)))", "exp2(load(s + i))"),
    "sum of the item before": ("w.l[row] = 0.0f;", ""),
    "output of the item before": ("std::fill(w.o[row], w.o[row] + DVP, 0.0f);", ""),
    "query heads in the wrong order": (
        "first + i, head * GROUP + g)",
        "first + i, g * KV_HEADS + head)",
    ),
    "every query head on KV head 0": ("static_cast<const C*>(a.k_cache) + head * a.k_stride_head", "static_cast<const C*>(a.k_cache)"),
    "block offset in 32 bits": ("k_head + block * a.k_stride_block", "k_head + int32_t(block * a.k_stride_block)"),
    "block offset in 32 unsigned bits": ("v_head + block * a.v_stride_block", "v_head + uint32_t(block * a.v_stride_block)"),
    "block id in 16 bits": ("const int64_t block = table[(t + i) / BLOCK];", "const int64_t block = int16_t(table[(t + i) / BLOCK]);"),
    "scale from the padded head dim": ("set1(a.scale * LOG2E)", "set1(0.25f * LOG2E)"),
    "a block too many read from the table": ("(context + BLOCK - 1) / BLOCK;", "context / BLOCK + 1;"),
    "last page taken as full": ("context = a.context_lens[s];\n  const int64_t parts", "context = (a.context_lens[s] + BLOCK - 1) / BLOCK * BLOCK;\n  const int64_t parts"),
    "table stride taken as its width": ("a.block_table + s * a.block_table_stride;\n  const bool", "a.block_table + s * a.table_width;\n  const bool"),
    "token stride of out assumed": ("token * a.out_stride_token", "token * DV * GROUP * KV_HEADS"),
    "head stride of q assumed": ("head * a.q_stride_head", "head * D"),
    "workspace too small": ("part_rows * PART * int64_t(sizeof(float))", "part_rows * DVP * int64_t(sizeof(float))"),
    "short workspace not refused": ("return PG_E_WORKSPACE;", "{}"),
    "lse in base 2": ("m * LN2 + std::log(l)", "m + std::log2(l)"),
    "negative block ids not refused": ("highest = std::max(highest, uint32_t(table[b]))", "highest = std::max(highest, uint32_t(std::max(0, table[b])))"),
    "older callers not refused": ("if (a.size < sizeof(pg_attend_args)) return PG_E_SIZE;", ""),
    "rows of no sequence written": ("const Workspace ws(a, part_rows);\n  if", "std::fill_n(static_cast<T*>(a.out), a.num_tokens ? 1 : 0, T(0));\n  const Workspace ws(a, part_rows);\n  if"),
}  # fmt: skip
WRITE_KV = {
    "padding written": ("if (slot < 0) continue;", ""),
    "padding written to the last slot": ("if (slot < 0) continue;\n    const int64_t block = slot / BLOCK", "const int64_t block = slot < 0 ? a.num_blocks - 1 : slot / BLOCK"),
    "block offset in 32 bits": ("v_cache + block * a.v_stride_block", "v_cache + int32_t(block * a.v_stride_block)"),
    "head stride of the source assumed": ("t * a.src_v_stride_token + h * a.src_v_stride_head", "t * a.src_v_stride_token + h * DV"),
    "V as long as K": ("put<DV, DV>", "put<D, D>"),
    "V into K's place": ("v_cache + block * a.v_stride_block + in_block * a.v_stride_token", "v_cache + block * a.v_stride_block + in_block * a.k_stride_token"),
    "a slot past the end accepted": (">= a.num_blocks * BLOCK", "> a.num_blocks * BLOCK"),
    "slots below -1 accepted": ("a.slot_mapping[t] < -1 ||", ""),
    "last token lost": ("for (int64_t t = 0; t < a.num_tokens; ++t) {\n    const", "for (int64_t t = 0; t < a.num_tokens - 1; ++t) {\n    const"),
}  # fmt: skip
COPY_BLOCKS = {
    "source and destination exchanged": ("a.pairs[2 * i], a.pairs[2 * i + 1]);\n    v.copy", "a.pairs[2 * i + 1], a.pairs[2 * i]);\n    v.copy"),
    "V not copied": ("v.copy(", "if (false) v.copy("),
    "gaps copied too": ("if (inner_stride == length && outer_stride == inner * length) {", "if (true) {"),
    "last run lost": ("i < outer;", "i < outer - (outer_stride != inner * length);"),
    "block offset in 32 bits": ("to * block_stride * ITEM", "int32_t(to * block_stride * ITEM)"),
    "a block past the end accepted": (">= a.num_blocks", "> a.num_blocks"),
}  # fmt: skip
MUTANTS = [(op, name) for op, mutants in ((Op.ATTEND, ATTEND), (Op.WRITE_KV, WRITE_KV), (Op.COPY_BLOCKS, COPY_BLOCKS)) for name in mutants]
EDITS = {Op.ATTEND: ATTEND, Op.WRITE_KV: WRITE_KV, Op.COPY_BLOCKS: COPY_BLOCKS}


@functools.cache
def text_of(op: Op) -> str:
    spec = parse_slug(SPECS[op])[0]
    config = template_for(op, spec, SCALAR).space(spec, SCALAR).config(CONFIG if op is Op.ATTEND else {})
    return render(variant(op, spec, SCALAR, config)).text


def judge(op: Op, text: str, build_text: Builder) -> CheckReport:
    spec = parse_slug(SPECS[op])[0]
    return check_library(build_text(text), op, SCALAR, quick_suite(spec), timeout=10)


@pytest.mark.parametrize("op", PAGED_OPS)
def test_the_kernel_as_it_is_passes(op: Op, build_text: Builder) -> None:
    assert judge(op, text_of(op), build_text) == CheckReport(Status.PASSED, sum(case.op is op for case in quick_suite(parse_slug(SPECS[op])[0])))


@pytest.mark.parametrize(("op", "name"), MUTANTS, ids=[f"{op.value}: {name}" for op, name in MUTANTS])
def test_a_planted_fault_is_noticed(op: Op, name: str, build_text: Builder) -> None:
    before, after = EDITS[op][name]
    assert before in text_of(op), "the mutant no longer applies: plant it anew"
    report = judge(op, text_of(op).replace(before, after), build_text)
    assert not report.passed
    assert report.failures[0].message
