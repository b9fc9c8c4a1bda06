"""What a kernel is compared with: torch's scaled_dot_product_attention in the three forms that users write.

None of them reads a paged cache, or a quantised one. `sdpa_gather` pays for making it contiguous in each call, and for
dequantising it, as a user must whose cache is paged; `sdpa_gqa` and `sdpa_folded` are given contiguous KV in spec.dtype
for nothing, which flatters them.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ..kernel import TORCH_DTYPES
from ..reference import token_view
from ..spec import DType, KernelSpec, KVScale
from .workload import Inputs  # noqa: TID251  # vendored: must stay relative

FORMS = ("sdpa_gather", "sdpa_gqa", "sdpa_folded")

Contiguous = tuple[torch.Tensor, torch.Tensor]  # K and V of a group: [seqs, kv_heads, context, head_dim]


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of equal shape, which one SDPA call serves."""

    seqs: list[int]
    rows: torch.Tensor  # their rows of q, [seqs, query_len]
    context: int
    mask: torch.Tensor | None  # additive, [query_len, context], aligned to the lower right
    folded_mask: torch.Tensor | None  # the same, repeated for every query head of a KV head

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """[seqs, q_heads, query_len, head_dim]."""
        return q[self.rows].transpose(1, 2)


class SdpaBaselines:
    """The three forms for one batch; each call writes `inputs.out`. Sequences of equal lengths share a call.

    A spec with an option between the scores and the softmax, which SDPA has no words for, has no baselines.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.spec = inputs, inputs.spec
        self._groups: list[_Group] = []
        if not _expressible(self.spec):
            return
        self._groups = _grouped(inputs)
        # The copies are of one table's KV: what counts is that each lies elsewhere, and that they are quickly made.
        copies = [_copies(self._gather(group, inputs.block_tables[0]), len(inputs.block_tables)) for group in self._groups]
        self._turn = itertools.cycle(zip(*copies, strict=True))

    def calls(self) -> dict[str, Callable[[], None]]:
        """Form to call, as `measure` takes them; empty if SDPA cannot say what the spec says."""
        return {} if not self._groups else {"sdpa_gather": self.gather, "sdpa_gqa": self.gqa, "sdpa_folded": self.folded}

    def gather(self) -> None:
        """Gathers K and V through the block table, then the enable_gqa form."""
        table = self.inputs.next_table()
        for group in self._groups:
            self._store(group, self._grouped_query(group, *self._gather(group, table)))

    def gqa(self) -> None:
        """enable_gqa on KV that is contiguous already."""
        for group, kv in zip(self._groups, next(self._turn), strict=True):
            self._store(group, self._grouped_query(group, *kv))

    def folded(self) -> None:
        """The query heads of a KV head folded into the query length, on KV that is contiguous already."""
        group_size = self.spec.group
        for group, (k, v) in zip(self._groups, next(self._turn), strict=True):
            q = group.queries(self.inputs.q)
            seqs, _, rows, _ = q.shape
            q = q.reshape(seqs, self.spec.kv_heads, group_size * rows, self.spec.head_dim)
            out = sdpa(q, k, v, attn_mask=group.folded_mask, scale=self.spec.softmax_scale)
            self._store(group, out.reshape(seqs, self.spec.q_heads, rows, self.spec.dim_v))

    def _grouped_query(self, group: _Group, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, scale = group.queries(self.inputs.q), self.spec.softmax_scale
        # is_causal aligns to the upper left, which is right for a square only
        square = self.spec.causal and self.spec.window is None and q.shape[2] == group.context > 1
        mask = None if square else group.mask
        return sdpa(q, k, v, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=self.spec.group > 1)

    def _store(self, group: _Group, out: torch.Tensor) -> None:
        self.inputs.out[group.rows] = out.transpose(1, 2)

    def _gather(self, group: _Group, block_table: torch.Tensor) -> Contiguous:
        width = -(-group.context // self.spec.block_size)
        blocks = block_table[group.seqs, :width]
        layout, pool, scales = self.spec.kv_layout, self.inputs.pool, self.inputs.pool.scales
        picked = blocks.flatten()
        k = token_view(layout.k_order, pool.k_cache[picked])
        v = token_view(layout.v_order, pool.v_cache[picked])
        if scales is not None:
            k = _dequantised(self.spec, k, picked, scales.k_scale, scales.k_zero)
            v = _dequantised(self.spec, v, picked, scales.v_scale, scales.v_zero)
        return _contiguous(k, group), _contiguous(v, group)


def _copies(kv: Contiguous, count: int) -> list[Contiguous]:
    k, v = (tensor.expand(count, *tensor.shape).contiguous().unbind() for tensor in kv)
    return list(zip(k, v, strict=True))


def _expressible(spec: KernelSpec) -> bool:
    return not (spec.soft_cap or spec.alibi or spec.sinks or spec.mask or spec.score_mod)


def _dequantised(
    spec: KernelSpec, stored: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    """Stored items of `blocks` as spec.dtype numbers, in the few steps in which a user of torch would do it."""
    dtype = TORCH_DTYPES[spec.dtype]
    by_token = spec.kv_scale is KVScale.TOKEN_HEAD
    values = (torch.cat((stored & 15, stored >> 4), dim=-1) if spec.cache_dtype is DType.INT4 else stored).to(dtype)
    if zero is not None:
        values = values - (zero[blocks] if by_token else zero)[..., None].to(dtype)
    elif spec.cache_dtype is DType.INT4:
        values = values - 8
    return values * (scale[blocks] if by_token else scale)[..., None].to(dtype)


def _contiguous(blocks: torch.Tensor, group: _Group) -> torch.Tensor:
    """[seqs * blocks, block_size, kv_heads, dim] of a group as [seqs, kv_heads, context, dim]."""
    tokens = blocks.reshape(len(group.seqs), -1, *blocks.shape[2:])
    return tokens[:, : group.context].transpose(1, 2).contiguous()


def _grouped(inputs: Inputs) -> list[_Group]:
    point, device = inputs.point, inputs.q.device
    shapes: dict[tuple[int, int], list[int]] = {}
    for seq, shape in enumerate(zip(point.query_lens, point.context_lens, strict=True)):
        shapes.setdefault(shape, []).append(seq)
    starts = inputs.cu_seqlens_q.tolist()
    groups = []
    for (rows, context), seqs in shapes.items():
        first = torch.tensor([starts[seq] for seq in seqs], device=device)
        mask = _lower_right(inputs.spec, rows, context, inputs.q)
        folded = None if mask is None else mask.repeat(inputs.spec.group, 1)
        groups.append(_Group(seqs, first[:, None] + torch.arange(rows, device=device), context, mask, folded))
    return groups


def _lower_right(spec: KernelSpec, rows: int, context: int, like: torch.Tensor) -> torch.Tensor | None:
    """Additive mask of `rows` queries that end the context; None if every query sees every key."""
    own = (context - rows + torch.arange(rows, device=like.device))[:, None]
    keys = torch.arange(context, device=like.device)[None, :]
    hidden = torch.zeros(rows, context, dtype=torch.bool, device=like.device)
    if spec.causal:
        hidden |= keys > own
    if spec.window is not None:
        hidden |= keys <= own - spec.window
    if spec.window_right is not None:
        hidden |= keys > own + spec.window_right
    if not hidden.any():
        return None
    return torch.zeros(rows, context, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
