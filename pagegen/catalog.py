"""The catalog: which template computes which op in which language, with which knobs. A kernel variant is a row here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from .errors import SpecError
from .space import Config, ConfigSpace, Constraint, Knob, Value, power_of_two
from .spec import MAX_HEAD_DIM, MAX_LATENT_GROUP, DType, KernelSpec, KVLayout, Op, Order, Phase
from .target import Target

ALL_PHASES = frozenset(Phase)
TILE_BYTES = 96 << 10  # of K and V of all heads, in a tile of the C++ attend with few rows
FIRST_CACHE = 32 << 10  # bytes, of most processors


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A row. `file` is relative to templates/; `supports` answers None, or why not in words a user can act on."""

    op: Op
    language: str  # cpp or triton
    file: str
    space: Callable[[KernelSpec, Target], ConfigSpace]
    supports: Callable[[KernelSpec, Target], str | None]
    phases: frozenset[Phase] = ALL_PHASES


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to be: what (spec), where (target), how (template and config)."""

    spec: KernelSpec
    target: Target
    template: Template
    config: Config

    @property
    def name(self) -> str:
        """Readable, unique up to the config: `attend cpu:avx512 bf16-d64-h9x3-b16-NHD`."""
        return f"{self.template.op.value} {self.target.name} {self.spec.slug}"

    @property
    def products(self) -> str:
        """How a C++ attend multiplies: see `products`."""
        return products(self.spec, self.target)


def products(spec: KernelSpec, target: Target) -> str:
    """How the C++ attend multiplies: on the target's `matrix` unit, on vectors of `pairs`, or on `vector`s of fp32.

    The first two where q and the stored numbers are exact in what they multiply.
    """
    exact = spec.cache_dtype is spec.dtype or spec.cache_dtype.quantised
    if exact and spec.dtype.value in target.matrix:
        return "matrix"
    return "pairs" if exact and spec.dtype.value in target.pairs else "vector"


def _options(spec: KernelSpec) -> Iterator[str]:
    """The options that a spec uses beyond plain attention, by field, and by value where a template may know some of them."""
    if spec.cache_dtype is not spec.dtype:
        yield f"kv_dtype={spec.cache_dtype}" if spec.cache_dtype.quantised else "kv_dtype"
    yield from (name for name in ("kv_zero", "v_in_k", "alibi", "sinks", "mask", "deterministic", "qk_norm") if getattr(spec, name))
    named = ("window", "window_right", "soft_cap", "score_mod", "rope")
    yield from (name for name in named if getattr(spec, name) is not None)


# What each template knows. An option that matters to another op only (rope to write_kv, sinks to attend) is in every set.
_ATTEND_ONLY = frozenset(("alibi", "sinks", "mask", "deterministic", "window", "window_right", "soft_cap", "score_mod"))
_WRITE_ONLY = frozenset(("rope", "qk_norm"))
_CACHE = frozenset(("kv_dtype", "kv_zero", "v_in_k", *(f"kv_dtype={dtype}" for dtype in DType if dtype.quantised)))
_CPP_ATTEND = _ATTEND_ONLY | _WRITE_ONLY | _CACHE
_CPP_WRITE_KV = _ATTEND_ONLY | _WRITE_ONLY | _CACHE
_CPP_MOVE = _ATTEND_ONLY | _WRITE_ONLY | _CACHE
_TRITON_ATTEND = _ATTEND_ONLY | _WRITE_ONLY | _CACHE
_TRITON_WRITE_KV = _ATTEND_ONLY | {"kv_dtype", "v_in_k"}  # moves bits; another float type is the caller's conversion
_TRITON_WRITE_COMPUTED = _ATTEND_ONLY | _WRITE_ONLY | _CACHE
_TRITON_MOVE = _ATTEND_ONLY | _WRITE_ONLY | _CACHE


def _supports(kind: str, known: frozenset[str]) -> Callable[[KernelSpec, Target], str | None]:
    """A row's `supports`: the language runs on this kind of target and its template knows every option."""

    def supports(spec: KernelSpec, target: Target) -> str | None:
        if (target.kind == "cpu") != (kind == "cpu"):
            return "C++ kernels run on CPUs" if kind == "cpu" else "Triton kernels run on GPUs"
        lacking = sorted(set(_options(spec)) - known)
        return f"this template has no {', '.join(lacking)}; leave it out" if lacking else None

    return supports


def _cpp_attend_space(spec: KernelSpec, target: Target) -> ConfigSpace:
    group = spec.group
    direct = max(rows for rows in (1, 2, 3, 4) if group % rows == 0 or group > 4)
    packing = (1, 8, 16, 32, 64) if spec.deterministic else (8, 16, 32, 64)  # deterministic: always or never, by the group

    def fits(v: Mapping[str, Value]) -> bool:
        return int(v["tile_q"]) * group * (spec.head_dim + spec.dim_v + int(v["tile_kv"])) * 4 <= 8 << 20

    too_large = Constraint(fits, "the rows of one work item exceed 8 MiB a thread; lower tile_q or tile_kv")
    if products(spec, target) == "matrix":
        tile_kv = 512 if max(spec.head_dim, spec.dim_v) <= 128 else 128
        few = Knob("tile_few", (64, 128, 256), 128, "tokens of a step where an item has few rows, as in decode; at most tile_kv")
        tile_q = 1 << (256 // group).bit_length() - 1  # packing K and V is shared by up to 256 rows
        return ConfigSpace(
            (
                power_of_two("tile_kv", 32, 512, tile_kv, "tokens of one online-softmax step"),
                power_of_two("tile_q", 1, 256, tile_q, "query tokens of one work item in prefill"),
                power_of_two("split_kv", 256, 8192, 1024, "tokens of one work item in decode; the parts are combined"),
                *(() if spec.deterministic else (few,)),  # deterministic: decode and prefill take the same tiles
                Knob("prefetch", (0, 1, 2), 1, "tiles ahead that are prefetched through the block table"),
            ),
            (too_large, Constraint(lambda v: int(v.get("tile_few", 0)) <= int(v["tile_kv"]), "tile_few exceeds tile_kv")),
        )

    # Where products are quick, what a tile costs otherwise is shared by more.
    wide = products(spec, target) == "pairs" and not (spec.v_in_k or spec.deterministic)
    # Rows that share the packing of a tile: too few, and it costs; too many, and a causal tile computes what nobody sees.
    if spec.v_in_k:
        tile_q = 1 << (min(16, MAX_LATENT_GROUP // group).bit_length() - 1)  # at most 128 rows
    else:
        rows, most = (256, 128) if wide else (128, 64)
        tile_q = min(most, max(16, 1 << (rows // group).bit_length() - 1))
    tile_kv = 128 if wide else 64
    # Two tiles of all heads, this one and the one that is prefetched, are to stay in the second cache beside what else is there.
    token = spec.kv_heads * (spec.k_width + (0 if spec.v_in_k else spec.v_width)) * spec.cache_dtype.itemsize
    tile_few = max(16, min(64, 1 << (TILE_BYTES // token).bit_length() - 1)) if token <= TILE_BYTES else 16
    if products(spec, target) == "pairs" and group > 4 and spec.head_dim < 128 and not spec.deterministic:
        direct = 8  # sums across lanes, which rows share, would take as long as the products
    if not spec.v_in_k and (spec.kv_layout.k_order is Order.NHD or (spec.kv_layout.k_order is Order.HND and spec.kv_heads == 1)):
        # Each head in turn reads its part of every token: in short tiles nearly in the order of memory, and in the first cache.
        tile_few = 32 if spec.cache_dtype.quantised or direct == 8 else 16
    if spec.kv_layout.k_order is Order.HDN:  # whole blocks: a part of one is a part of each of its rows
        tile_few = max(tile_few, min(128, 1 << (spec.block_size - 1).bit_length()))
        tile_kv = max(tile_kv, tile_few)
    # More often helps where two tiles are more than the first cache holds; where they fit, or bytes take long to read, it is only work.
    tiles = 2 * token * (tile_kv if spec.deterministic else tile_few)
    again = 6 if tiles > FIRST_CACHE and not spec.cache_dtype.quantised else 3
    if target.machine != "x86_64" or target.arch == "scalar" or (spec.cache_dtype.quantised and spec.kv_layout.k_order is Order.HDN):
        again = 0
    few = Knob("tile_few", (16, 32, 64, 128), tile_few, "tokens of a step where an item has few rows, as in decode; at most tile_kv")
    return ConfigSpace(
        (
            power_of_two("tile_kv", 16, 256, tile_kv, "tokens of one online-softmax step"),
            power_of_two("tile_q", 1 if spec.v_in_k else 4, 256, tile_q, "query tokens of one work item in prefill"),
            power_of_two("split_kv", 256, 8192, 1024, "tokens of one work item in decode; the parts are combined"),
            *(() if spec.deterministic else (few,)),  # deterministic: decode and prefill take the same tiles
            Knob("row_block", (1, 2, 3, 4, 6, 8), direct, "query rows that share a loaded K or V vector, decode"),
            Knob("row_block_packed", (2, 4, 6, 8, 12), 6, "query rows that share a packed K or V vector, prefill"),
            Knob("pack_rows", packing, 32 if spec.v_in_k else 16, "from this many rows on, K and V tiles are packed first"),
            Knob("prefetch", (0, 1, 2), 1, "tiles ahead that are prefetched through the block table"),
            Knob("prefetch_again", (0, 1, 3, 6), again, "how often a prefetched line is prefetched again: a full queue may drop it"),
        ),
        (too_large,),
    )


def _no_knobs(spec: KernelSpec, target: Target) -> ConfigSpace:
    return ConfigSpace(())


def _triton_defaults(spec: KernelSpec, target: Target) -> dict[str, int]:
    """Knobs that fit into shared memory and, for bf16 and fp16 heads up to 128, spill no register.

    Registers go to accumulators, to addresses (more of them where loads are narrow), to masks (where a head is padded), and
    to what lies between the two products: conversions, scales, and steps on scores.
    """
    widest, fp32 = max(spec.head_dim, spec.dim_v), _triton_compute_bytes(spec) == 4
    rdna = target.kind == "hip" and target.warp_size == 32
    uncapped = 255 if target.kind == "cuda" else 0
    large = target.arch in ("sm_90", "sm_100")
    if widest > MAX_HEAD_DIM and large and not fp32:  # MLA: 64 rows of 512 dims are all the registers of 8 warps
        return {"tile_q": 64, "tile_kv": 32, "num_warps": 8, "num_stages": 2, "max_registers": uncapped}
    if widest > 128 or fp32:
        narrow = rdna or fp32 or (widest > MAX_HEAD_DIM and target.kind == "hip")
        tile_kv = 16 if narrow else 32
        return {"tile_q": 16, "tile_kv": tile_kv, "num_warps": 4, "num_stages": 1 if rdna else 2, "max_registers": uncapped}
    width, steps = _load_width(spec), _score_steps(spec)
    plain = width == 8 and spec.head_dim == spec.dim_v == 1 << (widest - 1).bit_length() and not spec.v_in_k
    wide = plain and not steps and not (spec.kv_zero and target.kind == "hip")
    usual = plain and not any(_options(spec))
    roomy = large or target.warp_size == 64
    return {
        "tile_q": 64 if steps < 3 and (roomy or (usual and (widest <= 64 or not rdna))) else 32,
        "tile_kv": max(16, (64 if wide and (roomy or (widest <= 64 and target.arch != "sm_120")) else 32) * width // 8),
        "num_warps": 4,
        "num_stages": 1 if rdna and widest > 64 else 2,
        "max_registers": 0 if usual and roomy else uncapped,
    }


def _triton_compute_bytes(spec: KernelSpec) -> int:
    """Bytes of an element as it is multiplied: q's type, or fp32 where the cache has another float type."""
    return spec.dtype.itemsize if spec.cache_dtype is spec.dtype or spec.cache_dtype.quantised else 4


def _score_steps(spec: KernelSpec) -> int:
    """How many options of the spec work on every score."""
    return sum((spec.alibi, spec.mask, spec.soft_cap is not None, spec.score_mod is not None))


def _load_width(spec: KernelSpec) -> int:
    """Elements that one load of K or V takes, the narrower's, 8 (16 bytes) at most.

    Along the head dim, or, where the layout is dim-major, along a pack or a block's tokens.
    """
    layout = spec.layout or KVLayout()  # `auto` has no layout yet
    along_tokens = math.gcd(spec.block_size, 8)
    k_width = 8 if layout.k_order is not Order.HDN else layout.x if layout.x > 1 else along_tokens
    return min(k_width, along_tokens if layout.v_order is Order.HDN else 8)


def _triton_attend_space(spec: KernelSpec, target: Target) -> ConfigSpace:
    default = _triton_defaults(spec, target)
    group_rows = 1 << max(4, (spec.group - 1).bit_length())  # the least that holds one group, and that a dot takes
    if spec.v_in_k:  # programs share a group
        group_rows = 16
    split_below = (0,) if spec.deterministic else (0, 128, 256, 512)
    max_registers = (0, 128, 168, 255) if target.kind == "cuda" else (0,)
    dims = spec.head_dim + (0 if spec.v_in_k else spec.dim_v)
    stored, multiplied = dims * spec.cache_dtype.bits // 8, dims * _triton_compute_bytes(spec)

    def fits(v: Mapping[str, Value]) -> bool:
        in_flight = stored * (int(v["num_stages"]) - 1) + (multiplied if spec.cache_dtype is not spec.dtype else 0)
        return int(v["tile_kv"]) * max(in_flight, stored) <= target.shared_memory

    return ConfigSpace(
        (
            power_of_two("tile_q", 16, 128, max(group_rows, default["tile_q"]), "rows (query tokens x group) of one program"),
            power_of_two("tile_kv", 16, 128, default["tile_kv"], "tokens of one online-softmax step"),
            Knob("split_below", split_below, max(split_below) // 2, "grids of fewer programs cut the context into parts; 0: never"),
            Knob("num_warps", (2, 4, 8), default["num_warps"], "warps of one program"),
            Knob("num_stages", (1, 2, 3, 4), default["num_stages"], "software pipeline depth"),
            Knob("max_registers", max_registers, default["max_registers"], "registers of a thread at most; 0: ptxas may spill for occupancy"),
        ),
        (
            Constraint(lambda v: int(v["tile_q"]) * int(v["tile_kv"]) <= 128 * 128, "the score tile exceeds 128 x 128"),
            Constraint(lambda v: spec.v_in_k or int(v["tile_q"]) >= spec.group, f"tile_q must hold one group of {spec.group} query heads"),
            Constraint(fits, f"the K and V tiles in flight exceed {target.name}'s shared memory; lower tile_kv or num_stages"),
        ),
    )


TEMPLATES: tuple[Template, ...] = (
    Template(Op.ATTEND, "cpp", "cpp/attend.cpp.jinja", _cpp_attend_space, _supports("cpu", _CPP_ATTEND)),
    Template(Op.WRITE_KV, "cpp", "cpp/write_kv.cpp.jinja", _no_knobs, _supports("cpu", _CPP_WRITE_KV)),
    Template(Op.COPY_BLOCKS, "cpp", "cpp/copy_blocks.cpp.jinja", _no_knobs, _supports("cpu", _CPP_MOVE)),
    Template(Op.GATHER_BLOCKS, "cpp", "cpp/stage_blocks.cpp.jinja", _no_knobs, _supports("cpu", _CPP_MOVE)),
    Template(Op.SCATTER_BLOCKS, "cpp", "cpp/stage_blocks.cpp.jinja", _no_knobs, _supports("cpu", _CPP_MOVE)),
    Template(Op.RELAYOUT, "cpp", "cpp/relayout.cpp.jinja", _no_knobs, _supports("cpu", _CPP_MOVE)),
    Template(Op.ATTEND, "triton", "triton/attend.py.jinja", _triton_attend_space, _supports("gpu", _TRITON_ATTEND)),
    Template(Op.WRITE_KV, "triton", "triton/write_kv.py.jinja", _no_knobs, _supports("gpu", _TRITON_WRITE_KV)),
    Template(Op.WRITE_KV, "triton", "triton/write_kv_computed.py.jinja", _no_knobs, _supports("gpu", _TRITON_WRITE_COMPUTED)),
    Template(Op.COPY_BLOCKS, "triton", "triton/copy_blocks.py.jinja", _no_knobs, _supports("gpu", _TRITON_MOVE)),
    Template(Op.GATHER_BLOCKS, "triton", "triton/stage_blocks.py.jinja", _no_knobs, _supports("gpu", _TRITON_MOVE)),
    Template(Op.SCATTER_BLOCKS, "triton", "triton/stage_blocks.py.jinja", _no_knobs, _supports("gpu", _TRITON_MOVE)),
)


def template_for(op: Op, spec: KernelSpec, target: Target) -> Template:
    """The first row that serves. Raises SpecError with every row's reason if none does."""
    reasons = []
    for row in TEMPLATES:
        if row.op is op:
            reason = row.supports(spec, target)
            if reason is None:
                return row
            reasons.append(f"{row.language}: {reason}")
    raise SpecError(f"no {op.value} template serves {spec.slug} on {target.name} ({'; '.join(reasons)})")


def variant(op: Op, spec: KernelSpec, target: Target, config: Config | None = None) -> Variant:
    """The variant for `config`, or for the template's default."""
    template = template_for(op, spec, target)
    return Variant(spec, target, template, config or template.space(spec, target).default)
