"""Other systems' attention on the memory of a `Pool`: torch SDPA in two forms, and the CPU kernel of vLLM.

Each gets KV in the layout that it likes best, ready made: for a peer only the call is timed. All take the copies of a
batch in one common turn, so that no call finds what the one before has read.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagegen.kernel import TORCH_DTYPES
from pagegen.spec import KernelSpec
from pagegen.tuning.workload import Point, Pool

Call = Callable[[], None]
VLLM_PAGES = (16, 32, 128)


class Copies:
    """Disjoint pieces of a pool's memory, each as large as the K and V of one batch of equal sequences."""

    def __init__(self, pool: Pool, point: Point, turn: Iterator[int]) -> None:
        spec = pool.spec
        assert spec.head_dim == spec.dim_v and len(set(point.context_lens)) == len(set(point.query_lens)) == 1
        self.spec, self.turn = spec, turn
        self.seqs, self.rows, self.context = len(point.query_lens), point.query_lens[0], point.context_lens[0]
        memory = torch.empty(0, dtype=TORCH_DTYPES[spec.cache_dtype]).set_(pool.k_cache.untyped_storage())
        self.size = 2 * self.seqs * self.context * spec.kv_heads * spec.head_dim
        self.pieces = memory[: len(memory) // self.size * self.size].split(self.size)
        self.num_bytes = self.size * memory.itemsize

    def next(self) -> int:
        """The piece whose turn it is."""
        return next(self.turn) % len(self.pieces)

    def contiguous(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each piece, `[seqs, kv_heads, context, head_dim]`."""
        shape = (self.seqs, self.spec.kv_heads, self.context, self.spec.head_dim)
        return [(piece[: self.size // 2].view(shape), piece[self.size // 2 :].view(shape)) for piece in self.pieces]

    def query(self) -> torch.Tensor:
        """`[seqs * rows, q_heads, head_dim]`."""
        return torch.randn(self.seqs * self.rows, self.spec.q_heads, self.spec.head_dim).to(TORCH_DTYPES[self.spec.dtype])


def sdpa_calls(copies: Copies) -> dict[str, Call]:
    """`enable_gqa`, and for decode also the group folded into the query length; what they answer is thrown away."""
    spec, kv = copies.spec, copies.contiguous()
    q = copies.query().view(copies.seqs, copies.rows, spec.q_heads, spec.head_dim).transpose(1, 2).contiguous()
    square = copies.rows == copies.context > 1

    def gqa() -> None:
        k, v = kv[copies.next()]
        sdpa(q, k, v, is_causal=square, enable_gqa=spec.group > 1)

    if copies.rows > 1:  # folded, causality would need a mask, and with one SDPA takes its slow path
        return {"sdpa_gqa": gqa}
    folded_q = q.view(copies.seqs, spec.kv_heads, spec.group, spec.head_dim)

    def folded() -> None:
        k, v = kv[copies.next()]
        sdpa(folded_q, k, v)

    return {"sdpa_gqa": gqa, "sdpa_folded": folded}


@functools.cache
def vllm_ops() -> Any:
    """vLLM's ops, or None if it is not installed here (`make bench-peers`)."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.cpu._init_amx()  # its kernel takes the permission for granted
    from vllm import _custom_ops

    return _custom_ops


class Vllm:
    """vLLM's CPU attention over pages of `page` tokens, in the order of memory or in a random one; its plan for the batch is made
    once, as once a step."""

    def __init__(self, spec: KernelSpec, page: int, seqs: int, rows: int, context: int, ordered: bool = False) -> None:
        dtype = TORCH_DTYPES[spec.dtype]
        amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self.isa = "vec16" if page % 32 else "amx" if amx else "vec"
        self.spec, self.page, self.ops = spec, page, vllm_ops()
        self.seq_lens = torch.full((seqs,), context, dtype=torch.int32)
        self.starts = torch.arange(seqs + 1, dtype=torch.int32) * rows
        self.num_pages = seqs * -(-context // page)
        pages = torch.arange(self.num_pages) if ordered else torch.randperm(self.num_pages)
        self.table = pages.view(seqs, -1).to(torch.int32)
        self.plan = self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seqs,
            num_heads=spec.q_heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            seq_lens=self.seq_lens,
            dtype=dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def caches(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all pages, side by side in memory as vLLM allocates them."""
        k, v = memory.view(self.num_pages, self.spec.kv_heads, 2 * self.page, self.spec.head_dim).chunk(2, dim=2)
        return k, v

    def attend(self, out: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """One call."""
        self.ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=out,
            query_start_loc=self.starts,
            seq_lens=self.seq_lens,
            scale=self.spec.softmax_scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=self.plan,
            s_aux=None,
        )


def vllm_calls(copies: Copies, ordered: bool = False) -> dict[str, Call]:
    """A call for each page size that the context is a multiple of, pages in a random order or in that of memory; none without vLLM."""
    if vllm_ops() is None:
        return {}
    calls: dict[str, Call] = {}
    for page in VLLM_PAGES:
        if copies.context % page:
            continue
        vllm = Vllm(copies.spec, page, copies.seqs, copies.rows, copies.context, ordered)
        caches, q = [vllm.caches(piece) for piece in copies.pieces], copies.query()
        out = torch.empty_like(q)

        def call(vllm: Vllm = vllm, caches: Any = caches, q: torch.Tensor = q, out: torch.Tensor = out) -> None:
            vllm.attend(out, q, *caches[copies.next()])

        calls[f"vllm_{'ordered_' if ordered else ''}{page}"] = call
    return calls


def vllm_error(spec: KernelSpec, page: int, context: int = 300) -> float:
    """Largest error of vLLM's kernel on a small batch that it wrote by itself, against SDPA in fp32.

    What is compared with must be right: large errors say that it is called wrongly here.
    """
    seqs, vllm = 3, Vllm(spec, page, 3, 1, context)
    dtype = TORCH_DTYPES[spec.dtype]
    k, v = (torch.randn(seqs, context, spec.kv_heads, spec.head_dim).to(dtype) for _ in "kv")
    q = torch.randn(seqs, spec.q_heads, spec.head_dim).to(dtype)
    caches = vllm.caches(torch.zeros(vllm.num_pages * spec.kv_heads * 2 * page * spec.head_dim, dtype=dtype))
    at = torch.arange(context)
    slots = torch.cat([vllm.table[s][at // page].long() * page + at % page for s in range(seqs)])
    vllm.ops.cpu_attn_reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), *caches, slots, vllm.isa)
    out = torch.empty_like(q)
    vllm.attend(out, q, *caches)
    wide = (k.float().transpose(1, 2), v.float().transpose(1, 2))
    expected = sdpa(q.float()[:, :, None], *wide, scale=1 / math.sqrt(spec.head_dim), enable_gqa=True)[:, :, 0]
    return float((out.float() - expected).abs().max())


def common_turn() -> Iterator[int]:
    """Numbers that all contenders of a batch draw from."""
    return itertools.count()
