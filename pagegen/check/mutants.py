"""Planted faults that prove the gate: each is a search-and-replace in one rendered C++ kernel that must match exactly once.

Most are the ghost of a bug that somebody shipped; `public` says whose. tests/check/test_mutants.py has the gate kill them,
scripts/mutants.py writes docs/mutants.md: which case kills which, and what one comparison on random data would have seen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..catalog import Variant, template_for
from ..errors import CheckError
from ..render import Source, render
from ..spec import KernelSpec, Op
from ..target import Target

# Small tiles: many borders, and quick to compile.
CONFIG = {"tile_kv": 16, "tile_q": 4, "split_kv": 256, "row_block": 1, "row_block_packed": 2, "pack_rows": 8}

_BASE: dict[str, Any] = {"q_heads": 6, "kv_heads": 2, "head_dim": 16, "block_size": 4, "dtype": "fp32", "lse": True}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"window": 6, "soft_cap": 20.0, "alibi": True, "sinks": True},
    "tree": {"mask": True, "causal": False, "window": 9, "window_right": 3},
    "deterministic": {"deterministic": True, "window": 300},
    "hook": {"score_mod": "where(k_idx < 3, score, score - 0.5 * (q_idx - k_idx) * (head + 1))"},
    "fp8": {"kv_dtype": "fp8_e4m3", "kv_scale": "head"},
    "int8": {"kv_dtype": "int8", "kv_zero": True},
    "int4": {"kv_dtype": "int4", "head_dim": 24},
    "rope": {"dtype": "bf16", "rope": "neox", "rotary_dim": 8, "qk_norm": True},
    "wide": {"dtype": "bf16", "head_dim_v": 24, "block_size": 5},
    "hdn": {"dtype": "bf16", "head_dim_v": 24, "block_size": 16, "layout": "HDN2_HDN"},
    "hnd": {"dtype": "bf16", "head_dim_v": 24, "block_size": 5, "layout": "HND"},
    "hnd int8": {"kv_dtype": "int8", "kv_zero": True, "layout": "HND"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One planted fault: `before` stands once in the kernel of `op` for `spec` (a key of SPECS), and becomes `after`."""

    name: str
    op: Op
    spec: str
    before: str
    after: str
    public: str = ""  # where the same mistake was made in public; empty: our own

    def kernel_spec(self) -> KernelSpec:
        """The spec whose kernel it is planted in."""
        return KernelSpec.from_dict(_BASE | SPECS[self.spec])

    def healthy(self, target: Target) -> Source:
        """The kernel as it is."""
        return _healthy(self.op, self.spec, target)

    def planted(self, target: Target) -> Source:
        """The kernel with the fault. Raises CheckError unless `before` stands in it exactly once."""
        source = self.healthy(target)
        found = source.text.count(self.before)
        if found != 1:
            raise CheckError(f"mutant {self.name!r} matches {found} times in {self.op.value} for {self.spec}; plant it anew")
        return dataclasses.replace(source, text=source.text.replace(self.before, self.after))


@functools.lru_cache(maxsize=64)
def _healthy(op: Op, name: str, target: Target) -> Source:
    spec = KernelSpec.from_dict(_BASE | SPECS[name])
    template = template_for(op, spec, target)
    config = template.space(spec, target).config(CONFIG if op is Op.ATTEND else {})
    return render(Variant(spec, target, template, config))


def _attend(spec: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    return tuple(Mutant(row[0], Op.ATTEND, spec, *row[1:]) for row in rows)


_ATTEND = (
    *_attend(
        "plain",
        ("causal mask one key late", "std::clamp<int64_t>(position + 1,", "std::clamp<int64_t>(position + 2,", "flash-attention#436"),
        ("causal mask one key early", "std::clamp<int64_t>(position + 1,", "std::clamp<int64_t>(position,"),
        ("causal mask from the top left", "position = seq.context - seq.tokens + first + i;", "position = first + i;", "flash-attention#282"),
        ("no mask at the tail of a tile", "if (seen - i < W) store(s + i, v = keep(v, seen - i, NONE));", "", "flash-attention#1745"),
        ("weights of unseen tokens left over", "for (; i < count; i += W) store(s + i, zero());", "", "vllm#936"),
        ("keys past the context read and weighted 0", "count = int(std::clamp<int64_t>(range.to - t, 0, length));", "count = int(std::clamp<int64_t>((range.to - t + BLOCK - 1) / BLOCK * BLOCK, 0, length));", "vllm#641"),
        ("maximum starts at 0", "  w.m[row] = NONE;", "  w.m[row] = 0.0f;", "flashinfer#4401"),
        ("a row without keys divides by 0", "set1(l == 0.0f ? 0.0f : 1.0f / l)", "set1(1.0f / l)", "rocMLIR#2371"),
        ("a row without keys has a finite lse", "l == 0.0f ? NONE : m * LN2", "l == 0.0f ? -50000.0f : m * LN2", "flashinfer#4452"),
        ("lse in base 2", "m * LN2 + std::log(l)", "m + std::log2(l)", "flashinfer#50"),
        ("parts merged without their maxima", "weight = exp2(set1(m - highest));", "weight = set1(1.0f);", "flashinfer#58"),
        ("last part not merged", "for (int64_t p = 0; p < seq.parts; ++p) {", "for (int64_t p = 0; p < std::max<int64_t>(1, seq.parts - 1); ++p) {", "aiter#4420"),
        ("one token lost at every split", "to = std::min(from + SPLIT_KV, seq.context);", "to = std::min(from + SPLIT_KV - 1, seq.context);", "flashinfer#3890"),
        ("sum not rescaled", "mul(w.total[row], alpha)", "w.total[row]"),
        ("output not rescaled", "set1(w.alpha[row + r])) : zero();", "set1(1.0f)) : zero();"),
        ("maximum not subtracted", "exp2(add(load(s + i), m))", "exp2(load(s + i))", "flashinfer#4401"),
        ("sum of the item before", "  w.total[row] = zero();\n", "", "flashinfer#4002"),
        ("maximum of the first tile kept", "if (any_above(highest, w.m[row])) {", "if (w.m[row] == NONE && any_above(highest, NONE)) {"),
        ("output of the item before", "  std::fill(w.o[row], w.o[row] + DVP, 0.0f);\n", "", "triton#9230"),
        ("query heads in the wrong order", "first + i, head * GROUP + g)", "first + i, g * KV_HEADS + head)", "tvm#17074"),
        ("every query head on KV head 0", "static_cast<const C*>(a.k_cache) + head * a.k_stride_head", "static_cast<const C*>(a.k_cache)", "tvm#17074"),
        ("a group padded to a power of two", "int row = (at + i) * GROUP + g;", "int row = std::min(ROWS - 1, (at + i) * 4 + g);", "vllm#40792"),
        ("block offset in 32 bits", "k_head + block * a.k_stride_block", "k_head + int32_t(block * a.k_stride_block)", "vllm#47671"),
        ("block offset in 32 unsigned bits", "v_head + block * a.v_stride_block", "v_head + uint32_t(block * a.v_stride_block)", "vllm#50427"),
        ("block id in 16 bits", "const int64_t block = table[(t + i) / BLOCK];", "const int64_t block = int16_t(table[(t + i) / BLOCK]);", "xformers#719"),
        ("scale from a padded head dim", "set1(a.scale * LOG2E)", "set1(0.17677669f * LOG2E)", "ipex-llm#12619"),
        ("scale forgotten", "set1(a.scale * LOG2E)", "set1(0.25f * LOG2E)", "cudnn-frontend#493"),
        ("a block too many read from the table", "(context + BLOCK - 1) / BLOCK;", "context / BLOCK + 1;", "vllm#53856"),
        ("last page taken as full", "context = a.context_lens[s];\n  if (tokens", "context = (a.context_lens[s] + BLOCK - 1) / BLOCK * BLOCK;\n  if (tokens", "vllm#936"),
        ("last page length of the first sequence for all", "tokens = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s], context = a.context_lens[s];\n  if", "tokens = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s], context = std::min(a.context_lens[s], a.context_lens[0]);\n  if", "flashinfer#725"),
        ("one query a sequence assumed", "q_row(a, a.cu_seqlens_q[s] + first + i,", "q_row(a, seq.tokens == 1 ? s : a.cu_seqlens_q[s] + first + i,", "flash-attention#1537"),
        ("table stride taken as its width", "void run(Scratch& w, const pg_attend_args& a, int64_t s, int64_t head, int heads, int rows, Range range) {\n  const int32_t* table = a.block_table + s * a.block_table_stride;", "void run(Scratch& w, const pg_attend_args& a, int64_t s, int64_t head, int heads, int rows, Range range) {\n  const int32_t* table = a.block_table + s * a.table_width;"),
        ("token stride of out assumed", "token * a.out_stride_token", "token * DV * GROUP * KV_HEADS"),
        ("head stride of q assumed", "head * a.q_stride_head", "head * D"),
        ("workspace too small", "part_rows * PART * int64_t(sizeof(float))", "part_rows * DVP * int64_t(sizeof(float))", "flashinfer#4430"),
        ("short workspace not refused", "return PG_E_WORKSPACE;", "{}", "flashinfer#5176"),
        ("negative block ids not refused", "highest = std::max(highest, uint32_t(table[b]))", "highest = std::max(highest, uint32_t(std::max(0, table[b])))"),
        ("older callers not refused", "if (a.size < sizeof(pg_attend_args)) return PG_E_SIZE;", ""),
        ("rows of no sequence written", "Workspace ws(a, part_rows);\n  if", "std::fill_n(static_cast<T*>(a.out), a.num_tokens ? 1 : 0, T(0));\n  Workspace ws(a, part_rows);\n  if", "vllm#57156"),
        ("threads share a scratch", "Scratch& w = ws.scratch[omp_get_thread_num()];", "Scratch& w = ws.scratch[0];", "openvino#30692"),
        ("shared prefix read twice", "return {tokens, context, shared, from, shared + std::max<int64_t>(1, parts_of(context) - from / SPLIT_KV)};", "return {tokens, context, shared, 0, shared + parts_of(context)};"),
        ("shared prefix of the last sequence's rows only", "f(i, s, sequence(a, s), first + i - ws.first_sharing[s]);", "f(i, a.num_seqs - 1, sequence(a, a.num_seqs - 1), 0), (void)s;"),
        ("tables that differ accepted as a prefix", "if (!std::equal(table, table + a.shared_prefix_len / BLOCK, a.block_table)) return PG_E_PREFIX;", ""),
    ),
    *_attend(
        "scores",
        ("window one token too wide", "w.first[row] = std::max<int64_t>(0, position + 1 - 6);", "w.first[row] = std::max<int64_t>(0, position - 6);", "transformers#39408"),
        ("window one token too narrow", "w.first[row] = std::max<int64_t>(0, position + 1 - 6);", "w.first[row] = std::max<int64_t>(0, position + 2 - 6);", "openvino#30714"),
        ("window ignored in decode", "  std::fill(s, s + std::clamp<int64_t>(w.first[row] - tile.t, 0, seen), NONE);", "  if (w.position[row] + 1 < w.limit[row]) std::fill(s, s + std::clamp<int64_t>(w.first[row] - tile.t, 0, seen), NONE);", "mistral.rs#2094"),
        ("window of the last row for all", "std::max(range.from, *std::min_element(w.first, w.first + rows));", "std::max(range.from, *std::max_element(w.first, w.first + rows));", "flashinfer#4992"),
        ("window cut from the split by the newest row", "from = std::max(from, context - tokens + 1 - 6);", "from = std::max(from, context - 6);", "vllm#4405"),
        ("an empty part is merged", "  if (highest == NONE) return;\n", "", "vllm#39148"),
        ("soft cap not multiplied back", "x = 20.0f * steps::tanh(x * 0.05f);", "x = steps::tanh(x * 0.05f);"),
        ("soft cap after ALiBi", "    x = 20.0f * steps::tanh(x * 0.05f);\n    x += a.alibi_slopes[query_head] * float(key - position);", "    x += a.alibi_slopes[query_head] * float(key - position);\n    x = 20.0f * steps::tanh(x * 0.05f);"),
        ("tanh by 1 - 2 / (e^2x + 1), overflow included", "e = exp(-2.0f * size), square", "e = 1.0f / std::exp(2.0f * x), square"),
        ("ALiBi by the KV head", "a.alibi_slopes[query_head]", "a.alibi_slopes[query_head / GROUP]"),
        ("ALiBi from the end of the context", "float(key - position);", "float(key - int(w.limit[0]) + 1);"),
        ("sink not scaled to base 2", "const float sink = a.sinks[head] * LOG2E", "const float sink = a.sinks[head]"),
        ("sink left out of the maximum", "highest = std::max(m, sink);", "highest = m == NONE ? sink : m;"),
        ("sink added once a part", "  part[DVP + 1] = w.l[row];", "  part[DVP + 1] = w.l[row] + (w.m[row] == NONE ? 0.0f : 0.25f);"),
    ),
    *_attend(
        "tree",
        ("a row without keys subtracts -inf from -inf", "w.m[row] == NONE ? 0 : seen_of", "seen_of", "flashinfer#4051"),
        ("mask aligned to the left", "w.mask_from[row] = seq.context - a.mask_width;", "w.mask_from[row] = 0;", "flash-attention#282"),
        ("mask aligned to the rows", "w.mask_from[row] = seq.context - a.mask_width;", "w.mask_from[row] = seq.context - seq.tokens;"),
        ("mask row of the sequence, not of the batch", "w.token[row] = a.cu_seqlens_q[s] + first + i;", "w.token[row] = first + i;"),
        ("mask row stride taken as its width", "w.token[row] * a.mask_stride_token", "w.token[row] * a.mask_width"),
        ("mask read by its lowest bit", " ? s[i] : NONE", " & 1 ? s[i] : NONE"),
        ("columns before the context read", "std::clamp<int64_t>(-column, 0, seen)", "std::clamp<int64_t>(-column, 0, 0)"),
        ("right window one key short", "position + 1 + 3, 0", "position + 3, 0", "zml#763"),
        ("right window taken as causal", "position + 1 + 3, 0", "position + 1, 0", "flashinfer#1368"),
    ),
    *_attend(
        "deterministic",
        ("splits counted from the shared prefix", "a.shared_prefix_len / SPLIT_KV * SPLIT_KV;", "a.shared_prefix_len;", "sglang#10417"),
        ("tiles begin where the window does", "from = range.from / TILE_KV * TILE_KV;", "from = range.from;", "flash-attention#1897"),
        ("tiles are packed where a batch has many rows", "packed = GROUP >= PACK_ROWS;", "packed = rows >= PACK_ROWS;", "vllm#58131"),
        ("prefill does not split like decode", "from < w.limit[rows - 1]; from += SPLIT_KV) {\n    if (from + SPLIT_KV <= w.first[0]) continue;\n    run(w, a, s, head, heads, rows, {from, std::min(from + SPLIT_KV, seq.context)});", "from < 1; ++from) {\n    run(w, a, s, head, heads, rows, {from, seq.context});", "pegainfer#613"),
        ("values before the window weighted with 0", "for (int i = tile.hidden;", "for (int i = 0;"),
    ),
    *_attend(
        "hook",
        ("query position of the hook counts in the batch", "score_mod(x, float(position),", "score_mod(x, float(row / GROUP),", "sparkinfer#3"),
        ("key position of the hook counts in the tile", "key = first + i;", "key = i;"),
        ("head of the hook counts in its group", "float(query_head));", "float(query_head % GROUP));"),
        ("hook sees scores in base 2", "const V scale = set1(a.scale);", "const V scale = set1(a.scale * LOG2E);"),
    ),
    *_attend(
        "fp8",
        ("scale of K ignored", " * a.k_scale[head * a.k_scale_stride_head]", "", "flashinfer#1023"),
        ("scale of V ignored", " * a.v_scale[head / GROUP * a.v_scale_stride_head]", "", "flashinfer#4979"),
        ("scale of V by the query head", "a.v_scale[head / GROUP * a.v_scale_stride_head]", "a.v_scale[head % KV_HEADS * a.v_scale_stride_head]", "flashinfer#3617"),
        ("one scale for all heads", "a.k_scale[head * a.k_scale_stride_head]", "a.k_scale[0]", "vllm#11906"),
        ("e4m3 widened with the bias of e5m2", "return 256.0f * widen", "return 128.0f * widen"),
    ),
    *_attend(
        "int8",
        ("zero point of K ignored", "(x - w.q_sum[row] * tile.k_zero[i])", "x"),
        ("zero point of V ignored", "zeros = fma(weight, load(tile.v_zero + i), zeros);", ""),
        ("zero points of V not rescaled", "zeros = mul(w.zeros[row], alpha)", "zeros = w.zeros[row]"),
        ("scales of V in the softmax's sum", "total = add(total, p);", "total = add(total, weight);"),
        ("scales of unseen tokens multiplied with 0", "  std::fill(tile.v_scale + tile.count, tile.v_scale + up(tile.count, W), 0.0f);", "", "flashinfer#941"),
        ("scale of the block's first token for all", "k_scale + j * a.k_scale_stride_token", "k_scale", "flashinfer#3617"),
        ("scales of an item's first head for all", "tile.k_scales[i] + h * a.k_scale_stride_head", "tile.k_scales[i]"),
        ("scale offset in 32 bits", "int64_t k_scale = block * a.k_scale_stride_block", "int64_t k_scale = int32_t(block * a.k_scale_stride_block)", "SageAttention#386"),
        ("stored bytes read as unsigned", "static inline float widen(int8_t value) { return float(value); }", "static inline float widen(int8_t value) { return float(uint8_t(value)); }"),
    ),
    *_attend(
        "int4",
        ("halves of a byte exchanged", "d < up(H, W) ? low : high", "d < up(H, W) ? high : low"),
        ("pairs taken as neighbours", "d < up(H, W) ? low : high", "d % (2 * W) < W ? low : high"),
        ("halves of q taken as padded", "return load_dims(p + d / up(H, W) * H + in_half,", "return load_dims(p + d / up(H, W) * up(H, W) + in_half,"),
        ("offset of 7", "set1(-8.0f)", "set1(-7.0f)"),
    ),
)  # fmt: skip


def _others(op: Op, spec: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    return tuple(Mutant(row[0], op, spec, *row[1:]) for row in rows)


_OTHERS = (
    *_others(
        Op.WRITE_KV,
        "wide",
        ("padding written", "if (a.slot_mapping[t] >= 0) write(a, t);", "write(a, t);", "vllm#43869"),
        ("padding written to the last slot", "if (a.slot_mapping[t] >= 0) write(a, t);", "const int64_t last = a.num_blocks * BLOCK - 1;\n    auto b = a;\n    b.slot_mapping = &last - t;\n    write(a.slot_mapping[t] < 0 ? b : a, t);", "vllm#43869"),
        ("block offset in 32 bits", "v_cache + block * a.v_stride_block", "v_cache + int32_t(block * a.v_stride_block)", "fla#1080"),
        ("head stride of the source assumed", "v + t * a.src_v_stride_token + h * a.src_v_stride_head", "v + t * a.src_v_stride_token + h * DV"),
        ("V as long as K", "DV * sizeof(C)", "D * sizeof(C)"),
        ("V into K's place", "v_cache + block * a.v_stride_block + in_block * a.v_stride_token", "v_cache + block * a.v_stride_block + in_block * a.k_stride_token"),
        ("a slot past the end accepted", ">= a.num_blocks * BLOCK", "> a.num_blocks * BLOCK"),
        ("slots below -1 accepted", "a.slot_mapping[t] < -1 ||", ""),
        ("last token lost", "for (int64_t t = 0; t < a.num_tokens; ++t) {\n    if (a.slot_mapping[t] >= 0)", "for (int64_t t = 0; t < a.num_tokens - 1; ++t) {\n    if (a.slot_mapping[t] >= 0)"),
    ),
    *_others(
        Op.WRITE_KV,
        "hdn",
        ("a run across the end of its block", "slot % BLOCK + n < BLOCK && ", ""),
    ),
    *_others(
        Op.WRITE_KV,
        "rope",
        ("rotary width of the whole head", "row[i + HALF] = b * cos[i] + a * sin[i];\n  }", "row[i + HALF] = b * cos[i] + a * sin[i];\n  }\n  for (int i = 2 * HALF; i < D; ++i) row[i] *= cos[0];", "maxtext#4742"),
        ("pairs interleaved", "const float a = row[i], b = row[i + HALF];", "const float a = row[2 * i], b = row[2 * i + 1];", "llama.cpp#3364"),
        ("rotation the other way", "row[i] = a * cos[i] - b * sin[i];", "row[i] = a * cos[i] + b * sin[i];"),
        ("position taken from the row", "int64_t t) {\n  const float *cos = a.cos_sin + a.positions[t] *", "int64_t t) {\n  const float *cos = a.cos_sin + t *", "sparkinfer#3"),
        ("sines of the position after", "*sin = cos + HALF;\n  alignas(64) float row[ROW];\n  for (int64_t h = 0; h < KV_HEADS", "*sin = cos + HALF + (t & 1);\n  alignas(64) float row[ROW];\n  for (int64_t h = 0; h < KV_HEADS"),
        ("q of padding rows not rotated", "for (int64_t h = 0; h < Q_HEADS; ++h) {", "for (int64_t h = 0; h < (a.slot_mapping[t] < 0 ? 0 : Q_HEADS); ++h) {"),
        ("k normalised with q's weight", "normalise(row, a.k_weight, a.eps);", "normalise(row, a.q_weight, a.eps);"),
        ("norm after the rotation", "    normalise(row, a.q_weight, a.eps);\n    rotate(row, cos, sin);", "    rotate(row, cos, sin);\n    normalise(row, a.q_weight, a.eps);"),
        ("eps outside the root", "std::sqrt(sum(squares) / float(D) + eps)", "(std::sqrt(sum(squares) / float(D)) + 3e-3f)"),
        ("a position past the table accepted", ">= a.max_positions", "> a.max_positions"),
    ),
    *_others(
        Op.WRITE_KV,
        "int8",
        ("rounding half away from zero", "int(std::nearbyint(", "int(std::round("),
        ("a row of zeros divides by 0", "return scale >= 0x1p-126f ? 1.0f / scale : 0.0f;", "return 1.0f / scale;"),
        ("range without 0 in it", "V up = zero(), down = zero();", "V up = set1(-INFINITY), down = set1(-INFINITY);"),
        ("scale of V where K's belongs", "scale_of<D>(k + t * a.src_k_stride_token + h * a.src_k_stride_head", "scale_of<DV>(v + t * a.src_v_stride_token + h * a.src_v_stride_head"),
        ("scales not written for the last head", "scale_of<DV>(v +", "if (h + 1 < KV_HEADS) scale_of<DV>(v +", "kekzl/imp#1189"),
    ),
    *_others(
        Op.WRITE_KV,
        "fp8",
        ("values beyond the type become NaN", "const float size = std::fabs(value) < most ? std::fabs(value) : most;", "const float size = std::fabs(value) < 1e30f ? std::fabs(value) : most;", "ROCm/vllm#317"),
        ("multiplied by the scale", "const float factor = inverse(scale);", "const float factor = scale;", "ROCm/vllm#317"),
        ("one scale for all heads", "a.v_scale[h * a.v_scale_stride_head]);", "a.v_scale[0]);", "vllm#11906"),
        ("rounding towards zero", "(1u << (DROPPED - 1)) - 1 + (wide >> DROPPED & 1) - ", "-"),
    ),
    *_others(
        Op.WRITE_KV,
        "int4",
        ("high half first", "step(d, n), step(d + N / 2, n)", "step(d + N / 2, n), step(d, n)"),
        ("neighbours share a byte", "store_nibbles(to + d, step(d, n), step(d + N / 2, n), n);", "for (int i = 2 * d; i < 2 * (d + n); i += 2) to[i / 2] = uint8_t(whole(row[i] * factor + 8, 0, 15) | whole(row[i + 1] * factor + 8, 0, 15) << 4);"),
    ),
    *_others(
        Op.COPY_BLOCKS,
        "hnd",
        ("source and destination exchanged", "v_cache.copy(a.v_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);", "v_cache.copy(a.v_cache, a.pairs[2 * i + 1], a.pairs[2 * i]);", "xllm#1984"),
        ("V not copied", "    v_cache.copy(a.v_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);\n", "", "xllm#1984"),
        ("gaps copied too", "if (inner_stride == length && outer_stride == inner * length) {", "if (true) {"),
        ("last run lost", "for (int64_t j = 0; j < inner; ++j) {", "for (int64_t j = 0; j < inner - 1; ++j) {"),
        ("block offset in 32 bits", "to * block_stride * ITEM", "int32_t(to * block_stride * ITEM)", "vllm#47671"),
        ("a block past the end accepted", ">= a.num_blocks", "> a.num_blocks"),
        ("one destination a source", "    k_cache.copy(a.k_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);", "    if (i == 0 || a.pairs[2 * i] != a.pairs[2 * i - 2]) k_cache.copy(a.k_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);", "llama.cpp#3802"),
    ),
    *_others(
        Op.COPY_BLOCKS,
        "hnd int8",
        ("scales stay behind", "    k_scale.copy(a.k_scale, a.pairs[2 * i], a.pairs[2 * i + 1]);\n", "", "kekzl/imp#1189"),
    ),
    *_others(
        Op.GATHER_BLOCKS,
        "hnd int8",
        ("scales lost on the way out", "    v_scale.stage(a.v_scale, a.blocks[i], row);\n", "", "kekzl/imp#1189"),
        ("row stride taken as its length", "i * a.staging_stride", "i * (k_cache.bytes() + v_cache.bytes() + 4 * k_scale.bytes())"),
    ),
    *_others(
        Op.SCATTER_BLOCKS,
        "hnd int8",
        ("V before K", "    row += k_cache.bytes();\n    v_cache.stage", "    row += 0;\n    v_cache.stage"),
    ),
    *_others(
        Op.RELAYOUT,
        "hnd int8",
        ("block size of the source assumed", "from / a.source_block_size, from_token = from % a.source_block_size", "from / BLOCK, from_token = from % BLOCK"),
        ("skipped pairs written", "if (from < 0 || to < 0) continue;", "if (to < 0) continue;"),
        ("zero points stay behind", "      a.v_zero[v_to] = a.source_v_zero[v_from];\n", ""),
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (*_ATTEND, *_OTHERS)
