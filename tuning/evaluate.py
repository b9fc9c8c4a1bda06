"""One candidate's way: render, build, gate, time. Whatever goes wrong with it is a status, never an exception.

Candidates run in processes of their own: the gate's driver, then one `Timer` process that outlives them until one of
them kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch

import pagegen
from pagegen.build import build
from pagegen.catalog import template_for, variant
from pagegen.check import CheckReport, check_variant
from pagegen.errors import BuildError, CheckError, GateError, PagegenError, RenderError
from pagegen.kernel import Attend
from pagegen.loader import fingerprint
from pagegen.records import Evaluation, Status
from pagegen.render import render
from pagegen.space import Config
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import Target, detect, parse_target
from pagegen.tuning.baselines import FORMS, SdpaBaselines
from pagegen.tuning.contest import Conditions
from pagegen.tuning.inherit import source_hash
from pagegen.tuning.machine import PINNED, exclusive, openmp_settings, working
from pagegen.tuning.measure import Measurement, geomean_of_medians, measure, stopwatch_for
from pagegen.tuning.pruning import Judge
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.workload import Inputs, Point, Pool, Workload, cold_bytes_on

POINT_SECONDS = 0.08  # of interleaved rounds a point, candidate and anchor together
STARTUP_TIMEOUT = 120.0  # seconds until the timing process has torch and a filled cache
POINT_TIMEOUT = 15.0  # seconds beyond those asked for, a contender at a point
GATE_TIMEOUT = 300.0  # seconds of the gate on a device, which compiles a kernel for each kind of batch
CANDIDATE, DEFAULT = "candidate", "default"


# --- the timing process ----------------------------------------------------------------------------------------------


class TimerDied(Exception):
    """The timing process ended or hung; `status` says which, the message how."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Setup(Protocol):
    """What a timing process is started with; it travels there by pickle."""

    @property
    def threads(self) -> int:
        """That torch may start."""

    def ready(self) -> Callable[[Any], object]:
        """Called in the timing process: loads what is to be timed. Answers what answers each request."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Configs:
    """Configs of one spec on one KV pool."""

    spec: KernelSpec
    target: str
    points: tuple[Point, ...]
    pool_bytes: int
    threads: int

    def ready(self) -> Callable[[_Request | _GateRequest], Measurement | CheckReport]:
        """See `Setup`."""
        target = parse_target(self.target)
        pool = Pool.for_points(self.spec, self.points, self.pool_bytes, "cpu" if target.kind == "cpu" else "cuda")
        kernels: dict[Config, Attend] = {}

        def answer(request: _Request | _GateRequest) -> Measurement | CheckReport:
            if isinstance(request, _GateRequest):
                return check_variant(render(variant(Op.ATTEND, self.spec, target, request.config)))
            return _timed(request, pool, target, kernels)

        return answer


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    configs: Mapping[str, Config]
    anchor: str
    point: Point
    seconds: float
    with_sdpa: bool
    warm: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _GateRequest:
    config: Config


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    """The timing process's last words: what a call of a candidate raised."""

    reason: str


class Timer:
    """A process that loads kernels and times them side by side. Started when it is needed, and again when it died.

    It is a fresh interpreter, not a fork: torch's thread pool does not survive one.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False

    def time(
        self,
        configs: Mapping[str, Config],
        anchor: str,
        point: Point,
        seconds: float,
        *,
        with_sdpa: bool = False,
        warm: bool = False,
    ) -> Measurement:
        """Times `attend` of each config, and the SDPA forms, on one batch. The caller holds `machine.exclusive`.

        Raises TimerDied if a candidate took the process with it; PagegenError for what it refuses.
        """
        contenders = len(configs) + len(FORMS) * with_sdpa
        answer = self.ask(_Request(configs, anchor, point, seconds, with_sdpa, warm), seconds + contenders * POINT_TIMEOUT)
        assert isinstance(answer, Measurement)
        return answer

    def gate(self, config: Config) -> CheckReport:
        """The gate of `attend` with a config, for kernels that run in the process that judges them.

        Raises TimerDied if a candidate took the process with it; PagegenError for what it refuses.
        """
        answer = self.ask(_GateRequest(config), GATE_TIMEOUT)
        assert isinstance(answer, CheckReport)
        return answer

    def ask(self, request: object, timeout: float) -> object:
        """What the setup answers to a request within `timeout` seconds. The caller holds `machine.exclusive` if it times.

        Raises TimerDied if the request took the process with it; PagegenError for what it refuses.
        """
        connection = self.start()
        connection.send(request)
        answer = self._receive(connection, timeout)
        if isinstance(answer, PagegenError):
            raise answer
        if isinstance(answer, _Failed):
            self.close()
            raise TimerDied(Status.RUN_ERROR, answer.reason)
        return answer

    def begin(self) -> None:
        """Starts the process unless it runs, and does not wait for it."""
        if self._process and self._process.poll() is not None:  # died in its sleep: nobody's fault
            self.close()
        if not self._connection:
            self._begin()

    def start(self) -> Connection:
        """Sees to it that the process runs: this takes seconds. Raises TimerDied."""
        self.begin()
        assert self._connection
        if not self._is_ready:
            self._receive(self._connection, STARTUP_TIMEOUT)
            self._is_ready = True
        return self._connection

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.kill()
            self._process.wait()
        if self._connection:
            self._connection.close()
        self._process = self._connection = None
        self._is_ready = False

    def _begin(self) -> None:
        mine, its = Pipe()
        code = f"from pagegen.tuning.evaluate import serve; serve({its.fileno()})"
        root = str(Path(pagegen.__file__).parents[1])  # found there even if pagegen is not installed
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**PINNED, **os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the tuner, which ends this process itself; a session would be scheduled apart
        )
        its.close()
        self._connection = mine
        with contextlib.suppress(ConnectionError):  # who asks for its answer is told how it ended
            mine.send(self._setup)

    def _receive(self, connection: Connection, timeout: float) -> object:
        try:
            if connection.poll(timeout):
                return connection.recv()
            died = TimerDied(Status.TIMEOUT, f"no timing within {timeout:.0f} s")
        except (EOFError, ConnectionError):
            assert self._process is not None
            code = self._process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            died = TimerDied(Status.RUN_ERROR, f"the timing process ended with {how}")
        self.close()
        raise died


def serve(handle: int) -> None:
    """The timing process: answers requests on the connection until its other end closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a candidate that hangs must not outlive the tuner
    with Connection(handle) as connection, contextlib.suppress(EOFError, ConnectionError):  # raised when the tuner is gone
        setup: Setup = connection.recv()
        torch.set_num_threads(setup.threads)
        answer = setup.ready()
        connection.send(None)
        while True:
            request = connection.recv()
            try:
                connection.send(answer(request))
            except PagegenError as error:
                connection.send(type(error)(str(error)))
            except Exception as error:  # noqa: BLE001 - a device may be of no use after it: the next candidate gets a process of its own
                connection.send(_Failed(f"{type(error).__name__}: {error}"))
                return


def _timed(request: _Request, pool: Pool, target: Target, kernels: dict[Config, Attend]) -> Measurement:
    inputs = Inputs(pool, request.point, warm=request.warm)
    calls = {}
    for name, config in request.configs.items():
        if config not in kernels:
            kernels[config] = cast(Attend, build(render(variant(Op.ATTEND, pool.spec, target, config))))
        calls[name] = inputs.bind(kernels[config])
    if request.with_sdpa:
        calls |= SdpaBaselines(inputs).calls()
    timed = stopwatch_for(pool.device)
    calls[request.anchor]()  # starts the threads that the setting speaks of
    return measure(
        calls,
        request.anchor,
        seconds=request.seconds,
        stopwatch=timed,
        lock=contextlib.nullcontext(),  # the tuner holds it: a wait for it must not look like a candidate that hangs
        setting=inputs.setting(),
    )


# --- the evaluator ---------------------------------------------------------------------------------------------------


class Evaluator:
    """Evaluates configs of `attend` for one spec on this machine. A context manager: it owns the timing process.

    Of several evaluators on one machine one times, and no other does anything meanwhile if that takes the cores that are
    timed (`busy`). With a `roofline`, evaluations say what share of it they reach.
    """

    def __init__(
        self,
        spec: KernelSpec,
        target: Target,
        workloads: Mapping[Phase, Workload],
        roofline: Roofline | None = None,
    ) -> None:
        self.roofline = roofline
        self.spec, self.target, self.workloads = spec, target, workloads
        self.default = template_for(Op.ATTEND, spec, target).space(spec, target).default
        self.threads = detect().threads
        made_on = fingerprint(target)
        self.environment: dict[str, Any] = {
            "hardware": dict(made_on.hardware),
            "toolchain": dict(made_on.toolchain),
            "threads": self.threads,
            "openmp": openmp_settings({**PINNED, **os.environ}),  # of the timing process
        }
        points = tuple(point for workload in workloads.values() for point in workload.points)
        device = "cpu" if target.kind == "cpu" else "cuda"
        self._waited = False
        self._timer = Timer(_Configs(spec, target.name, points, cold_bytes_on(device), self.threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.close()

    def evaluate(self, phase: Phase, config: Config, judge: Judge | None = None) -> Evaluation:
        """Renders, builds, gates and times one config beside the default on the phase's workload.

        The batches that stand for most are timed first; once `judge` finds it clearly worse, the others are left out.

        Raises BuildError or GateError if the default itself does not build or pass: then nothing can be tuned.
        """
        begin = time.monotonic()
        failed, gate_seconds = self._gated(config)
        found = failed or self._timed(phase, config, judge or Judge())
        if config == self.default and found.status is not Status.PASSED:
            raise GateError(
                f"the default config of attend for {self.spec.slug} on {self.target.name} ended with {found.status} "
                f"({found.reason}), so there is nothing to tune against; `pagegen check` shows the smallest failing input"
            )
        spent = time.monotonic() - begin
        return dataclasses.replace(
            found, environment=self.environment, seconds=spent, gate_seconds=gate_seconds, source=self.source_of(config)
        )

    def source_of(self, config: Config) -> str:
        """`source_hash` of a config; "" if it does not render."""
        try:
            return source_hash(render(variant(Op.ATTEND, self.spec, self.target, config)))
        except RenderError:
            return ""

    def compare(
        self, configs: Mapping[str, Config], anchor: str, phase: Phase, seconds: float, with_sdpa: bool = False
    ) -> dict[Point, Measurement]:
        """Times configs that passed the gate side by side on every point of a phase, about `seconds` a point.

        Raises CheckError if one of them takes the timing process down after all.
        """
        try:
            workload = self.workloads[phase]
            with self.busy():
                self._timer.start()
            with exclusive(say=self._say_once):
                return {
                    point: self._timer.time(configs, anchor, point, seconds, with_sdpa=with_sdpa, warm=workload.warm)
                    for point in workload.points
                }
        except TimerDied as error:
            raise CheckError(f"a config that had passed the gate failed in {phase}: {error}; run the command again") from None

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """To be held while something takes a core that another process may be timing on; not together with a timing."""
        return working(say=self._say_once) if self.target.kind == "cpu" else contextlib.nullcontext()

    def _say_once(self, line: str) -> None:
        """Says who is waited for, the first time: workers of one machine wait for each other all the time."""
        if not self._waited:
            print(line, file=sys.stderr, flush=True)
        self._waited = True

    def _gated(self, config: Config) -> tuple[Evaluation | None, float]:
        """None if it passes; and the gate's seconds.

        A CPU's candidate runs in a driver of its own, a GPU's in the timing process: never in this one, which it might spoil.
        """
        values = config.to_dict()
        try:
            if self.target.kind == "cpu":
                with self.busy(), self._starting():
                    report = check_variant(render(variant(Op.ATTEND, self.spec, self.target, config)))
            else:
                report = self._timer.gate(config)
        except (BuildError, RenderError) as error:
            if config == self.default:
                raise
            return Evaluation(Status.BUILD_ERROR, values, str(error)), 0.0
        except TimerDied as error:
            return Evaluation(error.status, values, f"gate: {error}"), 0.0
        return None if report.passed else Evaluation(report.status, values, report.reason), report.seconds

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Has the timing process start beside what is done in the block, and be there at its end."""
        self._timer.begin()
        failure: PagegenError | None = None
        try:
            yield
        except PagegenError as error:
            failure = error
        with contextlib.suppress(TimerDied):  # the first batch's timing says what is wrong with it
            self._timer.start()
        if failure:
            raise failure

    def _timed(self, phase: Phase, config: Config, judge: Judge) -> Evaluation:
        measured = self._measured(phase, config, judge)
        if isinstance(measured, Evaluation):
            return measured
        with self.busy():
            return self._scored(phase, config, measured)

    def _measured(self, phase: Phase, config: Config, judge: Judge) -> dict[Point, Measurement] | Evaluation:
        """The timings of all batches; or what became of a config that did not come through them."""
        values, name = config.to_dict(), self._name(config)
        configs = {DEFAULT: self.default, name: config}
        points, warm = self.workloads[phase].points, self.workloads[phase].warm
        order = sorted(points, key=lambda point: (-point.weight, point.name))
        measured: dict[Point, Measurement] = {}
        with exclusive(say=self._say_once):  # over all batches, or others would work between them
            begin = time.monotonic()
            for step, point in enumerate(order):
                try:
                    found = measured[point] = self._timer.time(configs, DEFAULT, point, POINT_SECONDS, warm=warm)
                except TimerDied as error:
                    return Evaluation(error.status, values, f"{point.name}: {error}")
                except PagegenError as error:
                    return Evaluation(Status.RUN_ERROR, values, f"{point.name}: {error}")
                why = judge.hear(step, found.middle_ratio(name), point.weight)
                left = len(order) - step - 1
                if why and left and config != self.default:
                    saved = left * (time.monotonic() - begin) / (step + 1)
                    why += f"; {left} batches left out, about {saved:.1f} s"
                    return Evaluation(Status.PRUNED, values, why, partial=partial_score(measured, name))
        return measured

    def _scored(self, phase: Phase, config: Config, measured: Mapping[Point, Measurement]) -> Evaluation:
        points, name = self.workloads[phase].points, self._name(config)
        score = geomean_of_medians([measured[point].ratios(name) for point in points], [point.weight for point in points])
        conditions = Conditions.of([measured[point] for point in points])
        return Evaluation(
            Status.PASSED,
            config.to_dict(),
            score=score.median,
            timings={point.name: measured[point].timing(name) for point in points},
            conditions=conditions.to_dict() if conditions else {},
            noise=(score.high - score.low) / 2 / score.median,
            roofline=self._roofline_share(measured, name),
        )

    def _name(self, config: Config) -> str:
        return DEFAULT if config == self.default else CANDIDATE

    def _roofline_share(self, measured: Mapping[Point, Measurement], name: str) -> float | None:
        if self.roofline is None:
            return None
        shares = [
            self.roofline.floor(self.spec, point, found.setting.threads, found.setting.rotated_bytes) / found.timing(name).median
            for point, found in measured.items()
            if found.setting
        ]
        return statistics.geometric_mean(shares) if shares else None


def partial_score(measured: Mapping[Point, Measurement], name: str) -> float:
    """The score of `name` over some batches: time over the anchor's, weighted geometric mean."""
    logs = {point: math.log(found.middle_ratio(name)) for point, found in measured.items()}
    return math.exp(sum(point.weight * log for point, log in logs.items()) / sum(point.weight for point in logs))
