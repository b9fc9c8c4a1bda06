"""Claims about what can be asked for: names round-trip, equal specs are equal, and each refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.errors import SpecError
from pagegen.spec import MAX_GROUP, DType, KernelSpec, KVLayout, Order, Phase, parse_slug

BASE: dict[str, Any] = {"q_heads": 9, "kv_heads": 3, "head_dim": 64}

layouts = st.builds(KVLayout, st.sampled_from(Order), st.sampled_from(Order)) | st.builds(
    KVLayout, st.just(Order.HDN), st.sampled_from(Order), st.sampled_from([1, 2, 4, 8])
)
dims = st.integers(1, 32).map(lambda n: 8 * n)


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    kv_heads = draw(st.integers(1, 64))
    return KernelSpec(
        q_heads=kv_heads * draw(st.integers(1, MAX_GROUP)),
        kv_heads=kv_heads,
        head_dim=draw(dims),
        dtype=draw(st.sampled_from(DType)),
        kv_dtype=draw(st.none() | st.sampled_from(DType)),
        head_dim_v=draw(st.none() | dims),
        block_size=draw(st.integers(1, 1024)),
        layout=draw(st.none() | layouts),
        causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(1e-6, 1e6)),
        lse=draw(st.booleans()),
    )


# --- names -----------------------------------------------------------------------------------------------------------


@given(layouts)
def test_a_layout_is_its_name(layout: KVLayout) -> None:
    assert KVLayout.parse(layout.name) == layout


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("NHD", KVLayout()),
        ("HND", KVLayout(Order.HND, Order.HND)),
        ("HDN", KVLayout(Order.HDN, Order.HND)),
        ("HDN8", KVLayout(Order.HDN, Order.HND, 8)),
        ("HDN8_HDN", KVLayout(Order.HDN, Order.HDN, 8)),
        ("NHD_HDN", KVLayout(Order.NHD, Order.HDN)),
    ],
)
def test_the_names_that_are_written_down(name: str, layout: KVLayout) -> None:
    assert KVLayout.parse(name) == layout
    assert layout.name == name


@pytest.mark.parametrize("name", ["", "nhd", "NDH", "NHD8", "HDN3", "HDN32", "HDN0", "HDN8_", "HDN-8"])
def test_other_layout_names_are_refused(name: str) -> None:
    with pytest.raises(SpecError):
        KVLayout.parse(name)


@given(specs())
def test_a_slug_is_its_spec_where_the_grammar_reaches(spec: KernelSpec) -> None:
    named = spec.replace(causal=True, scale=None)
    assert parse_slug(named.slug) == (named, None)
    assert parse_slug(f"decode-{named.slug}") == (named, Phase.DECODE)
    if spec != named:
        assert spec.slug.startswith(named.slug + "-x")  # a hash, which says so
        with pytest.raises(SpecError, match="YAML"):
            parse_slug(spec.slug)


@given(specs(), specs())
def test_specs_are_equal_exactly_when_their_slugs_are(one: KernelSpec, other: KernelSpec) -> None:
    assert (one == other) == (one.slug == other.slug)
    assert one != other or hash(one) == hash(other)


def test_the_slug_reads_as_documented() -> None:
    spec = KernelSpec(9, 3, 64, kv_dtype=DType.FP16, head_dim_v=48, layout=KVLayout.parse("HDN8"), lse=True)
    assert spec.slug == "bf16-d64v48-h9x3-b16-HDN8-kvfp16-lse"
    assert KernelSpec(9, 3, 64, layout=None).slug == "bf16-d64-h9x3-b16-auto"


@given(specs())
def test_a_spec_survives_json(spec: KernelSpec) -> None:
    assert KernelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


# --- derived ---------------------------------------------------------------------------------------------------------


def test_what_is_left_out_follows_what_is_stated() -> None:
    spec = KernelSpec(**BASE)
    assert (spec.dim_v, spec.cache_dtype, spec.group) == (64, DType.BF16, 3)
    assert spec == KernelSpec(**BASE, head_dim_v=64, kv_dtype=DType.BF16)
    assert spec == KernelSpec(**BASE, dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [8, 80, 96, 112, 120, 256])
def test_the_scale_is_that_of_the_stated_head_dim(head_dim: int) -> None:
    assert KernelSpec(2, 1, head_dim).softmax_scale == pytest.approx(head_dim**-0.5, rel=1e-15)
    assert KernelSpec(2, 1, head_dim, scale=0.3).softmax_scale == 0.3


@given(layouts, st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.sampled_from([8, 16, 24, 48]))
def test_every_layout_holds_every_element_once(layout: KVLayout, blocks: int, size: int, heads: int, dim: int) -> None:
    elements = blocks * size * heads * dim
    for shape in (layout.k_shape(blocks, size, heads, dim), layout.v_shape(blocks, size, heads, dim)):
        product = 1
        for extent in shape:
            product *= extent
        assert product == elements
        assert shape[0] == blocks


def test_packed_keys_lie_as_vllm_has_them() -> None:
    layout = KVLayout.parse("HDN8_HDN")
    assert layout.k_shape(7, 16, 3, 64) == (7, 3, 8, 16, 8)
    assert layout.v_shape(7, 16, 3, 64) == (7, 3, 64, 16)


def test_a_layout_left_to_the_tuner_is_no_layout_yet() -> None:
    with pytest.raises(SpecError, match="pagegen tune"):
        _ = KernelSpec(**BASE, layout=None).kv_layout


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q_heads": 3, "kv_heads": 2}, "q_heads=3 is not a multiple of kv_heads=2"),
        ({"q_heads": 0}, "q_heads=0"),
        ({"kv_heads": -3}, "kv_heads=-3"),
        ({"q_heads": True}, "q_heads=True"),
        ({"q_heads": 9.0}, r"q_heads=9\.0"),
        ({"q_heads": 33, "kv_heads": 1}, "group"),
        ({"head_dim": 65}, "head_dim=65 .* multiples of 8"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"head_dim_v": 20}, "head_dim_v=20"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2048}, "block_size=2048"),
        ({"dtype": "fp8"}, "dtype='fp8' is not known; allowed: fp32, bf16, fp16"),
        ({"kv_dtype": 16}, "kv_dtype=16"),
        ({"layout": "NDH"}, "layout 'NDH'"),
        ({"layout": 5}, "layout=5"),
        ({"layout": "HDN16", "head_dim": 24}, "layout HDN16 packs 16 dims, head_dim=24"),
        ({"scale": 0}, "scale=0"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": "0.5"}, "scale='0.5'"),
        ({"scale": True}, "scale=True"),
        ({"causal": 1}, "causal=1"),
        ({"lse": "yes"}, "lse='yes'"),
        ({"windw": 4}, "'windw' is not known; allowed: block_size"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_refusal_names_the_field_in_one_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named) as caught:
        KernelSpec.from_dict(BASE | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", sorted(BASE))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(SpecError, match=f"'{field}' is missing"):
        KernelSpec.from_dict({name: value for name, value in BASE.items() if name != field})


@pytest.mark.parametrize(
    ("slug", "named"),
    [
        ("bf16-d64-h9x3-b16", "looks like"),
        ("", "looks like"),
        ("BF16-d64-h9x3-b16-NHD", "looks like"),
        ("bf8-d64-h9x3-b16-NHD", "dtype='bf8'"),
        ("bf16-d64-h9x2-b16-NHD", "multiple"),
        ("bf16-d64-h9x3-b16-XYZ", "XYZ"),
        ("bf16-d64-h9x3-b16-NHD-w128", "option 'w128'"),
        ("bf16-d64-h9x3-b16-NHD-kvint3", "kv_dtype='int3'"),
        ("chat-bf16-d64-h9x3-b16-NHD", "looks like"),
        ("bf16-d64-h9x3-b16-NHD\n", "looks like"),
    ],
)
def test_a_wrong_slug_is_refused_with_the_part_that_is_wrong(slug: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        parse_slug(slug)
