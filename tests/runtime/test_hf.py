"""Hugging Face folders load complete or not at all, and end tokens are joined over all files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import processors

from pagegen.errors import ModelError
from pagegen.runtime.weights.gguf_model import GGUFModel
from pagegen.runtime.weights.hf import HFModel, read_header
from tests.runtime.model_files import HF_CONFIG, TOKENS, hf_weights, tiny_backend, write_gguf, write_hf, write_shards

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARD_2, SHARD_3 = "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HFModel(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    model = HFModel(write_hf(tmp_path / "tiny"))
    assert model.name == "tiny"
    assert_same(model.weights(), hf_weights())


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    assert_same(HFModel(write_shards(tmp_path)).weights(), hf_weights())


def test_the_same_model_in_both_formats_has_the_same_config(tmp_path: Path) -> None:
    ours = HFModel(write_hf(tmp_path / "hf", {"bos_token_id": 1, "eos_token_id": [2, 0]})).config
    theirs = GGUFModel(write_gguf(tmp_path / "model.gguf")).config
    assert theirs.rms_norm_eps == pytest.approx(ours.rms_norm_eps)
    for field in ours.__dataclass_fields__.keys() - {"rms_norm_eps"}:
        assert getattr(ours, field) == getattr(theirs, field), field


def test_weights_keep_their_stored_dtype_and_large_values(tmp_path: Path) -> None:
    weights = {name: weight.bfloat16() for name, weight in hf_weights().items()}
    weights["model.norm.weight"][0] = 70000.0
    loaded = HFModel(write_hf(tmp_path, weights=weights)).weights()
    assert {weight.dtype for weight in loaded.values()} == {torch.bfloat16}
    assert loaded["model.norm.weight"][0].item() == 70144


# Completeness: found out before serving, naming file and tensor


def test_a_missing_shard_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SHARD_2).unlink()
    assert SHARD_2 in refusal(tmp_path) and "holds tensor 'model." in refusal(tmp_path)


@pytest.mark.parametrize("cut", ["a byte", "half"])
def test_a_truncated_shard_is_named_with_the_tensor_that_is_cut(tmp_path: Path, cut: str) -> None:
    path = write_shards(tmp_path) / SHARD_3
    data = path.read_bytes()
    path.write_bytes(data[:-1] if cut == "a byte" else data[: len(data) // 2])
    message = refusal(tmp_path)
    assert SHARD_3 in message and "truncated: tensor 'model." in message and "get the file again" in message


def test_an_index_that_names_what_no_shard_has(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = SHARD_2
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert SHARD_2 in refusal(tmp_path) and "model.ghost.weight" in refusal(tmp_path)


def test_without_an_index_all_shards_are_read_with_a_warning(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.warns(UserWarning, match="all 3 safetensors files"):
        model = HFModel(tmp_path)
    assert_same(model.weights(), hf_weights())


@pytest.mark.filterwarnings("ignore:.*index.json is missing")
def test_without_an_index_a_missing_shard_still_shows(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARD_2).unlink()
    assert "in none of its 2 safetensors files" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", 5])
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, name: Any) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    assert "plain file name" in refusal(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 9) + b'{"a": {}}',
        *(
            struct.pack("<Q", len(header)) + header + b"\0" * 16
            for header in (
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}',
                b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}',
                b'{"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": [], "shape": [4], "data_offsets": [0, 16]}}',
                b'{"a": 5}',
                b'{"a": "' + b"x" * 5000 + b'\xff"}',
            )
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000


def test_a_tensor_in_two_files_is_ambiguous(tmp_path: Path) -> None:
    write_hf(tmp_path)
    safetensors.torch.save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model-extra.safetensors")
    with pytest.warns(UserWarning, match="2 safetensors files"):
        assert "'model.norm.weight' is in model-extra.safetensors too" in refusal(tmp_path)


def test_shapes_and_strangers_are_refused(tmp_path: Path) -> None:
    assert "has shape [100, 32], config.json says [100, 40]" in refusal(
        write_hf(tmp_path / "a", {"hidden_size": 40}, hf_weights())
    )
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    assert "q_proj.bias' has no place" in refusal(write_hf(tmp_path / "b", weights=hf_weights() | bias))
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert_same(HFModel(write_hf(tmp_path / "c", weights=hf_weights() | buffer)).weights(), hf_weights())


# The head


def test_a_tied_head_is_the_embedding_even_if_the_file_has_another(tmp_path: Path) -> None:
    assert HEAD not in HFModel(write_hf(tmp_path / "absent")).weights()
    same = hf_weights() | {HEAD: hf_weights()[EMBEDDING].clone()}
    assert HEAD not in HFModel(write_hf(tmp_path / "same", weights=same)).weights()
    other = hf_weights() | {HEAD: torch.zeros(len(TOKENS), 32)}
    with pytest.warns(UserWarning, match=HEAD):
        assert HEAD not in HFModel(write_hf(tmp_path / "other", weights=other)).weights()


def test_an_untied_head_has_to_be_there(tmp_path: Path) -> None:
    untied = {"tie_word_embeddings": False}
    weights = hf_weights(HF_CONFIG | untied)
    assert_same(HFModel(write_hf(tmp_path / "a", untied)).weights(), weights)
    del weights[HEAD]
    assert HEAD in refusal(write_hf(tmp_path / "b", untied, weights))


# End tokens


def test_end_tokens_are_the_union_over_all_files(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "hi"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    model = HFModel(tmp_path)
    assert model.config.eos_token_ids == model.tokenizer().eos_token_ids == (2, 7, TOKENS.index("hi"))


def test_end_tokens_without_the_other_files(tmp_path: Path) -> None:
    write_hf(tmp_path, {"eos_token_id": None})
    (tmp_path / "tokenizer_config.json").unlink()
    assert HFModel(tmp_path).config.eos_token_ids == ()


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "\udcff"])
def test_a_malformed_generation_config_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "generation_config.json" in refusal(tmp_path)


# Tokenizer and template


def test_the_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    write_hf(tmp_path)
    named = ["junk", {"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": named}))
    messages = [{"role": "user", "content": "x"}]
    assert HFModel(tmp_path).tokenizer().render_chat(messages) == "D<|im_end|>"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert HFModel(tmp_path).tokenizer().render_chat(messages) == "J"


def test_bos_of_plain_prompts_is_the_post_processors_or_the_stated_one(tmp_path: Path) -> None:
    write_hf(tmp_path)
    hi = TOKENS.index("hi")

    def prompt(**settings: Any) -> list[int]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", **settings}))
        return HFModel(tmp_path).tokenizer().encode("hi")

    assert prompt() == [hi]
    assert prompt(add_bos_token=True) == [1, hi]
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert prompt() == [1, hi]
    assert prompt(add_bos_token=False) == [hi]


def test_a_folder_without_what_it_needs_says_what(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    write_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        HFModel(tmp_path).tokenizer()
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "tokenizer.json is not a readable tokenizer" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "no model*.safetensors" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"a": NaN' + "[" * 100_000)
    assert "config.json is not JSON" in refusal(tmp_path)


def test_numbers_that_json_allows_and_models_do_not(tmp_path: Path) -> None:
    write_hf(tmp_path, {"rms_norm_eps": math.nan}, hf_weights())
    assert "rms_norm_eps" in refusal(tmp_path)
