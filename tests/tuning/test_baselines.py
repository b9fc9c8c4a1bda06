"""The three SDPA forms compute what the reference computes; else a comparison with them says nothing."""

import pytest
import torch

from pagegen.reference import ReferenceKernels
from pagegen.spec import DType, KernelSpec, KVLayout, KVScale
from pagegen.tuning.baselines import FORMS, SdpaBaselines
from pagegen.tuning.workload import Inputs, Point, Pool

SPECS = {
    "group 3": KernelSpec(q_heads=6, kv_heads=2, head_dim=16, dtype=DType.FP32, block_size=5),
    "no group, V narrower": KernelSpec(q_heads=2, kv_heads=2, head_dim=16, head_dim_v=8, dtype=DType.FP32, block_size=4),
    "dim-major K": KernelSpec(q_heads=4, kv_heads=2, head_dim=16, dtype=DType.FP32, layout=KVLayout.parse("HDN4")),
    "HND, own scale": KernelSpec(q_heads=4, kv_heads=1, head_dim=8, dtype=DType.FP32, layout=KVLayout.parse("HND"), scale=0.5),
    "not causal": KernelSpec(q_heads=2, kv_heads=1, head_dim=8, dtype=DType.FP32, causal=False),
    "window": KernelSpec(q_heads=2, kv_heads=1, head_dim=8, dtype=DType.FP32, window=4),
    "window to both sides": KernelSpec(2, 1, 8, DType.FP32, causal=False, window=3, window_right=2),
    "int8": KernelSpec(4, 2, 16, DType.FP32, DType.INT8, block_size=5),
    "int8 with zero points": KernelSpec(4, 2, 16, DType.FP32, DType.INT8, kv_zero=True),
    "int4": KernelSpec(4, 2, 16, DType.FP32, DType.INT4, block_size=5, layout=KVLayout.parse("HND")),
    "int4 with zero points": KernelSpec(4, 2, 16, DType.FP32, DType.INT4, kv_zero=True),
    "fp8": KernelSpec(4, 2, 16, DType.FP32, DType.FP8_E4M3, layout=KVLayout.parse("HDN4")),
    "fp8, a scale a head": KernelSpec(4, 2, 16, DType.FP32, DType.FP8_E5M2, kv_scale=KVScale.HEAD),
    "V in K": KernelSpec(4, 1, 24, DType.FP32, head_dim_v=16, v_in_k=True),
}
POINTS = ("1x1@1", "3x1@17", "1x7@7", "2x3@11", "2x1@9+1x5@13+1x4@4")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_form_agrees_with_the_reference(spec: KernelSpec, point: str, form: str) -> None:
    where = Point.parse(point)
    inputs = Inputs(Pool.for_points(spec, (where,), num_bytes=0, seed=1), where)
    call = SdpaBaselines(inputs).calls()[form]
    inputs.run(ReferenceKernels(spec).attend, inputs.block_tables[0])
    expected = inputs.out.clone()
    inputs.out.fill_(float("nan"))
    call()
    torch.testing.assert_close(inputs.out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", [{"soft_cap": 5.0}, {"alibi": True}, {"sinks": True}, {"mask": True}, {"score_mod": "score"}])
def test_what_sdpa_has_no_words_for_has_no_baselines_but_is_timed(option: dict[str, object]) -> None:
    spec, where = KernelSpec(2, 1, 8, DType.FP32, **option), Point.parse("2x3@11")  # type: ignore[arg-type]
    inputs = Inputs(Pool.for_points(spec, (where,), num_bytes=0), where)
    assert SdpaBaselines(inputs).calls() == {}
    inputs.bind(ReferenceKernels(spec).attend)()
    assert inputs.out.isfinite().all()


def test_a_baseline_leaves_the_cache_as_it_was() -> None:
    spec, point = SPECS["group 3"], Point.parse("2x3@11")
    inputs = Inputs(Pool.for_points(spec, (point,), num_bytes=1 << 16), point)
    before = inputs.pool.k_cache.clone(), inputs.pool.v_cache.clone()
    for call in SdpaBaselines(inputs).calls().values():
        call()
    assert torch.equal(before[0], inputs.pool.k_cache) and torch.equal(before[1], inputs.pool.v_cache)
