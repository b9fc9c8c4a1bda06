"""Claims about the cases: what may not be read is poisoned, equal cases are equal, and the borders are all there."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.check import Case, full_suite, quick_suite
from pagegen.check.case import Fault, Poison
from pagegen.check.suite import longest_context, suite_named
from pagegen.check.tensors import flat, materialise, move
from pagegen.errors import CheckError
from pagegen.reference import token_view
from pagegen.spec import KernelSpec, Op, Phase, parse_slug

SLUGS = ["fp32-d8-h3x1-b1-NHD", "bf16-d16-h6x2-b5-HND-lse", "fp16-d16v8-h5x1-b16-HDN8_HDN", "bf16-d8-h2x2-b3-HDN"]


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize("suite", [quick_suite, full_suite])
def test_poison_lies_everywhere_but_in_the_context(slug: str, suite: object) -> None:
    assert callable(suite)
    for case in suite(parse_slug(slug)[0]):
        if case.op is not Op.ATTEND or case.fault or case.poison is not Poison.NAN or case.poisoned != "kv" or case.part or sum(case.context_lens) > 600:
            continue
        tensors = materialise(case)
        layout, size = case.spec.kv_layout, case.spec.block_size
        for order, cache in ((layout.k_order, tensors["k_cache"]), (layout.v_order, tensors["v_cache"])):
            tokens = token_view(order, cache)
            clean = set((~tokens.isnan().any(dim=(2, 3))).flatten().nonzero().flatten().tolist())
            held = {
                int(table[position // size]) * size + position % size
                for table, context in zip(tensors["block_table"], case.context_lens, strict=True)
                for position in range(context)
            }
            assert clean == held
        num_blocks = tensors["k_cache"].shape[0]
        for table, context in zip(tensors["block_table"].tolist(), case.context_lens, strict=True):
            tail = table[-(-context // size) :]
            assert len(tail) >= 2
            assert not any(0 <= block < num_blocks for block in tail)


@pytest.mark.parametrize("slug", SLUGS)
def test_equal_cases_make_equal_tensors_and_seeds_others(slug: str) -> None:
    spec = parse_slug(slug)[0]
    for case in quick_suite(spec)[-30:]:
        first, again = materialise(case), materialise(dataclasses.replace(case))
        assert all(torch.equal(flat(first[name]).view(torch.uint8), flat(again[name]).view(torch.uint8)) for name in first)
    one, other = (materialise(quick_suite(spec, seed=seed)[2]) for seed in (0, 1))
    assert not torch.equal(one["q"], other["q"])


@pytest.mark.parametrize("slug", SLUGS)
def test_the_borders_are_in_the_quick_suite(slug: str) -> None:
    spec = parse_slug(slug)[0]
    cases = [case for case in quick_suite(spec) if case.op is Op.ATTEND and case.fault is None]
    contexts = {context for case in cases for context in case.context_lens}
    b = spec.block_size
    assert {0, 1, b - 1, b, b + 1, 256, 1024, 2048, 2049} <= contexts
    assert {case.threads for case in cases} == {1, 3}
    assert {len(case.query_lens) for case in cases} >= {0, 1, 2}
    assert any(q > c for case in cases for q, c in zip(case.query_lens, case.context_lens, strict=True))
    assert any(0 in case.query_lens and max(case.query_lens) > 1 for case in cases)
    assert {case.poison for case in cases} == set(Poison)
    sizes = [sum(case.context_lens) for case in cases]
    assert any(big > 10 * small for big, small in itertools.pairwise(sizes))  # a small batch after a big one


WINDOW = ["decode at window borders", "prefill over the window", "windows at splits", "window after window"]
TREE = ["draft trees", "mask wider than contexts", "mask of one column", "mask of no column", "mask over splits"]
QUANTISED = ["values that saturate", "small values"]
SCALES = ["refuses scale_zero", "refuses scale_nan"]
ROTATED = ["rotated in place", "rotated in place, strided", "refuses position_negative", "refuses position_past_end"]


@pytest.mark.parametrize(
    ("option", "brings"),
    [
        ({"window": 6}, WINDOW),
        ({"window": 6, "window_right": 2, "causal": False}, WINDOW),
        ({"mask": True}, TREE),
        ({"kv_dtype": "int8"}, QUANTISED),
        ({"kv_dtype": "int4", "kv_zero": True}, QUANTISED),
        ({"kv_dtype": "fp8_e5m2", "kv_scale": "token_head"}, QUANTISED),
        ({"kv_dtype": "fp8_e4m3", "kv_scale": "tensor"}, [*QUANTISED, *SCALES]),
        ({"kv_dtype": "fp8_e4m3", "kv_scale": "head"}, [*QUANTISED, *SCALES]),
        ({"rope": "neox"}, ROTATED),
        ({"deterministic": True}, ["prefill over splits"]),
        ({"window": 3, "mask": True, "rope": "interleaved"}, [*WINDOW, *TREE, *ROTATED]),
        *(({option: value}, []) for option, value in (("soft_cap", 5.0), ("alibi", True), ("sinks", True), ("score_mod", "score * 2"))),
    ],
    ids=lambda value: " ".join(f"{name}={given}" for name, given in value.items()) if isinstance(value, dict) else "",
)
def test_an_option_brings_its_cases(option: dict[str, object], brings: list[str]) -> None:
    """And no case is lost by one; those of scores need none of their own, for every case is drawn with them."""
    plain, fields = KernelSpec(6, 2, 16, block_size=5), {"q_heads": 6, "kv_heads": 2, "head_dim": 16, "block_size": 5}
    names, found = ({case.name for case in quick_suite(spec)} for spec in (plain, KernelSpec.from_dict(fields | option)))
    assert found - names == set(brings)
    assert names <= found


def test_a_deterministic_spec_is_asked_in_parts_and_others_are_not() -> None:
    """A sequence alone, and its prompt in chunks that cover it, hold the bits of the batch."""
    for causal in (True, False):
        cases = [case for case in quick_suite(KernelSpec(6, 2, 16, causal=causal, deterministic=True)) if case.part]
        assert {case.like.name for case in cases if case.like} >= {"decode at split borders", "shared prefix", "prefill chunks"}
        chunks = [(case.part.first, case.part.last) for case in cases if case.part and case.name == "prefill over splits"]
        assert chunks == ([(0, 1), (1, 5), (5, 21)] if causal else [])
    assert not any(case.part for case in quick_suite(KernelSpec(6, 2, 16)))


def test_scores_of_an_option_are_in_the_tensors_of_every_case() -> None:
    spec = KernelSpec(6, 2, 16, alibi=True, sinks=True, mask=True, rope="neox", qk_norm=True)  # type: ignore[arg-type]
    wanted = {Op.ATTEND: {"alibi_slopes", "sinks", "mask"}, Op.WRITE_KV: {"positions", "cos_sin", "q_weight", "k_weight"}}
    for case in quick_suite(spec):
        assert wanted.get(case.op, set()) <= materialise(case).keys()


def test_a_phase_leaves_out_the_others() -> None:
    spec = parse_slug(SLUGS[0])[0]
    for phase in (Phase.DECODE, Phase.PREFILL):
        chosen = [case for case in quick_suite(spec, phase) if case.op is Op.ATTEND and case.fault is None]
        assert chosen
        assert {case.phase for case in chosen} == {phase}
    assert quick_suite(spec, Phase.MIXED) == quick_suite(spec)


def test_the_longest_context_shrinks_for_fat_caches() -> None:
    assert longest_context(parse_slug("bf16-d128-h32x8-b16-NHD")[0]) == 2049
    assert longest_context(parse_slug("fp32-d256-h32x32-b16-NHD")[0]) == 513


@pytest.mark.parametrize("fault", Fault)
def test_every_promised_refusal_has_a_case_in_which_one_thing_is_wrong(fault: Fault) -> None:
    spec = parse_slug(SLUGS[1])[0].replace(rope="neox", kv_dtype="fp8_e4m3", kv_scale="head")
    for case in (case for case in quick_suite(spec) if case.fault is fault):
        good, bad = materialise(case.replace(fault=None)), materialise(case)
        changed = [name for name in good if not torch.equal(flat(good[name]).double().nan_to_num(), flat(bad[name]).double().nan_to_num())]
        assert len(changed) == (0 if fault in (Fault.ARGS_SIZE, Fault.WORKSPACE, Fault.PREFIX_TOO_LONG) else 1)
    assert 1 <= fault.status <= 9
    assert any(case.fault is fault for case in quick_suite(spec))


def test_a_strided_case_has_gaps_everywhere() -> None:
    spec = parse_slug(SLUGS[2])[0]
    case = next(case for case in quick_suite(spec) if case.strided)
    tensors = materialise(case)
    for name in ("out", "q", "k_cache", "v_cache", "block_table"):
        assert flat(tensors[name]).numel() > tensors[name].numel(), name
    assert tensors["q"].stride(0) < tensors["q"].stride(1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3))
def test_a_moved_view_keeps_strides_values_and_gaps(shape: list[int], offset: int) -> None:
    room = torch.arange(offset + 400.0)[offset:].as_strided([n + 2 for n in shape], [49, 7, 1][-len(shape) :])
    view = room[tuple(slice(n) for n in shape)]
    moved = move(view, "cpu")
    assert moved.stride() == view.stride()
    assert torch.equal(flat(moved), flat(view))
    assert moved.data_ptr() != view.data_ptr()


def test_a_case_is_json_and_an_unknown_suite_one_line() -> None:
    case = quick_suite(KernelSpec(3, 1, 8))[0]
    assert json.loads(json.dumps(case.to_dict()))["spec"] == "bf16-d8-h3x1-b16-NHD"
    assert isinstance(case, Case)
    with pytest.raises(CheckError, match="allowed: quick, full"):
        suite_named("slow")
