"""Linears whose weights are kept in 8 or 4 bits: rounded to the nearest, without any data to calibrate on.

Products are torch's own for such weights, which read them as they are and add in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F

from pagegen.spec import DType

WEIGHT_DTYPES = (DType.INT8, DType.INT4)
GROUP = 32  # inputs that share a scale and a zero point in 4 bits
FEW_ROWS = 8  # from more on, an int8 weight is faster made wide once than read as it is for every row
_COLUMNS_OF_INT8 = 16  # torch reads inputs by so many, beyond the end of others without asking
_ROWS_OF_INT4 = 16  # torch packs outputs by so many


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """y = x W^T + b with W [out, in] = `weight` * `scales`: int8, a scale for each output in x's dtype."""

    weight: torch.Tensor  # [out, in], int8; zeros fill the inputs up to what torch reads
    scales: torch.Tensor  # [out]
    bias: torch.Tensor | None
    deterministic: bool

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool) -> Self:
        """Rounds a weight [out, in]: the largest magnitude of an output's row becomes 127."""
        wide = F.pad(weight.float(), (0, -weight.shape[1] % _COLUMNS_OF_INT8))
        scales = _usable((wide.abs().amax(1) / 127).to(weight.dtype))
        rounded = torch.round(wide / scales.float()[:, None]).clamp(-127, 127)
        return cls(rounded.to(torch.int8), scales, bias, deterministic)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = _filled_up(x, self.weight.shape[1])
        if self.deterministic:
            y = _row_by_row(self._product, x)
        elif len(x) <= FEW_ROWS:
            y = self._product(x)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scales
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scales)
        return y


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Int4Linear:
    """y = x W^T + b with W [out, in] = (q - 8) * scale + zero: q of 4 bits, the others for each output and GROUP inputs."""

    packed: torch.Tensor  # q, in torch's order for this machine
    scales_and_zeros: torch.Tensor  # [in / GROUP, out, 2], in x's dtype
    num_outputs: int
    bias: torch.Tensor | None
    deterministic: bool

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool) -> Self:
        """Rounds a weight [out, in]: the range of a group fills the 16 numbers. Zeros fill up what torch cannot pack."""
        num_outputs, num_inputs = weight.shape
        padded = F.pad(weight.float(), (0, -num_inputs % GROUP, 0, -num_outputs % _ROWS_OF_INT4))
        groups = padded.view(len(padded), -1, GROUP)
        low, high = groups.amin(2), groups.amax(2)
        scales = _usable(((high - low) / 15).to(weight.dtype))
        zeros = (low + 8 * scales.float()).to(weight.dtype)
        q = torch.round((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).clamp(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.view(padded.shape).to(torch.int32), 1)
        both = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous()
        return cls(packed, both, num_outputs, bias, deterministic)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = _filled_up(x, GROUP * len(self.scales_and_zeros))
        y = _row_by_row(self._product, x) if self.deterministic else self._product(x)
        y = y[:, : self.num_outputs]
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales_and_zeros)
        return y


def _filled_up(x: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """x [T, in] with zeros up to `num_inputs`, dense."""
    missing = num_inputs - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _usable(scales: torch.Tensor) -> torch.Tensor:
    """1 where all that a scale is for is one number, or so small that the scale was rounded to 0."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _row_by_row(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A call for each row: all of one shape, so that a row's additions know nothing of the others."""
    return torch.cat([product(row) for row in torch.split(x, 1)])


def weight_bytes(num_outputs: int, num_inputs: int, dtype: DType, weight_dtype: DType | None) -> int:
    """Bytes of a linear's weight in a model of `dtype`: as it is, or in int8 or int4 with its scales."""
    if weight_dtype is None:
        return num_outputs * num_inputs * dtype.itemsize
    if weight_dtype is DType.INT8:
        return num_outputs * (num_inputs + -num_inputs % _COLUMNS_OF_INT8 + dtype.itemsize)
    rows, groups = num_outputs + -num_outputs % _ROWS_OF_INT4, -(-num_inputs // GROUP)
    return rows * groups * (GROUP // 2 + 2 * dtype.itemsize)
