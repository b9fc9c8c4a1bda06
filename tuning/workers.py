"""Jobs in processes that are used again. A job that takes its process with it, or hangs, is its own loss only."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """What became of a job that has no answer."""

    how: str


@dataclasses.dataclass(slots=True)
class _Worker(Generic[Job, Answer]):
    """A spawned process, and the place of the job that it is at, if any."""

    process: BaseProcess
    connection: Connection
    place: int = 0
    deadline: float = 0.0

    @classmethod
    def start(cls, function: Callable[[Job], Answer]) -> _Worker[Job, Answer]:
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(its, function), daemon=True)
        process.start()
        its.close()
        return cls(process, mine)

    def give(self, place: int, job: Job, timeout: float) -> None:
        self.place, self.deadline = place, time.monotonic() + timeout
        with contextlib.suppress(OSError):  # it died while it was idle or starting: asking for its answer says so
            self.connection.send(job)

    def answer(self) -> Answer | Died:
        try:
            found: Answer = self.connection.recv()
            return found
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            return Died(f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_jobs(
    function: Callable[[Job], Answer], jobs: Sequence[Job], workers: int, timeout: float
) -> Iterator[tuple[int, Answer | Died]]:
    """Yields (place of the job, answer) in the order in which they end; `function` must be importable and not raise.

    A job that takes longer than `timeout` seconds is ended. Leaving the loop ends the processes.
    """
    queue = iter(enumerate(jobs))
    busy: list[_Worker[Job, Answer]] = []
    try:
        for place, job in _first(queue, min(workers, len(jobs))):
            busy.append(_Worker.start(function))
            busy[-1].give(place, job, timeout)
        while busy:
            left = min(worker.deadline for worker in busy) - time.monotonic()
            ready = wait([worker.connection for worker in busy], max(0.0, left))
            for worker in [each for each in busy if each.connection in ready or each.deadline <= time.monotonic()]:
                late = worker.connection not in ready
                answer = Died(f"it took longer than {timeout:.0f} s") if late else worker.answer()
                yield worker.place, answer
                busy.remove(worker)
                following = next(queue, None)
                if isinstance(answer, Died) or following is None:
                    worker.end()
                if following is not None:
                    worker = _Worker.start(function) if isinstance(answer, Died) else worker
                    busy.append(worker)
                    worker.give(*following, timeout)
    finally:
        for worker in busy:
            worker.end()


def _first(queue: Iterator[tuple[int, Job]], count: int) -> list[tuple[int, Job]]:
    return [next(queue) for _ in range(count)]


def _serve(connection: Connection, function: Callable[[Job], Answer]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive who asks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    with contextlib.suppress(EOFError, OSError):  # raised when that one is gone
        while True:
            connection.send(function(connection.recv()))
