"""Claims about the cache's memory: blocks that are swapped come back bit for bit, and whoever manages the blocks,
attention sees what a cache that just grows would show it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from pagegen.reference import ReferenceKernels
from pagegen.runtime.kv_cache import KVCache, block_bytes
from pagegen.runtime.policies import MEMORY_POLICIES, Demand, MemoryPolicy, make_memory_policy
from pagegen.spec import DType, KernelSpec, KVLayout

LAYOUTS = ["NHD", "HND", "HDN", "HDN8", "HDN8_HDN"]


def spec(layout: str = "NHD", kv_dtype: str | None = None, block_size: int = 3, dtype: str = "fp32") -> KernelSpec:
    return KernelSpec(
        dtype=DType(dtype),
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        block_size=block_size,
        layout=KVLayout.parse(layout),
        kv_dtype=DType(kv_dtype) if kv_dtype else None,
    )


def tensors(cache: KVCache) -> list[torch.Tensor]:
    """All that lies in blocks: K and V, and the scales of tokens."""
    scales = [scale for each in cache.scales if each for scale in (each.k_scale, each.v_scale) if scale.dim() > 1]
    return [*itertools.chain(*cache.layers), *scales]


def scrambled(kv_spec: KernelSpec, num_blocks: int) -> KVCache:
    cache, generator = KVCache(kv_spec, 2, num_blocks), torch.Generator().manual_seed(num_blocks)
    for tensor in tensors(cache):
        tensor.copy_(30 * torch.randn(tensor.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.flatten(1).view(torch.uint8).clone() for tensor in tensors(cache)]


KINDS = [("fp32", None), ("bf16", None), ("fp32", "bf16"), ("fp16", None), ("bf16", "fp8_e4m3"), ("fp32", "int8"), ("bf16", "int4")]


@pytest.mark.parametrize(
    ("layout", "dtype", "kv_dtype"),
    [(layout, *kind) for layout in LAYOUTS for kind in KINDS if kind[1] != "int4" or layout in ("NHD", "HND")],
)
def test_blocks_come_back_from_the_host_bit_for_bit_into_other_places(
    layout: str, dtype: str, kv_dtype: str | None
) -> None:
    device = scrambled(spec(layout, kv_dtype, dtype=dtype, block_size=1), 7)
    host = KVCache(device.spec, 2, 3)
    before = contents(device)
    host.copy_from(device, [(5, 2), (0, 0), (6, 1)])
    for tensor in tensors(device):
        tensor.flatten(1).view(torch.uint8)[[5, 0, 6, 1]] = 0
    device.copy_from(host, [(1, 0), (2, 6), (0, 1)])
    for old, new in zip(before, contents(device), strict=True):
        assert torch.equal(new[[0, 6, 1]], old[[6, 5, 0]]) and torch.equal(new[[2, 3, 4]], old[[2, 3, 4]])
        assert not new[5].any()


def test_moving_nothing_moves_nothing() -> None:
    device = scrambled(spec(), 4)
    before = contents(device)
    device.copy_from(KVCache(device.spec, 2, 1), [])
    assert all(map(torch.equal, contents(device), before))


def test_the_bytes_of_a_block_are_those_of_its_tensors() -> None:
    for layout, kv_dtype in [*itertools.product(LAYOUTS, (None, "bf16", "fp8_e5m2", "int8")), ("NHD", "int4")]:
        cache = KVCache(spec(layout, kv_dtype), 3, 5)
        assert 5 * block_bytes(cache.spec, 3) == sum(tensor.nbytes for tensor in tensors(cache))


def test_a_block_that_is_copied_keeps_its_scales() -> None:
    cache = scrambled(spec(kv_dtype="int8"), 4)
    before = contents(cache)
    cache.copy_blocks(ReferenceKernels(cache.spec), [(0, 2), (2, 3)])
    assert len(before) == 8
    for old, new in zip(before, contents(cache), strict=True):
        assert torch.equal(new, old[[0, 1, 0, 0]])


class ConcatCache:
    """What transformers' dynamic cache does: one pair of [kv_heads, tokens, head_dim], concatenated at every step."""

    def __init__(self) -> None:
        self.k = self.v = torch.empty(2, 0, 8)

    def fork(self) -> ConcatCache:
        child = ConcatCache()
        child.k, child.v = self.k, self.v
        return child

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k = torch.cat([self.k, k.transpose(0, 1)], dim=1)
        self.v = torch.cat([self.v, v.transpose(0, 1)], dim=1)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """The newest token's output [q_heads, head_dim]."""
        k, v = (cache.repeat_interleave(2, dim=0) for cache in (self.k, self.v))
        return torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v)[:, 0]


class PagedSession:
    """Sequences in blocks of some policy and, beside them, in concatenated tensors."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.kernels = ReferenceKernels(spec("HDN8", block_size=policy.block_size))
        self.device = KVCache(self.kernels.spec, 1, policy.num_blocks)
        self.host = KVCache(self.kernels.spec, 1, 8)
        self.caches: dict[int, ConcatCache] = {}
        self.generator = torch.Generator().manual_seed(3)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def start(self, seq_id: int, num_tokens: int, num_sequences: int = 1) -> None:
        demand = Demand(range(num_tokens), 16, 14, num_sequences=num_sequences)
        self.policy.allocate(seq_id, demand, num_tokens)
        self.caches[seq_id] = ConcatCache()
        self.write(seq_id, 0, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        self.device.copy_blocks(self.kernels, self.policy.fork(parent, child))
        self.caches[child] = self.caches[parent].fork()

    def decode(self, seq_id: int) -> None:
        self.device.copy_blocks(self.kernels, self.policy.append(seq_id))
        self.write(seq_id, self.policy.num_tokens(seq_id) - 1, 1)

    def write(self, seq_id: int, start: int, num_tokens: int) -> None:
        k, v = self.random(num_tokens, 2, 8), self.random(num_tokens, 2, 8)
        self.caches[seq_id].append(k, v)
        table, size = self.policy.block_table(seq_id), self.policy.block_size
        slots = [table[p // size] * size + p % size for p in range(start, start + num_tokens)]
        self.kernels.write_kv(k, v, *self.device.layers[0], torch.tensor(slots))

    def check(self, *seq_ids: int) -> None:
        """One query of each sequence, in one batch, against the sequence's own concatenated cache."""
        q, out = self.random(len(seq_ids), 4, 8), torch.empty(len(seq_ids), 4, 8)
        tables = [list(self.policy.block_table(seq_id)) for seq_id in seq_ids]
        width = max(map(len, tables))
        self.kernels.attend(
            out,
            q,
            *self.device.layers[0],
            torch.tensor([table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32),
            torch.tensor([self.policy.num_tokens(seq_id) for seq_id in seq_ids], dtype=torch.int32),
            torch.arange(len(seq_ids) + 1, dtype=torch.int32),
        )
        expected = torch.stack([self.caches[seq_id].attend(row) for seq_id, row in zip(seq_ids, q, strict=True)])
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MEMORY_POLICIES)
@pytest.mark.parametrize("num_prompt_tokens", [5, 6])
def test_every_policy_feeds_the_same_kernels_as_a_cache_that_grows(name: str, num_prompt_tokens: int) -> None:
    """Samples of one prompt beside another request; one ends, another forks into its place, all read their own."""
    session = PagedSession(make_memory_policy(name, 40, 3, max_model_len=18))
    session.start(0, num_prompt_tokens, num_sequences=3)
    session.start(9, 4)
    session.fork(0, 1)
    session.fork(0, 2)
    for seq_id in (0, 1, 2, 9, 2, 1, 0, 9):
        session.decode(seq_id)
    session.check(0, 1, 2, 9)
    session.policy.free(1)
    session.fork(2, 3)
    for seq_id in (3, 2, 0, 3, 9):
        session.decode(seq_id)
    session.check(3, 9, 0, 2)


def test_a_group_that_was_swapped_attends_as_before() -> None:
    session = PagedSession(make_memory_policy("paged", 8, 3, max_model_len=18, num_host_blocks=8))
    session.start(0, 5)
    session.fork(0, 1)
    session.decode(0)
    session.decode(1)
    session.host.copy_from(session.device, session.policy.swap_out([0, 1]))
    session.start(9, 14)  # in their place
    session.policy.free(9)
    session.start(8, 4)
    session.device.copy_from(session.host, session.policy.swap_in([1, 0]))
    session.decode(1)
    session.check(8, 1, 0)
