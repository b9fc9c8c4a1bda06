"""attend's options in C++: each agrees with the reference on every ISA, and what they promise beyond numbers holds."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from pagegen.build import build
from pagegen.build.cpp import compile_library
from pagegen.catalog import template_for, variant
from pagegen.check import check_variant, quick_suite
from pagegen.check.compare import check_calls
from pagegen.errors import KernelError
from pagegen.kernel import NO_ATTEND_EXTRAS, TORCH_DTYPES, Attend, AttendExtras, allocate_cache
from pagegen.reference import ReferenceKernels
from pagegen.render import environment, render
from pagegen.spec import DType, KernelSpec, KVLayout, Op
from pagegen.target import TARGETS, Target, best_cpu, parse_target
from tests.conftest import cpu_targets, needs

CPUS = [target for target in TARGETS if target.kind == "cpu"]


def spec_of(**fields: Any) -> KernelSpec:
    usual: dict[str, Any] = {"q_heads": 6, "kv_heads": 2, "head_dim": 40, "dtype": "fp32", "block_size": 5, "lse": True}
    if "layout" in fields:
        fields["layout"] = KVLayout.parse(fields["layout"])
    return KernelSpec(**(usual | fields))


def mla(q_heads: int, **fields: Any) -> KernelSpec:
    return spec_of(q_heads=q_heads, kv_heads=1, head_dim=576, head_dim_v=512, v_in_k=True, dtype="bf16", **fields)


MOD = "where(q_idx - k_idx < 12 or head == 2, tanh(score) + exp(-abs(score)), score - min(0.5, sqrt(k_idx) / 9))"
SPECS = {
    "steps": spec_of(window=9, soft_cap=2.5, alibi=True, sinks=True, mask=True, score_mod=MOD),
    "both windows": spec_of(window=9, window_right=2, causal=False, layout="HDN"),
    "fp8 by head": spec_of(dtype="bf16", kv_dtype="fp8_e4m3", kv_scale="head", layout="HDN8_HDN", sinks=True),
    "fp8 by token": spec_of(kv_dtype="fp8_e5m2", kv_scale="token_head", window=3),
    "int8 with zero points": spec_of(kv_dtype="int8", kv_zero=True, soft_cap=5.0, layout="HDN2", block_size=3),
    "int4 with zero points": spec_of(
        head_dim=24, head_dim_v=40, kv_dtype="int4", kv_zero=True, window=9, deterministic=True
    ),
    "int4": spec_of(dtype="bf16", head_dim=64, kv_dtype="int4", layout="HND"),
    "wide cache": spec_of(dtype="bf16", kv_dtype="fp32", mask=True, causal=False),
    "seven rows": spec_of(q_heads=14, dtype="bf16", block_size=3),  # as many share a head, and with pairs what is loaded of it
    "six rows of fp8": spec_of(q_heads=12, head_dim=72, dtype="bf16", kv_dtype="fp8_e4m3", layout="HND"),
    "mla": mla(16),
    "mla of 128 heads": mla(128, layout="HND"),
    "drop by score_mod": spec_of(score_mod="where(k_idx < 3, -inf, log(1 + k_idx) + max(score, 0.25) - floor(score))"),
    "a token of more than eight pages": spec_of(q_heads=34, kv_heads=34, head_dim=128, deterministic=True),
}


def kernel(spec: KernelSpec, target: Target, **knobs: Any) -> Attend:
    chosen = variant(Op.ATTEND, spec, target)
    config = chosen.template.space(spec, target).config(knobs)
    return build(render(dataclasses.replace(chosen, config=config)))  # type: ignore[return-value]


def suited(spec: KernelSpec, target: Target) -> KernelSpec:
    """In the dtype that the target's matrix unit or its pairs know; elsewhere as it is."""
    return dataclasses.replace(spec, dtype=DType.BF16) if target.pairs else spec


def gate(spec: KernelSpec, target: Target, every: int) -> str:
    """What the quick gate says of `every`-th case; empty if nothing."""
    cases = [case for case in quick_suite(spec) if case.op is Op.ATTEND and not case.fault][::every]
    failures = check_calls({Op.ATTEND: kernel(spec, target)}, cases)
    return f"{failures[0].case.label}: {failures[0].message}" if failures else ""


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(target, name, id=f"{target.name}-{name}", marks=needs(target))
        for target, name in (
            (parse_target("cpu:amx"), "int8 with zero points"),
            (parse_target("cpu:avx512_bf16"), "fp8 by token"),
            (parse_target("cpu:avx512_bf16"), "int8 with zero points"),
            (parse_target("cpu:avx512_bf16"), "seven rows"),
            (parse_target("cpu:avx512_bf16"), "six rows of fp8"),
            (parse_target("cpu:avx512"), "steps"),
            (parse_target("cpu:avx2"), "int4 with zero points"),
            (parse_target("cpu:avx2"), "a token of more than eight pages"),
            (parse_target("cpu:scalar"), "fp8 by head"),
        )
    ],
)
def test_options_pass_a_slice_of_the_gate(target: Target, name: str) -> None:
    assert not gate(suited(SPECS[name], target), target, every=6)


@pytest.mark.long
@pytest.mark.parametrize("target", cpu_targets())
@pytest.mark.parametrize("name", SPECS)
def test_options_pass_the_gate(target: Target, name: str) -> None:
    assert not gate(suited(SPECS[name], target), target, every=1)


ENDS = [
    (knob.name, value)
    for knob in template_for(Op.ATTEND, spec_of(), best_cpu()).space(spec_of(), best_cpu()).knobs
    for value in (knob.values[0], knob.values[-1])
]


@pytest.mark.parametrize(
    ("knob", "value"), [pytest.param(*end, marks=[] if end == ("prefetch", 0) else pytest.mark.long) for end in ENDS]
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN2"])
def test_the_default_with_one_knob_at_either_end_passes_the_gate(layout: str, knob: str, value: int) -> None:
    spec, target = spec_of(layout=layout, dtype="bf16", block_size=8), best_cpu()
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    changed = {**space.default.to_dict(), knob: value}
    if why := space.broken(changed):
        pytest.skip(why)
    report = check_variant(render(variant(Op.ATTEND, spec, target, space.config(changed))))
    assert report.passed, report.reason


# --- what a batch looks like here ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Caches with one sequence of `length` tokens a row of `table`, and a query row for each of its positions."""

    spec: KernelSpec
    q: torch.Tensor  # [sequences, length, q_heads, head_dim]
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    @classmethod
    def random(cls, spec: KernelSpec, sequences: int, length: int, shared: int = 0) -> Pool:
        """The first `shared` tokens are those of sequence 0."""
        generator = torch.Generator().manual_seed(7)
        blocks = -(-length // spec.block_size)
        table = torch.randperm(sequences * blocks, generator=generator).int().view(sequences, blocks)
        table[:, : shared // spec.block_size] = table[0, : shared // spec.block_size]
        k, v = allocate_cache(spec, sequences * blocks)
        k.copy_(torch.randn(k.shape, generator=generator))
        v.copy_(torch.randn(v.shape, generator=generator))
        q = torch.randn(sequences, length, spec.q_heads, spec.head_dim, generator=generator)
        return cls(spec, q.to(TORCH_DTYPES[spec.dtype]), k, v, table)

    def attend(
        self, attend: Attend, *rows: tuple[int, int, int], extras: AttendExtras = NO_ATTEND_EXTRAS
    ) -> torch.Tensor:
        """Output rows of positions [begin, end) of each (sequence, begin, end)."""
        q = torch.cat([self.q[s, begin:end] for s, begin, end in rows])
        out = torch.full((*q.shape[:2], self.spec.dim_v), float("nan"), dtype=q.dtype)
        starts = torch.tensor([0, *(end - begin for _, begin, end in rows)]).cumsum(0).int()
        contexts = torch.tensor([end for _, _, end in rows], dtype=torch.int32)
        attend(out, q, self.k, self.v, self.table[[s for s, _, _ in rows]], contexts, starts, extras=extras)
        return out


DETERMINISTIC = [
    spec_of(deterministic=True, lse=False),
    spec_of(deterministic=True, lse=False, window=70, layout="HDN", block_size=24),
    spec_of(deterministic=True, lse=False, q_heads=32, dtype="bf16", soft_cap=9.0, layout="HDN8_HDN", block_size=16),
]


@pytest.mark.parametrize(
    ("spec", "target", "chunks"),
    [
        (DETERMINISTIC[0], best_cpu(), (64, 299)),
        *(
            pytest.param(spec, target, (1, 7, 64, 300), marks=[pytest.mark.long, needs(target)])
            for spec in DETERMINISTIC
            for target in CPUS
        ),
    ],
    ids=lambda value: value.slug if isinstance(value, KernelSpec) else getattr(value, "name", None),
)
def test_a_rows_bits_depend_on_its_sequence_alone(spec: KernelSpec, target: Target, chunks: tuple[int, ...]) -> None:
    attend = kernel(spec, target, split_kv=256)  # the prompt spans two parts
    pool, prompt, length = Pool.random(spec, 5, 960, shared=480), 300, 304
    want = pool.attend(attend, (0, 0, length))
    mates = [(1, 5, 6), (2, 700, 960), (3, 957, 960), (4, 0, 257)]
    for chunk in chunks:
        cuts = [*range(0, prompt, chunk), *range(prompt, length + 1)]  # then decode
        for batch in ([], mates):
            rows = [
                pool.attend(attend, *batch, (0, begin, end))[begin - end :] for begin, end in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(rows), want), f"chunks of {chunk} with {len(batch)} mates"
    cascade = pool.attend(attend, (3, 479, 480), (0, prompt, length), extras=AttendExtras(shared_prefix_len=240))
    assert torch.equal(cascade[1:], want[prompt:])


def test_a_shared_prefix_changes_no_result_and_is_proven_shared() -> None:
    spec = spec_of(lse=False)
    attend = kernel(spec, best_cpu(), split_kv=256)
    pool = Pool.random(spec, 40, 700, shared=600)
    rows = [(s, 660 + s, 661 + s) for s in range(38)]  # decode
    rows += [(38, 500, 700), (39, 597, 600)]  # prefill; queries inside the prefix
    reference = pool.attend(ReferenceKernels(spec).attend, *rows)
    for prefix in (5, 255, 260, 600):
        out = pool.attend(attend, *rows, extras=AttendExtras(shared_prefix_len=prefix))
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelError, match="shared_prefix_len exceeds a context"):
        pool.attend(attend, (0, 3, 4), extras=AttendExtras(shared_prefix_len=5))
    with pytest.raises(KernelError, match="does not begin with the same blocks"):
        pool.attend(attend, *rows[:-1], extras=AttendExtras(shared_prefix_len=605))


def test_k_and_v_may_be_views_of_one_buffer() -> None:
    spec = spec_of(lse=False)
    attend = kernel(spec, best_cpu(), split_kv=256)
    pool = Pool.random(spec, 2, 40)
    both = torch.full((16, spec.block_size + 1, 2, spec.kv_heads, spec.head_dim + 8), float("nan"))
    interleaved = dataclasses.replace(pool, k=both[:, :-1, 0, :, :-8], v=both[:, :-1, 1, :, 8:])
    interleaved.k.copy_(pool.k)
    interleaved.v.copy_(pool.v)
    rows = [(0, 9, 10), (1, 3, 40)]
    assert torch.equal(interleaved.attend(attend, *rows), pool.attend(attend, *rows))


def test_scratch_of_mla_fits_a_core() -> None:
    for spec in (mla(8), mla(16), mla(24), mla(128)):
        config = variant(Op.ATTEND, spec, parse_target("cpu:avx512")).config.to_dict()
        rows = int(config["tile_q"]) * spec.group
        assert 64 <= rows <= 128 and rows * (spec.head_dim + spec.dim_v + int(config["tile_kv"])) * 4 <= 1 << 20


@pytest.mark.parametrize("name", ["exp", "tanh"])
def test_functions_of_steps_are_accurate_and_total(name: str) -> None:
    text = """#include <cstddef>
{% include "cpp/simd/types.h" %}
{% import "cpp/score_steps.jinja" as steps with context %}
static constexpr float LOG2E = 1.44269504088896341f;
{{ steps.functions() }}
extern "C" __attribute__((visibility("default"))) void apply(const float* x, float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] = steps::FUNCTION(x[i]);
}
"""
    spec = spec_of()
    path = compile_library(environment().from_string(text.replace("FUNCTION", name)).render(spec=spec), best_cpu())
    x = torch.cat([torch.linspace(-87, 88, 1 << 15), torch.linspace(-0.5, 0.5, 1 << 12), torch.logspace(-30, 0, 99)])
    special = torch.tensor([float("-inf"), float("inf"), float("nan"), -1e30, 1e30, 0.0, -0.0])
    x = torch.cat([x, special])
    y = torch.empty_like(x)
    ctypes.CDLL(str(path)).apply(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_size_t(len(x)))
    want = getattr(torch, name)(x.double())
    error = ((y.double() - want).abs() / want.abs().clamp(min=1e-37))[: -len(special)]
    assert error.max() < 5e-7
    assert torch.equal(y[-len(special) :].nan_to_num(9.0), want[-len(special) :].float().nan_to_num(9.0))
