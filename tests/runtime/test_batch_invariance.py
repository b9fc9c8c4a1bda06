"""Claims about arithmetic whose rows have the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.runtime import batch_invariance
from pagegen.runtime.batch_invariance import probe, product, row_counts
from pagegen.runtime.layers import Linear, LMHead, RMSNorm, RotaryEmbedding, silu_and_mul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(384, 128), (56, 40), (127, 33), (96, 600)]  # [out, in]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield int(request.param)
    torch.set_num_threads(before)


def assert_rows_stand_alone(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, begin: int) -> None:
    """What `function` makes of rows is what it makes of all rows of `x`, for rows from `begin` on."""
    whole = function(x)
    for row in {0, begin, len(x) - 1}:
        assert torch.equal(function(x[row : row + 1]), whole[row : row + 1]), f"row {row} of {len(x)} alone"
    assert torch.equal(function(x[begin:]), whole[begin:]), f"rows from {begin} of {len(x)}"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 150),
    data=st.data(),
)
def test_a_products_row_does_not_depend_on_its_company(
    shape: tuple[int, int], dtype: torch.dtype, num_rows: int, data: st.DataObject
) -> None:
    weight, begin = rand(*shape, dtype=dtype), data.draw(st.integers(0, num_rows - 1))
    assert_rows_stand_alone(lambda x: product(x, weight), rand(num_rows, shape[1], dtype=dtype, seed=1), begin)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (960, 576), (576, 1536)], ids=str)
def test_a_product_has_the_same_bits_for_every_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype, num_threads: int
) -> None:
    """On cancelling data, where any other order of additions shows."""
    x, weight = batch_invariance._cancelling(600, *shape, dtype)
    whole = product(x, weight)
    for num_rows in range(1, 601):
        assert torch.equal(product(x[:num_rows], weight), whole[:num_rows]), num_rows
        assert torch.equal(product(x[-num_rows:], weight), whole[-num_rows:]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_the_product(dtype: torch.dtype) -> None:
    x, weight, bias = (rand(*shape, dtype=dtype) for shape in ((37, 100), (70, 100), (70,)))
    for added in (None, bias):
        linear = Linear(weight, added, deterministic=True)(x)
        want = F.linear(x.float(), weight.float(), None if added is None else added.float())
        eps = torch.finfo(dtype).eps  # sums of 100 products, of size 10: rounded once, and again with a bias
        torch.testing.assert_close(linear.float(), want, atol=20 * eps, rtol=eps)
    assert product(x[:0], weight).shape == (0, 70)


def test_plain_products_differ_which_these_tests_would_notice() -> None:
    x, weight = batch_invariance._cancelling(65, 96, 600, torch.float32)
    whole = x @ weight.T
    if all(torch.equal(x[:rows] @ weight.T, whole[:rows]) for rows in (1, 64)):
        pytest.skip("this machine's products do not depend on their rows' number")
    with pytest.raises(AssertionError, match="row"):
        assert_rows_stand_alone(lambda x: F.linear(x, weight), x, 1)


def backwards(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In another order than `forwards`."""
    return forwards(x.flip(1), weight.flip(1))


def forwards(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(x), len(weight))
    for mine, theirs in zip(x.T, weight.T, strict=True):
        total += mine[:, None] * theirs
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_probe_finds_the_numbers_of_rows_that_add_in_another_order(dtype: torch.dtype) -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, weight = x.float(), weight.float()
        out = backwards(x, weight) if len(x) == 32 else forwards(x, weight)
        if len(x) == 64:  # its last row only
            out[-1:] = backwards(x[-1:], weight)
        return out.to(dtype)

    assert probe(multiply, 3, 60, dtype, [8, 16, 32, 64, 128]) == (128, 16, 8)


def test_where_rows_of_one_call_differ_each_is_a_call_of_its_own() -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat((backwards(x[:5], weight), forwards(x[5:], weight)))

    assert probe(multiply, 3, 60, torch.float32, [8, 16]) == (1,)


def test_large_weights_are_probed_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "MOST_MACS", 41 * 43 * 40)
    assert set(row_counts(41, 43, torch.float32, torch.get_num_threads())) <= {32, 16, 1}


ROWWISE: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rms_norm": (577, RMSNorm(rand(577), 1e-5, torch.float32)),
    "rms_norm, bf16": (576, RMSNorm(rand(576), 1e-5, torch.bfloat16)),
    "silu": (1154, lambda x: silu_and_mul(x, deterministic=True)),
    "silu, bf16": (1154, lambda x: silu_and_mul(x.bfloat16(), deterministic=True)),
    "rotary embedding": (
        120,
        lambda x: RotaryEmbedding.rotate(
            x.view(len(x), 5, 24)[:, :4], RotaryEmbedding(rand(12).abs()).angles((1000 * x[:, 0].abs()).long())
        ),
    ),
    "lm head": (64, LMHead(Linear(rand(201, 64), None, deterministic=True))),
    "lm head, bf16": (
        64,
        lambda x: LMHead(Linear(rand(201, 64).bfloat16(), None, deterministic=True))(x.bfloat16()),
    ),
    "log_softmax": (259, lambda x: torch.log_softmax(x, -1)),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_what_else_a_model_does_to_a_row_does_not_depend_on_its_company(name: str, num_threads: int) -> None:
    width, function = ROWWISE[name]
    for num_rows, begin in ((2, 1), (3, 2), (17, 5), (601, 300)):
        assert_rows_stand_alone(function, 3 * rand(num_rows, width, seed=num_rows), begin)


def test_silu_rounds_an_element_alike_wherever_it_stands() -> None:
    x = 4 * rand(20_000)
    whole = batch_invariance.silu(x)
    assert torch.equal(torch.cat([batch_invariance.silu(part) for part in torch.split(x, 3)]), whole)
    torch.testing.assert_close(whole, F.silu(x))
    assert batch_invariance.silu(torch.tensor([-200.0])).tolist() == [0.0]
