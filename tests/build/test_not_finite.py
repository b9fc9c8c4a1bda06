"""Rows that are not finite, quantised: every backend stores what the reference does, and what is read back says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagegen.build import build
from pagegen.build.triton import Interpreter
from pagegen.catalog import variant
from pagegen.kernel import TORCH_DTYPES, KVScales, WriteExtras, allocate_cache, allocate_scales
from pagegen.reference import ReferenceKernels, dequantise, scale_tensors, token_view
from pagegen.render import render
from pagegen.spec import DType, KernelSpec, KVScale, Op
from pagegen.target import parse_target
from tests.conftest import cpu_targets

NAN, INF = math.nan, math.inf
INTERPRETED = pytest.param(parse_target("cuda:sm_90"), id="triton, interpreted", marks=pytest.mark.triton)
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"kv_dtype": "int8"},
    "int8 with zeros": {"kv_dtype": "int8", "kv_zero": True},
    "int4": {"kv_dtype": "int4"},
    "int4 with zeros": {"kv_dtype": "int4", "kv_zero": True},
    "e4m3": {"kv_dtype": "fp8_e4m3", "kv_scale": "token_head"},
    "e5m2 of the tensor": {"kv_dtype": "fp8_e5m2", "kv_scale": "tensor"},
    "e4m3 of a head": {"kv_dtype": "fp8_e4m3", "kv_scale": "head"},
}
SINGLE = (NAN, -NAN, INF, -INF)  # one number of a row, in its first half and in its last place


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def spec_of(name: str, dtype: str) -> KernelSpec:
    return KernelSpec.from_dict({"q_heads": 2, "kv_heads": 2, "head_dim": 24, "dtype": dtype, "block_size": 4} | FORMATS[name])


def rows(dtype: str) -> torch.Tensor:
    """Each of SINGLE in two places of one head, the other head being finite; and both infinities in one row."""
    found = torch.randn(2 * len(SINGLE) + 1, 2, 24, generator=torch.Generator().manual_seed(3))
    for row, number in enumerate(SINGLE):
        found[2 * row, 0, 2] = found[2 * row + 1, 1, -1] = number
    found[-1, :, 5], found[-1, :, 20] = INF, -INF
    return found.to(TORCH_DTYPES[DType(dtype)])


def written(write_kv: Callable[..., None], spec: KernelSpec) -> tuple[torch.Tensor, torch.Tensor, KVScales]:
    k_cache, v_cache = allocate_cache(spec, 3)
    for cache in (k_cache, v_cache):
        cache.view(torch.uint8).fill_(0)
    scales = allocate_scales(spec, 3)
    assert scales
    for tensor in scale_tensors(scales):
        tensor.fill_(0.5)
    new = rows(spec.dtype.value)
    write_kv(new, new.flip(2).contiguous(), k_cache, v_cache, torch.arange(len(new)), extras=WriteExtras(scales))
    return k_cache, v_cache, scales


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal, one NaN being like another."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.double().nan_to_num(), want.double().nan_to_num())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", [*cpu_targets(), INTERPRETED])
def test_every_backend_stores_what_the_reference_does(request: pytest.FixtureRequest, target: Any, name: str, dtype: str) -> None:
    spec = spec_of(name, dtype)
    source = render(variant(Op.WRITE_KV, spec, target))
    if target.kind == "cpu":
        kernel = build(source)
    else:
        kernel = request.getfixturevalue("interpreter").load(source.text, source.key, spec, Op.WRITE_KV, source.variant.config.to_dict())
    *caches, scales = written(kernel, spec)
    *right, right_scales = written(ReferenceKernels(spec).write_kv, spec)
    assert all(map(same, (*caches, *scale_tensors(scales)), (*right, *scale_tensors(right_scales))))


@pytest.mark.parametrize("name", [name for name, fields in FORMATS.items() if spec_of(name, "fp32").kv_scale is KVScale.TOKEN_HEAD])
def test_a_row_with_its_own_scale_is_read_as_finite_only_if_it_was(name: str) -> None:
    spec = spec_of(name, "fp32")
    k_cache, _, scales = written(ReferenceKernels(spec).write_kv, spec)
    values = dequantise(spec, token_view(spec.kv_layout.k_order, k_cache), scales.k_scale, scales.k_zero).flatten(0, 1)
    new = rows("fp32")
    finite = new.isfinite().all(-1, keepdim=True).expand_as(new)
    assert torch.equal(values[: len(new)].isfinite(), finite)
