"""What the machine does beside the timing: one lock a machine, and what disturbed it while it ran.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..paths import timing_lock

# --- one timing at a time --------------------------------------------------------------------------------------------

ATTEMPTS = 100  # at a lock file that another process is making at this moment


@contextlib.contextmanager
def exclusive(path: Path | None = None, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds the machine's timing lock: no two timings of one machine overlap, whoever runs them.

    While somebody else holds it this waits, and says once who that is (on stderr by default). The operating system
    releases it when its holder dies, however it dies. Not to be held twice in one process. Raises ConfigError if the
    lock cannot be opened.
    """
    with _held(path, fcntl.LOCK_EX, "timing", say):
        yield


@contextlib.contextmanager
def working(path: Path | None = None, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keeps timings waiting while something runs that would disturb them, and waits while one runs.

    Any number may work at once, but none that comes after a timing that waits: who builds would else begin the next build at
    once, and who waits to time be idle for all of it. Otherwise as `exclusive`.
    """
    with _held(path, fcntl.LOCK_SH, "work", say):
        yield


@contextlib.contextmanager
def _held(path: Path | None, kind: int, what: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """The lock, for which all queue: who is at the turn gets it next, whatever its kind."""
    path, tell = path or timing_lock(), _once(say or _to_stderr)
    with contextlib.ExitStack() as lock:
        with _locked(path.with_name(f"{path.name}.turn"), fcntl.LOCK_EX, what, tell):
            lock.enter_context(_locked(path, kind, what, tell))
        yield


@contextlib.contextmanager
def _locked(path: Path, kind: int, what: str, say: Callable[[str], None]) -> Iterator[None]:
    while True:
        handle = _open(path)
        try:
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(handle, 400, 0).decode(errors="replace").strip() or "another process"
                say(f"{what} waits for {holder}")
                fcntl.flock(handle, kind)
            if not _is_still(path, handle):
                continue  # removed by somebody who cleans up: others would lock the new file
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{_self()}\n".encode(), 0)
            try:
                yield
            finally:
                os.ftruncate(handle, 0)  # or those who wait for others that hold it, too, would be told of this process
            return
        finally:
            os.close(handle)


def _open(path: Path) -> int:
    """The lock file, open to every user of the machine. In a sticky folder O_CREAT is refused for another user's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in itertools.count():
        try:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            with contextlib.suppress(FileExistsError):
                handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(handle, 0o666)  # whatever the umask
                return handle
        except OSError as error:
            if not isinstance(error, PermissionError) or attempt == ATTEMPTS:
                raise ConfigError(
                    f"the timing lock {path} cannot be opened ({error.strerror}); set PAGEGEN_TIMING_LOCK to a file that "
                    "all who time on this machine can write"
                ) from None
            time.sleep(0.01)  # it is being made, and opened to all in a moment
    raise AssertionError  # it counts for ever


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _self() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:80]
    return f"process {os.getpid()} of user {os.getuid()} ({command}), since {time.strftime('%H:%M:%S')}"


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    said: list[str] = []

    def tell(line: str) -> None:
        if not said:
            say(line)
        said.append(line)

    return tell


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- disturbance -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Disturbance:
    """What else went on while something was timed. Shares are of the machine's CPU time, but for `waited`."""

    seconds: float = 0.0
    stolen: float = 0.0  # given by the hypervisor to other machines
    others: float = 0.0  # used by other processes
    waited: float = 0.0  # share of the time that this process's threads were ready and had no core, a thread
    switches: int = 0  # times that a thread of this process was made to give up its core
    retaken: int = 0  # samples that were thrown away because that happened in them
    drift: float = 0.0  # how much slower a fixed piece of work was in the slowest part of the time than in the fastest

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was more than a quiet machine has, in words; empty if nothing was."""
        limits = {"stolen": 0.01, "others": 0.10, "waited": 0.02, "drift": 0.05}
        words = {
            "stolen": "of the cores' time went to other virtual machines",
            "others": "was used by other processes",
            "waited": "of the time threads waited for a core",
            "drift": "was the clock slower at times",
        }
        found = {name: getattr(self, name) for name in limits}
        return tuple(f"{value:.0%} {words[name]}" for name, value in found.items() if value > limits[name])

    @property
    def line(self) -> str:
        """One line for people; empty if nothing disturbed."""
        return f"the machine was disturbed while it was timed: {'; '.join(self.reasons)}" if self.reasons else ""

    @classmethod
    def over(cls, parts: Sequence[Disturbance]) -> Disturbance:
        """That of several timings: shares weighted by their time, the worst drift."""
        total = sum(part.seconds for part in parts)
        if not total:
            return cls()
        shares = {
            name: sum(getattr(part, name) * part.seconds for part in parts) / total for name in ("stolen", "others", "waited")
        }
        counts = {name: sum(getattr(part, name) for part in parts) for name in ("switches", "retaken")}
        return cls(total, **shares, **counts, drift=max(part.drift for part in parts))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `Disturbance(**values)` is the inverse."""
        return dataclasses.asdict(self)


NO_DISTURBANCE = Disturbance()


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What a timing was given: the same for all candidates of a batch."""

    warm: bool  # every call read the same blocks
    rotated_bytes: int  # of KV, which calls read in turn
    threads: int
    pinned: bool  # each of them to a core of its own
    huge_pages: float | None  # share of the KV's memory that lies in pages of 2 MiB; None: not known, or a device's

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `Setting(**values)` is the inverse."""
        return dataclasses.asdict(self)


def spin() -> None:
    """A fixed piece of work that stays in the first cache: as long as the core's clock makes it."""
    hashlib.sha256(_SPIN).digest()


_SPIN = bytes(8192)
PARTS = 8  # of the time of a measurement, whose clocks are compared


@dataclasses.dataclass(frozen=True, slots=True)
class _Counters:
    """Cumulative; jiffies are summed over the cores."""

    seconds: float
    total: int
    busy: int
    stolen: int
    own: float  # seconds of CPU time
    waited: float  # seconds
    switches: int


def involuntary_switches() -> int:
    """Times so far that a thread of this process was made to give up its core."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Watch:
    """Looks at the machine's counters from when it is made. The arguments are for tests."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        work: Callable[[], None] = spin,
        proc: Path = Path("/proc"),
        switches: Callable[[], int] | None = None,
    ) -> None:
        self._clock, self._work, self._proc = clock, work, proc
        self.switches = switches or involuntary_switches
        self.retaken = 0
        self._spins: list[float] = []
        self._first = self._read()

    def tick(self) -> None:
        """Times the fixed work once; the fastest of three, as an interrupt is no change of the clock."""
        times = []
        for _ in range(3):
            begin = self._clock()
            self._work()
            times.append(self._clock() - begin)
        self._spins.append(min(times))

    def disturbance(self) -> Disturbance:
        """What happened since this watch was made."""
        first, last = self._first, self._read()
        total = last.total - first.total
        seconds = last.seconds - first.seconds
        ticks = os.sysconf("SC_CLK_TCK")
        others = last.busy - first.busy - (last.own - first.own) * ticks - 2  # a jiffy at each end may be anybody's
        threads = max(1, len(list(self._tasks())))
        return Disturbance(
            seconds=seconds,
            stolen=(last.stolen - first.stolen) / total if total else 0.0,
            others=max(0.0, others / total) if total else 0.0,
            waited=max(0.0, last.waited - first.waited) / seconds / min(threads, os.cpu_count() or 1) if seconds > 0 else 0.0,
            switches=last.switches - first.switches,
            retaken=self.retaken,
            drift=self._drift(),
        )

    def _drift(self) -> float:
        count = min(PARTS, len(self._spins))
        if count < 2 or min(self._spins) <= 0:
            return 0.0
        bounds = [len(self._spins) * i // count for i in range(count + 1)]
        medians = [statistics.median(self._spins[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(medians) / min(medians) - 1

    def _tasks(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (self._proc / "self" / "task").iterdir()

    def _read(self) -> _Counters:
        user, nice, system, idle, wait, irq, softirq, stolen = self._machine()
        waited = 0.0
        for task in self._tasks():
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that just ended
                waited += int((task / "schedstat").read_text().split()[1]) / 1e9
        busy = user + nice + system + irq + softirq
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = usage.ru_utime + usage.ru_stime
        return _Counters(time.monotonic(), busy + idle + wait + stolen, busy, stolen, own, waited, self.switches())

    def _machine(self) -> tuple[int, ...]:
        """Jiffies of all cores: user, nice, system, idle, iowait, irq, softirq, steal (proc(5)); zeros where unknown."""
        try:
            words = (self._proc / "stat").read_text().partition("\n")[0].split()[1:9]
            return tuple(map(int, words)) if len(words) == 8 else (0,) * 8
        except (OSError, ValueError):
            return (0,) * 8


# Threads stay on their cores, and torch's own tensors lie in 2 MiB pages like the KV; what the user has set stands.
PINNED = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores", "THP_MEM_ALLOC_ENABLE": "1"}


def pin_threads() -> None:
    """Starts this process's command line again with PINNED, unless it runs with that: OpenMP reads it when it is loaded."""
    if not os.environ.keys() >= PINNED.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**PINNED, **os.environ})


def openmp_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """What tells OpenMP's threads how to run and to wait: small batches take tens of percent more or less by it."""
    return {name: variables[name] for name in sorted(variables) if name.startswith(("OMP_", "GOMP_", "KMP_"))}


def pinned_threads(proc: Path = Path("/proc")) -> int:
    """Threads of this process that may run on one core only."""
    count = 0
    with contextlib.suppress(OSError):
        for task in (proc / "self" / "task").iterdir():
            with contextlib.suppress(OSError):
                lines = (task / "status").read_text().splitlines()
                allowed = next((line for line in lines if line.startswith("Cpus_allowed_list:")), "")
                count += allowed.split(":")[-1].strip().isdigit()
    return count
