"""How far a right kernel may be from the reference: a running error analysis of each case, element by element.

**A score.** u32 = 2**-24. A dot product of D terms, its operands dequantised and scaled in fp32, is off by at most
(sqrt(D) + 8) u32 |scale| |q| |k|: errors of long sums grow with the square root of their length (Higham and Mary 2019,
https://doi.org/10.1137/18M1226312); eight roundings pay for scale, zero point and a change of base. |k| takes (|stored| +
|zero|) * scale for a quantised value, for a kernel may subtract the zero point after the dot product. Then every step of
the spec (soft cap, ALiBi, score_mod) carries the error on and adds its own roundings: see `Bounded`.

**A row.** With p the reference's probabilities and d a score's bound, increased by 4 u32 (|score| + |max|) for the
subtraction of the maximum and the exponent, exp makes of d a relative error e = expm1(d) of its probability. So with n
keys, u the unit roundoff of the output's dtype and N = sum p e |v|, E = sum p e, A = sum p |v|:

    |out - reference| <= u (2 |reference| + A) + t (2 + S) + f S + (N + E |reference| + 2 u32 (sqrt(n) + 8) A) / (1 - E)
    |lse - reference| <= log1p(E) + u32 (sqrt(n) + 8 + 2 |reference|)

The first terms of out are its rounding on both sides, and of the probabilities, which a kernel on matrix units rounds to
the output's dtype; t is half its smallest subnormal number, and S = sum |v|. f = 2**-125: a weight, and the rescaling of
a part, may be 0 below the least normal number, as a fast exp has it; in bf16 f (n + S), for matrix units take every product
that is subnormal for 0. Where E is 1 or more, or a score may have left fp32's range,
nothing is promised: the bound is infinite, and a NaN within it. Vendored into every kernel package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..expression import FUNCTIONS, render_expression
from ..kernel import TORCH_DTYPES
from ..reference import ReferenceKernels, rms_norm
from ..spec import DType, KernelSpec, Rope
from .case import Case
from .pool import Tensors
from .tensors import arguments

U32 = 2.0**-24
FP32_MAX = float(torch.finfo(torch.float32).max)
FLUSHED = 2.0**-125  # what a weight beside a largest one of 1 may lose to exp without subnormal numbers, twice
STEPS = 4  # units in the last place that a library's exp, tanh, log or division may lose


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """float64 values, and bounds of the errors that fp32 arithmetic may have made up to them."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def of(cls, number: Bounded | torch.Tensor | float) -> Bounded:
        """A number as fp32 holds it."""
        if isinstance(number, Bounded):
            return number
        value = torch.as_tensor(number, dtype=torch.float64)
        return cls(value, (value.float().double() - value).abs().nan_to_num(nan=0.0))

    def rounded(self, steps: float = 1.0) -> Bounded:
        """After an operation that may lose `steps` units in the last place, but none of an exact whole number below 2**24."""
        size = self.value.abs()
        whole = (self.error == 0) & (self.value.frac() == 0) & (size < 2**24)
        error = self.error + torch.where(whole, 0.0, steps * _last_place(self.value))
        left = size.isfinite() & (size + error > FP32_MAX)  # infinite in fp32, and from there on anything
        return Bounded(self.value, torch.where(left | error.isnan(), math.inf, error))

    def __add__(self, other: Bounded | float) -> Bounded:
        other = Bounded.of(other)
        return Bounded(self.value + other.value, self.error + other.error).rounded()

    def __radd__(self, other: float) -> Bounded:
        return self + other

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error)

    def __sub__(self, other: Bounded | float) -> Bounded:
        return self + -Bounded.of(other)

    def __rsub__(self, other: float) -> Bounded:
        return Bounded.of(other) + -self

    def __mul__(self, other: Bounded | float) -> Bounded:
        other = Bounded.of(other)
        error = self.error * other.value.abs() + other.error * self.value.abs() + self.error * other.error
        return Bounded(self.value * other.value, error.nan_to_num(nan=0.0)).rounded()

    def __rmul__(self, other: float) -> Bounded:
        return self * other

    def __truediv__(self, other: Bounded | float) -> Bounded:
        other = Bounded.of(other)
        least = (other.value.abs() - other.error).clamp(min=0.0)
        error = (self.error + (self.value / other.value).abs() * other.error) / least
        return Bounded(self.value / other.value, error).rounded(STEPS)

    def __rtruediv__(self, other: float) -> Bounded:
        return Bounded.of(other) / self

    def __lt__(self, other: Bounded | float) -> Condition:
        return Condition.of(torch.lt, self, other)

    def __le__(self, other: Bounded | float) -> Condition:
        return Condition.of(torch.le, self, other)

    def __gt__(self, other: Bounded | float) -> Condition:
        return Condition.of(torch.gt, self, other)

    def __ge__(self, other: Bounded | float) -> Condition:
        return Condition.of(torch.ge, self, other)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]  # element by element, as tensors do
        return Condition.of(torch.eq, self, other)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition.of(torch.ne, self, other)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor], steps: float = STEPS) -> Bounded:
        """A monotone function: what its value does between value - error and value + error."""
        value = function(self.value)
        low, high = function(self.value - self.error), function(self.value + self.error)
        spread = torch.maximum((low - value).abs(), (high - value).abs())
        return Bounded(value, spread.where(low != high, 0.0).nan_to_num(nan=math.inf)).rounded(steps)


def _last_place(value: torch.Tensor) -> torch.Tensor:
    """Of a subnormal number all that it is: some targets take it for 0."""
    return (2 * U32 * value.abs().nan_to_num(posinf=0.0)).clamp(min=2.0**-126)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A comparison of bounded numbers, and where their errors leave it open."""

    truth: torch.Tensor
    doubtful: torch.Tensor

    @classmethod
    def of(cls, compare: Callable[..., torch.Tensor], left: Any, right: Any) -> Condition:
        """left compared with right; exact numbers, such as positions, leave no doubt."""
        left, right = Bounded.of(left), Bounded.of(right)
        error = left.error + right.error
        return cls(compare(left.value, right.value), ((left.value - right.value).abs() <= error) & (error > 0))

    def __and__(self, other: Condition) -> Condition:
        return Condition(self.truth & other.truth, self.doubtful | other.doubtful)

    def __or__(self, other: Condition) -> Condition:
        return Condition(self.truth | other.truth, self.doubtful | other.doubtful)

    def __invert__(self) -> Condition:
        return Condition(~self.truth, self.doubtful)


def _where(condition: Condition, a: Any, b: Any) -> Bounded:
    a, b = Bounded.of(a), Bounded.of(b)
    value, error = torch.where(condition.truth, a.value, b.value), torch.where(condition.truth, a.error, b.error)
    apart = (a.value - b.value).abs() + a.error + b.error
    return Bounded(value, torch.where(condition.doubtful, apart, error))


def _extreme(choose: Callable[..., torch.Tensor]) -> Callable[..., Bounded]:
    def function(a: Any, b: Any) -> Bounded:
        a, b = Bounded.of(a), Bounded.of(b)
        return Bounded(choose(a.value, b.value), torch.maximum(a.error, b.error))

    return function


def _unary(name: str) -> Callable[[Any], Bounded]:
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, name)
    return lambda a: Bounded.of(a).mapped(function, 0.0 if name in ("abs", "floor") else STEPS)


def bounded_score_mod(text: str, score: Bounded, **positions: torch.Tensor) -> Bounded:
    """A score_mod expression with its running error; positions q_idx, k_idx, head are exact."""
    words = render_expression(text, repr, {name: name for name in FUNCTIONS}, ("&", "|", "~"))
    functions = {
        "where": _where,
        "min": _extreme(torch.minimum),
        "max": _extreme(torch.maximum),
        **{name: _unary(name) for name in ("abs", "exp", "log", "sqrt", "tanh", "floor")},
    }
    names = {name: Bounded(at.double(), torch.zeros(())) for name, at in positions.items()}
    result = Bounded.of(eval(words, {"__builtins__": {}}, {**functions, **names, "score": score, "inf": math.inf}))
    shape = score.value.shape
    return Bounded(result.value.expand(shape), result.error.double().expand(shape))


# --- attend ----------------------------------------------------------------------------------------------------------


def attend_tolerances(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Bounds for `out` and `lse`, given the tensors after the reference has filled them."""
    out = torch.zeros(tensors["out"].shape, dtype=torch.float64)
    lse = torch.zeros(out.shape[:2], dtype=torch.float64)
    for rows, bounds in _sequences(case, tensors):
        out[rows], lse[rows] = bounds
    return {"out": out, "lse": lse}


def _sequences(case: Case, tensors: Tensors) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    spec, reference = case.spec, ReferenceKernels(case.spec)
    extras = arguments(case, tensors).get("extras")
    scales = extras.scales if extras else None
    blank = {name: torch.zeros_like(tensors[name]) for name in ("k_cache", "v_cache")}
    starts: list[int] = tensors["cu_seqlens_q"].tolist()
    for s, context in enumerate(tensors["context_lens"].tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.stop == rows.start:
            continue
        table = tensors["block_table"][s]
        keys, values = reference.keys_and_values(tensors["k_cache"], tensors["v_cache"], table, context, scales)
        sizes = [keys.abs(), values.abs()]
        if scales is not None:  # |stored| + |zero| <= |stored - zero| + 2 |0 - zero|
            zeros = reference.keys_and_values(blank["k_cache"], blank["v_cache"], table, context, scales)
            sizes = [size + 2 * zero.abs() for size, zero in zip(sizes, zeros, strict=True)]
        q = tensors["q"][rows].double()
        own = context - len(q) + torch.arange(len(q))
        scores = _scores(case, q, keys, sizes[0], own, tensors)
        seen = reference.seen(own, context, tensors["mask"][rows] if "mask" in tensors else None)
        sizes[1][~seen.any(0)] = 0.0
        sinks = tensors.get("sinks")
        yield rows, _row_bounds(spec, scores, seen[:, None, :], sizes[1], sinks, tensors["out"][rows].double())


def _scores(case: Case, q: torch.Tensor, keys: torch.Tensor, sizes: torch.Tensor, own: torch.Tensor, tensors: Tensors) -> Bounded:
    """Final scores `[rows, q_heads, keys]`, step by step as KernelSpec has them."""
    spec, scale = case.spec, case.spec.softmax_scale if case.scale is None else case.scale
    largest = abs(scale) * torch.einsum("qh,kh->qhk", q.norm(dim=-1), sizes.norm(dim=-1))
    scores = Bounded(torch.einsum("qhd,khd->qhk", q, keys) * scale, (math.sqrt(spec.head_dim) + 8) * U32 * largest)
    q_idx, k_idx = own[:, None, None], torch.arange(len(keys))[None, None, :]
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).mapped(torch.tanh) * spec.soft_cap
    if "alibi_slopes" in tensors:
        slopes = tensors["alibi_slopes"].double()[None, :, None]
        scores = scores + Bounded(slopes * (k_idx - q_idx), torch.zeros(())).rounded()
    if spec.score_mod is not None:
        heads = torch.arange(spec.q_heads)[None, :, None]
        scores = bounded_score_mod(spec.score_mod, scores, q_idx=q_idx, k_idx=k_idx, head=heads)
    return scores


def _row_bounds(
    spec: KernelSpec, scores: Bounded, seen: torch.Tensor, sizes: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of a sequence's rows: (out, lse)."""
    value, error = scores.value.masked_fill(~seen, -math.inf), scores.error.masked_fill(~seen, 0.0)
    if sinks is not None:  # one more key, exact, with V = 0
        sink = sinks.double()[None, :, None].expand(*value.shape[:2], 1)
        value, error = torch.cat((value, sink), -1), torch.cat((error, torch.zeros_like(sink)), -1)
        sizes = torch.cat((sizes, sizes.new_zeros(1, *sizes.shape[1:])))
    if value.shape[-1] == 0:
        return torch.zeros_like(out), out.new_zeros(out.shape[:2])
    top, total = value.amax(-1, keepdim=True), torch.logsumexp(value, -1)
    p = torch.where(value.isneginf(), 0.0, torch.exp(value - total[..., None]))
    shaken = torch.where(p > 0, p * torch.expm1(error + 4 * U32 * (value.abs() + top.abs())), 0.0)
    shaken = torch.where(value.isneginf() & error.isinf(), math.inf, shaken)  # -inf here, and perhaps not in a kernel
    loose = shaken.sum(-1)
    mean, moved = (torch.einsum("qhk,khd->qhd", w.nan_to_num(posinf=0.0), sizes) for w in (p, shaken))
    sums = math.sqrt(value.shape[-1]) + 8
    info = torch.finfo(TORCH_DTYPES[spec.dtype])
    unit, tiny = info.eps / 2, info.smallest_normal * info.eps / 2
    everything = torch.einsum("qhk,khd->qhd", (p > 0).double(), sizes)
    arithmetic = (moved + loose[..., None] * out.abs() + 2 * U32 * sums * mean) / (1 - loose[..., None])
    flushed = FLUSHED * (everything + (value.shape[-1] if spec.dtype is DType.BF16 else 0))
    bound = unit * (2 * out.abs() + mean) + tiny * (2 + everything) + flushed + torch.where(loose[..., None] < 1, arithmetic, math.inf)
    return bound, torch.log1p(loose) + U32 * (sums + 2 * total.abs().nan_to_num(posinf=0.0))


# --- write_kv --------------------------------------------------------------------------------------------------------


def rotated_tolerance(spec: KernelSpec, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Bound of the fp32 error of rows `[T, heads, head_dim]` after norm and rotation, before any store."""
    size, rotary = x.double().abs(), spec.rotary_dim or 0
    relative = 4.0
    if weight is not None:
        size = rms_norm(size, weight.double().abs(), eps)
        relative += math.sqrt(spec.head_dim) + 8
    pair = size[..., :rotary].clone()
    half = torch.cat((pair[..., rotary // 2 :], pair[..., : rotary // 2]), -1)
    if spec.rope is Rope.INTERLEAVED:
        half = torch.stack((pair[..., 1::2], pair[..., ::2]), -1).flatten(-2)
    size[..., :rotary] = pair + half
    return relative * U32 * size


def store_tolerance(spec: KernelSpec, dtype: DType, values: torch.Tensor, error: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Bound after the store of `values` (off by `error`) as `dtype`, divided by `scale`: two neighbours of the grid."""
    if scale is None:
        info = torch.finfo(TORCH_DTYPES[dtype])
        return error + info.eps * (values.abs() + error).clamp(min=info.smallest_normal)  # subnormals stand as far apart
    step = scale.double()[..., None].abs()
    if dtype in (DType.INT8, DType.INT4):
        return 2 * error + step * (1 + 2.0**-16)
    info = torch.finfo(TORCH_DTYPES[dtype])
    return 2 * error + info.eps * values.abs() + step * info.smallest_normal * info.eps

