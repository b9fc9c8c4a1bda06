"""Claims about what can be asked for: names round-trip, equal specs are equal, and each refusal names its field."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import SpecError
from pagegen.spec import (
    FLOATS,
    MAX_GROUP,
    MAX_LATENT_DIM,
    MAX_LATENT_GROUP,
    DType,
    KernelSpec,
    KVLayout,
    KVScale,
    Order,
    Phase,
    Rope,
    parse_slug,
)

BASE: dict[str, Any] = {"q_heads": 9, "kv_heads": 3, "head_dim": 64}

layouts = st.builds(KVLayout, st.sampled_from(Order), st.sampled_from(Order)) | st.builds(
    KVLayout, st.just(Order.HDN), st.sampled_from(Order), st.sampled_from([1, 2, 4, 8])
)
dims = st.integers(1, 32).map(lambda n: 8 * n)


token_major = st.builds(KVLayout, st.sampled_from([Order.NHD, Order.HND]), st.sampled_from([Order.NHD, Order.HND]))
one_order = st.sampled_from([Order.NHD, Order.HND]).map(lambda order: KVLayout(order, order))
positive = st.floats(1e-6, 1e6)
NAMED = {  # fields of which the slug's grammar says all
    *("q_heads", "kv_heads", "head_dim", "head_dim_v", "dtype", "kv_dtype", "block_size", "layout", "window"),
    *("alibi", "sinks", "lse", "deterministic"),
}
EXPRESSIONS = ("score * 2", "where(k_idx < 4, score, -inf)", "score - 0.5 * abs(q_idx - k_idx) * (head + 1)")


@st.composite
def specs(draw: st.DrawFn, named: bool = False) -> KernelSpec:
    """Any spec of the family, or any that a slug names in full: what depends on another field is drawn to fit it."""
    causal, rope = draw(st.booleans()), draw(st.none() | st.sampled_from(Rope))
    fields: dict[str, Any] = {
        "dtype": draw(st.sampled_from(FLOATS)),
        "block_size": draw(st.integers(1, 1024)),
        "causal": causal,
        "scale": draw(st.none() | positive),
        "window": draw(st.none() | st.integers(1, 5000)),
        "window_right": None if causal else draw(st.none() | st.integers(0, 5000)),
        "soft_cap": draw(st.none() | positive),
        "score_mod": draw(st.none() | st.sampled_from(EXPRESSIONS)),
        "rope": rope,
        "qk_norm": rope is not None and draw(st.booleans()),
    }
    fields |= {name: draw(st.booleans()) for name in ("lse", "alibi", "sinks", "mask", "deterministic")}
    if not named and draw(st.integers(0, 5)) == 0:
        latent = st.integers(1, MAX_LATENT_DIM // 8).map(lambda n: 8 * n)
        fields |= {"q_heads": draw(st.integers(1, MAX_LATENT_GROUP)), "kv_heads": 1, "head_dim": draw(latent), "v_in_k": True}
        fields |= {"head_dim_v": draw(latent.filter(lambda n: n <= fields["head_dim"])), "layout": draw(one_order)}
    else:
        kv_heads, kv_dtype = draw(st.integers(1, 64)), draw(st.none() | st.sampled_from(DType))
        integral = kv_dtype in (DType.INT8, DType.INT4)
        scales = [KVScale.TOKEN_HEAD] if integral else list(KVScale)
        fields |= {"q_heads": kv_heads * draw(st.integers(1, MAX_GROUP)), "kv_heads": kv_heads, "kv_dtype": kv_dtype}
        fields |= {"head_dim": draw(dims), "head_dim_v": draw(st.none() | dims), "kv_zero": integral and draw(st.booleans())}
        fields |= {"layout": draw(st.none() | (token_major if kv_dtype is DType.INT4 else layouts))}
        fields |= {"kv_scale": draw(st.none() | st.sampled_from(scales)) if kv_dtype and kv_dtype.quantised else None}
    fields |= {"rotary_dim": draw(st.none() | st.integers(1, fields["head_dim"] // 2).map(lambda n: 2 * n)) if rope else None}
    if named:
        fields = {name: value for name, value in fields.items() if name in NAMED}
        fields["soft_cap"] = draw(st.none() | st.integers(1, 10**6 - 1).map(lambda n: n / 10000))
    return KernelSpec(**fields)


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


@given(specs(named=True))
def test_a_slug_is_its_spec_where_the_grammar_reaches(spec: KernelSpec) -> None:
    assert parse_slug(spec.slug) == (spec, None)
    assert parse_slug(f"decode-{spec.slug}") == (spec, Phase.DECODE)


@given(specs())
def test_a_slug_that_says_less_than_its_spec_says_so_with_a_hash(spec: KernelSpec) -> None:
    if re.search("-x[0-9a-f]{8}$", spec.slug):
        with pytest.raises(SpecError, match="YAML"):
            parse_slug(spec.slug)
    else:
        assert parse_slug(spec.slug) == (spec, None)


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
        ({"q_heads": 33, "kv_heads": 1}, "q_heads=33 over kv_heads=1 is a group of 33, .* allowed: 1 to 32 query heads a KV head"),
        ({"head_dim": 65}, "head_dim=65 .* multiples of 8"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"head_dim_v": 20}, "head_dim_v=20"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2048}, "block_size=2048"),
        ({"dtype": "fp8"}, "dtype='fp8' is not known; allowed: fp32, bf16, fp16"),
        ({"dtype": None}, "dtype=None is not known; allowed: fp32, bf16, fp16"),
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
        ({"dtype": "int8"}, "dtype=int8 is for the KV cache only"),
        ({"kv_scale": "tensor"}, "kv_scale=tensor needs a quantised kv_dtype"),
        ({"kv_scale": "row", "kv_dtype": "fp8_e4m3"}, "kv_scale='row' is not known"),
        ({"kv_scale": "head", "kv_dtype": "int8"}, "kv_scale=head is not supported for int8; allowed: token_head"),
        ({"kv_zero": True, "kv_dtype": "fp8_e5m2"}, "kv_zero needs kv_dtype int8 or int4, not fp8_e5m2"),
        ({"kv_dtype": "int4", "layout": "HDN8"}, "int4 packs pairs along the head dim, which layout HDN8 splits"),
        ({"v_in_k": True}, "v_in_k needs one KV head and head_dim_v <= head_dim, not 3 and 64"),
        ({"v_in_k": True, "kv_heads": 1, "head_dim_v": 72}, "v_in_k needs one KV head .*, not 1 and 72"),
        ({"v_in_k": True, "kv_heads": 1, "kv_dtype": "int8"}, "v_in_k needs a float KV cache"),
        ({"v_in_k": True, "kv_heads": 1, "layout": "HND_NHD"}, "v_in_k: V lies inside K, in one order, and layout HND_NHD has two"),
        ({"v_in_k": True, "kv_heads": 1, "layout": "HDN"}, "v_in_k needs a float KV cache, token-major"),
        ({"v_in_k": True, "kv_heads": 1, "head_dim": 584}, "head_dim=584 .* from 8 to 576"),
        ({"window": 0}, "window=0 is not a whole number of at least 1"),
        ({"window": True}, "window=True"),
        ({"window_right": 2}, "window_right=2 means nothing where causal"),
        ({"window_right": -1, "causal": False}, "window_right=-1 is not a whole number of at least 0"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 is not a positive"),
        ({"soft_cap": "30"}, "soft_cap='30' is not a number"),
        ({"score_mod": "scor * 2"}, "'scor' is not known; names: score"),
        ({"score_mod": 3}, "score_mod=3 is not an expression"),
        ({"score_mod": "-" * 999 + "1"}, "is not an expression"),
        ({"rotary_dim": 32}, "rotary_dim=32 needs rope"),
        ({"rotary_dim": 31, "rope": "neox"}, "rotary_dim=31 is not supported; allowed: even numbers from 2"),
        ({"rope": "gptj"}, "rope='gptj' is not known; allowed: neox, interleaved"),
        ({"qk_norm": True}, "qk_norm .* set rope"),
        ({"alibi": 1}, "alibi=1 is not true or false"),
        ({"windw": 4}, "'windw' is not known; allowed: alibi, block_size"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_refusal_names_the_field_in_one_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named) as caught:
        KernelSpec.from_dict(BASE | changes)
    assert "\n" not in str(caught.value)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2000),
    st.floats(-4, 4),
    st.sampled_from([math.inf, -math.inf, math.nan, 2**70]),
    st.sampled_from(["", "auto", "fp8_e5m2", "int4", "HDN8_HDN", "neox", "score * 2", "head", "\n"]),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=600)
@given(st.sampled_from([field.name for field in dataclasses.fields(KernelSpec)]), JUNK)
def test_any_value_of_a_field_is_a_spec_or_one_line_that_names_the_field_and_the_value(field: str, value: object) -> None:
    try:
        spec = KernelSpec.from_dict(BASE | {field: value})
    except SpecError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 400
        assert field in said
        assert value is True or repr(value)[:20] in said or str(value)[:20] in said
    else:
        assert KernelSpec.from_dict(spec.to_dict()) == spec


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
        ("bf16-d64-h9x3-b16-NHD-w", "option 'w'"),
        ("bf16-d64-h9x3-b16-NHD-decode", "write decode-bf16-d64-h9x3-b16-NHD"),
        ("bf16-d64-h9x3-b16-NHD-cap1e6", "option 'cap1e6'"),
        ("bf16-d64-h9x3-b16-NHD-w0", "window=0"),
        ("bf16-d64-h9x3-b16-NHD-kvint3", "kv_dtype='int3'"),
        ("chat-bf16-d64-h9x3-b16-NHD", "looks like"),
        ("bf16-d64-h9x3-b16-NHD\n", "looks like"),
        ("bf16-d６４-h9x3-b16-NHD", "looks like"),
    ],
)
def test_a_wrong_slug_is_refused_with_the_part_that_is_wrong(slug: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        parse_slug(slug)
