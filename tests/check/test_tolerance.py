"""Claims about the bounds: arithmetic as kernels do it stays within them, they are not far above it, and what is just
above them is noticed."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagegen.check import Case
from pagegen.check.compare import compare, expected, invoke, written
from pagegen.check.grid import probe
from pagegen.check.pool import Tensors
from pagegen.check.tensors import arguments, materialise
from pagegen.check.tolerance import U32, Bounded, bounded_score_mod, store_tolerance
from pagegen.kernel import NO_ATTEND_EXTRAS, TORCH_DTYPES
from pagegen.reference import ReferenceKernels, evaluate_score_mod
from pagegen.spec import DType, KernelSpec, Op

TILE = 16
HOOK = "where(k_idx < 3, score, score - 0.1 * abs(q_idx - k_idx)) * (head + 1)"
OPTIONS: dict[str, dict[str, object]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {},
    "fp16": {"dtype": "fp16"},
    "soft cap, ALiBi, sinks": {"dtype": "fp32", "soft_cap": 5.0, "alibi": True, "sinks": True},
    "hook": {"dtype": "fp32", "score_mod": HOOK},
    "int8": {"dtype": "fp32", "kv_dtype": "int8", "kv_zero": True},
    "fp8": {"dtype": "fp16", "kv_dtype": "fp8_e4m3", "kv_scale": "head"},
    "window": {"dtype": "fp32", "window": 7, "window_right": 3, "causal": False},
}


def spec_of(name: str) -> KernelSpec:
    return KernelSpec.from_dict({"q_heads": 6, "kv_heads": 2, "head_dim": 24, "block_size": 5, "lse": True} | OPTIONS[name])


def cases_of(spec: KernelSpec) -> list[Case]:
    return [case for case in probe(spec, 0, 1e6) if case.op is Op.ATTEND and not case.far and case.fault is None and case.like is None]


def exp(x: torch.Tensor) -> torch.Tensor:
    """Without subnormal results, which fast ones leave out."""
    found = torch.exp(x)
    return torch.where(found < torch.finfo(x.dtype).smallest_normal, 0.0, found)


def attend_in_tiles(case: Case, tensors: Tensors) -> None:
    """attend as kernels do it: in fp32, a tile of keys at a time under a running maximum, weights rounded to q's dtype."""
    spec, given_ = case.spec, arguments(case, tensors)
    reference, extras = ReferenceKernels(spec), given_.get("extras", NO_ATTEND_EXTRAS)
    scale = spec.softmax_scale if case.scale is None else case.scale
    starts = tensors["cu_seqlens_q"].tolist()
    for s, context in enumerate(tensors["context_lens"].tolist()):
        rows = slice(starts[s], starts[s + 1])
        caches = tensors["k_cache"], tensors["v_cache"], tensors["block_table"][s]
        k, v = (x.float() for x in reference.keys_and_values(*caches, context, extras.scales))
        own = context - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)
        seen = reference.seen(own, context, extras.mask)
        v[~seen.any(0)] = 0.0
        scores = torch.einsum("qhd,khd->qhk", tensors["q"][rows].float(), k) * torch.tensor(scale)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        q_idx, k_idx = own[:, None, None], torch.arange(context)[None, None, :]
        if extras.alibi_slopes is not None:
            scores = scores + extras.alibi_slopes[None, :, None] * (k_idx - q_idx)
        if spec.score_mod is not None:
            scores = evaluate_score_mod(spec.score_mod, scores, q_idx, k_idx, torch.arange(spec.q_heads)[None, :, None]).float()
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        top = torch.full(scores.shape[:2], -math.inf) if extras.sinks is None else extras.sinks.expand(scores.shape[:2])
        total, sums = (top > -math.inf).float(), torch.zeros(*scores.shape[:2], spec.dim_v)
        for t in range(0, context, TILE):
            tile, values = scores[..., t : t + TILE], v[t : t + TILE]
            new = torch.maximum(top, tile.amax(-1))
            shift = new.nan_to_num(neginf=0.0)
            p, alpha = exp(tile - shift[..., None]), exp(top - shift)
            top, total = new, total * alpha + p.sum(-1)
            sums = sums * alpha[..., None] + torch.einsum("qhk,khd->qhd", p.to(TORCH_DTYPES[spec.dtype]).float(), values)
        tensors["out"][rows] = torch.where(total[..., None] > 0, sums / total[..., None], 0.0).to(TORCH_DTYPES[spec.dtype])
        tensors["lse"][rows] = top + torch.log(total)


@functools.cache
def ratios(name: str) -> dict[str, float]:
    """The largest error of `attend_in_tiles` in units of its bound, by output, over the cases of a spec."""
    found = {"out": 0.0, "lse": 0.0}
    for case in cases_of(spec_of(name)):
        tensors, want = materialise(case), expected(case)
        attend_in_tiles(case, tensors)
        assert compare(case, written(case, tensors)) is None, case.label
        for output, bound in want.tolerances.items():
            error = (tensors[output].double() - want.tensors[output].double()).abs()
            promised = bound.isfinite() & (bound > 0) & error.isfinite()
            found[output] = max(found[output], float((error / bound)[promised].amax()) if promised.any() else 0.0)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_arithmetic_stays_within_the_bounds_and_comes_near_them(name: str) -> None:
    """Near: two thirds where rounding to 16 bits rules; a twentieth in fp32, whose errors mostly cancel in so short sums."""
    least = 0.02 if spec_of(name).dtype is DType.FP32 else 0.3
    assert least < ratios(name)["out"] <= 1
    assert 0.05 < ratios(name)["lse"] <= 1


def moved(case: Case, output: str, by: float) -> str | None:
    """The verdict on right outputs but for one element, moved by so many bounds: the one whose dtype shows it best."""
    tensors, want = materialise(case), expected(case)
    invoke(getattr(ReferenceKernels(case.spec), case.op.value), case, tensors)
    exact, bound = want.tensors[output].double(), want.tolerances[output]
    grid = torch.finfo(tensors[output].dtype).eps * exact.abs() / bound
    grid[~(bound.isfinite() & (bound > 0) & exact.isfinite())] = math.inf
    at = tuple(int(i) for i in torch.unravel_index(grid.argmin(), grid.shape))
    tensors[output][at] = float(exact[at] + by * bound[at])
    return compare(case, written(case, tensors))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("output", ["out", "lse"])
def test_an_error_just_above_the_bound_is_noticed_and_one_just_below_is_not(name: str, output: str) -> None:
    case = Case("ragged", Op.ATTEND, spec_of(name), (1, 3, 9), (40, 9, 17))
    for sign in (-1, 1):
        assert moved(case, output, 0.9 * sign) is None
        assert str(moved(case, output, 1.1 * sign)).startswith(f"{output}[")


@pytest.mark.parametrize(("name", "error"), [("fp32", 1e-5), ("bf16", 0.02), ("fp16", 4e-3)])
def test_a_relative_error_of_all_outputs_is_noticed(name: str, error: float) -> None:
    """As a scale, or a sum that lacks a term, makes it: far below what a tolerance of 1e-2 sees in fp32 and fp16."""
    case = Case("ragged", Op.ATTEND, spec_of(name), (1, 3, 9), (40, 9, 17))
    for sign in (-1, 1):
        tensors = materialise(case)
        invoke(ReferenceKernels(case.spec).attend, case, tensors)
        tensors["out"].mul_(1 + sign * error)
        assert "out[" in str(compare(case, written(case, tensors)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.sampled_from(["score * 3.1 - q_idx", "tanh(score / 7) * 20", "exp(score / 9) + k_idx", HOOK, "max(score, -sqrt(k_idx)) / 3"]),
    st.floats(0, 1),
)
@example([5.83963109038081e-41], "tanh(score / 7) * 20", 0.0)  # a subnormal, whose rounding the product makes larger
def test_a_score_carries_its_error_through_every_step(scores: list[float], text: str, share: float) -> None:
    """fp32 evaluation of scores that are off by anything up to their bound ends within the bound of the exact result."""
    exact = torch.tensor(scores, dtype=torch.float64)
    error = 8 * U32 * exact.abs()
    k_idx = torch.arange(len(scores))
    at = {"q_idx": torch.tensor(len(scores)), "k_idx": k_idx, "head": torch.tensor(2)}
    bounded = bounded_score_mod(text, Bounded(exact, error), **at)
    for off in (-share, share):
        found = evaluate_score_mod(text, (exact + off * error).float(), at["q_idx"].float(), k_idx.float(), at["head"].float())
        assert ((found.double() - bounded.value).abs() <= bounded.error + U32 * bounded.value.abs()).all()


def test_a_weight_below_the_normal_numbers_may_be_none() -> None:
    """One key with a score of -90 beside a sink: its weight is subnormal, and 0 where exp has no such numbers."""
    spec = spec_of("fp32").replace(sinks=True)
    case = Case("one key", Op.ATTEND, spec, (1,), (1,))
    tensors = materialise(case)
    key, _ = ReferenceKernels(spec).keys_and_values(tensors["k_cache"], tensors["v_cache"], tensors["block_table"][0], 1, None)
    case = case.replace(scale=-90 / float(tensors["q"][0, 0].double() @ key[0, 0]))
    exact = expected(case).tensors["out"][0, 0]
    assert 0 < exact.abs().max() < torch.finfo(torch.float32).smallest_normal
    attend_in_tiles(case, tensors)
    assert (tensors["out"][0, 0] == 0).all()
    assert compare(case, written(case, tensors)) is None
    tensors["out"][0, 0] = 2.0**-120
    assert str(compare(case, written(case, tensors))).startswith("out[0, 0, ")


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_numbers_below_the_normal_ones_may_be_stored_as_either_neighbour(dtype: DType) -> None:
    least = torch.finfo(TORCH_DTYPES[dtype]).smallest_normal * torch.finfo(TORCH_DTYPES[dtype]).eps
    value = torch.tensor([7.5 * least], dtype=torch.float64)  # the reference goes to 7, arithmetic that is off to 8
    bound = store_tolerance(spec_of("fp16"), dtype, value, torch.zeros(1, dtype=torch.float64), None)
    assert least <= bound.item() < 2 * least


def test_where_nothing_can_be_promised_nothing_is() -> None:
    """Scores beyond fp32's range are infinite in a kernel, and a NaN may follow; within it no bound is infinite."""
    spec = spec_of("fp32")
    case = Case("ragged", Op.ATTEND, spec, (1, 3), (9, 5))
    assert all(bound.isfinite().all() for bound in expected(case).tolerances.values())
    assert expected(dataclasses.replace(case, scale=1e38, gain=100.0)).tolerances["out"].isinf().any()
