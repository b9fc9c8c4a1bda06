"""Claims about weights of 8 and 4 bits: each is the nearest that there is, and products are those of what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagegen.runtime.layers import Linear
from pagegen.runtime.models import build_model
from pagegen.runtime.quantised import FEW_ROWS, GROUP, Int4Linear, Int8Linear, weight_bytes
from pagegen.runtime.simulation.capacity import plan
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(16, 32), (40, 40), (3, 7), (259, 96), (48, 1000)]  # few of them are what torch packs
ROWS = [1, FEW_ROWS, FEW_ROWS + 1, 40]
Kind = type[Int8Linear] | type[Int4Linear]
KINDS: list[Kind] = [Int8Linear, Int4Linear]


def weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    values = torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[0])[:, None]  # rows of many sizes
    values[-1] = 0
    return values.to(dtype)


def meant(linear: Int8Linear | Int4Linear, num_inputs: int) -> torch.Tensor:
    """The weight that a linear stands for, [out, in] in float32: what it makes of unit vectors."""
    field = "scales" if isinstance(linear, Int8Linear) else "scales_and_zeros"
    parts = {name: getattr(linear, name) for name in linear.__slots__}
    wide: Any = type(linear)(**{**parts, field: parts[field].float(), "bias": None})  # what comes out is not rounded
    product: torch.Tensor = wide(torch.eye(num_inputs))
    return product.t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_rounded_to_the_nearest_of_its_scale(
    kind: Kind, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    given = weight(shape, dtype).float()
    off = (meant(kind.of(given.to(dtype), None, False), shape[1]) - given).abs()
    if kind is Int8Linear:
        step = given.abs().amax(1, keepdim=True) / 127
    else:
        padded = torch.nn.functional.pad(given, (0, -shape[1] % GROUP)).view(shape[0], -1, GROUP)
        step = ((padded.amax(2) - padded.amin(2)) / 15).repeat_interleave(GROUP, 1)[:, : shape[1]]
    scales_are_rounded = 1.0 if dtype is torch.float32 else 1.3 if dtype is torch.bfloat16 else 1.1
    assert (off <= 0.5 * scales_are_rounded * step + 1e-6).all()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weight_that_is_meant(
    kind: Kind, shape: tuple[int, int], dtype: torch.dtype, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    linear = kind.of(weight(shape, dtype), bias, False)
    want = x.float() @ meant(linear, shape[1]).t() + bias.float()
    bound = (4 + shape[1] ** 0.5) * torch.finfo(dtype).eps * (want.abs().amax() + 1)  # a sum's order is torch's own
    assert linear(x).dtype == dtype and (linear(x).float() - want).abs().max() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_rows_have_their_bits_in_any_company(kind: Kind) -> None:
    linear = kind.of(weight((72, 96), torch.bfloat16), None, True)
    x = torch.randn(60, 96).bfloat16()
    whole = linear(x)
    for begin, end in ((0, 1), (3, 4), (5, 19), (0, 60)):
        assert torch.equal(linear(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_rows(kind: Kind) -> None:
    linear = kind.of(weight((16, 32), torch.float32), None, False)
    assert linear(torch.empty(0, 32)).shape == (0, 16)


def test_weights_take_the_bytes_that_plan_counts() -> None:
    source = resolve_model("dummy:tiny")
    for weight_dtype in (None, DType.INT8, DType.INT4):
        model: Any = build_model(source.config, source.weights(), DType.BF16, False, weight_dtype)
        linears = [part for layer in model.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        fields = {Linear: ("weight",), Int8Linear: ("weight", "scales"), Int4Linear: ("packed", "scales_and_zeros")}
        found = sum(getattr(linear, name).nbytes for linear in linears for name in fields[type(linear)])
        rest = sum(tensor.nbytes for tensor in (model.embed_tokens, model.lm_head.linear.weight))
        norms = 2 * (2 * 2 + 1) * source.config.hidden_size  # that plan counts as bf16
        planned = plan(source.config, DType.BF16, 2**24, weight_dtype=weight_dtype).weight_bytes
        assert found + rest + norms == pytest.approx(planned, rel=0.02)  # what is joined is padded once
    assert weight_bytes(64, 64, DType.BF16, DType.INT4) * 3 < weight_bytes(64, 64, DType.BF16, None)
