"""Claims about the meaning of a spec: the reference is dense attention through a block table, and public failures of
other libraries come out right.

With K = 0 all scores are equal, so that an answer is a plain mean of V, known by hand. The long tests put the same questions
to built C++ kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.build import build_kernels
from pagegen.check.case import Fault
from pagegen.check.compare import invoke
from pagegen.check.suite import quick_suite
from pagegen.check.tensors import materialise
from pagegen.errors import KernelError, SpecError
from pagegen.kernel import REFUSALS, TORCH_DTYPES, AttendExtras, PagedKernels, allocate_cache
from pagegen.reference import ReferenceKernels, token_view
from pagegen.spec import DType, KernelSpec, KVLayout
from pagegen.target import parse_target

NAN, INF = math.nan, math.inf

Maker = Callable[[KernelSpec], PagedKernels]


@pytest.fixture(params=["reference", pytest.param("cpp", marks=pytest.mark.long)])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Maker:
    if request.param == "reference":
        return ReferenceKernels
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    return lambda spec: build_kernels(spec, parse_target("cpu"))


def fp32(**fields: object) -> KernelSpec:
    """A small fp32 spec with the log-sum-exp."""
    small: dict[str, object] = {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4, "dtype": "fp32", "lse": True}
    return KernelSpec.from_dict({**small, **fields})


class Cache:
    """A cache filled with `filler`, written token by token."""

    def __init__(self, spec: KernelSpec, num_blocks: int, filler: float = NAN) -> None:
        self.spec = spec
        self.k, self.v = (tensor.fill_(filler) for tensor in allocate_cache(spec, num_blocks))

    def put(self, blocks: Sequence[int], values: Sequence[float], key: float = 0.0) -> None:
        """K = key and V = values[i], in every head and dimension, for token i of a sequence in `blocks`."""
        for position, value in enumerate(values):
            block, offset = blocks[position // self.spec.block_size], position % self.spec.block_size
            token_view(self.spec.kv_layout.k_order, self.k)[block, offset] = key
            token_view(self.spec.kv_layout.v_order, self.v)[block, offset] = value

    def attend(
        self, kernels: PagedKernels, tables: Sequence[Sequence[int]], contexts: Sequence[int], queries: Sequence[int], q: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of queries that are `q` everywhere; tables may have different lengths."""
        spec, tokens = self.spec, sum(queries)
        width = max(map(len, tables), default=0) + 1
        table = torch.tensor([[*row, *[-1] * (width - len(row))] for row in tables], dtype=torch.int32).reshape(-1, width)
        out = torch.full((tokens, spec.q_heads, spec.dim_v), NAN, dtype=TORCH_DTYPES[spec.dtype])
        lse = torch.full((tokens, spec.q_heads), NAN)
        rows = torch.full((tokens, spec.q_heads, spec.head_dim), q, dtype=out.dtype)
        cu = torch.tensor([0, *queries]).cumsum(0).int()
        context_lens = torch.tensor(contexts, dtype=torch.int32)
        kernels.attend(out, rows, self.k, self.v, table, context_lens, cu, lse=lse if spec.lse else None)
        return out, lse


# --- against dense attention -----------------------------------------------------------------------------------------

LAYOUTS = ["NHD", "HND", "HDN", "HDN2", "HDN8_HDN", "NHD_HDN"]


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), max_size=4),
    layout=st.sampled_from(LAYOUTS),
    block_size=st.integers(1, 7),
    group=st.sampled_from([1, 3, 5]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.1, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_it_is_dense_attention_through_a_block_table(
    lens: list[tuple[int, int]], layout: str, block_size: int, group: int, causal: bool, scale: float | None, seed: int
) -> None:
    heads, dim, dim_v = 2, 16, 8
    spec = fp32(q_heads=heads * group, kv_heads=heads, head_dim=dim, head_dim_v=dim_v, block_size=block_size, layout=layout, causal=causal)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    counts = [-(-context // block_size) for _, context in lens]
    ids = torch.randperm(sum(counts) + 2, generator=generator).int()
    cache = Cache(spec, len(ids))
    table = torch.full((len(lens), max(counts, default=0)), -7, dtype=torch.int32)
    dense, first = [], 0
    kernels = ReferenceKernels(spec)
    for s, (_, context) in enumerate(lens):
        table[s, : counts[s]] = ids[first : first + counts[s]]
        first += counts[s]
        k, v = normal(context, heads, dim), normal(context, heads, dim_v)
        position = torch.arange(context)
        slots = table[s].long()[position // block_size] * block_size + position % block_size if context else position
        kernels.write_kv(k, v, cache.k, cache.v, slots)
        dense.append((k, v))
    queries = [query for query, _ in lens]
    q = normal(sum(queries), heads * group, dim)
    out, lse = torch.full((len(q), heads * group, dim_v), NAN), torch.full((len(q), heads * group), NAN)
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    context_lens = torch.tensor([context for _, context in lens], dtype=torch.int32)
    kernels.attend(out, q, cache.k, cache.v, table, context_lens, cu, scale=scale, lse=lse)
    row, want, want_lse = 0, torch.empty(out.shape, dtype=torch.float64), torch.empty(lse.shape, dtype=torch.float64)
    for (query, context), (k, v) in zip(lens, dense, strict=True):
        for i in range(query):
            seen = min(context, max(0, context - query + i + 1)) if causal else context
            for head in range(heads * group):
                scores = k[:seen, head // group].double() @ q[row, head].double() * (dim**-0.5 if scale is None else scale)
                want[row, head] = torch.softmax(scores, 0) @ v[:seen, head // group].double()
                want_lse[row, head] = torch.logsumexp(scores, 0) if seen else -INF
            row += 1
    assert row == len(q)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_the_only_rounding_is_that_of_the_store(dtype: DType) -> None:
    spec = fp32(dtype=dtype, head_dim=8, lse=False)
    cache = Cache(spec, 2)
    cache.put([1], [1.0, 2.0, 2.0])
    out, _ = cache.attend(ReferenceKernels(spec), [[1]], [3], [1])
    assert torch.equal(out, torch.full_like(out, 5 / 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copied_blocks_are_equal_and_nothing_else_changes(layout: str) -> None:
    spec = fp32(layout=layout, kv_heads=2, q_heads=2)
    cache = Cache(spec, 5)
    for tensor in (cache.k, cache.v):
        tensor.copy_(torch.randn(tensor.shape))
    before_k, before_v = cache.k.clone(), cache.v.clone()
    ReferenceKernels(spec).copy_blocks(cache.k, cache.v, torch.tensor([[4, 0], [4, 2]]))
    for now, before in ((cache.k, before_k), (cache.v, before_v)):
        assert torch.equal(now, before[[4, 1, 4, 3, 4]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_written_token_is_where_the_layout_says(layout: str) -> None:
    spec = fp32(layout=layout, kv_heads=2, q_heads=2, head_dim=16)
    cache = Cache(spec, 3, filler=0.0)
    k, v = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    ReferenceKernels(spec).write_kv(k, v, cache.k, cache.v, torch.tensor([9]))
    x = KVLayout.parse(layout).x
    expected = {"N": cache.k[2, 1], "H": cache.k[2, :, 1]}
    got = expected[layout[0]] if not layout.startswith("HDN") else torch.stack([cache.k[2, :, d // x, 1, d % x] for d in range(16)], 1)
    assert torch.equal(got, k[0])
    assert cache.k.count_nonzero() == cache.v.count_nonzero() == 32


# --- public failures of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("filler", [NAN, INF, 1e30])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN8_HDN"])
def test_unused_slots_of_the_last_page_do_not_leak(make: Maker, filler: float, queries: int, layout: str) -> None:
    """flash-attention issues 1745 and 2374: masked by weight, 0 x NaN."""
    spec = fp32(layout=layout)
    cache = Cache(spec, 3, filler)
    cache.put([2, 0], [1, 2, 3, 4, 5])
    out, lse = cache.attend(make(spec), [[2, 0]], [5], [queries])
    assert torch.equal(out[-1], torch.full_like(out[-1], 3.0))
    assert torch.isfinite(out).all()
    torch.testing.assert_close(lse[-1], torch.tensor([math.log(5)]))


def test_no_key_at_all_gives_zero_and_minus_infinity(make: Maker, recwarn: pytest.WarningsRecorder) -> None:
    """flashinfer issue 4051, vLLM PR 39148: -inf minus -inf where parts of a sequence saw nothing."""
    spec = fp32()
    cache = Cache(spec, 2)
    cache.put([1], [2.0])
    kernels = make(spec)
    recwarn.clear()
    out, lse = cache.attend(kernels, [[], [1]], [0, 1], [2, 3])
    assert torch.equal(out[:, 0, 0], torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0]))
    assert torch.equal(lse[:4, 0], torch.full((4,), -INF))
    assert not recwarn.list


@pytest.mark.parametrize("block_size", [1, 2, 8, 256])
@pytest.mark.parametrize("tables", [[[1], [3]], [[3], [1]]])
def test_a_second_sequence_shorter_than_a_page(make: Maker, block_size: int, tables: list[list[int]]) -> None:
    """flashinfer issue 725: the second of two one-page sequences came back as zeros."""
    spec = fp32(block_size=block_size)
    cache = Cache(spec, 4, filler=1e4)
    for block in (1, 3):
        cache.put([block], [0.0])
        token_view(spec.kv_layout.v_order, cache.v)[block, 0, 0] = torch.tensor([3.0, -7.0] * 4)
    out, _ = cache.attend(make(spec), tables, [1, 1], [1, 1])
    assert torch.equal(out[:, 0, :2], torch.tensor([[3.0, -7.0], [3.0, -7.0]]))


@pytest.mark.parametrize("group", [1, 5, 6, 7, 12, 24])
def test_any_number_of_query_heads_shares_a_kv_head(make: Maker, group: int) -> None:
    """genesis-vllm-patches issue 7, vLLM PR 40792: tiles over heads that run into the next KV head."""
    spec = fp32(q_heads=2 * group, kv_heads=2)
    cache = Cache(spec, 2)
    cache.put([0], [10.0, 10.0, 10.0])
    token_view(spec.kv_layout.v_order, cache.v)[0, :3, 1] = 20.0
    out, _ = cache.attend(make(spec), [[0]], [3], [1])
    assert torch.equal(out[0, :, 0], torch.tensor([10.0] * group + [20.0] * group))


def test_heads_that_do_not_divide_are_refused_before_there_is_a_kernel() -> None:
    with pytest.raises(SpecError, match="multiple"):
        fp32(q_heads=3, kv_heads=2)


@pytest.mark.parametrize(("head_dim", "want"), [(80, 0.709803), (96, 0.727068), (112, 0.742366), (120, 0.749406)])
def test_the_scale_is_that_of_the_stated_head_dim(make: Maker, head_dim: int, want: float) -> None:
    """cudnn-frontend PR 493, ipex-llm PR 12619: scale of the padded width (0.669762 for 80 on 128)."""
    spec = fp32(head_dim=head_dim)
    cache = Cache(spec, 1)
    cache.put([0], [1.0, 0.0])
    token_view(spec.kv_layout.k_order, cache.k)[0, 0] = 1.0
    out, _ = cache.attend(make(spec), [[0]], [2], [1], q=0.1)
    assert float(out[0, 0, 0]) == pytest.approx(want, abs=1e-6)


def test_chunked_prefill_aligns_the_mask_to_the_last_key(make: Maker) -> None:
    """flash-attention issue 282: with fewer queries than keys, query 0 was taken for position 0."""
    spec = fp32()
    cache = Cache(spec, 3)
    cache.put([2, 0], [1, 2, 3, 4, 5])
    out, _ = cache.attend(make(spec), [[2, 0]], [5], [2])
    assert torch.allclose(out[:, 0, 0], torch.tensor([2.5, 3.0]), atol=1e-6)


def test_chunkings_of_a_prompt_agree(make: Maker) -> None:
    spec = fp32()
    cache = Cache(spec, 4)
    cache.put([3, 1, 2], [1, 5, 2, 8, 3, 9, 4, 7, 6], key=0.25)
    kernels, results = make(spec), []
    for chunks in ([9], [4, 4, 1], [1] * 9):
        parts = [cache.attend(kernels, [[3, 1, 2]], [sum(chunks[: i + 1])], [n])[0] for i, n in enumerate(chunks)]
        results.append(torch.cat(parts))
    assert torch.allclose(results[0], results[1], atol=1e-6)
    assert torch.allclose(results[0], results[2], atol=1e-6)


def test_sequences_without_a_query_are_passed_over(make: Maker) -> None:
    """flash-attention issues 1537 and 1619: a longest query of 1 taken for a query each."""
    spec = fp32()
    cache = Cache(spec, 4)
    for s, context in enumerate([3, 2, 4, 1]):
        cache.put([s], [float(s)] * context)
    kernels, tables = make(spec), [[0], [1], [2], [3]]
    out, _ = cache.attend(kernels, tables, [3, 2, 4, 1], [0, 1, 0, 1])
    assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 3.0]))
    assert cache.attend(kernels, tables, [3, 2, 4, 1], [0, 0, 0, 0])[0].shape == (0, 1, 8)


def test_padding_slots_write_nothing(make: Maker) -> None:
    """vLLM PR 43869: slot -1 became the last slot of the last block."""
    spec = fp32(head_dim=8)
    cache = Cache(spec, 4, filler=0.0)
    values = torch.tensor([1.0, 9.0, 9.0])[:, None, None].expand(3, 1, 8).contiguous()
    make(spec).write_kv(values, values, cache.k, cache.v, torch.tensor([5, -1, -1]))
    for tensor in (cache.k, cache.v):
        assert tensor.count_nonzero() == 8
        assert torch.equal(tensor[1, 1, 0], torch.ones(8))


def test_positions_past_32768_are_seen(make: Maker) -> None:
    """xformers issue 719: a sequence index of 16 bits."""
    spec = fp32(block_size=16)
    cache = Cache(spec, 2500)
    token_view(spec.kv_layout.k_order, cache.k)[:] = 0.0
    token_view(spec.kv_layout.v_order, cache.v)[:] = (torch.arange(40000) >= 32768).float().reshape(2500, 16, 1, 1)
    out, _ = cache.attend(make(spec), [list(range(2500))], [40000], [1])
    assert float(out[0, 0, 0]) == pytest.approx(0.1808, abs=1e-5)


def test_block_ids_past_65536_are_told_apart(make: Maker) -> None:
    """A block id of 16 bits finds block 3 in the place of 65539."""
    spec = fp32(block_size=1)
    cache = Cache(spec, 70000, filler=0.0)
    cache.v[3], cache.v[65539] = -1.0, 7.0
    out, _ = cache.attend(make(spec), [[65539]], [1], [1])
    assert float(out[0, 0, 0]) == 7.0


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in (Fault.ARGS_SIZE, Fault.WORKSPACE, Fault.PREFIX_TOO_LONG)])
def test_numbers_that_a_kernel_refuses_are_refused_in_its_words(fault: Fault) -> None:
    """The gate's own wrong arguments; of the three left out two are a library's, and one is that of its driver."""
    spec = KernelSpec.from_dict({"q_heads": 4, "kv_heads": 2, "head_dim": 16, "rope": "neox", "kv_dtype": "fp8_e4m3", "kv_scale": "head"})
    cases = [case for case in quick_suite(spec) if case.fault is fault]
    assert cases
    for case in cases:
        with pytest.raises(KernelError) as caught:
            invoke(getattr(ReferenceKernels(spec), case.op.value), case, materialise(case))
        assert str(caught.value) == f"{case.op.value}: {REFUSALS[fault.status]}"


def test_a_shared_prefix_longer_than_a_context_is_refused() -> None:
    spec = fp32(lse=False)
    out = torch.zeros(1, 1, 8)
    table, lens, cu = (torch.tensor(values, dtype=torch.int32) for values in ([[0, 1]], [5], [0, 1]))
    with pytest.raises(KernelError, match="shared_prefix_len exceeds a context"):
        ReferenceKernels(spec).attend(out, out.clone(), *allocate_cache(spec, 2), table, lens, cu, extras=AttendExtras(shared_prefix_len=8))
