"""Claims about judging configs without measuring: what is pruned, what never is, and what the estimates obey."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.catalog import template_for
from pagegen.resources import Resources, occupancy
from pagegen.space import Config
from pagegen.spec import KernelSpec, Op, Phase, parse_slug
from pagegen.target import TARGETS, Target, parse_target
from pagegen.tuning import static_cpu, static_gpu
from pagegen.tuning.static_gpu import DEVICES, MERGE, Launch
from pagegen.tuning.static_model import Launches, kind_of, rank
from pagegen.tuning.workload import Point, Workload

SPEC = parse_slug("bf16-d128-h32x8-b16-NHD")[0]
SM_90, GFX942, AVX512 = (parse_target(name) for name in ("cuda:sm_90", "hip:gfx942", "cpu:avx512"))
DECODE = Workload(Phase.DECODE, (Point.parse("32x1@2048"), Point.parse("1x1@8192", 2.0)))


def config(target: Target = SM_90, spec: KernelSpec = SPEC, **knobs: int) -> Config:
    return template_for(Op.ATTEND, spec, target).space(spec, target).config(knobs)


def used(target: Target, *, registers: int = 128, spills: int = 0, shared: int = 32768, threads: int = 128, code: str = "") -> Resources:
    mix = {"HGMMA": 8} if target.kind == "cuda" else {"MFMA": 8}
    resident = occupancy(target, registers, shared, threads)
    return Resources(registers, spills, shared, threads, resident, mix, code or f"{registers} {spills} {shared} {threads}")


def launched(resources: Resources, workload: Workload = DECODE, *, rows: int = 16, parts: int = 1) -> Launches:
    """As the launcher would: a program for every sequence, KV head and part, and a merge where there are parts."""
    merge = Launch(MERGE, (1, 32), 1, used(SM_90, registers=32, shared=0))
    return {
        point.name: (
            Launch("attend", (len(point.query_lens), SPEC.kv_heads, parts), rows, resources),
            *((merge,) if parts > 1 else ()),
        )
        for point in workload.points
    }


def reasons(launches: Mapping[Config, Launches], target: Target = SM_90) -> dict[Config, str]:
    found = rank(SPEC, target, DECODE, launches, launches=launches)
    assert {each.config for each in found} == set(launches) and len(found) == len(launches)
    return {each.config: kind_of(each.reason) for each in found}


# --- what is pruned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "resources", "kind"),
    [
        (SM_90, used(SM_90), ""),
        (SM_90, used(SM_90, shared=227 * 1024), ""),  # one program fits
        (SM_90, used(SM_90, shared=227 * 1024 + 1), "shared memory"),
        (SM_90, used(SM_90, registers=255, threads=512), "registers"),  # 130,560 of 65,536
        (SM_90, used(SM_90, shared=200 * 1024, threads=64), "occupancy"),  # two warps for four schedulers
        (GFX942, used(GFX942, shared=40 * 1024, threads=128), "occupancy"),
        (GFX942, used(GFX942, shared=40 * 1024, threads=256), ""),
        (GFX942, used(GFX942, shared=65 * 1024), "shared memory"),
    ],
)
def test_what_a_device_cannot_use_is_pruned_with_its_reason(target: Target, resources: Resources, kind: str) -> None:
    assert reasons({config(target): launched(resources)}, target) == {config(target): kind}


def test_spills_are_pruned_where_another_config_spills_none_and_only_there() -> None:
    clean, spilling, worse = (config(num_warps=warps) for warps in (2, 4, 8))
    some, more = launched(used(SM_90, spills=7)), launched(used(SM_90, spills=9))
    assert reasons({clean: launched(used(SM_90)), spilling: some}) == {clean: "", spilling: "spills"}
    assert reasons({spilling: some, worse: more}) == {spilling: "", worse: ""}
    unfit = launched(used(SM_90, shared=1 << 20))  # spills none, but is of no use
    assert reasons({clean: unfit, spilling: some}) == {clean: "shared memory", spilling: ""}


def test_of_configs_that_launch_the_same_the_first_given_is_kept() -> None:
    first, same, finer, other = (config(split_below=below) for below in (256, 128, 512, 0))
    found = reasons(
        {first: launched(used(SM_90)), same: launched(used(SM_90)), finer: launched(used(SM_90), parts=4), other: launched(used(SM_90, code="x"))}
    )
    assert found == {first: "", same: "duplicate", finer: "", other: ""}


# --- what the estimates obey -----------------------------------------------------------------------------------------


def test_every_gpu_target_has_nominal_limits_with_a_source() -> None:
    assert set(DEVICES) == {target.arch for target in TARGETS if target.kind != "cpu"}
    assert all(device.source and device.bandwidth > 1e11 and device.matrix > device.fp32 for device in DEVICES.values())
    for device in DEVICES.values():  # 64 or 128 multiply-adds of a multiprocessor a clock
        assert any(device.fp32 / device.processors / device.clock == pytest.approx(each, rel=0.01) for each in (128, 256))


@given(
    st.sampled_from([SM_90, GFX942]),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(0, 4),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["1x1@1", "3x1@77", "64x1@4096", "1x512@512", "2x37@411+1x5@5"]),
)
@settings(max_examples=60)
def test_no_gpu_estimate_beats_the_roofline_and_more_loads_under_way_never_hurt(
    target: Target, tile_kv: int, tiles: int, parts: int, batch: str
) -> None:
    point = Point.parse(batch)
    device = DEVICES[target.arch]
    (one, *merge) = launched(used(target), Workload(Phase.MIXED, (point,)), parts=parts)[point.name]
    if max(point.query_lens) > 1:  # a program for every four tokens, and one more a sequence, as the launcher has it
        one = dataclasses.replace(one, grid=(sum(point.query_lens) // 4 + len(point.query_lens), SPEC.kv_heads, parts))
    shallow, deep = (
        static_gpu.seconds_of(SPEC, target, config(tile_kv=tile_kv), point, (holding(one, each * tile_kv * 512), *merge))
        for each in (tiles, tiles + 1)
    )
    moved = point.kv_bytes(SPEC) + point.io_bytes(SPEC)
    assert deep <= shallow and deep >= max(moved / device.bandwidth, point.flops(SPEC) / device.matrix)


def holding(launch: Launch, shared: int) -> Launch:
    """A launch with so many bytes of shared memory, as often resident as before."""
    return dataclasses.replace(launch, resources=dataclasses.replace(launch.resources, shared_memory=shared))


def test_configs_of_one_binary_are_estimated_alike_whichever_is_drawn_first() -> None:
    launches = launched(used(SM_90, shared=74240))
    configs = [config(tile_kv=128, split_below=0, num_stages=stages, num_warps=4) for stages in (1, 2, 3, 4)]
    scores = {rank(SPEC, SM_90, DECODE, order, launches=dict.fromkeys(configs, launches))[0].score for order in (configs, configs[::-1])}
    assert len(scores) == 1


@pytest.mark.parametrize("target", [SM_90, GFX942])
def test_few_programs_do_not_take_all_the_bandwidth(target: Target) -> None:
    point, device = Point.parse("1x1@8192"), DEVICES[target.arch]
    (one,) = launched(used(target), Workload(Phase.DECODE, (point,)))[point.name]
    seconds = static_gpu.seconds_of(SPEC, target, config(target), point, (holding(one, 1 << 24),))
    assert seconds >= point.kv_bytes(SPEC) / (SPEC.kv_heads * static_gpu.PORT * device.clock)


def test_one_long_sequence_is_estimated_faster_in_parts_and_many_are_not() -> None:
    whole, parts = (launched(used(SM_90), parts=count) for count in (1, 8))
    for name, better in (("1x1@8192", True), ("32x1@2048", False)):
        point = Point.parse(name)
        seconds = [static_gpu.seconds_of(SPEC, SM_90, config(), point, each[point.name]) for each in (whole, parts)]
        assert (seconds[1] < seconds[0]) is better


def test_a_kernel_on_the_older_matrix_instruction_is_estimated_slower() -> None:
    workload = Workload(Phase.PREFILL, (Point.parse("1x4096@4096"),))
    modern = used(SM_90)
    older = dataclasses.replace(modern, instructions={"HMMA": 8})
    times = [
        static_gpu.seconds_of(SPEC, SM_90, config(tile_q=64), point, (Launch("attend", (257, 8, 1), 64, each),))
        for point in workload.points
        for each in (modern, older)
    ]
    assert times[0] < times[1]


# --- CPU -------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=40)
def test_a_cpu_ranking_keeps_every_config_once_and_an_estimate_a_batch(data: st.DataObject) -> None:
    target = data.draw(st.sampled_from([AVX512, parse_target("cpu:amx"), parse_target("cpu:scalar")]))
    slug = data.draw(st.sampled_from(["bf16-d64-h9x3-b16-NHD", "fp32-d80-h2x2-b3-HDN", "bf16-d128-h8x1-b16-NHD-w100", "bf16-d64-h4x2-b16-NHD-det"]))
    spec = parse_slug(slug)[0]
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    choice = st.fixed_dictionaries({knob.name: st.sampled_from(knob.values) for knob in space.knobs})
    drawn = data.draw(st.lists(choice.filter(lambda knobs: not space.broken(knobs)), max_size=12))
    configs = list({space.default, *map(space.config, drawn)})
    workload = Workload(Phase.MIXED, tuple(map(Point.parse, ("1x1@1", "3x1@999", "1x77@100", "2x1@31+1x40@40"))))
    found = rank(spec, target, workload, configs, threads=2)
    good = [each for each in found if not each.reason]
    assert sorted(each.config.slug for each in found) == sorted(each.slug for each in configs)
    assert found[: len(good)] == good and [each.score for each in good] == sorted(each.score for each in good)
    assert all(each.seconds.keys() == {point.name for point in workload.points} and each.score > 0 for each in found)
    assert {kind_of(each.reason) for each in found} <= {"", "duplicate"}


def test_knobs_that_a_batch_does_not_reach_make_no_difference_to_it() -> None:
    point = Point.parse("8x1@2048")

    def work(**knobs: int) -> static_cpu.Work:
        return static_cpu.work_of(SPEC, AVX512, config(AVX512, SPEC, **knobs), point, 2)

    assert work() == work(row_block_packed=12) == work(tile_q=8) == work(row_block=8)  # four rows, read in place
    assert work(split_kv=2048) == work(split_kv=8192) != work(split_kv=1024)
    assert len({work(tile_few=64), work(prefetch=0), work(prefetch=2), work(row_block=1), work(tile_q=4), work()}) == 6


def works_of(batch: str, slug: str, target: Target, *each: dict[str, int]) -> set[static_cpu.Work]:
    """What configs do with a batch on one thread: as many as there are different works."""
    spec, point = parse_slug(slug)[0], Point.parse(batch)
    return {static_cpu.work_of(spec, target, config(target, spec, **knobs), point, 1) for knobs in each}


@pytest.mark.parametrize(
    ("batch", "slug", "one", "other"),
    [
        ("1x1@1024", "fp32-d64-h8x8-b16-NHD", {"tile_q": 4}, {"tile_q": 8}),  # KV heads of an item, though the items are few
        ("1x64@600", "fp32-d64-h8x8-b16-NHD-det", {"split_kv": 256}, {"split_kv": 512}),  # prefill is merged in decode's parts
        ("8x4@512", "fp32-d64-h8x8-b16-HDN8", {"row_block_packed": 2}, {"row_block_packed": 4}),  # K is packed for few rows, too
        ("8x4@512", "fp32-d64-h8x8-b16-HDN_HDN", {"row_block_packed": 2}, {"row_block_packed": 4}),  # V is
        ("1x12@12", "fp32-d64-h8x8-b16-NHD", {"pack_rows": 8, "tile_kv": 16}, {"pack_rows": 8, "tile_kv": 32}),  # by two vectors
    ],
)
def test_what_makes_a_difference_in_the_template_makes_one_here(
    batch: str, slug: str, one: dict[str, int], other: dict[str, int]
) -> None:
    assert len(works_of(batch, slug, AVX512, one, other)) == 2


def test_a_tile_of_queries_that_none_fills_is_as_large_as_they_are() -> None:
    assert len(works_of("2x20@300", "fp32-d64-h8x8-b16-NHD", AVX512, {"tile_q": 32}, {"tile_q": 64}, {"tile_q": 16})) == 2


def test_threads_share_one_long_sequence_once_it_is_cut_and_prefetching_hides_what_is_read() -> None:
    spec, point = parse_slug("bf16-d128-h4x1-b16-NHD")[0], Point.parse("1x1@8192")

    def seconds(threads: int, **knobs: int) -> float:
        work = static_cpu.work_of(spec, AVX512, config(AVX512, spec, **knobs), point, threads)
        return static_cpu.seconds_of(spec, AVX512, work, threads)

    assert seconds(2, split_kv=8192) == seconds(1, split_kv=8192) > 1.8 * seconds(2, split_kv=1024)
    assert seconds(1, prefetch=1) < seconds(1, prefetch=0)
