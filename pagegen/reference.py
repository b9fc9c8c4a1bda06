"""Paged attention in plain float64 torch: the meaning of a spec. Slow on purpose, and shares no code with a kernel.

Softmax attention as in Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), section 3.2.1; block tables as in Kwon
et al. 2023 (https://arxiv.org/abs/2309.06180), section 4.1. Vendored into every kernel package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import KernelError
from .expression import FUNCTIONS, render_expression
from .kernel import (
    NO_ATTEND_EXTRAS,
    NO_WRITE_EXTRAS,
    REFUSALS,
    TORCH_DTYPES,
    AttendExtras,
    KVScales,
    WriteExtras,
    check_attend,
    check_copy_blocks,
    check_write_kv,
)
from .spec import DType, KernelSpec, KVScale, Op, Order, Rope
from .transfer import check_gather_blocks, check_relayout, check_scatter_blocks


def token_view(order: Order, cache: torch.Tensor) -> torch.Tensor:
    """A view or copy of a cache tensor as `[blocks, block_size, kv_heads, head_dim]`, whatever its layout."""
    match order:
        case Order.NHD:
            return cache
        case Order.HND:
            return cache.permute(0, 2, 1, 3)
        case Order.HDN if cache.dim() == 5:  # [blocks, heads, dim / x, tokens, x]
            return cache.permute(0, 3, 1, 2, 4).flatten(-2)
        case Order.HDN:
            return cache.permute(0, 3, 1, 2)


def store_tokens(order: Order, cache: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
    """Writes rows `[T, kv_heads, head_dim]` at (block, token in it), whatever the cache tensor's layout and dtype."""
    rows = rows.to(cache.dtype)
    if order is Order.HDN and cache.dim() == 5:
        cache[at[0], :, :, at[1]] = rows.reshape(*rows.shape[:-1], cache.shape[2], cache.shape[4])
    else:
        token_view(order, cache)[at] = rows


def scale_tensors(scales: KVScales) -> list[torch.Tensor]:
    """The scales and zero points that there are."""
    return [tensor for tensor in (scales.k_scale, scales.v_scale, scales.k_zero, scales.v_zero) if tensor is not None]


def _refuse_unless(ok: torch.Tensor | bool, op: Op, status: int) -> None:
    """Raises KernelError with a kernel's words, unless `ok`, or all of it."""
    if not torch.as_tensor(ok).all():
        raise KernelError(f"{op.value}: {REFUSALS[status]}")


def _refuse_scales(spec: KernelSpec, op: Op, scales: KVScales | None) -> None:
    if scales is not None and spec.kv_scale is not KVScale.TOKEN_HEAD:
        for scale in (scales.k_scale, scales.v_scale):
            _refuse_unless((scale > 0) & scale.isfinite(), op, 9)


def _refuse_blocks(op: Op, blocks: torch.Tensor, cache: torch.Tensor) -> None:
    _refuse_unless((blocks >= 0) & (blocks < len(cache)), op, 6)


def _refuse_slots(op: Op, slots: torch.Tensor, cache: torch.Tensor, block_size: int) -> None:
    _refuse_unless((slots >= -1) & (slots < len(cache) * block_size), op, 6)


def _refuse_batch(
    spec: KernelSpec, q: torch.Tensor, blocks: int, block_table: torch.Tensor, lens: torch.Tensor, cu: torch.Tensor, prefix: int
) -> None:
    """What attend refuses of a batch, in a kernel's order."""
    _refuse_unless(bool(cu[0] == 0 and cu[-1] <= len(q)), Op.ATTEND, 3)
    for s, context in enumerate(lens.tolist()):
        _refuse_unless(bool(cu[s] <= cu[s + 1]), Op.ATTEND, 3)
        _refuse_unless(0 <= context <= block_table.shape[1] * spec.block_size, Op.ATTEND, 4)
        shared = prefix // spec.block_size
        _refuse_unless(prefix <= context and torch.equal(block_table[s, :shared], block_table[0, :shared]), Op.ATTEND, 7)
        needed = block_table[s, : -(-context // spec.block_size)]
        _refuse_unless((needed >= 0) & (needed < blocks), Op.ATTEND, 5)


def dequantise(spec: KernelSpec, stored: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """float64 values `[..., kv_heads, head_dim]` of stored ones, by scales that broadcast against `[..., kv_heads]`."""
    if spec.cache_dtype is DType.INT4:
        values = torch.cat((stored & 15, stored >> 4), dim=-1).double()
        zero = torch.tensor(8.0) if zero is None else zero
    else:
        values = stored.float().double()
    if zero is not None:
        values = values - zero.double()[..., None]
    return values * scale.double()[..., None]


def quantise(
    spec: KernelSpec, values: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(stored, scale, zero) of fp32 rows `[T, kv_heads, head_dim]`, bit for bit what a kernel stores.

    With `scale` (broadcasting against [T, kv_heads]) rows are divided by it and saturate. Without, each row gets its own:
    its largest magnitude, or with kv_zero its range, fills the type; a row of zeros has scale 0 and stands for zeros.

    Infinity saturates, and NaN is stored as NaN or, where the type has none, as its least number. A row's own scale is infinite
    or NaN where a number of the row is, so that none of it is read as a finite one.
    """
    low, high = _LIMITS[spec.cache_dtype]
    zero = None
    if scale is None and spec.kv_zero:
        least, most = values.amin(-1).clamp(max=0.0), values.amax(-1).clamp(min=0.0)
        scale = (most - least) / (high - low)
        zero = low - least * _inverse(scale)
    elif scale is None:
        scale = values.abs().amax(-1) / (7.0 if spec.cache_dtype is DType.INT4 else high)
    steps = values * _inverse(scale)[..., None]
    if zero is not None:
        steps = steps + zero[..., None]
    elif spec.cache_dtype is DType.INT4:
        steps, low, high = steps + 8.0, 0.0, 15.0
    if spec.cache_dtype in (DType.INT8, DType.INT4):
        steps = steps.round().nan_to_num(nan=low)
    stored = steps.clamp(low, high).to(TORCH_DTYPES[spec.cache_dtype])
    if spec.cache_dtype is DType.INT4:
        first, second = stored.chunk(2, dim=-1)
        stored = first | second << 4
    return stored, scale, zero


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """0 where the scale is 0, or subnormal, whose inverse may be infinite."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, 1.0 / scale, 0.0)


_LIMITS = {  # what a row's extremes become; with a zero point both ends are used
    DType.FP8_E4M3: (-448.0, 448.0),
    DType.FP8_E5M2: (-57344.0, 57344.0),
    DType.INT8: (-128.0, 127.0),
    DType.INT4: (0.0, 15.0),
}


def evaluate_score_mod(text: str, score: torch.Tensor, q_idx: torch.Tensor, k_idx: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The value of a score_mod expression on float64 tensors that broadcast."""
    words = render_expression(text, repr, {name: name for name in FUNCTIONS}, ("&", "|", "~"))
    as_tensor = torch.as_tensor
    functions = {
        "where": lambda condition, a, b: torch.where(condition, as_tensor(a).double(), as_tensor(b).double()),
        "min": lambda a, b: torch.minimum(as_tensor(a).double(), as_tensor(b).double()),
        "max": lambda a, b: torch.maximum(as_tensor(a).double(), as_tensor(b).double()),
        **{name: _unary(name) for name in ("abs", "exp", "log", "sqrt", "tanh", "floor")},
    }
    names = {"score": score, "q_idx": q_idx.double(), "k_idx": k_idx.double(), "head": head.double(), "inf": torch.inf}
    value = eval(words, {"__builtins__": {}}, functions | names)  # the words are our own: only what the language knows
    return as_tensor(value).double().expand(score.shape)


def _unary(name: str) -> Callable[[torch.Tensor | float], torch.Tensor]:
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, name)
    return lambda a: function(torch.as_tensor(a).double())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(spec: KernelSpec, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) of x `[T, heads, head_dim]`; see WriteExtras."""
    size = spec.rotary_dim or 0
    cos, sin = (part[:, None, :] for part in cos_sin[positions].to(x.dtype).chunk(2, dim=-1))
    turned = x[..., :size]
    if spec.rope is Rope.NEOX:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., size:]), dim=-1)


class ReferenceKernels:
    """`PagedKernels`, and the ops of pagegen.transfer, in float64: exact inputs, one rounding at the store.

    Quantisation is in fp32, as kernels do it.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        *,
        scale: float | None = None,
        lse: torch.Tensor | None = None,
        extras: AttendExtras = NO_ATTEND_EXTRAS,
        max_query_len: int | None = None,
        max_context_len: int | None = None,
    ) -> None:
        """See pagegen.kernel for the shapes."""
        spec = self.spec
        check_attend(spec, out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, lse, extras)
        _refuse_scales(spec, Op.ATTEND, extras.scales)
        _refuse_batch(spec, q, len(k_cache), block_table, context_lens, cu_seqlens_q, extras.shared_prefix_len)
        starts: list[int] = cu_seqlens_q.tolist()
        for s, context in enumerate(context_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            k, v = self.keys_and_values(k_cache, v_cache, block_table[s], context, extras.scales)
            scores = torch.einsum("qhd,khd->qhk", q[rows].double(), k) * (spec.softmax_scale if scale is None else scale)
            own = context - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)
            scores = self._modified(scores, own, extras)
            seen = self.seen(own, context, None if extras.mask is None else extras.mask[rows])
            scores.masked_fill_(~seen[:, None, :], float("-inf"))
            v[~seen.any(0)] = 0.0  # keys that no row sees may hold anything
            logits = scores
            if extras.sinks is not None:
                logits = torch.cat((scores, extras.sinks.double()[None, :, None].expand(len(scores), -1, 1)), dim=-1)
            total = torch.logsumexp(logits, -1) if logits.shape[-1] else torch.full(logits.shape[:-1], -torch.inf).double()
            weights = torch.where(total[..., None].isneginf(), 0.0, torch.exp(scores - total[..., None]))
            out[rows] = torch.einsum("qhk,khd->qhd", weights, v).to(out.dtype)
            if lse is not None:
                lse[rows] = total.float()

    def keys_and_values(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, context: int, scales: KVScales | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 K and V `[context, q_heads, dim]` of one sequence, each KV head repeated for its group."""
        spec, layout = self.spec, self.spec.kv_layout
        positions = torch.arange(context)
        at = table[positions // spec.block_size].long(), positions % spec.block_size
        found = []
        for name, order, cache in (("k", layout.k_order, k_cache), ("v", layout.v_order, v_cache)):
            stored = token_view(order, cache)[at]
            if scales is None:
                values = stored.double()
            else:
                scale, zero = getattr(scales, f"{name}_scale"), getattr(scales, f"{name}_zero")
                by_token = spec.kv_scale is KVScale.TOKEN_HEAD
                values = dequantise(
                    spec, stored, scale[at] if by_token else scale, zero[at] if by_token and zero is not None else zero
                )
            found.append(values.repeat_interleave(spec.group, dim=1))
        return found[0], found[1]

    def _modified(self, scores: torch.Tensor, own: torch.Tensor, extras: AttendExtras) -> torch.Tensor:
        """Scores [rows, q_heads, keys] after soft cap, ALiBi and score_mod, in this order."""
        spec = self.spec
        q_idx, k_idx = own[:, None, None], torch.arange(scores.shape[-1])[None, None, :]
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if extras.alibi_slopes is not None:
            scores = scores + extras.alibi_slopes.double()[None, :, None] * (k_idx - q_idx)
        if spec.score_mod is not None:
            heads = torch.arange(spec.q_heads)[None, :, None]
            scores = evaluate_score_mod(spec.score_mod, scores, q_idx, k_idx, heads).clone()
        return scores

    def seen(self, own: torch.Tensor, context: int, mask: torch.Tensor | None) -> torch.Tensor:
        """[rows, context]: whether a row at position own sees a key."""
        spec, keys = self.spec, torch.arange(context)[None, :]
        seen = torch.ones(len(own), context, dtype=torch.bool)
        if spec.causal:
            seen &= keys <= own[:, None]
        if spec.window is not None:
            seen &= keys > own[:, None] - spec.window
        if spec.window_right is not None:
            seen &= keys <= own[:, None] + spec.window_right
        if mask is not None:
            covered = min(mask.shape[1], context)
            seen[:, context - covered :] &= mask[:, mask.shape[1] - covered :].bool()
        return seen

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        extras: WriteExtras = NO_WRITE_EXTRAS,
    ) -> None:
        """See pagegen.kernel for the shapes. Rotation is in float64, rounded to fp32 before quantisation."""
        spec, layout, scales = self.spec, self.spec.kv_layout, extras.scales
        check_write_kv(spec, k, v, k_cache, v_cache, slot_mapping, extras)
        _refuse_scales(spec, Op.WRITE_KV, scales)
        _refuse_slots(Op.WRITE_KV, slot_mapping, k_cache, spec.block_size)
        if extras.positions is not None and extras.cos_sin is not None:
            _refuse_unless((extras.positions >= 0) & (extras.positions < len(extras.cos_sin)), Op.WRITE_KV, 8)
        if extras.q is not None and extras.q_out is not None and extras.positions is not None and extras.cos_sin is not None:
            q, k_rows = extras.q.double(), k.double()
            if extras.q_weight is not None and extras.k_weight is not None:
                q = rms_norm(q, extras.q_weight.double(), extras.eps)
                k_rows = rms_norm(k_rows, extras.k_weight.double(), extras.eps)
            extras.q_out.copy_(rotate(spec, q, extras.positions, extras.cos_sin))
            k = rotate(spec, k_rows, extras.positions, extras.cos_sin).to(torch.float32 if scales else k_cache.dtype)
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        at = slot_mapping[tokens] // spec.block_size, slot_mapping[tokens] % spec.block_size
        for name, order, cache, rows in (("k", layout.k_order, k_cache, k), ("v", layout.v_order, v_cache, v)):
            if name == "v" and spec.v_in_k:
                continue
            stored = rows[tokens]
            if scales is not None:
                stored = self._quantised(name, stored.float(), at, scales)
            store_tokens(order, cache, at, stored)

    def _quantised(self, name: str, rows: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], scales: KVScales) -> torch.Tensor:
        """Stored rows; scales per token and head are written, coarser ones read."""
        scale, zero = getattr(scales, f"{name}_scale"), getattr(scales, f"{name}_zero")
        by_token = self.spec.kv_scale is KVScale.TOKEN_HEAD
        stored, new_scale, new_zero = quantise(self.spec, rows, None if by_token else scale)
        if by_token:
            scale[at] = new_scale
            if zero is not None:
                zero[at] = new_zero
        return stored

    def copy_blocks(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        """See pagegen.kernel for the shapes."""
        check_copy_blocks(self.spec, k_cache, v_cache, pairs, scales)
        _refuse_blocks(Op.COPY_BLOCKS, pairs, k_cache)
        for tensor in _moved(self.spec, k_cache, v_cache, scales):
            tensor[pairs[:, 1]] = tensor[pairs[:, 0]]

    def gather_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """See pagegen.transfer for the shapes."""
        check_gather_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        _refuse_blocks(Op.GATHER_BLOCKS, blocks, k_cache)
        parts = [tensor[blocks].flatten(1).view(torch.uint8) for tensor in _moved(self.spec, k_cache, v_cache, scales)]
        staging.copy_(torch.cat(parts, dim=1))

    def scatter_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        staging: torch.Tensor,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """See pagegen.transfer for the shapes."""
        check_scatter_blocks(self.spec, k_cache, v_cache, blocks, staging, scales)
        _refuse_blocks(Op.SCATTER_BLOCKS, blocks, k_cache)
        begin = 0
        for tensor in _moved(self.spec, k_cache, v_cache, scales):
            end = begin + tensor.shape[1:].numel() * tensor.element_size()
            tensor[blocks] = staging[:, begin:end].clone().view(tensor.dtype).reshape(-1, *tensor.shape[1:])
            begin = end

    def relayout(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        source_k: torch.Tensor,
        source_v: torch.Tensor,
        slots: torch.Tensor,
        *,
        source: KernelSpec,
        scales: KVScales | None = None,
        source_scales: KVScales | None = None,
    ) -> None:
        """See pagegen.transfer for the shapes."""
        spec = self.spec
        check_relayout(spec, k_cache, v_cache, source_k, source_v, slots, source, scales, source_scales)
        _refuse_slots(Op.RELAYOUT, slots[:, 0], source_k, source.block_size)
        _refuse_slots(Op.RELAYOUT, slots[:, 1], k_cache, spec.block_size)
        read, written = slots[(slots >= 0).all(1)].unbind(1)
        there, here = ((s // cache.block_size, s % cache.block_size) for s, cache in ((read, source), (written, spec)))
        layout, theirs = spec.kv_layout, source.kv_layout
        store_tokens(layout.k_order, k_cache, here, token_view(theirs.k_order, source_k)[there])
        if not spec.v_in_k:
            store_tokens(layout.v_order, v_cache, here, token_view(theirs.v_order, source_v)[there])
        if scales is not None and source_scales is not None and spec.kv_scale is KVScale.TOKEN_HEAD:
            for mine, other in zip(scale_tensors(scales), scale_tensors(source_scales), strict=True):
                mine[here] = other[there]


def _moved(spec: KernelSpec, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScales | None) -> list[torch.Tensor]:
    """Every tensor whose first dimension is the block, in the order of pagegen.transfer's staging rows."""
    caches = [k_cache] if spec.v_in_k else [k_cache, v_cache]
    return caches + (scale_tensors(scales) if scales is not None and spec.kv_scale is KVScale.TOKEN_HEAD else [])
