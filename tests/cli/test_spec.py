"""Naming a spec: file, slug or model, with fields replaced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from pagegen.cli import _common
from pagegen.cli._common import format_size, parse_size, spec_from
from pagegen.errors import ConfigError, SpecError
from pagegen.spec import DType, KernelSpec, KVLayout, Phase, parse_slug
from tests.cli.helpers import run

SLUG = "bf16-d64-h9x3-b16-NHD"


def test_a_slug_with_overrides() -> None:
    spec, phase = spec_from(f"decode-{SLUG}", None, {"block_size": 32, "layout": "HDN8"})
    assert phase is Phase.DECODE
    assert spec == parse_slug(SLUG)[0].replace(block_size=32, layout=KVLayout.parse("HDN8"))


def test_fields_that_follow_another_one_still_do_after_an_override() -> None:
    assert spec_from(SLUG, None, {"dtype": "fp32"})[0].cache_dtype is DType.FP32
    assert spec_from(SLUG, None, {"head_dim": 128})[0].dim_v == 128
    assert spec_from(f"{SLUG}-kvfp16", None, {"dtype": "fp32"})[0].cache_dtype is DType.FP16


@pytest.mark.parametrize("name", ["spec.yaml", "spec.json"])
def test_a_file_says_the_same_as_the_spec_it_was_written_from(name: str, tmp_path: Path) -> None:
    spec = KernelSpec(q_heads=5, kv_heads=5, head_dim=40, dtype=DType.FP32, block_size=7, layout=None, scale=0.5)
    values = spec.to_dict() | {"phase": "prefill"}
    (tmp_path / name).write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
    assert spec_from(str(tmp_path / name), None, {}) == (spec, Phase.PREFILL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "holds no fields"),
        ("{", "cannot be read"),
        ("q_heads: 9\nkv_heads: 3\nhead_dim: 64\ncolour: red", "'colour'"),
        ("q_heads: 9\nkv_heads: 3\nhead_dim: 64\nphase: lunar", "phase='lunar'"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_bad_file_is_a_spec_error(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(SpecError, match=said):
        spec_from(str(tmp_path / "spec.yaml"), None, {})


@pytest.mark.parametrize(("spec", "model"), [(None, None), (SLUG, "dummy:tiny")])
def test_exactly_one_way_to_name_it(spec: str | None, model: str | None) -> None:
    with pytest.raises(SpecError, match="name one spec"):
        spec_from(spec, model, {})


def test_a_models_spec_is_read_from_its_config() -> None:
    result = run("spec", "--model", "dummy:smollm2-135m", "--json")
    assert result.document["slug"] == SLUG


def test_every_field_of_the_spec_can_be_overridden() -> None:
    names = {field.name for field in dataclasses.fields(KernelSpec)}
    assert set(_common._FIELD_HELP) == names
    words = ["--no-causal", "--lse", "--scale", "0.5", "--head-dim-v", "32", "--kv-dtype", "bf16", "--layout", "auto"]
    document = run("spec", "--json", *words).document
    assert (document["causal"], document["lse"], document["scale"]) == (False, True, 0.5)
    assert (document["head_dim_v"], document["kv_dtype"], document["layout"]) == (32, "bf16", "auto")


def test_what_spec_prints_can_be_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(run("spec", f"mixed-{SLUG}", "--block-size", "8").stdout)
    assert spec_from(str(tmp_path / "a.yaml"), None, {}) == (parse_slug(SLUG)[0].replace(block_size=8), Phase.MIXED)


def test_render_prints_source_and_the_config_used() -> None:
    document = run("render", SLUG, "--target", "cuda:sm_90", "--set", "tile_kv=32", "--json").document
    assert document["config"]["tile_kv"] == 32
    assert "@triton.jit" in document["source"]
    plain = run("render", SLUG, "--target", "cpu:avx2", "--op", "write_kv")
    assert "pagegen_write_kv" in plain.stdout
    assert plain.stderr.startswith(f"{SLUG} on cpu:avx2, key ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "tile_kv"), "KNOB=VALUE"),
        (("--set", "tile_kv=33"), "tile_kv"),
        (("--set", "warp_speed=9"), "allowed: tile_kv (default "),
        (("--target", "cpu:avx2", "--set", "prefetch_again=2"), "(how often a prefetched line is prefetched again"),
        (("--target", "cpu:avx2", "--set", "row_block=4", "--set", "row_block=8"), "row_block is already 4; set each knob once"),
        (("--target", "tpu:v5"), "tpu:v5"),
        (("--layout", "DHN"), "DHN"),
        (("--kv-scale", "head"), "kv_dtype"),
    ],
)
def test_render_refuses_in_one_line(words: tuple[str, ...], said: str) -> None:
    result = run("render", SLUG, *words)
    assert result.status == 2 and said in result.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("2 kb", 2048), ("1g", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--kv-cache-memory") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4T", "nan", "1e9", "M"])
def test_bad_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        parse_size(text, "--kv-cache-memory")


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 GiB",
    ]
