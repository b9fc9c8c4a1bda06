"""Arithmetic whose rows come out the same, to the bit, however many there are and wherever they stand.

A library chooses the order of a product's additions by its shape, so a row beside 3 others and beside 300 rounds
differently. `product` therefore calls it with a few fixed numbers of rows, the last call filled up with zeros. The
smallest of them would do for all; the larger ones, which are faster, are taken where a probe shows that they add in
the same order. What remains: one machine, one torch, and one number of threads, which the order may depend on, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [T, in], weight [out, in] -> x weight^T [T, out]

ROWS = 16  # the smallest call: it costs what its weight's bytes cost, as a single row does
MOST_ROWS = 512
MOST_MACS = 2**32  # of one probed call; larger weights are not read often enough for more rows to matter


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T, [T, out] for x [T, in] and weight [out, in] of one dtype."""
    counts = row_counts(*weight.shape, weight.dtype, torch.get_num_threads())
    num_rows = len(x)
    missing = -num_rows % counts[-1]
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    out = x.new_empty(len(x), len(weight))
    begin = 0
    for count in counts:
        while len(x) - begin >= count:
            end = begin + count
            torch.mm(x[begin:end], weight.t(), out=out[begin:end])
            begin = end
    return out[:num_rows]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in float32, stored in x's dtype.

    torch's own rounds elements at the end of a vector or of a thread's share differently; its `exp` does not.
    """
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


@functools.cache
def row_counts(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> tuple[int, ...]:
    """The numbers of rows, from the most down, with which a product of this shape adds in one and the same order.

    `num_threads` must be torch's of now: it is part of the key.
    """
    most = MOST_MACS // (num_outputs * num_inputs)
    counts = [count for count in _doubling(ROWS, MOST_ROWS) if count <= max(ROWS, most)]
    return probe(_multiply, num_outputs, num_inputs, dtype, counts)


def probe(
    multiply: Product, num_outputs: int, num_inputs: int, dtype: torch.dtype, counts: list[int]
) -> tuple[int, ...]:
    """Those of ascending `counts` that give rows the bits of the first, from the most down; (1,) if the first of them
    treats its own rows differently.

    All terms of a sum have a partner that cancels it, so what comes out is rounding errors alone: any other order of
    additions shows in nearly every element, also where a sum that is not 0 would be rounded to the same bf16.
    """
    x, weight = _cancelling(counts[-1], num_outputs, num_inputs, dtype)
    first = counts[0]
    want = torch.cat([multiply(x[i : i + first], weight) for i in range(0, len(x), first)])
    rolled = multiply(x[:first].roll(1, 0), weight)  # each row at the place of the next: all places add alike
    if not torch.equal(rolled, want[:first].roll(1, 0)):
        return (1,)
    same = [count for count in counts if torch.equal(multiply(x[:count], weight), want[:count])]
    return tuple(reversed(same))


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


def _doubling(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


def _cancelling(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, num_inputs] and weight [num_outputs, num_inputs] whose product is 0 but for rounding."""
    generator = torch.Generator().manual_seed(0)
    half = num_inputs // 2
    spread = 2.0 ** torch.randint(-6, 7, (half,), generator=generator)  # terms of many sizes: more is rounded
    order = torch.randperm(2 * half, generator=generator)

    def paired(num: int, sign: int, scale: torch.Tensor) -> torch.Tensor:
        values = torch.randn(num, half, generator=generator) * scale
        return F.pad(torch.cat((values, sign * values), 1)[:, order], (0, num_inputs % 2)).to(dtype)

    x, weight = paired(num_rows, 1, spread), paired(min(num_outputs, 256), -1, spread.flip(0))
    return x, weight.repeat(-(-num_outputs // len(weight)), 1)[:num_outputs]
