"""GGUF files give the numbers they hold; hostile and damaged ones give one line, fast and without memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ModelError
from pagegen.runtime.weights import quants
from pagegen.runtime.weights.gguf import read_gguf
from pagegen.runtime.weights.gguf_model import GGUFModel, hf_tensor_name, unpermute
from tests.runtime.model_files import (
    F32,
    GGUF_METADATA,
    TOKENS,
    Tagged,
    gguf_bytes,
    gguf_tensors,
    hf_weights,
    permute,
    stored,
    stored_q8_0,
    string,
    value,
    write_gguf,
)

SMALL = {"t": (F32, (1,), b"\0" * 4)}


def head(num_tensors: int = 0, num_pairs: int = 0, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs)


def pair(tag: str, item: Any, key: str = "general.alignment") -> bytes:
    return head(0, 1) + string(key) + value(tag, item)


def array(element: int, count: int, data: bytes = b"") -> bytes:
    return head(0, 1) + string("k") + struct.pack("<IIQ", 9, element, count) + data


def tensor(dims: list[int], *, n_dims: int | None = None, code: int = 0, offset: int = 0, data: bytes = b"") -> bytes:
    count = len(dims) if n_dims is None else n_dims
    table = string("t") + struct.pack(f"<I{len(dims)}QIQ", count, *dims, code, offset)
    start = head(1) + table
    return start + b"\0" * (-len(start) % 32) + data


HOSTILE = {
    "empty": b"",
    "magic only": b"GGUF",
    "wrong magic": head(magic=b"GGML"),
    "version 99": head(version=99),
    "version 1": head(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2^63 pairs": head(0, 2**63),
    "2^63 tensors": head(2**63, 0),
    "as many pairs as bytes": head(0, 20) + b"\0" * 20,
    "string of 2^63 bytes": head(0, 1) + struct.pack("<Q", 2**63) + b"x",
    "string past the end": head(0, 1) + struct.pack("<Q", 9) + b"x",
    "string not UTF-8": head(0, 1) + struct.pack("<Q", 1) + b"\xff" + value("u32", 1),
    "array of 2^63": array(4, 2**63),
    "array of 2^64 - 1 strings": array(8, 2**64 - 1),
    "strings cut short": array(8, 3, string("a") + b"\1"),
    "array nested 10 deep": array(9, 1, struct.pack("<IQ", 9, 1) * 10),
    "array of unknown type": array(77, 1, b"\0" * 8),
    "value of unknown type": head(0, 1) + string("k") + struct.pack("<I", 77),
    "no dimensions": tensor([]),
    "9 dimensions": tensor([1] * 9),
    "2^32 - 1 dimensions": tensor([1], n_dims=0xFFFFFFFF),
    "zero-sized": tensor([0, 4]),
    "product that wraps": tensor([2**42 + 1, 2**22], data=b"\0" * 64),
    "product that wraps to a small number": tensor([2**63, 2], data=b"\0" * 64),
    "unknown tensor type": tensor([4], code=999),
    "removed tensor type": tensor([4], code=4),
    "row of no whole blocks": tensor([33, 1], code=8, data=b"\0" * 64),
    "offset past the end": tensor([4], offset=2**62),
    "offset not aligned": tensor([4], offset=1, data=b"\0" * 64),
    "alignment 0": pair("u32", 0),
    "alignment 3": pair("u32", 3),
    "alignment 2^30": pair("u32", 2**30),
    "alignment of another type": pair("str", "32"),
    "key twice": head(0, 2) + (string("k") + value("u32", 1)) * 2,
    "tensor twice": head(2) + (string("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2 + b"\0" * 64,
    "data cut by a byte": gguf_bytes({}, SMALL)[:-1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begin < 1 and peak < 100_000_000
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_damage_escapes_as_anything_but_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(gguf_bytes(GGUF_METADATA, gguf_tensors(hf_weights())))
    table_end = whole.rindex(b"blk.1") + 64
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, table_end))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), table_end, 1000]))])
    try:
        model = GGUFModel(path)
        model.weights()
        model.tokenizer()
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("version", [2, 3])
def test_a_valid_file_reads_back(tmp_path: Path, version: int) -> None:
    metadata: dict[str, Tagged] = {
        "a": ("u32", 7),
        "b": ("str", "é"),
        "c": ("[str]", ["x", "", "y"]),
        "d": ("[f32]", [0.5, 2.0]),
        "e": ("bool", True),
        "f": ("[i32]", []),
    }
    numbers = torch.arange(6.0).reshape(2, 3)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, {"t": stored(numbers), "u": stored(-numbers)}, version=version))
    file = read_gguf(path)
    assert file.get("a", int) == 7 and file.get("b", str) == "é" and file.get("e", bool) is True
    assert file.get("c", list) == ["x", "", "y"]
    assert file.get("d", np.ndarray).tolist() == [0.5, 2.0]
    assert torch.equal(file.tensor("t"), numbers) and torch.equal(file.tensor("u"), -numbers)


def test_metadata_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"n": ("str", "4"), "e": ("bool", True)}, {}))
    for key, kind in (("n", int), ("e", int), ("gone", int)):
        with pytest.raises(ModelError, match=f"key {key}"):
            read_gguf(path).get(key, kind)


def test_truncation_names_both_sizes_and_the_remedy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(ModelError, match=f"expected {size} bytes, found {size // 2}; do this"):
        read_gguf(path, "do this")


def test_a_file_cut_after_it_was_opened_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    model = GGUFModel(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="tensor"):
        model.weights()


# Quantised blocks


def test_q4_blocks_put_low_nibbles_first() -> None:
    packed = bytes(index | (15 - index) << 4 for index in range(16))
    halves = np.array([0.5, -1.0], np.float16).tobytes()
    q4_1 = quants.to_tensor(quants.TYPES[3], bytearray(halves + packed), (32,))
    assert q4_1.tolist() == [q * 0.5 - 1 for q in [*range(16), *range(15, -1, -1)]]
    q4_0 = quants.to_tensor(quants.TYPES[2], bytearray(halves[:2] + packed), (32,))
    assert q4_0.tolist() == [(q - 8) * 0.5 for q in [*range(16), *range(15, -1, -1)]]


def test_q8_0_blocks_are_a_scale_and_signed_bytes() -> None:
    data = np.float16(0.25).tobytes() + bytes(range(112, 144))
    numbers = quants.to_tensor(quants.TYPES[8], bytearray(data), (4, 8))
    assert numbers.flatten().tolist() == [0.25 * (q if q < 128 else q - 256) for q in range(112, 144)]


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q6_K"])
def test_dequantisation_is_bit_equal_to_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    type_ = next(row for row in quants.TYPES.values() if row.name == name)
    blocks = 3 * quants.CHUNK_BLOCKS // 2 + 7 if type_.decode else 5  # more than a chunk, and an odd rest
    data = np.random.default_rng(0).integers(0, 256, (blocks, type_.block_bytes), np.uint8)
    for column in (1, 3) if name != "Q6_K" else (209,):  # keep the fp16 scales finite: clear an exponent bit
        data[:, column] &= 0xBF
    ours = quants.to_tensor(type_, bytearray(data.tobytes()), (blocks, type_.block_size))
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    assert ours.numpy().tobytes() == theirs.astype(np.float32).tobytes()


@pytest.mark.oracle
def test_block_sizes_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    for row in quants.TYPES.values():
        if row.name in gguf.GGMLQuantizationType.__members__:
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[row.name]] == (row.block_size, row.block_bytes)
            assert gguf.GGMLQuantizationType[row.name] == row.code


def test_rare_types_without_the_gguf_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModelError, match=r"Q6_K needs the gguf package.*pip install"):
        quants.to_tensor(quants.TYPES[14], bytearray(210), (256,))


# The model in the file


def test_unpermute_restores_the_halves_of_each_head() -> None:
    k_rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])
    assert unpermute(k_rows, 2).tolist() == list(range(16))
    assert unpermute(permute(torch.arange(32.0)[:, None], 4), 4).flatten().tolist() == list(range(32))


def test_all_weights_equal_those_that_were_stored(tmp_path: Path) -> None:
    model = GGUFModel(write_gguf(tmp_path / "model.gguf"))
    expected = hf_weights()
    weights = model.weights()
    assert list(weights) == list(model.config.weight_shapes()) == list(expected)
    for name, weight in weights.items():
        tolerance = 0.02 if name == "model.embed_tokens.weight" else 0  # that one went through Q8_0
        assert torch.allclose(weight, expected[name], rtol=0, atol=tolerance), name
    assert weights["model.embed_tokens.weight"].dtype == torch.float32


def test_quantised_q_and_k_and_their_biases_are_unpermuted(tmp_path: Path) -> None:
    config_weights = hf_weights()
    name = "model.layers.0.self_attn.k_proj.weight"
    config_weights[name] = torch.arange(16.0)[:, None].expand(16, 32).contiguous()
    tensors = gguf_tensors(config_weights)
    tensors["blk.0.attn_k.weight"] = stored_q8_0(permute(config_weights[name], 2))
    for layer in range(2):
        for part, rows, heads in (("q", 32, 4), ("k", 16, 2), ("v", 16, 0), ("output", 32, 0)):
            bias = torch.arange(float(rows))
            tensors[f"blk.{layer}.attn_{part}.bias"] = stored(permute(bias, heads) if heads else bias)
    model = GGUFModel(write_gguf(tmp_path / "model.gguf", tensors=tensors))
    weights = model.weights()
    assert model.config.attention_bias
    assert weights[name][:, 0].round().tolist() == list(range(16))
    for part, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
        assert weights[f"model.layers.1.self_attn.{part}_proj.bias"].tolist() == list(range(rows))


def test_the_head_is_tied_exactly_when_the_file_has_none(tmp_path: Path) -> None:
    assert GGUFModel(write_gguf(tmp_path / "tied.gguf")).config.tie_word_embeddings
    tensors = gguf_tensors(hf_weights())
    head = torch.full((len(TOKENS), 32), 0.5)
    model = GGUFModel(write_gguf(tmp_path / "untied.gguf", tensors=tensors | {"output.weight": stored(head)}))
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.weights()["lm_head.weight"], head)


def test_llama3_scaling_is_recognised_in_its_table_of_factors(tmp_path: Path) -> None:
    unscaled = torch.tensor([1, 0.0376060309, 0.00141421356, 5.3182959e-05])
    scaled = torch.tensor([1, 0.0376060309, 0.000524846161, 6.64786987e-06])
    tensors = gguf_tensors(hf_weights())
    theta: dict[str, Tagged] = {"llama.rope.freq_base": ("f32", 500000.0)}
    factors = {"rope_freqs.weight": stored(unscaled / scaled)}
    model = GGUFModel(write_gguf(tmp_path / "a.gguf", theta, tensors | factors))
    assert model.config.inverse_frequencies() == pytest.approx(scaled.tolist(), rel=1e-5)
    assert "rope" not in "".join(model.weights())
    with pytest.raises(ModelError, match="rope_freqs"):
        GGUFModel(
            write_gguf(
                tmp_path / "b.gguf", theta, tensors | {"rope_freqs.weight": stored(torch.tensor([1.0, 2, 3, 4]))}
            )
        )


def test_end_tokens_are_the_stated_ones_and_control_tokens_known_to_end_a_turn(tmp_path: Path) -> None:
    model = GGUFModel(write_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.eot_token_id": ("u32", 9)}))
    assert model.config.eos_token_ids == (2, 9, 0)
    assert model.tokenizer().eos_token_ids == (2, 9, 0)


def test_the_stated_head_size_wins(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attn_q.weight has shape \[32, 32\].*\[64, 32\]"):
        GGUFModel(write_gguf(tmp_path / "model.gguf", {"llama.attention.key_length": ("u32", 16)}))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": ("str", "qwen2")}, "'qwen2'"),
        ({"general.architecture": ("u32", 1)}, "general.architecture"),
        ({"llama.expert_count": ("u32", 8)}, "mixture-of-experts"),
        ({"llama.block_count": ("u32", 3)}, "layers.2"),
        ({"llama.block_count": ("u32", 2**31)}, "num_layers"),
        ({"llama.attention.head_count": ("u32", 0)}, "num_heads"),
        ({"llama.attention.head_count_kv": ("[i32]", [2, 2])}, "head_count_kv"),
        ({"llama.rope.dimension_count": ("u32", 4)}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": ("str", "yarn")}, "'yarn'"),
        ({"llama.rope.freq_base": ("f32", float("nan"))}, "rope_theta"),
        ({"tokenizer.ggml.scores": ("[u8]", [1, 2])}, "scores"),
        ({"tokenizer.ggml.token_type": ("[i32]", [1])}, "token_type"),
        ({"tokenizer.ggml.tokens": ("[i32]", [1])}, "tokens"),
        ({"tokenizer.ggml.tokens": ("[str]", ["a"]), "tokenizer.ggml.token_type": ("[i32]", [1])}, "special token"),
        ({"tokenizer.ggml.eos_token_id": ("u32", 5000)}, "5000"),
    ],
)
def test_what_the_file_says_and_no_code_covers_is_refused(
    tmp_path: Path, metadata: dict[str, Tagged], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        GGUFModel(write_gguf(tmp_path / "model.gguf", metadata))


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_weights())
    extra = tensors | {"blk.0.attn_q_norm.weight": stored(torch.ones(8))}
    with pytest.raises(ModelError, match="attn_q_norm"):
        GGUFModel(write_gguf(tmp_path / "extra.gguf", tensors=extra))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        GGUFModel(write_gguf(tmp_path / "missing.gguf", tensors=tensors))
    assert hf_tensor_name("blk.7.attn_output.weight") == "model.layers.7.self_attn.o_proj.weight"


# The tokenizer in the file


def test_smollm_cuts_numbers_into_digits_and_never_merges_across_them(tmp_path: Path) -> None:
    tokenizer = GGUFModel(write_gguf(tmp_path / "model.gguf")).tokenizer()
    text = "hi  12\n\n1. hi"
    ids = tokenizer.encode(text)
    assert [TOKENS[token] for token in ids] == ["hi", "Ġ", "Ġ", "1", "2", "Ċ", "Ċ", "1", ".", "Ġ", "hi"]
    assert tokenizer.decode(ids) == text


def test_bos_of_plain_prompts_follows_the_file_and_else_the_family(tmp_path: Path) -> None:
    def prompt(**keys: Tagged) -> list[int]:
        metadata = {f"tokenizer.ggml.{name}": tagged for name, tagged in keys.items()}
        return GGUFModel(write_gguf(tmp_path / "model.gguf", metadata)).tokenizer().encode("hi")

    hi = TOKENS.index("hi")
    assert prompt() == [hi]
    assert prompt(add_bos_token=("bool", True)) == [1, hi]
    assert prompt(pre=("str", "llama-bpe")) == [1, hi]
    assert prompt(pre=("str", "llama-bpe"), add_bos_token=("bool", False)) == [hi]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tokenizer.ggml.model": ("str", "llama")}, "'llama'"),
        ({"tokenizer.ggml.pre": ("str", "tekken")}, "'tekken'.*allowed: smollm, gpt-2, llama-bpe"),
        ({"tokenizer.ggml.pre": ("str", "default")}, "'default'"),
        ({"tokenizer.ggml.merges": ("[str]", ["h q"])}, "merges"),
        ({"tokenizer.ggml.merges": ("[str]", ["hi"])}, "merges"),
        ({"tokenizer.ggml.tokens": ("[str]", ["!"] * len(TOKENS))}, "twice"),
    ],
)
def test_tokenizers_that_are_not_known_for_sure_are_refused(
    tmp_path: Path, metadata: dict[str, Tagged], said: str
) -> None:
    model = GGUFModel(write_gguf(tmp_path / "model.gguf", metadata))
    with pytest.raises(ModelError, match=said):
        model.tokenizer()
