"""While one process times on a CPU, no other that pagegen started does anything; the phases of a run are counted right."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from pagegen.catalog import template_for
from pagegen.check import CheckReport
from pagegen.errors import BuildError
from pagegen.records import Evaluation, Status
from pagegen.render import Source
from pagegen.space import Config
from pagegen.spec import DType, KernelSpec, Op, Phase, parse_slug
from pagegen.target import best_cpu, parse_target
from pagegen.tuning import beside, crew, evaluate, job, roofline, static_compile
from pagegen.tuning.evaluate import Evaluator, Timer
from pagegen.tuning.measure import Interval, Measurement, geomean_of_medians
from pagegen.tuning.search import search
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workload import Point, Workload
from pagegen.tuning.workloads import Selection

from .fake_tune import SPACE as BOWL
from .fake_tune import score

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuner_throughput.py"
SPEC = KernelSpec(q_heads=2, kv_heads=1, head_dim=8, dtype=DType.FP32, block_size=4)
GPU_SPEC = parse_slug("bf16-d64-h4x2-b16-NHD")[0]
DECODE = Workload(Phase.DECODE, (Point.parse("2x1@37"), Point.parse("3x1@80")))
SPACE = template_for(Op.ATTEND, SPEC, best_cpu()).space(SPEC, best_cpu())
OTHER = SPACE.config({"tile_kv": 16})


class Locks:
    """Stands for the machine's lock in a process: what is held when something is done, and never two at once."""

    def __init__(self) -> None:
        self.held = ""
        self.done: list[tuple[str, str]] = []

    def lock(self, kind: str) -> Callable[..., contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def hold(*_: object, **__: object) -> Iterator[None]:
            assert not self.held, f"{kind} is asked for while {self.held} is held"
            self.held = kind
            try:
                yield
            finally:
                self.held = ""

        return hold

    def note(self, what: str) -> None:
        self.done.append((what, self.held))


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    """Those of an evaluator whose timing process, gate and statistics only note that they were asked."""
    found = Locks()
    monkeypatch.setattr(evaluate, "working", found.lock("work"))
    monkeypatch.setattr(evaluate, "exclusive", found.lock("timing"))

    def judged(source: Source) -> CheckReport:
        found.note("build and gate")
        return CheckReport(Status.PASSED, 1)

    def timed(timer: Timer, configs: dict[str, Config], anchor: str, point: Point, *_: object, **__: object) -> Measurement:
        found.note("time")
        return Measurement(anchor, {name: (1.0,) * 5 for name in configs})

    def counted(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Interval:
        found.note("score")
        return geomean_of_medians(groups, weights)

    monkeypatch.setattr(evaluate, "check_variant", judged)
    monkeypatch.setattr(evaluate, "geomean_of_medians", counted)
    monkeypatch.setattr(Timer, "time", timed)
    monkeypatch.setattr(Timer, "begin", lambda timer: found.note("begin the timing process"))
    monkeypatch.setattr(Timer, "start", lambda timer: found.note("start the timing process"))
    return found


def test_a_timing_is_made_alone_and_whatever_else_an_evaluation_does_waits_for_timings(locks: Locks) -> None:
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
        assert made.evaluate(Phase.DECODE, OTHER).status is Status.PASSED
    assert locks.done == [
        ("begin the timing process", "work"),
        ("build and gate", "work"),
        ("start the timing process", "work"),
        ("time", "timing"),
        ("time", "timing"),
        ("score", "work"),
    ]


def test_a_config_that_does_not_build_leaves_no_process_that_is_still_starting(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Source) -> CheckReport:
        raise BuildError("the compiler said no")

    monkeypatch.setattr(evaluate, "check_variant", refuse)
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
        assert made.evaluate(Phase.DECODE, OTHER).status is Status.BUILD_ERROR
    assert locks.done == [("begin the timing process", "work"), ("start the timing process", "work")]


def test_the_finalists_process_does_not_start_beside_a_timing(locks: Locks) -> None:
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
        made.compare({"default": SPACE.default, "other": OTHER}, "default", Phase.DECODE, 0.1)
    assert locks.done == [("start the timing process", "work"), ("time", "timing"), ("time", "timing")]


def test_configs_are_chosen_and_recorded_while_nobody_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()

    class Noting(BucketStudy):
        def claim(self, only_queued=False):  # type: ignore[no-untyped-def]
            locks.note("choose")
            return super().claim(only_queued)

        def finish(self, claim, evaluation):  # type: ignore[no-untyped-def]
            locks.note("tell")
            return super().finish(claim, evaluation)

    def evaluated(config: Config, judge: object) -> Evaluation:
        locks.note("evaluate")
        return score(config)

    with contextlib.closing(Noting(open_storage(None, tmp_path), "s", BOWL, {}, total=2)) as study:
        search({"only": study}, {"only": evaluated}, busy=locks.lock("work"))
    assert locks.done == [("choose", "work"), ("evaluate", ""), ("tell", "work")] * 2 + [("choose", "work")]


def test_a_worker_loads_what_it_needs_while_nobody_times(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()

    class Slow(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "join":
                locks.note("load")
                return len
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "pagegen.tuning.joining", Slow("joining"))
    monkeypatch.setattr(crew, "working", locks.lock("work"))
    assert crew._loaded_join() is len and ("load", "work") in locks.done and {held for _, held in locks.done} == {"work"}


def test_a_package_s_kernels_are_compiled_while_nobody_times(locks: Locks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packaged(*_: object) -> Path:
        locks.note("compile the package")
        return tmp_path

    monkeypatch.setattr(job, "measure_roofline", lambda *_, **__: None)
    monkeypatch.setattr(job, "_write_package", packaged)
    job.tune(SPEC, target="cpu:scalar", phase=Phase.DECODE, trials=1, out=tmp_path, warm_start=False, install=False)
    assert [held for what, held in locks.done if what == "compile the package"] == ["work"]


def test_the_roofline_s_loops_are_compiled_and_counted_while_nobody_times(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()

    class Loops:
        def __init__(self, *_: object) -> None:
            locks.note("compile")

        def fma(self, threads: int) -> int:
            locks.note("count")
            return 1

        bf16 = read = fma

    def timed(calls: dict[str, Callable[[], None]], anchor: str, **_: object) -> Measurement:
        locks.note("time")  # which takes its lock itself
        return Measurement(anchor, {name: (1.0,) * 5 for name in calls})

    monkeypatch.setattr(roofline, "working", locks.lock("work"))
    monkeypatch.setattr(roofline, "limits", Loops)
    monkeypatch.setattr(roofline, "measure", timed)
    roofline.measure_roofline(best_cpu())
    assert set(locks.done) == {("compile", "work"), ("count", "work"), ("time", "")}


def test_pairs_are_built_and_their_pools_filled_while_nobody_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locks = Locks()

    class Process:
        def __init__(self, setup: object) -> None: ...

        def start(self) -> None:
            locks.note("fill")

        def ask(self, batch: beside.Batch, timeout: float) -> Measurement:
            locks.note("time")
            return Measurement("b4-NHD", {"b4-NHD": (1.0,) * 5})

        def close(self) -> None: ...

    def built(source: Source) -> None:
        locks.note("build")

    monkeypatch.setattr(beside, "working", locks.lock("work"))
    monkeypatch.setattr(beside, "exclusive", locks.lock("time"))
    monkeypatch.setattr(beside, "build", built)
    monkeypatch.setattr(beside, "Timer", Process)
    beside.compare({"b4-NHD": tmp_path}, {"b4-NHD": SPEC}, parse_target("cpu:scalar"), Selection("w", {Phase.DECODE: DECODE}, 2))
    assert set(locks.done) == {("fill", "work"), ("build", "work"), ("time", "time")}


def test_candidates_of_an_absent_gpu_are_compiled_while_nobody_times(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, target = Locks(), parse_target("cuda:sm_90")

    def refuse(*_: object) -> object:
        locks.note("compile")
        raise BuildError("the compiler said no")

    monkeypatch.setattr(static_compile, "working", locks.lock("work"))
    monkeypatch.setattr(static_compile, "attend_calls", refuse)
    default = template_for(Op.ATTEND, GPU_SPEC, target).space(GPU_SPEC, target).default
    made = static_compile.compile_candidate(static_compile.Job(GPU_SPEC, target.name, default, DECODE.points))
    assert made == "the compiler said no" and locks.done == [("compile", "work")]


def test_two_evaluators_build_side_by_side_and_neither_beside_the_others_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the machine's real lock."""
    spans: list[tuple[str, int, float, float]] = []
    meet, turns = threading.Barrier(2), itertools.count()

    @contextlib.contextmanager
    def noted(what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        spans.append((what, threading.get_ident(), begin, time.monotonic()))

    def judged(source: Source) -> CheckReport:
        with noted("build and gate"):
            if next(turns) < 2:
                meet.wait(60)  # both are in it: a lock that lets one in at a time would never get beyond
            time.sleep(0.01)
        return CheckReport(Status.PASSED, 1)

    def timed(timer: Timer, configs: dict[str, Config], anchor: str, *_: object, **__: object) -> Measurement:
        with noted("time"):
            time.sleep(0.01)
        return Measurement(anchor, {name: (1.0,) * 5 for name in configs})

    def run() -> None:
        with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
            for _ in range(5):
                assert made.evaluate(Phase.DECODE, OTHER).status is Status.PASSED

    monkeypatch.setattr(evaluate, "check_variant", judged)
    monkeypatch.setattr(Timer, "time", timed)
    monkeypatch.setattr(Timer, "begin", lambda timer: None)
    monkeypatch.setattr(Timer, "start", lambda timer: None)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(spans) == 2 * 5 * 3
    for (one, its, begin, end), (other, whose, start, stop) in itertools.combinations(spans, 2):
        if its != whose and "time" in (one, other):
            assert end <= start or stop <= begin, f"{one} beside {other}"


# --- benchmarks/tuner_throughput.py ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tuner_throughput", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["tuner_throughput"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_time_is_counted_once_however_many_spans_cover_it(script: ModuleType) -> None:
    spans = [(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)]
    assert script.union(spans) == [(0.0, 3.0), (4.0, 5.0)] and script.length(spans) == 4.0
    assert script.without(spans, [(0.5, 1.0), (2.5, 4.5)]) == [(0.0, 0.5), (1.0, 2.5), (4.5, 5.0)]
    assert script.common(spans, [(2.0, 4.5), (9.0, 10.0)]) == 1.5


def test_idle_is_when_nobody_works_and_what_ran_beside_a_timing_is_found(script: ModuleType) -> None:
    """Two processes, over ten seconds. The second builds for one of the two seconds in which the first times."""
    rows = [
        (1, "search", 0, 10, {}),
        (1, "choose", 0, 1, {}),
        (1, "trial", 1, 7, {"noise": 0.01, "others": 0.0}),
        (1, "wait", 3, 5, {}),
        (1, "timing", 5, 7, {}),
        (1, "tell", 7, 8, {}),
        (2, "start", -3, 1, {}),
        (2, "trial", 1, 6, {"noise": 0.03, "others": 0.2}),
        (2, "compile", 1, 6, {}),
        (2, "trial", 9, 12, {"status": "BUILD_ERROR", "noise": None}),
    ]
    found = script.figures([script.Noted(*row) for row in rows])
    assert (found["processes"], found["trials"], found["trials_per_minute"]) == (2, 3, 18)
    assert found["idle"] == pytest.approx(0.1) and found["waiting"] == pytest.approx(0.1)
    assert found["beside_timing"] == {"compile": 0.5, "any": 0.5}
    assert found["seconds_of"] == {"start": 1, "choose": 1, "compile": 5, "timing": 2, "tell": 1}
    assert found["half_width"] == pytest.approx(0.02) and found["others"] == pytest.approx(0.1)


def test_one_build_in_a_timing_shows_in_what_processes_note(script: ModuleType, tmp_path: Path) -> None:
    notes = script.Notes(tmp_path / "log")
    with notes.noting("search"), notes.noting("timing"):
        assert notes.noted("compile", lambda text: text + "!")("built") == "built!"
    compiled, timed, searched = notes.read()
    assert [each.what for each in (compiled, timed, searched)] == ["compile", "timing", "search"]
    assert searched.begin <= timed.begin <= compiled.begin <= compiled.end <= timed.end <= searched.end
