"""Every word of the SIMD vocabulary means the same on every ISA that runs here, in an emulator if need be: what torch means."""

import ctypes
import functools
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from pagegen.build.cpp import compile_library, compile_program, emulator
from pagegen.errors import BuildError
from pagegen.render import environment
from pagegen.spec import parse_slug
from pagegen.target import TARGETS, Target, is_native, is_present

WORDS = Path(__file__).with_name("simd_words.cpp.jinja").read_text()
CPUS = [target for target in TARGETS if target.kind == "cpu"]
QUANTISED = parse_slug("bf16-d64-h9x3-b16-NHD-kvint8")[0]  # what makes the 8-bit words be there
BYTES = {"int8_t": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DTYPES = {"float": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


CALLER = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
/* argv: LIBRARY FUNCTION. stdin: for each of 4 arguments its size and bytes, or -1 and a number; stdout: the bytes after. */
int main(int argc, char** argv) {
  void* library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : 0;
  int64_t (*function)(int64_t, int64_t, int64_t, int64_t) = 0;
  *(void**)&function = library ? dlsym(library, argv[2]) : 0;
  if (!function) return 1;
  int64_t size[4], value[4] = {0};
  for (int i = 0; i < 4; i++) {
    if (!fread(&size[i], 8, 1, stdin)) return 2;
    if (size[i] < 0) {
      if (!fread(&value[i], 8, 1, stdin)) return 2;
    } else {
      value[i] = (int64_t)malloc((size_t)size[i] + 1);
      if (!value[i] || fread((void*)value[i], 1, (size_t)size[i], stdin) != (size_t)size[i]) return 2;
    }
  }
  int32_t answer = (int32_t)function(value[0], value[1], value[2], value[3]);
  for (int i = 0; i < 4; i++)
    if (size[i] > 0) fwrite((void*)value[i], 1, (size_t)size[i], stdout);
  fwrite(&answer, 4, 1, stdout);
  return 0;
}
"""


class Words:
    """The vocabulary on one ISA: here, or in an emulator that is started for each call."""

    def __init__(self, target: Target) -> None:
        self.target = target
        text = environment().from_string(WORDS).render(target=target, spec=QUANTISED)
        self.library = compile_library(text, target)
        emulated = not is_native(target)
        self.command = (*emulator(target), str(compile_program(CALLER, target)), str(self.library)) if emulated else ()

    @functools.cached_property
    def lanes(self) -> int:
        """W."""
        return self.call("lanes")

    def call(self, name: str, *arguments: torch.Tensor | int) -> int:
        """Calls a word; it writes to the tensors it gets. Returns what the word returns, if anything."""
        if self.command:
            return self._call_emulated(name, *arguments)
        converted = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_size_t(a) for a in arguments
        ]
        return int(getattr(ctypes.CDLL(str(self.library)), name)(*converted))

    def _call_emulated(self, name: str, *arguments: torch.Tensor | int) -> int:
        sent = b""
        for argument in (*arguments, *[0] * (4 - len(arguments))):
            if isinstance(argument, int):
                sent += struct.pack("2q", -1, argument)
            else:
                data = argument.view(torch.uint8).numpy().tobytes()
                sent += struct.pack("q", len(data)) + data
        got = subprocess.run([*self.command, name], input=sent, capture_output=True, check=True, timeout=60).stdout
        at = 0
        for tensor in (argument for argument in arguments if isinstance(argument, torch.Tensor)):
            as_bytes = tensor.view(torch.uint8)
            end = at + as_bytes.numel()
            as_bytes.copy_(torch.frombuffer(bytearray(got[at:end]), dtype=torch.uint8).view(as_bytes.shape))
            at = end
        return int(struct.unpack("i", got[at:])[0])


@pytest.fixture(scope="module", params=CPUS, ids=lambda target: target.arch)
def words(request: pytest.FixtureRequest) -> Words:
    target: Target = request.param
    if is_native(target) and not is_present(target):
        pytest.skip(f"this CPU does not run {target.name}")
    try:
        return Words(target)
    except BuildError as error:
        if is_native(target):
            raise
        pytest.skip(str(error))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def hard_floats(dtype: torch.dtype) -> torch.Tensor:
    """Every value of the narrow type, the ties between neighbours, and one place beside each tie; infinities and NaN."""
    values = every_pattern(dtype).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    beside = torch.cat([torch.nextafter(ties, torch.tensor(v)) for v in (float("inf"), float("-inf"))])
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 65519.0, 65520.0, 3.4e38, 0.0, -0.0, 1e-40])
    found = torch.cat([values, ties, beside, special])
    return torch.nn.functional.pad(found, (0, -len(found) % 16))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("prefix", ["", "scalar_"])
def test_every_16_bit_value_widens_exactly(words: Words, name: str, prefix: str) -> None:
    values = every_pattern(DTYPES[name])
    out = torch.empty(len(values))
    words.call(f"{prefix}widen_{name}", values, out, len(values))
    assert same(out, values.float())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("prefix", ["", "scalar_"])
def test_narrowing_rounds_to_nearest_even_like_torch(words: Words, name: str, prefix: str) -> None:
    values = hard_floats(DTYPES[name])
    out = torch.empty(len(values), dtype=DTYPES[name])
    words.call(f"{prefix}narrow_{name}", values, out, len(values))
    assert same(out.float(), values.to(DTYPES[name]).float())


@pytest.mark.parametrize("name", list(BYTES))
@pytest.mark.parametrize("prefix", ["", "scalar_"])
def test_every_8_bit_value_widens_exactly(words: Words, name: str, prefix: str) -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).view(BYTES[name])
    out = torch.empty(256)
    words.call(f"{prefix}widen_{name}", values, out, 256)
    assert same(out, values.float())
    for n in range(1, words.lanes):
        some = torch.full((words.lanes,), 7.0)
        words.call(f"widen_some_{name}", values[40:], some, n)
        assert same(some, torch.nn.functional.pad(values[40 : 40 + n].float(), (0, words.lanes - n)))


@pytest.mark.parametrize("name", list(BYTES))
@pytest.mark.parametrize("prefix", ["", "scalar_"])
def test_narrowing_to_8_bits_rounds_like_torch_and_saturates(words: Words, name: str, prefix: str) -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).view(BYTES[name]).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = torch.cat([torch.nextafter(ties, torch.tensor(v)) for v in (torch.inf, -torch.inf)])
    special = torch.tensor([1e-30, -1e-30, 1e-40, -0.0, 3.4e38, -3e9, torch.inf, -torch.inf, torch.nan, 463.9, 470.0])
    values = torch.cat([values, ties, beside, special])
    values = torch.nn.functional.pad(values, (0, -len(values) % 16))
    out = torch.empty(len(values), dtype=BYTES[name])
    words.call(f"{prefix}narrow_{name}", values, out, len(values))
    if name == "int8_t":
        assert torch.equal(out, values.nan_to_num(-torch.inf).round().clamp(-128, 127).to(torch.int8))
    else:
        most = torch.finfo(BYTES[name]).max
        assert same(out.float(), values.clamp(-most, most).to(BYTES[name]).float())


@pytest.mark.parametrize("name", list(DTYPES))
def test_the_largest_magnitude_is_found_wherever_it_lies(words: Words, name: str) -> None:
    for n in (1, words.lanes - 1, words.lanes, 2 * words.lanes + 3):
        values = torch.linspace(-1, 0.5, n)
        top = torch.empty(1)
        for at, most in ((0, -3.0), (n - 1, 5.0), (n // 2, -torch.inf), (n - 1, torch.nan)):
            values[at] = most
            words.call(f"top_size_{name}", values.to(DTYPES[name]), top, n)
            assert same(top, torch.tensor([most]).abs()), f"{most} at {at} of {n}"


def test_nibbles_split_into_low_and_high(words: Words) -> None:
    width = words.lanes
    source = torch.arange(3, 256, 11, dtype=torch.uint8)[:width]
    for n in range(1, width + 1):
        low, high = torch.full((width,), 7.0), torch.full((width,), 7.0)
        words.call("nibbles", source, low, high, n)
        assert low.tolist() == [*(source[:n] & 15).tolist(), *[0] * (width - n)]
        assert high.tolist() == [*(source[:n] >> 4).tolist(), *[0] * (width - n)]


def test_nibbles_are_rounded_saturated_and_joined(words: Words) -> None:
    width = words.lanes
    low = torch.tensor([-1.0, 0.5, 1.5, 2.5, 14.5, 15.5, 3e9, torch.nan] * 2)[:width]
    whole = torch.tensor([0, 0, 2, 2, 14, 15, 15, 0] * 2, dtype=torch.uint8)[:width]
    for n in range(1, width + 1):
        out = torch.full((width,), 0xAB, dtype=torch.uint8)
        words.call("to_nibbles", low, low.flip(0), out, n)
        assert out.tolist() == [*(whole | whole.flip(0) << 4)[:n].tolist(), *[0xAB] * (width - n)]


@pytest.mark.parametrize("name", list(DTYPES | BYTES))
def test_partial_loads_and_stores_keep_to_their_elements(words: Words, name: str) -> None:
    width = words.lanes
    source = torch.arange(1, width + 1).to((DTYPES | BYTES)[name])
    values = source.float().tolist()
    for n in range(1, width):
        out = torch.full((width,), 7.0)
        words.call(f"widen_some_{name}", source, out, n)
        assert out.tolist() == [*values[:n], *[0] * (width - n)]
        target = torch.full((width,), 7.0).to(source.dtype)
        words.call(f"narrow_some_{name}", source.float(), target, n)
        assert target.float().tolist() == [*values[:n], *[7] * (width - n)]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_pairs_split_into_even_and_odd(words: Words, name: str) -> None:
    width = words.lanes
    source = torch.arange(2 * width).to(DTYPES[name])
    for n in range(1, width + 1):
        even, odd = torch.full((width,), 7.0), torch.full((width,), 7.0)
        words.call(f"pairs_{name}", source, even, odd, n)
        assert even.tolist() == [*range(0, 2 * n, 2), *[0] * (width - n)]
        assert odd.tolist() == [*range(1, 2 * n, 2), *[0] * (width - n)]


def test_exp2_is_accurate_and_total_on_what_a_softmax_gives_it(words: Words) -> None:
    x = torch.cat([torch.linspace(-125.9, 0, 1 << 16), torch.zeros(16)])
    out = torch.empty_like(x)
    words.call("exp2_words", x, out, len(x))
    exact = torch.exp2(x.double())
    assert ((out.double() - exact).abs() / exact).max() < 2e-7
    edges = torch.tensor([0.0, -0.0, float("-inf"), -1e30, -150.0, float("nan")] + [0.0] * 10)
    words.call("exp2_words", edges, out, len(edges))
    assert out[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert out[5].isnan(), "a NaN score must not turn into a weight of 0"


def test_reductions_joins_and_transposition(words: Words) -> None:
    width = words.lanes
    rows = torch.randint(-100, 100, (width, width), generator=torch.Generator().manual_seed(0)).float()
    out = torch.empty(3, width)
    words.call("reduce_words", rows, out)
    assert torch.equal(out[0], rows.sum(1)) and torch.equal(out[1], rows.amax(1)) and torch.equal(out[2], rows.sum(1))
    turned = torch.empty_like(rows)
    words.call("transpose_words", rows, turned)
    assert torch.equal(turned, rows.T)


def test_any_lane_above_a_number_counts_but_a_nan(words: Words) -> None:
    row = torch.full((words.lanes,), -1.0)
    row[0] = float("nan")
    for lane in range(1, words.lanes):
        row[lane] = 2.0
        assert words.call("any_above_words", row, torch.tensor([1.5])) == 1, f"lane {lane}"
        assert words.call("any_above_words", row, torch.tensor([2.0])) == 0, "as high is not above"
        row[lane] = -1.0
    assert words.call("any_above_words", row, torch.tensor([float("-inf")])) == 1
    assert words.call("any_above_words", torch.full_like(row, float("-inf")), torch.tensor([float("-inf")])) == 0


def test_arithmetic_and_keep(words: Words) -> None:
    width = words.lanes
    a, b, out = torch.arange(width) - 3.0, torch.arange(width).flip(0) * 1.5, torch.empty(5, width)
    words.call("arithmetic", a, b, out)
    assert torch.equal(out, torch.stack([a + b, a * b, torch.maximum(a, b), a * b + 0.5, torch.zeros(width)]))
    for n in range(width + 1):
        kept = torch.empty(width)
        words.call("keep_words", a, kept, n)
        assert kept.tolist() == [*a[:n].tolist(), *[-1.0] * (width - n)]


# --- pairs of bf16 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(words: Words) -> Words:
    if not words.target.pairs:
        pytest.skip(f"{words.target.name} multiplies no pairs")
    return words


def test_floats_are_rounded_to_pairs_as_torch_does_but_for_subnormals(pairs: Words) -> None:
    floats = hard_floats(torch.bfloat16)
    floats = floats[: len(floats) // 32 * 32]
    out = torch.empty(len(floats), dtype=torch.bfloat16)
    pairs.call("round_pairs", floats, out, len(floats))
    normal = floats.abs() >= torch.finfo(torch.bfloat16).smallest_normal
    assert torch.equal(out[normal], floats[normal].bfloat16()) and torch.equal(out.isnan(), floats.isnan())
    assert out[~normal & ~floats.isnan()].abs().max() <= torch.finfo(torch.bfloat16).smallest_normal


def test_some_pairs_are_the_first_and_then_zeros(pairs: Words) -> None:
    rows, some = torch.arange(1, 33).bfloat16(), torch.empty(32, dtype=torch.bfloat16)
    for n in range(1, 32):
        pairs.call("some_pairs", rows, some, n)
        assert some.tolist() == [*range(1, n + 1), *[0] * (32 - n)]


def test_a_lane_adds_both_products_of_its_pair(pairs: Words) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-99, 100, (16, 2), generator=generator).bfloat16() for _ in range(2))
    c, out = torch.arange(16.0), torch.empty(2, 16)
    pairs.call("dot_words", a, b, c, out)
    assert torch.equal(out[0], c + (a.float() * b.float()).sum(1))
    assert torch.equal(out[1], c + a.float() @ b[0].float())


def test_four_rows_are_transposed_128_bits_at_a_time(pairs: Words) -> None:
    rows, out = torch.arange(128).bfloat16().view(4, 4, 8), torch.empty(5, 4, 8, dtype=torch.bfloat16)
    pairs.call("quads", rows, out)
    assert torch.equal(out[:4], rows.transpose(0, 1))
    assert torch.equal(out[4], rows[0, 0].expand(4, 8))


def test_two_rows_become_pairs(pairs: Words) -> None:
    out = torch.empty(2, 4, 4, 2, dtype=torch.bfloat16)  # vector, 128 bits of it, pair, row
    pairs.call("interleave_pairs", torch.arange(64).bfloat16(), out)
    assert torch.equal(out.permute(3, 1, 0, 2).reshape(2, 32), torch.arange(64).bfloat16().view(2, 32))
    zipped = torch.empty(16, 2, dtype=torch.bfloat16)
    pairs.call("zip_words", torch.arange(32.0).sub(16), zipped)
    assert torch.equal(zipped.T.float(), torch.arange(32.0).sub(16).view(2, 16))


@pytest.mark.parametrize("name", BYTES)
def test_every_stored_byte_is_the_bf16_of_its_value(pairs: Words, name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for part in codes.view(4, 64):
        out = torch.empty(2, 4, 8, dtype=torch.bfloat16)  # vector, 128 bits of it, number
        pairs.call(f"pairs_{name}", part, out, 64)
        assert same(out.transpose(0, 1).flatten().float(), part.view(BYTES[name]).float())
        pairs.call(f"pairs_{name}", part, out, 37)
        assert same(out.transpose(0, 1).flatten().float()[:37], part.view(BYTES[name]).float()[:37])
        assert not out.transpose(0, 1).flatten()[37:].any()


def test_bytes_of_two_rows_become_pairs(pairs: Words) -> None:
    rows = torch.arange(-64, 64, dtype=torch.int8).view(2, 64)
    for n in (64, 29):
        out = torch.empty(4, 4, 4, 2, dtype=torch.bfloat16)  # vector, 128 bits of it, pair, row
        pairs.call("interleave_int8_t", rows, out, n)
        expected = rows.float() * (torch.arange(64) < n)
        assert torch.equal(out.permute(3, 1, 0, 2).reshape(2, 64).float(), expected)


# --- matrix units -----------------------------------------------------------------------------------------------------


@pytest.fixture
def matrix(words: Words) -> Words:
    if not words.target.matrix:
        pytest.skip(f"{words.target.name} has no matrix unit")
    return words


@pytest.mark.parametrize("tiles", range(5), ids=["1x1", "2x1", "1x2", "2x2", "1x4"])
def test_products_of_tiles_are_exact_for_small_whole_numbers(matrix: Words, tiles: int) -> None:
    generator = torch.Generator().manual_seed(tiles)
    a, b = (torch.randint(-9, 10, (rows, 96), generator=generator).bfloat16() for rows in (32, 64))
    c = torch.full((32, 64), float("nan"))
    assert matrix.call("multiply_words", a, b, c, 2 * tiles), "the system grants no tiles"
    assert torch.equal(c, a.float() @ b.float().T)
    matrix.call("multiply_words", a, b, c, 2 * tiles + 1)
    assert torch.equal(c, 2 * (a.float() @ b.float().T))


def test_pairs_go_apart_and_come_back(matrix: Words) -> None:
    rows, first, second = torch.arange(64).bfloat16(), torch.empty(32), torch.empty(32)
    matrix.call("interleave_words", rows, first, second)
    assert torch.equal(torch.cat([first, second]), rows.float())
    table, column = torch.arange(256.0), torch.empty(16)
    matrix.call("column_words", table, column)
    assert torch.equal(column, table[::16])
