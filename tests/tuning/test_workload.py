"""Workloads say what is timed, and their tensors make a call find its KV cold and scattered."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pagegen.errors import ConfigError
from pagegen.records import phase_of
from pagegen.spec import DType, KernelSpec, Phase, parse_slug
from pagegen.tuning.workload import RUN, Inputs, Order, Point, Pool, Workload, cold_bytes

SPEC = KernelSpec(q_heads=6, kv_heads=2, head_dim=16, dtype=DType.FP32, block_size=5)
CACHES = ("HDN8", "NHD-kvfp8_e4m3", "NHD-kvint8", "NHD-kvint4")
SEQUENCES = st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(SEQUENCES, min_size=1, max_size=12))
def test_a_points_name_says_it_all(sequences: list[tuple[int, int]]) -> None:
    point = Point(tuple(q for q, _ in sequences), tuple(c for _, c in sequences))
    assert Point.parse(point.name) == point


@pytest.mark.parametrize("name", ["", "8", "8x1", "8x1@", "0x1@5", "1x0@5", "1x6@5", "1x1@5+", "1x-1@5"])
def test_a_malformed_point_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="point"):
        Point.parse(name)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_positive_and_finite(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Point.parse("1x1@5", weight)


def test_bytes_and_flops_count_what_the_mathematics_needs() -> None:
    point = Point.parse("1x3@5")
    assert point.kv_bytes(SPEC) == 5 * 2 * (16 + 16) * 4
    assert point.flops(SPEC) == 2 * (3 + 4 + 5) * 6 * (16 + 16)  # rows see 3, 4 and 5 keys
    assert point.flops(SPEC.replace(causal=False)) == 2 * 15 * 6 * 32


@given(SEQUENCES, st.booleans(), *[st.none() | st.integers(1, 50)] * 2)
def test_flops_count_the_keys_that_each_row_sees(sequence: tuple[int, int], causal: bool, left: int | None, right: int | None) -> None:
    rows, context = sequence
    spec = SPEC.replace(causal=causal, window=left, window_right=None if causal else right)
    seen = 0
    for own in range(context - rows, context):
        last = own if causal else context - 1 if right is None else min(context - 1, own + right)
        seen += last - (0 if left is None else max(0, own - left + 1)) + 1
    assert Point((rows,), (context,)).flops(spec) == 2 * seen * SPEC.q_heads * (SPEC.head_dim + SPEC.dim_v)


@given(st.lists(SEQUENCES, min_size=1, max_size=5), st.integers(0, 200_000), st.sampled_from(Order), st.sampled_from((1, 5)))
def test_copies_of_a_batch_share_no_block_and_lie_in_the_order_asked_for(
    sequences: list[tuple[int, int]], pool_bytes: int, order: Order, block_size: int
) -> None:
    point, spec = Point(tuple(q for q, _ in sequences), tuple(c for _, c in sequences)), SPEC.replace(block_size=block_size)
    inputs = Inputs(Pool.for_points(spec, (point,), pool_bytes), point, order=order)
    rows = [[block for block in row if block >= 0] for table in inputs.block_tables for row in table.tolist()]
    used = [block for row in rows for block in row]
    assert len(used) == len(set(used)) and inputs.block_tables
    assert max(used) < inputs.pool.k_cache.shape[0]
    assert [len(row) for row in rows] == [-(-context // block_size) for context in point.context_lens] * len(inputs.block_tables)
    if order is Order.ORDERED:
        assert used == list(range(len(used)))
    if order is Order.RUNS:
        runs = [row[at : at + RUN] for row in rows for at in range(0, len(row), RUN)]
        assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)


def test_runs_lie_at_random_places_and_the_usual_order_is_random() -> None:
    point = Point.parse("3x1@700")  # of 140 blocks: 8 runs and 12 blocks more
    pool = Pool.for_points(SPEC, (point,), 1 << 21)
    begins = [int(row[at]) for table in Inputs(pool, point, order=Order.RUNS).block_tables for row in table for at in range(0, 140, RUN)]
    assert sum(0 < b - a <= RUN for a, b in itertools.pairwise(begins)) < len(begins) / 3 and begins[0] > 0
    assert torch.equal(torch.stack(Inputs(pool, point).block_tables), torch.stack(Inputs(pool, point, order=Order.RANDOM).block_tables))


@pytest.mark.parametrize("slug", ["fp32-d16-h6x2-b5-NHD", *(f"bf16-d64-h9x3-b16-{word}" for word in CACHES)])
def test_what_is_timed_looks_like_a_cache_in_use(slug: str) -> None:
    """Values of a normal distribution, not zeros, which some processors multiply faster, and in every block; blocks in no
    order, neither within a sequence nor from one to the next."""
    spec = parse_slug(slug)[0]
    point = Point.parse("4x1@700")
    pool = Pool.for_points(spec, (point,), 1 << 21)
    inputs = Inputs(pool, point)
    for cache in (pool.k_cache, pool.v_cache):
        items = cache.view(torch.uint8).reshape(len(cache), -1)
        assert all(len(block.unique()) > 8 for block in items)
        values = cache.float() if spec.cache_dtype is not DType.INT4 else (cache & 15).float() - 8
        assert (values == 0).float().mean() < 0.15  # of int4 one value in sixteen at the least is the middle one
        scale = values.std()
        assert abs(float(values.mean())) < 0.1 * scale
        assert float((values.abs() < scale).float().mean()) == pytest.approx(0.68, abs=0.1)
    assert inputs.q.float().std() == pytest.approx(1.0, abs=0.2) and not (inputs.q == 0).all()
    width = -(-700 // spec.block_size)
    steps = [int(b) - int(a) for row in inputs.block_tables[0] for a, b in itertools.pairwise(row[:width])]
    assert sum(step == 1 for step in steps) < len(steps) / 10 and min(steps) < 0 < max(steps)


def test_every_caller_of_a_batch_takes_the_next_copy() -> None:
    point = Point.parse("2x1@7")
    inputs = Inputs(Pool.for_points(SPEC, (point,), num_bytes=20_000), point)
    copies = len(inputs.block_tables)
    assert copies > 2
    turns = [inputs.next_table() for _ in range(copies + 1)]
    assert len({id(table) for table in turns}) == copies and turns[0] is turns[-1]


def test_the_nearest_batch_that_fits_stands_for_one_that_does_not_and_the_smallest_always_fits() -> None:
    names = ("1x1@64", "1x1@4096", "8x1@64", "9x1@60", "64x1@64", "1x1@9000")
    workload = Workload(Phase.DECODE, tuple(Point.parse(name, 2.0**i) for i, name in enumerate(names)))

    def bounded(fits: Callable[[Point], bool]) -> dict[str, float]:
        return {point.name: point.weight for point in workload.within(SPEC, fits).points}

    assert bounded(lambda point: point.kv_bytes(SPEC) <= 5000 * 256) == {p.name: p.weight for p in workload.points[:5]} | {"1x1@4096": 34}
    assert bounded(lambda point: len(point.query_lens) < 9 and max(point.context_lens) < 4096) == {"1x1@64": 1 + 2 + 32, "8x1@64": 4 + 8 + 16}
    assert bounded(lambda point: False) == {"1x1@64": 63}
    assert workload.within(SPEC, lambda point: True) == workload


@pytest.mark.parametrize("phase", Phase)
def test_presets_read_back_and_hold_batches_of_their_phase(phase: Phase) -> None:
    path = Path(__file__).parents[2] / "tuning" / "presets" / f"{phase}.yaml"
    workload = Workload.from_dict(yaml.safe_load(path.read_text()))
    assert workload.phase is phase and Workload.from_dict(workload.to_dict()) == workload
    for point in workload.points:
        decoding = [rows == 1 for rows in point.query_lens]
        assert all(decoding) if phase is Phase.DECODE else not any(decoding) if phase is Phase.PREFILL else len(set(decoding)) == 2


@pytest.mark.parametrize("phase", Phase)
def test_what_a_bucket_is_tuned_for_is_what_its_kernel_is_given(phase: Phase) -> None:
    path = Path(__file__).parents[2] / "tuning" / "presets" / f"{phase}.yaml"
    for point in Workload.from_dict(yaml.safe_load(path.read_text())).points:
        assert phase_of(sum(point.query_lens), len(point.query_lens), max(point.query_lens)) is phase


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"format": 2}, "format"), ({"phase": "both"}, "phase"), ({"points": []}, "points"), ({"points": {"1x1@5": "2"}}, "weight"), ({"points": {"1x1@5": 10**400}}, "weight")],
)
def test_a_malformed_workload_is_refused_by_field(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Workload.from_dict({"format": 1, "phase": "decode", "points": {"1x1@5": 1}, **changes})


def test_the_digest_follows_the_content() -> None:
    workload = Workload(Phase.DECODE, (Point.parse("1x1@64"),))
    assert workload.digest == Workload(Phase.DECODE, (Point.parse("1x1@64"),)).digest
    assert workload.digest != Workload(Phase.DECODE, (Point.parse("1x1@64", 2.0),)).digest
    assert workload.digest != Workload(Phase.MIXED, workload.points).digest


def test_cold_bytes_are_twice_the_last_level_cache_but_not_all_the_memory() -> None:
    assert cold_bytes({"L1d": 32 << 10, "L3": 300 << 20}, 16 << 30) == 600 << 20
    assert cold_bytes({"L3": 300 << 20}, 1 << 30) == 128 << 20
    assert cold_bytes({}) == 256 << 20
