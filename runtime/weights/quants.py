"""GGML tensor types: how many bytes they take, and how their blocks become numbers.

Q4_0, Q4_1, Q8_0 and the float types are decoded here; the rarer ones by the optional `gguf` package.
Formats: ggml/src/ggml-common.h of llama.cpp. Results are bit-equal to `gguf.quants.dequantize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pagegen.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoder = Callable[[Bytes, Floats], None]  # [n, block_bytes] blocks into [n, block_size] numbers

CHUNK_BLOCKS = 2048  # 32 values each: a chunk of both sides stays in the cache of one core


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """A row of TYPES: `block_size` values are stored in `block_bytes` bytes."""

    code: int
    name: str
    block_size: int
    block_bytes: int
    dtype: torch.dtype | None = None  # stored as these numbers
    decode: Decoder | None = None  # stored as blocks that we decode; neither: the gguf package does

    def num_bytes(self, num_values: int) -> int:
        """Bytes of `num_values` values, a multiple of the block size."""
        return num_values // self.block_size * self.block_bytes


def to_tensor(type_: TensorType, data: bytearray, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` that owns `data`: the stored float dtype, or fp32 for quantised types.

    Raises ModelError if the type needs the gguf package and that is absent or too old.
    """
    if type_.dtype is not None:
        return torch.frombuffer(data, dtype=type_.dtype).reshape(shape)
    blocks = np.frombuffer(data, np.uint8).reshape(-1, type_.block_bytes)
    if type_.decode is None:
        return _decode_with_package(type_, blocks).reshape(shape)
    out = np.empty((len(blocks), type_.block_size), np.float32)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = slice(start, start + CHUNK_BLOCKS)
        type_.decode(blocks[chunk], out[chunk])
    return torch.from_numpy(out).reshape(shape)


def _half(blocks: Bytes, start: int) -> Floats:
    """The fp16 at byte `start` of each block, as a column of fp32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Value i is the low nibble of byte i, value i + 16 its high nibble."""
    half = packed.shape[1]
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _decode_with_package(type_: TensorType, blocks: Bytes) -> torch.Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(
            f"tensor type {type_.name} needs the gguf package; install it with `pip install 'pagegen[gguf]'`"
        ) from None
    try:
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(type_.code)))
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"tensor type {type_.name} is not decoded by the installed gguf package: {error}") from error


_ROWS = (
    TensorType(0, "F32", 1, 4, torch.float32),
    TensorType(1, "F16", 1, 2, torch.float16),
    TensorType(30, "BF16", 1, 2, torch.bfloat16),
    TensorType(2, "Q4_0", 32, 18, decode=_q4_0),
    TensorType(3, "Q4_1", 32, 20, decode=_q4_1),
    TensorType(8, "Q8_0", 32, 34, decode=_q8_0),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(34, "TQ1_0", 256, 54),
    TensorType(35, "TQ2_0", 256, 66),
    TensorType(39, "MXFP4", 32, 17),
)

TYPES = {row.code: row for row in _ROWS}
