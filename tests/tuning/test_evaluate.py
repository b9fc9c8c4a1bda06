"""Whatever a candidate does is a status of its own; the timing process dies with it and the tuner lives on."""

import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagegen.catalog import template_for
from pagegen.check import CheckReport
from pagegen.errors import BuildError, CheckError
from pagegen.records import Evaluation, Status
from pagegen.render import Source
from pagegen.space import Config
from pagegen.spec import DType, KernelSpec, Op, Phase
from pagegen.target import best_cpu
from pagegen.tuning import evaluate as module
from pagegen.tuning.evaluate import Evaluator, TimerDied
from pagegen.tuning.measure import MeasureError, Measurement
from pagegen.tuning.pruning import Judge
from pagegen.tuning.workload import Point, Workload

SPEC = KernelSpec(q_heads=2, kv_heads=1, head_dim=8, dtype=DType.FP32, block_size=4)
POINT = Point.parse("2x1@37")
DECODE = Workload(Phase.DECODE, (POINT,))
SPACE = template_for(Op.ATTEND, SPEC, best_cpu()).space(SPEC, best_cpu())
OTHER = SPACE.config({"tile_kv": 16})


@pytest.fixture(scope="module")
def shared() -> Iterator[Evaluator]:
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
        yield made


@pytest.fixture
def evaluator(shared: Evaluator, monkeypatch: pytest.MonkeyPatch) -> Evaluator:
    """An evaluator whose gate passes everything: the gate has its own tests."""
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(Status.PASSED, 1))
    return shared


def test_the_default_is_its_own_anchor(evaluator: Evaluator) -> None:
    found = evaluator.evaluate(Phase.DECODE, SPACE.default)
    assert found.status is Status.PASSED and found.score == 1.0
    assert found.timings[POINT.name].median > 0 and found.environment["hardware"]["target"] == best_cpu().name


def test_a_passing_candidate_has_a_score_and_survives_json(evaluator: Evaluator) -> None:
    found = evaluator.evaluate(Phase.DECODE, OTHER)
    assert found.status is Status.PASSED and found.score and found.score > 0
    assert Evaluation.from_dict(found.to_dict()) == found


def test_the_heaviest_batches_are_timed_first_and_a_hopeless_candidate_is_not_timed_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(Status.PASSED, 1))
    points = tuple(Point.parse(f"{number}x1@8", weight=number) for number in range(1, 7))
    asked: list[str] = []

    def time(configs: dict[str, Config], anchor: str, point: Point, *_: object, **__: object) -> Measurement:
        asked.append(point.name)
        return Measurement(anchor, {name: (1.2 if name == "candidate" else 1.0,) * 5 for name in configs})

    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: Workload(Phase.DECODE, points)}) as made:
        monkeypatch.setattr(made._timer, "time", time)
        monkeypatch.setattr(made._timer, "start", lambda: None)
        found = made.evaluate(Phase.DECODE, OTHER, Judge(dict.fromkeys(range(6), 1.0)))
        assert found.status is Status.PRUNED and "20% slower" in found.reason and "2 batches left out" in found.reason
        assert found.partial == pytest.approx(1.2)
        assert asked == ["6x1@8", "5x1@8", "4x1@8", "3x1@8"] and found.score is None
        whole = made.evaluate(Phase.DECODE, OTHER)
        assert whole.score == pytest.approx(1.2) and whole.noise == pytest.approx(0) and list(whole.timings) == [p.name for p in points]
        assert made.evaluate(Phase.DECODE, SPACE.default, Judge(dict.fromkeys(range(6), 0.1))).status is Status.PASSED


@pytest.mark.parametrize("status", [Status.INCORRECT, Status.RUN_ERROR, Status.TIMEOUT])
def test_what_the_gate_says_is_the_status_and_nothing_is_timed(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(status, 1))
    monkeypatch.setattr(evaluator._timer, "time", lambda *_, **__: pytest.fail("timed"))
    found = evaluator.evaluate(Phase.DECODE, OTHER)
    assert found.status is status and found.score is None and not found.timings


def test_a_candidate_that_does_not_build_is_recorded(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Source) -> CheckReport:
        raise BuildError("the compiler said no")

    monkeypatch.setattr(module, "check_variant", refuse)
    found = evaluator.evaluate(Phase.DECODE, OTHER)
    assert found.status is Status.BUILD_ERROR and "said no" in found.reason
    with pytest.raises(BuildError):  # but without a default there is nothing to tune against
        evaluator.evaluate(Phase.DECODE, SPACE.default)


def test_a_default_that_fails_ends_the_tuning_with_its_reason(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(Status.INCORRECT, 1))
    with pytest.raises(CheckError, match="INCORRECT"):
        evaluator.evaluate(Phase.DECODE, SPACE.default)


@pytest.mark.parametrize(
    ("sent", "status", "word"), [(signal.SIGSEGV, Status.RUN_ERROR, "SIGSEGV"), (signal.SIGSTOP, Status.TIMEOUT, "within")]
)
def test_a_crash_or_hang_while_timing_is_a_status_and_the_next_candidate_is_timed(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, status: Status, word: str
) -> None:
    evaluator.evaluate(Phase.DECODE, SPACE.default)  # the timing process runs now
    process = evaluator._timer._process
    assert process is not None
    receive = evaluator._timer._receive

    def interrupted(*arguments: Any) -> object:
        """The request is on its way, the answer is not there yet."""
        os.kill(process.pid, sent)
        return receive(*arguments)

    monkeypatch.setattr(module, "POINT_TIMEOUT", 0.7)
    monkeypatch.setattr(evaluator._timer, "_receive", interrupted)
    found = evaluator.evaluate(Phase.DECODE, OTHER)
    assert found.status is status and word in found.reason and POINT.name in found.reason
    monkeypatch.undo()
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(Status.PASSED, 1))
    assert evaluator.evaluate(Phase.DECODE, OTHER).status is Status.PASSED


def test_a_process_that_died_between_two_timings_is_started_again(evaluator: Evaluator) -> None:
    evaluator.evaluate(Phase.DECODE, SPACE.default)
    process = evaluator._timer._process
    assert process is not None
    process.kill()
    process.wait()
    assert evaluator.evaluate(Phase.DECODE, OTHER).status is Status.PASSED


def test_a_broken_clock_is_a_run_error(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(*_: object, **__: object) -> Measurement:
        raise MeasureError("default: the clock measured 0.0 s")

    monkeypatch.setattr(evaluator._timer, "time", time)
    assert evaluator.evaluate(Phase.DECODE, OTHER).status is Status.RUN_ERROR


def test_a_finalist_that_dies_ends_the_run_with_a_remedy(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(*_: object, **__: object) -> Measurement:
        raise TimerDied(Status.RUN_ERROR, "SIGILL")

    monkeypatch.setattr(evaluator._timer, "time", time)
    with pytest.raises(CheckError, match="SIGILL"):
        evaluator.compare({"default": SPACE.default}, "default", Phase.DECODE, 0.1)


def test_the_timing_process_ends_with_its_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_variant", lambda source: CheckReport(Status.PASSED, 1))
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as made:
        made.evaluate(Phase.DECODE, SPACE.default)
        process = made._timer._process
        assert process is not None and process.poll() is None
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is not None


def test_configs_travel_to_the_timing_process_unchanged() -> None:
    assert pickle.loads(pickle.dumps(OTHER)) == OTHER and isinstance(OTHER, Config)
