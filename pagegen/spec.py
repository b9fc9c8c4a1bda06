"""What to compute: `KernelSpec`, phase-free and made of compile-time facts only.

Vendored into every kernel package, therefore relative imports and nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from .errors import SpecError
from .expression import check_expression

SPEC_FORMAT = 1
MAX_BLOCK_SIZE = 1024
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576  # of MLA, whose V lies inside K: 512 latent dims and 64 rotary ones
MAX_GROUP = 32
MAX_LATENT_GROUP = 128

E = TypeVar("E", bound=StrEnum)


class DType(StrEnum):
    """Element types. q and out take the first three, the KV cache all: what is narrower comes with scales."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return {"fp32": 32, "bf16": 16, "fp16": 16, "int4": 4}.get(self.value, 8)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored item: an element, or a pair of int4."""
        return max(8, self.bits) // 8

    @property
    def quantised(self) -> bool:
        """Whether values are stored divided by a scale."""
        return self.bits < 16


FLOATS = (DType.FP32, DType.BF16, DType.FP16)


class KVScale(StrEnum):
    """How many numbers share one scale of a quantised cache; K and V have scales of their own, all fp32.

    Shapes: `[1]`, `[kv_heads]`, `[blocks, block_size, kv_heads]`.
    """

    TENSOR = "tensor"
    HEAD = "head"
    TOKEN_HEAD = "token_head"


class Rope(StrEnum):
    """Which dims a rotary embedding pairs: i with i + rotary_dim / 2, or 2 i with 2 i + 1."""

    NEOX = "neox"
    INTERLEAVED = "interleaved"


class Phase(StrEnum):
    """What the rows of a batch are doing; MIXED holds decode and prefill rows in one launch."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class Op(StrEnum):
    """The operations of the kernel family. `attend` reads the paged cache, the others keep it."""

    ATTEND = "attend"
    WRITE_KV = "write_kv"
    COPY_BLOCKS = "copy_blocks"
    GATHER_BLOCKS = "gather_blocks"
    SCATTER_BLOCKS = "scatter_blocks"
    RELAYOUT = "relayout"


PAGED_OPS = (Op.ATTEND, Op.WRITE_KV, Op.COPY_BLOCKS)  # of PagedKernels: what every package has; others are built when wanted


class Order(StrEnum):
    """Order of one cache tensor's dimensions after the block: N token, H kv head, D head dim."""

    NHD = "NHD"
    HND = "HND"
    HDN = "HDN"


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """Where K and V of a token lie inside a block, K and V described apart.

    Shapes, with `x` elements of the head dim packed together (K only, 1 unless K is dim-major):

    ===== ====================================================
    order shape
    ===== ====================================================
    NHD   `[blocks, block_size, kv_heads, head_dim]`
    HND   `[blocks, kv_heads, block_size, head_dim]`
    HDN   K `[blocks, kv_heads, head_dim / x, block_size, x]`, V `[blocks, kv_heads, head_dim, block_size]`
    ===== ====================================================

    Names: `NHD`, `HND`, `HDN` (dim-major K, HND V), `HDN8` (x = 8), `HDN8_HDN` (vLLM's classic: V dim-major too).
    """

    k_order: Order = Order.NHD
    v_order: Order = Order.NHD
    x: int = 1

    def __post_init__(self) -> None:
        if self.x < 1 or self.x & (self.x - 1) or self.x > 16:
            raise SpecError(f"KV layout: x={self.x} is not one of 1, 2, 4, 8, 16; change the number after HDN")
        if self.x > 1 and self.k_order is not Order.HDN:
            raise SpecError(f"KV layout: x={self.x} needs dim-major K (HDN), not {self.k_order}; use x=1 or HDN")

    @property
    def name(self) -> str:
        """The slug's word for this layout; `parse` is its inverse."""
        k = self.k_order.value + (str(self.x) if self.x > 1 else "")
        return k if self.v_order is _usual_v_order(self.k_order) else f"{k}_{self.v_order.value}"

    @classmethod
    def parse(cls, name: str) -> KVLayout:
        """Reads a name such as `NHD`, `HDN8`, `HDN2_HDN`. Raises SpecError on anything else."""
        match = re.fullmatch(r"(NHD|HND|HDN)(\d*)(?:_(NHD|HND|HDN))?", name)
        if not match:
            raise SpecError(
                f"KV layout {name!r} is not known; allowed: NHD, HND, HDN (dim-major K), HDN2..HDN16 (x-packed K), "
                "each with an optional _NHD, _HND or _HDN for V; change the layout field or --layout"
            )
        k_order = Order(match[1])
        v_order = Order(match[3]) if match[3] else _usual_v_order(k_order)
        return cls(k_order, v_order, int(match[2] or 1))

    def k_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the K cache tensor."""
        if self.k_order is Order.HDN:
            return (num_blocks, kv_heads, head_dim // self.x, block_size, self.x)
        return _token_major(self.k_order, num_blocks, block_size, kv_heads, head_dim)

    def v_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the V cache tensor."""
        if self.v_order is Order.HDN:
            return (num_blocks, kv_heads, head_dim, block_size)
        return _token_major(self.v_order, num_blocks, block_size, kv_heads, head_dim)


def _usual_v_order(k_order: Order) -> Order:
    return Order.HND if k_order is Order.HDN else k_order


def _token_major(order: Order, blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
    return (blocks, block_size, heads, dim) if order is Order.NHD else (blocks, heads, block_size, dim)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSpec:
    """What attention to compute. Two specs are equal exactly when one kernel serves both.

    `layout` None means `auto`: the tuner chooses. `scale` None means head_dim ** -0.5 of the *stated* head_dim.
    The score of query position i and key position j of query head h goes through these steps, each only if asked for:
    `q . k * scale`; `soft_cap * tanh(score / soft_cap)`; `+ alibi_slopes[h] * (j - i)`; `score_mod`, an expression of
    pagegen/expression.py; then it is dropped unless `causal`, `window`, `window_right` and the mask all let j be seen.
    Raises SpecError, naming the field, for anything outside the family.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: DType = DType.BF16
    kv_dtype: DType | None = None  # None: the same as dtype; normalised away below
    head_dim_v: int | None = None  # None: the same as head_dim; normalised away below
    block_size: int = 16
    layout: KVLayout | None = KVLayout()
    causal: bool = True
    scale: float | None = None
    lse: bool = False
    kv_scale: KVScale | None = None  # None: by kv_dtype; normalised away below
    kv_zero: bool = False  # quantised values have zero points: (stored - zero) * scale
    v_in_k: bool = False  # MLA: V is the first head_dim_v dims of K, and there is no V cache of its own
    window: int | None = None  # keys that a query sees to its left, its own included
    window_right: int | None = None  # keys that it sees to its right
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False  # one more logit a query head, whose value is 0
    mask: bool = False  # a boolean mask beside causal and window, such as the tree of a draft
    score_mod: str | None = None
    deterministic: bool = False  # a row's bits depend on its own sequence alone, however its prefill is chunked
    rope: Rope | None = None  # write_kv rotates q and k first
    rotary_dim: int | None = None  # None: head_dim, with rope; normalised away below
    qk_norm: bool = False  # write_kv applies RMSNorm to the heads of q and k before it rotates them

    def __post_init__(self) -> None:
        self._normalise()
        self._check_sizes()
        self._check_cache()
        self._check_scores()
        self._check_rope()

    def _normalise(self) -> None:
        set_field = object.__setattr__  # the one way to normalise a frozen value
        for name, kind in (("dtype", DType), ("kv_dtype", DType), ("kv_scale", KVScale), ("rope", Rope)):
            value = getattr(self, name)
            if (value is not None or name == "dtype") and not isinstance(value, kind):
                set_field(self, name, _enum(kind, value, name))
        if self.kv_dtype is None:
            set_field(self, "kv_dtype", self.dtype)
        if self.kv_scale is None and self.cache_dtype.quantised:
            set_field(self, "kv_scale", _usual_scale(self.cache_dtype))
        if self.head_dim_v is None:
            set_field(self, "head_dim_v", self.head_dim)
        if self.rotary_dim is None and self.rope is not None:
            set_field(self, "rotary_dim", self.head_dim)

    def _check_sizes(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim", "head_dim_v", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}={value!r} is not a positive whole number; change the {name} field")
        max_dim, max_group = (MAX_LATENT_DIM, MAX_LATENT_GROUP) if self.v_in_k else (MAX_HEAD_DIM, MAX_GROUP)
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % 8 or value > max_dim:
                raise SpecError(
                    f"{name}={value} is not supported; allowed: multiples of 8 from 8 to {max_dim}; "
                    f"change {name}, or pad the heads with zeros and state `scale`"
                )
        if self.block_size > MAX_BLOCK_SIZE:
            raise SpecError(f"block_size={self.block_size} is not supported; allowed: 1 to {MAX_BLOCK_SIZE}")
        if self.q_heads % self.kv_heads:
            raise SpecError(
                f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}; "
                "grouped-query attention shares each KV head among the same number of query heads"
            )
        if self.group > max_group:
            raise SpecError(
                f"q_heads={self.q_heads} over kv_heads={self.kv_heads} is a group of {self.group}, which is not supported; "
                f"allowed: 1 to {max_group} query heads a KV head"
            )

    def _check_cache(self) -> None:
        if self.dtype not in FLOATS:
            raise SpecError(f"dtype={self.dtype} is for the KV cache only; allowed: {', '.join(FLOATS)}; set kv_dtype instead")
        if self.layout is not None and self.head_dim % self.layout.x:
            raise SpecError(f"layout {self.layout.name} packs {self.layout.x} dims, head_dim={self.head_dim} is no multiple")
        if self.kv_scale is not None and not self.cache_dtype.quantised:
            raise SpecError(f"kv_scale={self.kv_scale} needs a quantised kv_dtype, not {self.cache_dtype}; leave it out")
        if self.cache_dtype in (DType.INT8, DType.INT4) and self.kv_scale is not KVScale.TOKEN_HEAD:
            raise SpecError(f"kv_scale={self.kv_scale} is not supported for {self.cache_dtype}; allowed: token_head")
        if self.kv_zero and self.cache_dtype not in (DType.INT8, DType.INT4):
            raise SpecError(f"kv_zero needs kv_dtype int8 or int4, not {self.cache_dtype}; leave it out")
        if self.cache_dtype is DType.INT4 and self.layout is not None and Order.HDN in (self.layout.k_order, self.layout.v_order):
            raise SpecError(f"kv_dtype=int4 packs pairs along the head dim, which layout {self.layout.name} splits; use NHD or HND")
        if self.v_in_k and (self.kv_heads != 1 or self.dim_v > self.head_dim):
            raise SpecError(f"v_in_k needs one KV head and head_dim_v <= head_dim, not {self.kv_heads} and {self.dim_v}")
        if self.v_in_k and (self.cache_dtype.quantised or (self.layout and Order.HDN in (self.layout.k_order, self.layout.v_order))):
            raise SpecError("v_in_k needs a float KV cache, token-major (NHD or HND); change kv_dtype or layout")
        if self.v_in_k and self.layout and self.layout.k_order is not self.layout.v_order:
            raise SpecError(f"v_in_k: V lies inside K, in one order, and layout {self.layout.name} has two; use NHD or HND")

    def _check_scores(self) -> None:
        for name, low in (("window", 1), ("window_right", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise SpecError(f"{name}={value!r} is not a whole number of at least {low}; leave it out for no window")
        if self.causal and self.window_right is not None:
            raise SpecError(f"window_right={self.window_right} means nothing where causal hides every later key; set causal to false")
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name}={value} is not a positive finite number; leave it out for the usual")
        if self.score_mod is not None:
            check_expression(self.score_mod)

    def _check_rope(self) -> None:
        if self.rotary_dim is not None and self.rope is None:
            raise SpecError(f"rotary_dim={self.rotary_dim!r} needs rope: neox or interleaved")
        if self.rotary_dim is not None and not (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise SpecError(f"rotary_dim={self.rotary_dim!r} is not supported; allowed: even numbers from 2 to head_dim={self.head_dim}")
        if self.qk_norm and self.rope is None:
            raise SpecError("qk_norm is part of the fused rotary embedding; set rope, or normalise before write_kv")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with before the softmax."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def dim_v(self) -> int:
        """Head dim of V and of the output."""
        assert self.head_dim_v is not None  # __post_init__ fills it
        return self.head_dim_v

    @property
    def cache_dtype(self) -> DType:
        """Element type of the KV cache."""
        assert self.kv_dtype is not None  # __post_init__ fills it
        return self.kv_dtype

    @property
    def k_width(self) -> int:
        """Stored items of one head's K of one token: head_dim, or half of it for int4 (dim i and i + head_dim / 2 share a byte)."""
        return self.head_dim * self.cache_dtype.bits // (8 * self.cache_dtype.itemsize)

    @property
    def v_width(self) -> int:
        """The same of V."""
        return self.dim_v * self.cache_dtype.bits // (8 * self.cache_dtype.itemsize)

    @property
    def kv_layout(self) -> KVLayout:
        """The layout. Raises SpecError while it is still `auto`."""
        if self.layout is None:
            raise SpecError("layout is `auto`: a kernel needs one; run `pagegen tune`, or set --layout NHD")
        return self.layout

    @property
    def slug(self) -> str:
        """Readable name; fields that the grammar lacks become a short hash suffix."""
        dim_v = f"v{self.dim_v}" if self.dim_v != self.head_dim else ""
        layout = self.layout.name if self.layout else "auto"
        words = [
            self.dtype.value,
            f"d{self.head_dim}{dim_v}",
            f"h{self.q_heads}x{self.kv_heads}",
            f"b{self.block_size}",
            layout,
        ]
        if self.cache_dtype is not self.dtype:
            words.append(f"kv{self.cache_dtype.value}")
        if self.window is not None:
            words.append(f"w{self.window}")
        if (cap := self._named_soft_cap) is not None:
            words.append(f"cap{cap:g}")
        words += [word for word, name in _FLAGS.items() if getattr(self, name)]
        if unnamed := self._unnamed():
            words.append("x" + hashlib.sha256(json.dumps(unnamed, sort_keys=True).encode()).hexdigest()[:8])
        return "-".join(words)

    @property
    def _named_soft_cap(self) -> float | None:
        """What the slug's word says of soft_cap: six digits, and nothing where they need an exponent."""
        word = "" if self.soft_cap is None else f"{self.soft_cap:g}"
        return float(word) if re.fullmatch(_DECIMAL, word) else None

    def _unnamed(self) -> dict[str, Any]:
        """Fields that differ from their usual value and that the slug's grammar lacks."""
        usual = dict(_DEFAULTS) | {
            "kv_scale": _usual_scale(self.cache_dtype),
            "rotary_dim": self.head_dim if self.rope else None,
            "soft_cap": self._named_soft_cap,
        }
        return {name: getattr(self, name) for name in _UNNAMED if getattr(self, name) != usual[name]}

    def replace(self, **changes: Any) -> KernelSpec:
        """A copy with fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        values: dict[str, Any] = {"format": SPEC_FORMAT}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values[field.name] = value.value if isinstance(value, StrEnum) else value
        values["layout"] = self.layout.name if self.layout else "auto"
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelSpec:
        """Reads what `to_dict` (or a person, in YAML) wrote. Raises SpecError naming an unknown or missing field."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = dict(values)
        version = values.pop("format", SPEC_FORMAT)
        if version != SPEC_FORMAT:
            raise SpecError(f"spec format {version!r} is not known; this pagegen reads format {SPEC_FORMAT}")
        unknown = sorted(set(values) - known)
        if unknown:
            raise SpecError(f"spec field {unknown[0]!r} is not known; allowed: {', '.join(sorted(known))}")
        missing = [name for name in ("q_heads", "kv_heads", "head_dim") if name not in values]
        if missing:
            raise SpecError(f"spec field {missing[0]!r} is missing; `pagegen spec` prints a complete spec to start from")
        layout = values.get("layout", "NHD")
        if isinstance(layout, str):
            values["layout"] = None if layout == "auto" else KVLayout.parse(layout)
        elif not isinstance(layout, KVLayout):
            raise SpecError(f"layout={layout!r} is not a layout name; allowed: NHD, HND, HDN, HDN2..HDN16, auto")
        for field in dataclasses.fields(cls):
            if field.default in (True, False) and not isinstance(values.get(field.name, False), bool):
                raise SpecError(f"{field.name}={values[field.name]!r} is not true or false; change the {field.name} field")
        for name in ("scale", "soft_cap"):
            if not isinstance(values.get(name), int | float | None) or isinstance(values.get(name), bool):
                raise SpecError(f"{name}={values[name]!r} is not a number; leave it out for the usual")
        if not isinstance(values.get("score_mod"), str | None):
            raise SpecError(f"score_mod={values['score_mod']!r} is not an expression in quotes")
        return cls(**values)


def _usual_scale(kv_dtype: DType) -> KVScale | None:
    if not kv_dtype.quantised:
        return None
    return KVScale.TENSOR if kv_dtype in (DType.FP8_E4M3, DType.FP8_E5M2) else KVScale.TOKEN_HEAD


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(KernelSpec)}
_FLAGS = {"alibi": "alibi", "sinks": "sinks", "lse": "lse", "det": "deterministic"}  # the slug's word, the field
_UNNAMED = (
    *("causal", "scale", "kv_scale", "kv_zero", "v_in_k", "window_right", "soft_cap", "mask", "score_mod"),
    *("rope", "rotary_dim", "qk_norm"),
)

_DECIMAL = r"\d+(?:\.\d+)?"
_SLUG = re.compile(
    r"(?:(?P<phase>decode|prefill|mixed)-)?(?P<dtype>[a-z0-9]+)-d(?P<head_dim>\d+)(?:v(?P<head_dim_v>\d+))?"
    r"-h(?P<q_heads>\d+)x(?P<kv_heads>\d+)-b(?P<block_size>\d+)-(?P<layout>[A-Za-z0-9_]+)(?P<options>(?:-[a-z0-9_.]+)*)",
    re.ASCII,
)


def parse_slug(slug: str) -> tuple[KernelSpec, Phase | None]:
    """Reads `[phase-]dtype-dD[vDV]-hQxKV-bB-LAYOUT[-options]`; a missing phase means all.

    Raises SpecError naming the part that is wrong.
    """
    match = _SLUG.fullmatch(slug)
    if not match:
        raise SpecError(
            f"spec {slug!r} is neither a file nor a slug; a slug looks like bf16-d64-h9x3-b16-NHD, "
            "optionally with decode-, prefill- or mixed- in front"
        )
    part = match.groupdict()
    fields: dict[str, Any] = {
        "dtype": _enum(DType, part["dtype"], "dtype"),
        "layout": part["layout"],
        **{name: int(part[name]) for name in ("head_dim", "q_heads", "kv_heads", "block_size")},
    }
    if part["head_dim_v"]:
        fields["head_dim_v"] = int(part["head_dim_v"])
    for word in filter(None, part["options"].split("-")):
        if word in _FLAGS:
            fields[_FLAGS[word]] = True
        elif word.startswith("kv"):
            fields["kv_dtype"] = _enum(DType, word[2:], "kv_dtype")
        elif re.fullmatch(r"w\d+", word):
            fields["window"] = int(word[1:])
        elif re.fullmatch(f"cap{_DECIMAL}", word):
            fields["soft_cap"] = float(word[3:])
        elif word in set(Phase):
            raise SpecError(f"spec {slug!r}: a phase stands in front of the others; write {word}-{slug.replace(f'-{word}', '', 1)}")
        else:
            raise SpecError(
                f"spec {slug!r}: option {word!r} is not known; allowed: kv<dtype>, w<window>, cap<soft cap>, "
                f"{', '.join(_FLAGS)}; use a YAML file for others"
            )
    return KernelSpec.from_dict(fields), Phase(part["phase"]) if part["phase"] else None


def _enum(kind: type[E], value: Any, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise SpecError(f"{field}={value!r} is not known; allowed: {allowed}; change the {field} field") from None
