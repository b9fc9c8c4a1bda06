"""A thin reader of GGUF files: header, metadata and tensor table from a memory map, tensor bytes on demand.

A file may be hostile: every count is checked against the bytes that are left before anything is allocated, and every
tensor has to lie inside the file. Layout: ggml/docs/gguf.md of llama.cpp; versions 2 and 3, little endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from pagegen.errors import ModelError
from pagegen.runtime.weights.quants import TYPES, TensorType, to_tensor

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
REMEDY = "get the file again"

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` is outermost first, as in torch; `offset` counts from the file's start."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GGUF:
    """What a file holds. Numeric arrays in `metadata` are numpy arrays, string arrays lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of the given Python type. Raises ModelError naming the key if absent or of another type."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "is missing" if value is None else f"is a {type(value).__name__}, not {kind.__name__}"
            raise ModelError(f"{self.path}: metadata key {key} {found}; {REMEDY}")
        return value

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in its stored float dtype, or fp32 if quantised.

        Reads rather than maps: a file cut short meanwhile is then an error and not a bus error.
        """
        info = self.tensors[name]
        data = bytearray(info.num_bytes)
        with self.path.open("rb") as file:
            file.seek(info.offset)
            found = file.readinto(data)
        if found != info.num_bytes:
            raise ModelError(f"{self.path}: tensor {name} has {found} of {info.num_bytes} bytes; {REMEDY}")
        return to_tensor(info.type, data, info.shape)


def read_gguf(path: Path, remedy: str = REMEDY) -> GGUF:
    """Parses a file without reading its tensors. Raises ModelError, one line that ends with `remedy`."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path} does not begin with GGUF, it is another kind of file; {remedy}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(data, path, remedy).parse()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; {remedy}") from error


class _Parser:
    """A cursor over the mapped file; every step forward is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path, remedy: str) -> None:
        self.data, self.path, self.remedy = data, path, remedy
        self.position, self.size = len(MAGIC), len(data)

    def parse(self) -> GGUF:
        """Header, key-value pairs, tensor table, in the file's order."""
        version = self.scalar("I")
        if version in (2 << 24, 3 << 24):
            self.fail("it is big-endian; only little-endian files are read")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not known; allowed: 2, 3")
        num_tensors, num_pairs = self.count(24), self.count(13)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            if key in metadata:
                self.fail(f"metadata key {key[:80]!r} is there twice")
            metadata[key] = self.value(self.scalar("I"), key)
        return GGUF(self.path, metadata, self.tensor_table(num_tensors, self.alignment(metadata)))

    def tensor_table(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        """Offsets in the file count from the table's end, aligned: known only after the last row."""
        rows = [(self.string(), self.shape(), self.scalar("I"), self.scalar("Q")) for _ in range(num_tensors)]
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, code, offset in rows:
            if name in tensors:
                self.fail(f"tensor {name[:80]!r} is there twice")
            if code not in TYPES:
                self.fail(f"tensor {name[:80]!r} has type {code}; allowed: {', '.join(t.name for t in TYPES.values())}")
            if offset % alignment:
                self.fail(f"tensor {name[:80]!r} begins at {offset}, which is not aligned to {alignment} bytes")
            type_ = TYPES[code]
            if shape[-1] % type_.block_size:
                self.fail(f"tensor {name[:80]!r}: rows of {shape[-1]} values are no whole blocks of {type_.block_size}")
            tensors[name] = TensorInfo(name, type_, shape, start + offset, type_.num_bytes(math.prod(shape)))
        expected = max((info.offset + info.num_bytes for info in tensors.values()), default=start)
        if expected > self.size:
            raise ModelError(f"{self.path} is truncated: expected {expected} bytes, found {self.size}; {self.remedy}")
        return tensors

    def shape(self) -> tuple[int, ...]:
        """Dimensions, which the file has fastest first."""
        dims = self.scalar("I")
        if not 1 <= dims <= MAX_DIMS:
            self.fail(f"a tensor has {dims} dimensions; allowed: 1 to {MAX_DIMS}")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        if not 0 < math.prod(shape) < 2**63:
            self.fail(f"a tensor has shape {list(shape)}")
        return shape

    def alignment(self, metadata: dict[str, Any]) -> int:
        """`general.alignment`: a power of two, 32 if absent."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(f"general.alignment={alignment!r}; allowed: powers of two up to {MAX_ALIGNMENT}")
        return alignment

    def value(self, code: int, key: str) -> Any:
        """A metadata value. Arrays of arrays do not occur in model files and are refused."""
        if code == _STRING:
            return self.string()
        if code in _SCALARS:
            return self.scalar(_SCALARS[code])
        if code != _ARRAY:
            self.fail(f"metadata key {key[:80]!r} has value type {code}, which is not known")
        element = self.scalar("I")
        if element == _STRING:
            return self.strings(self.count(_U64.size))
        if element not in _SCALARS:
            self.fail(f"metadata key {key[:80]!r} is an array of type {element}; allowed: numbers and strings")
        dtype = np.dtype(_SCALARS[element]).newbyteorder("<")
        count = self.count(dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()

    def strings(self, count: int) -> list[str]:
        """The hot loop of opening a model: a vocabulary has 100k strings, so it works on locals."""
        data, position, size, unpack = self.data, self.position, self.size, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + unpack(data, position)[0]
                if position > size:
                    self.position = begin
                    self.take(position - begin)
                strings.append(data[begin:position].decode())
        except struct.error:
            self.fail_short()
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")
        self.position = position
        return strings

    def string(self) -> str:
        """A length of 8 bytes, then UTF-8."""
        return self.strings(1)[0]

    def count(self, element_bytes: int) -> int:
        """A 64-bit count of things of at least `element_bytes` each: more than the file can hold is refused."""
        count: int = self.scalar("Q")
        if count * element_bytes > self.size - self.position:
            self.fail_short(f"{count} elements")
        return count

    def scalar(self, code: str) -> Any:
        """One number of a struct code."""
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.take(layout.size))[0]

    def take(self, num_bytes: int) -> int:
        """Steps over `num_bytes` and returns where they begin."""
        begin = self.position
        if num_bytes > self.size - begin:
            self.fail_short(f"{num_bytes} bytes")
        self.position = begin + num_bytes
        return begin

    def fail_short(self, wanted: str = "more bytes") -> NoReturn:
        raise ModelError(
            f"{self.path} is truncated: expected {wanted} at byte {self.position} of {self.size}; {self.remedy}"
        )

    def fail(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path} is not a usable GGUF file: {why}; {self.remedy}")
