"""Virtual time: the engine's own scheduler and memory policies on traces; recorded runs again; the papers' numbers."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.errors import ConfigError
from pagegen.runtime.policies import MEMORY_POLICIES
from pagegen.runtime.scheduler import Preemption, ScheduledBatch
from pagegen.runtime.scheduling import POLICIES
from pagegen.runtime.scheduling.events import Added, Planned, SchedulerEvent
from pagegen.runtime.simulate import replay, simulate
from pagegen.runtime.simulation.batches import BatchSampler, point_name
from pagegen.runtime.simulation.beams import PARENTS, SimulatedBeams
from pagegen.runtime.simulation.costs import StepCosts
from pagegen.runtime.simulation.experiment import Load, experiment
from pagegen.runtime.simulation.figures import CHAT, FIGURES, find_figure
from pagegen.runtime.simulation.log import EventLog, decode, encode, read_log
from pagegen.runtime.simulation.setup import NUM_SLOTS, SYSTEMS, Setup
from pagegen.runtime.simulation.traces import TraceRow, read_trace, synthesize, write_trace
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import Phase
from pagegen.tuning.workload import Point, Workload

TIGHT = Setup(num_blocks=70, block_size=4, max_model_len=160, max_num_seqs=13)  # a pool that makes requests yield

ONE = dataclasses.replace(SYSTEMS["vLLM"], max_num_seqs=1)


def small_trace(seed: int = 0, num_requests: int = 40) -> list[TraceRow]:
    return synthesize("alpaca", rate=20, num_requests=num_requests, seed=seed, max_model_len=130)


# --- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_input", "num_output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
def test_lengths_have_the_printed_means(name: str, num_input: float, num_output: float) -> None:
    rows = synthesize(name, rate=1, num_requests=30_000)
    assert statistics.fmean(row.input for row in rows) == pytest.approx(num_input, rel=0.03)
    assert statistics.fmean(row.output for row in rows) == pytest.approx(num_output, rel=0.03)
    assert max(row.input + row.output for row in rows) <= 2048


def test_arrivals_are_poisson_of_the_rate_and_a_seed_repeats_them() -> None:
    rows = synthesize("orca", rate=5, num_requests=20_000, seed=3)
    assert rows[-1].arrival == pytest.approx(4000, rel=0.03)
    assert (
        rows
        == synthesize("orca", rate=5, num_requests=20_000, seed=3)
        != synthesize("orca", rate=5, num_requests=20_000)
    )
    assert {row.arrival for row in synthesize("fixed:7x9", rate=math.inf, num_requests=5)} == {0.0}


def test_a_trace_file_is_read_by_arrival_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRow(2.0, 3, 4), TraceRow(0.5, 1, 1, max_tokens=9, n=2)])
    assert read_trace(path) == [TraceRow(0.5, 1, 1, max_tokens=9, n=2), TraceRow(2.0, 3, 4)]
    huge = '{"arrival": 0, "input": 99999999999, "output": 1}'
    for line in (huge, '{"arrival": 0, "input": 0, "output": 1}', "[1]", "{", '{"arrival": 0, "input": 1, "speed": 2}'):
        path.write_text('{"arrival": 0, "input": 1, "output": 1}\n' + line + "\n")
        with pytest.raises(ConfigError, match="line 2"):
            read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"input": 5, "output": 3, "arrival": 1}\n{"input": 5, "output": 3}', "line 2: trace: it has no arrival; give every"),
        ('{"output": 3}', "line 1: trace: it has no input"),
        ('{"input": 5, "output": 3, "speed": 2}', "line 1: trace: field 'speed' is not known; allowed: arrival, input"),
        (r'[{"conversations": [{"value": "\ud800"}, {"value": "b"}]}]', "conversation 1: prompt is not valid Unicode"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "a conversation has two turns of at least 4"),
    ],
)
def test_a_damaged_trace_is_refused_in_words_of_the_trace(text: str, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "trace.json").write_text(text)
    tokenizer = resolve_model("dummy:tiny").tokenizer()
    with pytest.raises(ConfigError) as caught:
        read_trace(path, count=lambda turn: len(tokenizer.encode(turn)))
    assert said in str(caught.value) and "trace.json" in str(caught.value) and "\n" not in str(caught.value)



def test_requests_without_arrivals_come_at_the_rate_and_conversations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input": 7, "output": 5}\n' * 3000)
    rows = read_trace(path, rate=10.0)
    assert rows[-1].arrival == pytest.approx(300, rel=0.1) and rows[0].arrival > 0
    assert {row.arrival for row in read_trace(path)} == {0.0}
    path = tmp_path / "sharegpt.json"
    talks = [
        ["a " * 5, "b " * 9, "c"],
        ["a " * 3, "b " * 9],
        ["a " * 1025, "b " * 9],
        ["a " * 900, "b " * 1200],
        ["alone"],
    ]
    values = [{"conversations": [{"from": "human", "value": turn} for turn in turns]} for turns in talks]
    path.write_text(json.dumps(values))
    (row,) = read_trace(path, count=lambda text: len(text.split()))  # the others are too short, too long, or one-sided
    assert (row.input, row.output) == (5, 9)
    with pytest.raises(ConfigError, match="--model"):
        read_trace(path)
    for text in ("[1]", '[{"conversations": 5}]', "[", '[{"conversations": [{"from": "human"}]}]'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="conversations"):
            read_trace(path, count=len)


# --- virtual time ----------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    costs = StepCosts(base=1.0, per_seq=0.1, per_kv_token=0.01, per_kv_block=0.0001, per_prefill_token=0.001)
    figures = simulate([TraceRow(5.0, 10, 3)], Setup(), costs)
    # The prompt's ten tokens in a block; then the newest one at context 11 and 12.
    first, second, third = 1.0 + 0.1 + 0.10 + 0.0001 + 0.010, 1.2101, 1.2201
    assert figures.time_to_first_token.mean == pytest.approx(first)
    assert figures.normalized_latency.mean == pytest.approx((first + second + third) / 3)
    assert figures.virtual_seconds == pytest.approx(5 + first + second + third)
    assert (figures.num_steps, figures.num_computed_tokens, figures.num_finished) == (3, 12, 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory_policy", MEMORY_POLICIES)
def test_every_request_ends_at_its_length_under_every_policy(policy: str, memory_policy: str) -> None:
    trace = small_trace()
    figures = simulate(trace, dataclasses.replace(TIGHT, policy=policy, memory_policy=memory_policy))
    assert figures.num_finished == len(trace) and not figures.num_failed
    assert sum(figures.split.values()) == pytest.approx(1)
    least = sum(row.input + row.output - 1 for row in trace)
    assert figures.num_computed_tokens >= least
    if not figures.num_preemptions:
        assert figures.num_computed_tokens == least


def test_samples_share_their_prompt_in_full_blocks() -> None:
    figures = simulate([TraceRow(0.0, 64, 1 << 4, n=4)], Setup())  # 4 blocks of prompt, one or two of each sample's own
    assert 3 * 4 / (4 + 3 * 4 + 4 * 2) <= figures.saved_share <= 3 * 4 / (4 * 4 + 4)


@pytest.mark.parametrize("width", PARENTS)
def test_beams_share_more_than_samples_and_a_recorded_search_repeats(width: int) -> None:
    """Two full blocks of the prompt and nothing else are shared by samples."""
    setup, log = Setup(num_blocks=400, block_size=4), list[SchedulerEvent]()
    rows = [TraceRow(0.0, 9, 40, 40, width, beams=beams) for beams in (False, True)]
    samples, beams = (simulate([row], setup, recorder=log.append) for row in rows)
    assert beams.saved_share > samples.saved_share > 0
    assert beams.num_computed_tokens == samples.num_computed_tokens == 9 + width * 39
    begin = next(i for i, event in enumerate(log) if isinstance(event, Added) and event.request.beams)
    figures, (row,) = replay(setup, log[begin:])
    assert row == rows[1] and figures.saved_share == beams.saved_share


@given(st.sampled_from(list(PARENTS)), st.text())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_simulated_beams_keep_their_place_if_they_have_a_child(width: int, request_id: str) -> None:
    search = SimulatedBeams(request_id, width)
    for _ in range(50):
        search.step()
        assert all(search.parents[parent] == parent for parent in search.parents)


def test_beams_of_a_number_that_was_not_counted_are_refused() -> None:
    with pytest.raises(ConfigError, match="trace: 7 beams cannot be simulated; allowed: 2, 4, 6"):
        TraceRow(0.0, 9, 9, n=7, beams=True)


def test_what_does_not_fit_the_pool_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="KV blocks"):
        simulate([TraceRow(0.0, 700, 1)], dataclasses.replace(TIGHT, max_model_len=701))


def test_a_horizon_ends_the_run_and_a_warmup_is_left_out() -> None:
    trace = synthesize("fixed:16x64", rate=math.inf, num_requests=50)
    setup = dataclasses.replace(Setup(), max_num_seqs=10)
    whole, part = simulate(trace, setup), simulate(trace, setup, warmup=1.0, horizon=4.0)
    assert part.num_finished < whole.num_finished == 50
    assert part.num_running == pytest.approx(10)
    assert part.virtual_seconds < 4.1 < whole.virtual_seconds


@pytest.mark.long
def test_ten_thousand_sequences_in_a_million_blocks() -> None:
    trace = synthesize("fixed:61x200", rate=math.inf, num_requests=10_000)
    setup = Setup(num_blocks=1_000_000, max_num_seqs=10_000, max_num_batched_tokens=700_000)
    figures = simulate(trace, setup)
    assert figures.max_running_sequences == figures.num_finished == 10_000
    assert figures.num_preemptions == 0


# --- recorded runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("policy", ["default", "vllm-paper", "orca"])
def test_a_recorded_run_repeats_bit_for_bit(tmp_path: Path, policy: str, preemption: Preemption) -> None:
    setup = dataclasses.replace(TIGHT, policy=policy, preemption=preemption, num_host_blocks=23)
    path, trace = tmp_path / "run.log", small_trace(7)
    trace = [dataclasses.replace(row, n=1 + i % 3, max_tokens=row.output) for i, row in enumerate(trace)]
    trace = [row for row in trace if row.n * (row.input + row.output) < 260]
    with EventLog(path) as log:
        log.begin(setup)
        figures = simulate(trace, setup, recorder=log)
    found, events = read_log(path)
    repeated, rows = replay(found, events)
    assert found == setup
    for name in ("num_steps", "num_preemptions", "num_swaps", "num_computed_tokens", "num_finished", "num_failed"):
        assert getattr(repeated, name) == getattr(figures, name), name
    if not figures.num_failed:  # without preemption, deadlocks cut some short
        assert [(row.input, row.output, row.n) for row in rows] == [(row.input, row.output, row.n) for row in trace]


def test_a_log_that_was_changed_or_cut_is_told_from_one_that_repeats(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with EventLog(path) as log:
        log.begin(TIGHT)
        simulate(small_trace(), TIGHT, recorder=log)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], '["upd']))  # killed while it wrote: what is whole repeats
    setup, events = read_log(path)
    assert replay(setup, events)[0].num_steps > 3
    plan = next(i for i, line in enumerate(lines) if i > 30 and line.startswith('["plan"'))
    path.write_text("\n".join([*lines[:plan], '["plan","0000000000000000"]', ""]))
    setup, events = read_log(path)
    with pytest.raises(ConfigError, match=f"event {plan} of the log does not repeat"):
        replay(setup, events)
    for text in ("", "{}\n", '["pagegen",99,{}]\n', '["pagegen",1,{"speed":1}]\n'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_log(path)


_WRONG: tuple[Any, ...] = (None, -1, 0, True, 2**70, 1e308, "x", [], {}, [[1]], {"parent": 7, "token_id": {}}, {"parent": "0", "token_id": 3})


def _damaged(value: Any, chance: random.Random) -> Any:
    """The same, but for one thing somewhere in it."""
    if isinstance(value, list | dict) and value and chance.random() < 0.85:
        where = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        copy[where] = _damaged(value[where], chance)
        return copy
    return chance.choice(_WRONG)


@pytest.mark.parametrize("policy", ["default", "vllm-paper"])
def test_a_log_with_any_one_thing_changed_repeats_or_is_refused_in_one_line(tmp_path: Path, policy: str) -> None:
    path, setup = tmp_path / "run.log", dataclasses.replace(TIGHT, policy=policy)
    trace = [dataclasses.replace(row, n=2, max_tokens=row.output) for row in small_trace(3)][:6]
    with EventLog(path) as log:
        log.begin(setup)
        simulate([row for row in trace if row.n * (row.input + row.output) < 260], setup, recorder=log)
    lines, refused = path.read_text().splitlines(), 0
    for seed in range(300):
        chance = random.Random(seed)
        at = chance.choice([0, chance.randrange(len(lines)), chance.randrange(min(20, len(lines)))])
        path.write_text(
            "\n".join([*lines[:at], json.dumps(_damaged(json.loads(lines[at]), chance)), *lines[at + 1 :], ""])
        )
        try:
            replay(*read_log(path))
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 200


def test_a_run_goes_on_where_its_log_cannot_and_says_where_the_log_ends(tmp_path: Path) -> None:
    path, full = tmp_path / "run.log", False

    class Disk(io.StringIO):
        def write(self, text: str) -> int:
            if full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk, log = Disk(), EventLog(path)
    log._file = disk
    log.begin(TIGHT)

    def fill(batch: ScheduledBatch) -> None:
        nonlocal full
        full = True

    with pytest.warns(RuntimeWarning, match=r"run.log ends here: No space left on device") as warned:
        figures = simulate(small_trace(), TIGHT, recorder=log, observe=fill)
    assert figures.num_finished == len(small_trace()) and len(warned) == 1
    path.write_text(disk.getvalue())
    replay(*read_log(path))
    with pytest.raises(ConfigError, match=r"run.log cannot be written: No space left on device"):
        log.begin(TIGHT)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(list(POLICIES)), n=st.integers(1, 3))
def test_events_survive_being_written(seed: int, policy: str, n: int) -> None:
    events = list[SchedulerEvent]()
    trace = synthesize("fixed:5x7", rate=9, num_requests=6, seed=seed, n=n)
    simulate(trace, dataclasses.replace(TIGHT, policy=policy), recorder=events.append)
    assert any(isinstance(event, Planned) for event in events)
    assert [decode(json.loads(json.dumps(encode(event)))) for event in events] == events


# --- what the tuner is handed ----------------------------------------------------------------------------------------


def test_the_batches_of_a_run_are_a_workload_that_the_tuner_reads(tmp_path: Path) -> None:
    sampler = BatchSampler()
    figures = simulate(small_trace(), TIGHT, observe=sampler)
    num_batches = 0.0
    for phase in (Phase.DECODE, Phase.MIXED):
        sampler.write(tmp_path / "w.yaml", phase)
        workload = Workload.from_dict(yaml.safe_load((tmp_path / "w.yaml").read_text()))
        assert workload.phase is phase
        num_batches += sum(point.weight for point in workload.points)
        assert all(min(point.query_lens) == 1 for point in workload.points)
        assert all((max(point.query_lens) > 1) == (phase is Phase.MIXED) for point in workload.points)
    assert 0.5 * figures.num_steps < num_batches <= figures.num_steps


@given(
    st.lists(st.integers(1, 50).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 300))), min_size=1, max_size=60)
)
def test_a_point_keeps_sequences_and_nearly_their_tokens(shape: list[tuple[int, int]]) -> None:
    point = Point.parse(point_name(shape))
    assert len(point.context_lens) == len(shape)
    assert sum(point.context_lens) == pytest.approx(sum(context for _, context in shape), abs=len(shape) + 50)


# --- the papers ------------------------------------------------------------------------------------------------------


def test_a_modelled_row_has_its_range_and_holds_only_if_it_does_with_every_constant_off() -> None:
    cases = {"vLLM": (Load("fixed:20x20", 30.0, 6), SYSTEMS["vLLM"]), "one": (Load("fixed:20x20", 30.0, 6), ONE)}
    results = experiment(cases, varied_scale=1.0)
    row = results.faster("vLLM", "one", "above 1", (1.0, math.inf))
    assert row.ok and row.kind == "modelled" and row.varied is not None and len(row.seeds) == 3
    assert row.varied[0] < row.ours < row.varied[1] and row.decisive == "base"
    names = {name for name, _ in results.varied}
    assert names == {"base", "per_seq", "per_kv_token", "per_kv_block", "per_prefill_token"}  # nothing is swapped
    slow = max(found.costs.base for _, found in results.varied)
    assert not results.row("x", lambda _: 1.0, 1, (0, 2), "x", lambda found: found.costs.base < slow).ok
    with pytest.raises(ConfigError, match="--scale"):
        results.row("x", lambda found: 1 / found["one"].num_failed, 1, (0, 2), "x")


def test_blocks_and_swaps_cost_what_their_size_says() -> None:
    costs = StepCosts(per_swapped_token=1.0, per_swapped_block=10.0)
    assert (costs.swapping(3, 4), costs.swapping(12, 1)) == (42.0, 132.0)
    small, large = (
        simulate(
            [TraceRow(0.0, 64, 9)], Setup(block_size=size, num_blocks=NUM_SLOTS // size), StepCosts(per_kv_block=1.0)
        ).virtual_seconds
        for size in (1, 64)
    )
    assert small > 9 * 64 > 20 > large


def test_a_shared_prefix_is_computed_once() -> None:
    rows = synthesize("fixed:10x4", rate=1.0, num_requests=8, prefix=64)
    assert {(row.input, row.prefix) for row in rows} == {(74, 64)}
    setup = Setup("default", prefix_cache=True)
    with_cache, without = simulate(rows, setup), simulate(rows, dataclasses.replace(setup, prefix_cache=False))
    assert without.num_computed_tokens - with_cache.num_computed_tokens == 7 * 64
    apart = [dataclasses.replace(row, prefix=0) for row in rows]
    assert simulate(apart, setup).num_computed_tokens == without.num_computed_tokens


def test_fixed_reservations_waste_what_figure_2_shows_and_paging_does_not() -> None:
    runs = {system: CHAT.run(setup, 0, 0.1) for system, setup in SYSTEMS.items()}
    assert runs["Orca (Max)"].num_running == pytest.approx(7, abs=0.1)
    assert runs["Orca (Max)"].split["external"] == pytest.approx(1 - 7 * 2048 / 15_728, abs=1e-6)
    assert runs["Orca (Oracle)"].split["internal"] == 0
    assert runs["vLLM"].token_share > 0.95
    batched = [runs[system].num_running for system in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")]
    assert batched == sorted(batched)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_comes_out_as_printed(name: str) -> None:
    rows = find_figure(name).rows()
    assert rows and [row for row in rows if not row.ok and not row.note] == []
