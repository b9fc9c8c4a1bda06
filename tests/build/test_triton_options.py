"""Claims about what a spec may ask of Triton beyond plain attention: the gate's numbers, interpreted, and the binaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pagegen.build import triton as backend
from pagegen.build.triton import Interpreter
from pagegen.catalog import template_for, variant
from pagegen.check.case import Case, Part
from pagegen.check.compare import check_calls
from pagegen.check.suite import quick_suite
from pagegen.render import Source, render
from pagegen.resources import Resources, gpu_resources
from pagegen.space import Value
from pagegen.spec import KernelSpec, KVLayout, Op, parse_slug
from pagegen.target import parse_target

from ..conftest import Golden

pytestmark = pytest.mark.triton

SCORE_MOD = "where(q_idx - k_idx < 9 and not head == 1, score, min(score, 2 * tanh(score / sqrt(2))) - 0.1 * abs(q_idx - k_idx))"

# By name: fields that differ from the base spec of `small`.
SCORES: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "window of one": {"window": 1, "dtype": "bf16"},
    "two-sided window": {"causal": False, "window": 9, "window_right": 3},
    "right window": {"causal": False, "window_right": 0},
    "soft cap": {"soft_cap": 3.0, "dtype": "fp16"},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask": {"mask": True},
    "free mask": {"mask": True, "causal": False},
    "score_mod": {"score_mod": SCORE_MOD},
    "constant score": {"score_mod": "1"},
    "dropped key": {"score_mod": "where(k_idx == 3, -inf, max(score, exp(log(2.0)) * floor(score)))"},
    "all of them": {"window": 6, "soft_cap": 2.0, "alibi": True, "sinks": True, "mask": True, "score_mod": "score * 1.5"},
}
CACHES: dict[str, dict[str, Any]] = {
    "bf16 for fp32": {"kv_dtype": "bf16"},
    "fp16 for bf16": {"dtype": "bf16", "kv_dtype": "fp16", "layout": "HDN2"},
    "fp32 for fp16": {"dtype": "fp16", "kv_dtype": "fp32"},
    "e4m3": {"kv_dtype": "fp8_e4m3", "dtype": "bf16"},
    "e5m2 by head": {"kv_dtype": "fp8_e5m2", "kv_scale": "head", "layout": "HND", "window": 11},
    "e4m3 by token": {"kv_dtype": "fp8_e4m3", "kv_scale": "token_head", "layout": "HDN8_HDN", "dtype": "fp16"},
    "int8": {"kv_dtype": "int8", "dtype": "bf16"},
    "int8 with zeros": {"kv_dtype": "int8", "kv_zero": True, "layout": "HDN_HDN"},
    "int4": {"kv_dtype": "int4", "head_dim_v": 40, "sinks": True},
    "int4 with zeros": {"kv_dtype": "int4", "kv_zero": True, "layout": "HND_NHD", "dtype": "fp16"},
    "latent": {"q_heads": 5, "kv_heads": 1, "head_dim": 72, "head_dim_v": 64, "v_in_k": True},
    "latent, V is K": {"q_heads": 3, "kv_heads": 1, "head_dim": 40, "head_dim_v": 40, "v_in_k": True, "dtype": "bf16", "window": 7},
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "neox": {"rope": "neox", "dtype": "bf16"},
    "interleaved, normalised": {"rope": "interleaved", "rotary_dim": 18, "qk_norm": True},
    "partial, packed": {"rope": "neox", "rotary_dim": 8, "kv_dtype": "bf16", "layout": "HDN4_HDN"},
    "neox to int4": {"rope": "neox", "kv_dtype": "int4", "qk_norm": True, "dtype": "fp16"},
    "interleaved to int8": {"rope": "interleaved", "kv_dtype": "int8", "kv_zero": True},
    "neox to e4m3": {"rope": "neox", "kv_dtype": "fp8_e4m3", "dtype": "bf16"},
    "latent, rotated": {"rope": "neox", "rotary_dim": 8, "dtype": "bf16", **CACHES["latent"]},
}
ALL = SCORES | CACHES | ROTATIONS

# Others have the same steps and formats, with more.
LATER = {
    *("window", "window of one", "right window", "soft cap", "alibi", "sinks", "mask", "constant score"),
    *("bf16 for fp32", "fp32 for fp16", "e4m3", "int8", "int4", "latent, V is K"),
}

QUICK = {
    Op.ATTEND: (
        *("decode strided", "mixed with empty queries", "shared prefix, prompts"),
        *("prefill over the window", "draft trees", "mask wider than contexts"),
    ),
    Op.WRITE_KV: ("decode tokens", "strided source and cache", "values that saturate", "rotated in place, strided"),
    Op.COPY_BLOCKS: ("many blocks", "strided cache", "no block"),
    Op.GATHER_BLOCKS: ("many blocks", "strided cache"),
    Op.SCATTER_BLOCKS: ("many blocks", "strided cache"),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own: a kernel of an earlier run proves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def interpreter(cache: None) -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def small(name: str, **changes: Any) -> KernelSpec:
    base = {"q_heads": 6, "kv_heads": 2, "head_dim": 24, "dtype": "fp32", "block_size": 5, "lse": True}
    return KernelSpec.from_dict(base | ALL.get(name, {}) | changes)


def source(
    spec: KernelSpec, op: Op = Op.ATTEND, target: str = "cuda:sm_90", knobs: dict[str, Value] | None = None
) -> Source:
    where = parse_target(target)
    return render(variant(op, spec, where, template_for(op, spec, where).space(spec, where).config(knobs or {})))


def failures(interpreter: Interpreter, made: Source, cases: list[Case]) -> list[str]:
    op, spec = made.variant.template.op, made.variant.spec
    kernel = interpreter.load(made.text, made.key, spec, op, made.variant.config.to_dict())
    return [f"{failure.case.label}: {failure.message}" for failure in check_calls({op: kernel}, cases)]


def cases_of(spec: KernelSpec, op: Op, names: tuple[str, ...] | None = None) -> list[Case]:
    """The gate's, those that are refusals or twins of others left out if names are given."""
    cases = [case for case in quick_suite(spec) if case.op is op and case.fault is None]
    return cases if names is None else [case for case in cases if case.name in names and case.like is None]


def in_every_run(names: Iterable[str]) -> list[Any]:
    """The names, with a mark on those of LATER."""
    return [pytest.param(name, marks=pytest.mark.long if name in LATER else []) for name in names]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", in_every_run(SCORES | CACHES))
def test_attend_gives_the_references_numbers(interpreter: Interpreter, name: str) -> None:
    spec = small(name)
    assert failures(interpreter, source(spec), cases_of(spec, Op.ATTEND, QUICK[Op.ATTEND])) == []


@pytest.mark.parametrize("name", in_every_run(ROTATIONS | {name: fields for name, fields in CACHES.items() if "kv_dtype" in fields}))
def test_write_kv_stores_the_references_bits(interpreter: Interpreter, name: str) -> None:
    spec = small(name)
    assert failures(interpreter, source(spec, Op.WRITE_KV), cases_of(spec, Op.WRITE_KV, QUICK[Op.WRITE_KV])) == []


@pytest.mark.parametrize("name", in_every_run(["e4m3 by token", "int8 with zeros", "int4", "bf16 for fp32", "latent"]))
@pytest.mark.parametrize("op", [Op.COPY_BLOCKS, Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS])
def test_blocks_move_with_their_scales(interpreter: Interpreter, op: Op, name: str) -> None:
    spec = small(name)
    assert failures(interpreter, source(spec, op), cases_of(spec, op, QUICK[op])) == []


ROWS = [{}, {"window": 9, "dtype": "bf16"}]


@pytest.mark.parametrize("changes", ROWS, ids=str)
def test_a_deterministic_row_has_the_same_bits_in_any_batch_and_chunk(
    interpreter: Interpreter, changes: dict[str, Any]
) -> None:
    """Of a decode and two prompts: each alone, and the longer one, which is more than a tile, in chunks."""
    spec = small("", deterministic=True, block_size=16, **changes)
    whole = Case("mixed", Op.ATTEND, spec, (1, 5, 29), (33, 21, 60))
    parts = [Part(0, 0, 1), Part(1, 0, 5), Part(2, 0, 13), Part(2, 13, 14), Part(2, 14, 29)]
    shared = [case for case in cases_of(spec, Op.ATTEND) if case.part and case.name.startswith("shared prefix")]
    bases = [case for case in cases_of(spec, Op.ATTEND) if case in {case.like for case in shared}]
    assert len(bases) == 2
    assert failures(interpreter, source(spec), [whole, *(whole.replace(part=part, like=whole) for part in parts), *bases, *shared]) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("changes", ROWS, ids=str)
def test_so_has_each_in_the_gates_batches(interpreter: Interpreter, changes: dict[str, Any]) -> None:
    spec = small("", deterministic=True, block_size=16, **changes)
    cases = [case for case in cases_of(spec, Op.ATTEND) if case.part or case.name in ("prefill over splits", "shared prefix")]
    cases += [case for case in cases_of(spec, Op.ATTEND) if case.name in {case.like.name for case in cases if case.like}]
    assert any(case.part for case in cases)
    assert failures(interpreter, source(spec), [*dict.fromkeys(cases)]) == []


def test_sums_of_the_largest_deterministic_tile_are_interpreted(interpreter: Interpreter) -> None:
    """128 x 128 scores of 128 dims: more elements than Triton compiles, and than any product on a GPU has."""
    spec = small("", deterministic=True, head_dim=128)
    made = source(spec, knobs={"tile_q": 128, "tile_kv": 128})
    assert failures(interpreter, made, cases_of(spec, Op.ATTEND, ("two unfinished pages",))) == []


def test_a_prefix_is_shared_in_one_pass_or_several(interpreter: Interpreter) -> None:
    spec = small("sinks", block_size=16)
    queries, contexts = (1, 3, 1), (560, 600, 544)
    choices: list[dict[str, Value]] = [{"tile_q": 16}, {"split_below": 512}, {"split_below": 0}]
    for knobs in choices:
        case = Case("long prefix", Op.ATTEND, spec, queries, contexts, shared_blocks=34)
        assert failures(interpreter, source(spec, knobs=knobs), [case]) == []


def test_a_group_larger_than_a_tile_is_cut(interpreter: Interpreter) -> None:
    spec = small("latent", q_heads=37)
    cases = [Case("mixed", Op.ATTEND, spec, (1, 5, 0), (9, 12, 3))]
    for tile_q in (16, 32):
        assert failures(interpreter, source(spec, knobs={"tile_q": tile_q}), cases) == []


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("changes", [{"block_size": 16}, {"block_size": 1, "deterministic": True}], ids=["free", "deterministic"])
def test_the_whole_gate_passes_interpreted(interpreter: Interpreter, name: str, changes: dict[str, Any]) -> None:
    spec = small(name, **changes)
    for op in QUICK:
        assert failures(interpreter, source(spec, op), cases_of(spec, op)) == []


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "slug", "fields"),
    [
        (Op.ATTEND, "bf16-d64-h8x2-b16-NHD-kvint4-w128-cap30-sinks", {"kv_zero": True, "score_mod": "score - 0.5 * head"}),
        (Op.ATTEND, "bf16-d576v512-h128x1-b64-NHD", {"v_in_k": True}),
        (Op.WRITE_KV, "bf16-d64-h8x2-b16-NHD-kvfp8_e4m3", {"rope": "neox", "qk_norm": True, "kv_scale": "token_head"}),
        (Op.GATHER_BLOCKS, "bf16-d64-h8x2-b16-HDN8-kvint8", {}),
    ],
)
def test_golden_text(golden: Golden, op: Op, slug: str, fields: dict[str, Any]) -> None:
    spec = _spec(slug, fields)
    golden(f"triton/{op.value}-{slug}-options.py", source(spec, op).text)


def _spec(slug: str, fields: dict[str, Any]) -> KernelSpec:
    """A latent spec has more dims and heads than its slug alone may have."""
    if fields.get("v_in_k"):
        return KernelSpec(128, 1, 576, head_dim_v=512, block_size=64, layout=KVLayout(), v_in_k=True)
    return parse_slug(slug)[0].replace(**fields)


# --- binaries --------------------------------------------------------------------------------------------------------

COMPILED: dict[str, dict[str, Any]] = {
    **{name: SCORES[name] | {"dtype": "bf16"} for name in ("window", "soft cap", "sinks", "mask", "score_mod", "all of them")},
    "e4m3": {"kv_dtype": "fp8_e4m3"},
    "e5m2 by head": {"kv_dtype": "fp8_e5m2", "kv_scale": "head"},
    "int8 with zeros": {"kv_dtype": "int8", "kv_zero": True},
    "int4": {"kv_dtype": "int4"},
    "deterministic": {"deterministic": True},
}
MATRIX_UNITS = {"cuda:sm_80": "HMMA", "cuda:sm_90": "HGMMA", "cuda:sm_100": "UTCMMA", "hip:gfx942": "MFMA"}


def compiled(made: Source) -> dict[str, Resources]:
    return {
        kernel.name: gpu_resources(kernel.target, kernel.binary, kernel.assembly, kernel.num_warps, kernel.shared_memory)
        for kernel in backend.compile_for(made)
    }


def large(name: str) -> KernelSpec:
    return KernelSpec.from_dict({"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"} | COMPILED[name])


def check_binaries(spec: KernelSpec, target: str) -> dict[str, Resources]:
    """Nothing spills, and a prefill tile of 64 rows is on the target's own matrix unit."""
    made = source(spec, target=target)
    found = compiled(made)
    for name, kernel in found.items():
        assert kernel.spills == 0 and kernel.occupancy, f"{spec.slug} {target} {name}: {kernel}"
    prefill = found.get("prefill", found["decode"])
    unit = MATRIX_UNITS[target] if int(made.variant.config.to_dict()["tile_q"]) >= 64 or target.startswith("hip") else "HMMA"
    assert prefill.instructions[unit], f"{spec.slug} {target}: {prefill}"
    assert found["decode"].instructions["load 16 B"] >= 2, f"{spec.slug} {target}: {found['decode']}"
    return found


def test_an_int8_cache_is_read_16_bytes_at_a_time_onto_the_matrix_units() -> None:
    found = check_binaries(large("int8 with zeros"), "cuda:sm_90")
    assert found["prefill"].instructions["HGMMA"] and found["decode"].instructions["load 16 B"] >= 8


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", MATRIX_UNITS)
@pytest.mark.parametrize("name", COMPILED)
def test_options_spill_nothing_and_use_the_matrix_units(name: str, target: str) -> None:
    check_binaries(large(name), target)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("q_heads", [128, 16])
def test_latent_attention_fits_the_large_gpus(q_heads: int, target: str) -> None:
    spec = KernelSpec(q_heads, 1, 576, head_dim_v=512, block_size=64, v_in_k=True)
    for name, kernel in compiled(source(spec, target=target)).items():
        assert kernel.occupancy, f"{q_heads} heads {target} {name} cannot be launched: {kernel}"
        if q_heads == 128 and name != "merge":
            assert kernel.instructions[MATRIX_UNITS[target]], f"{target} {name}: {kernel}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", MATRIX_UNITS)
@pytest.mark.parametrize("op", [Op.WRITE_KV, Op.COPY_BLOCKS, Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS])
def test_the_other_ops_compile_without_spilling(op: Op, target: str) -> None:
    for name in ("neox to int4", "interleaved to int8", "neox to e4m3", "e5m2 by head", "latent, rotated"):
        spec = small(name, dtype="bf16", block_size=16)
        assert {kernel.spills for kernel in compiled(source(spec, op, target)).values()} == {0}, f"{name} {target}"
