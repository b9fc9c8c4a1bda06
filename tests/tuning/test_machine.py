"""One timing at a time on a machine, whoever runs them; and what disturbed one is seen and said."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagegen.errors import ConfigError
from pagegen.tuning.inherit import comparable
from pagegen.tuning.machine import Disturbance, Watch, exclusive, openmp_settings, pinned_threads, working

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from pagegen.tuning.machine import exclusive
for _ in range(int(sys.argv[3])):
    with exclusive(Path(sys.argv[1])):
        with open(sys.argv[2], "a") as log:
            print("begin", file=log, flush=True)
            time.sleep(float(sys.argv[4]))
            print("end", file=log, flush=True)
"""


def holder(lock: Path, log: Path, times: int, seconds: float) -> subprocess.Popen[str]:
    """A process that takes the lock `times` times, for `seconds` each."""
    words = [sys.executable, "-c", HOLD, str(lock), str(log), str(times), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_line(log: Path) -> None:
    while not (log.exists() and log.read_text()):
        threading.Event().wait(0.01)


def test_openmp_settings_are_recorded_and_make_no_other_study() -> None:
    found = openmp_settings({"OMP_WAIT_POLICY": "passive", "PATH": "/bin", "GOMP_SPINCOUNT": "0"})
    assert found == {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
    assert comparable({"threads": 2, "openmp": found}) == comparable({"threads": 2})


def test_timings_of_two_processes_do_not_overlap(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "log"
    processes = [holder(lock, log, 20, 0.005) for _ in range(2)]
    said = [process.communicate()[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    assert log.read_text().split() == ["begin", "end"] * 40


def test_many_work_at_once_but_never_beside_a_timing(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "log"
    said: list[str] = []
    with working(lock), working(lock, said.append):
        process = holder(lock, log, 1, 0.5)
        assert process.stderr and f"timing waits for process {os.getpid()} of user" in process.stderr.readline()
        assert not log.exists() and not said
    with process:
        wait_for_line(log)
        with working(lock, said.append):
            assert log.read_text().split() == ["begin", "end"]
    assert len(said) == 1 and f"work waits for process {process.pid}" in said[0]


def test_a_lock_that_was_given_back_names_nobody(tmp_path: Path) -> None:
    """Several may work at once: who waits for the last of them is not told of the first, which has gone, or is itself."""
    lock = tmp_path / "lock"
    for hold in (working, exclusive):
        with hold(lock):
            assert f"process {os.getpid()} of user" in lock.read_text()
        assert lock.read_text() == ""


def test_work_that_comes_after_a_timing_that_waits_does_not_overtake_it(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", list[str]()
    is_waiting = {name: threading.Event() for name in ("timing", "work")}

    def take(name: str, held: Callable[..., contextlib.AbstractContextManager[None]]) -> None:
        with held(lock, lambda line: is_waiting[name].set()):
            order.append(name)

    threads = [threading.Thread(target=take, args=row) for row in (("timing", exclusive), ("work", working))]
    with working(lock):
        for name, thread in zip(is_waiting, threads, strict=True):
            thread.start()
            assert is_waiting[name].wait(60), f"{name} did not wait"
    for thread in threads:
        thread.join(60)
    assert order == ["timing", "work"]


def test_a_holder_that_is_killed_holds_nothing_and_who_waits_says_for_whom(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "log"
    with holder(lock, log, 1, 600) as process:
        wait_for_line(log)
        said: list[str] = []
        threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
        with exclusive(lock, said.append):
            assert process.wait() == -signal.SIGKILL
    assert len(said) == 1 and f"process {process.pid} of user" in said[0]
    with exclusive(lock, said.append):
        assert f"process {os.getpid()}" in lock.read_text()
    assert len(said) == 1  # nobody held it


def test_a_lock_file_that_is_removed_meanwhile_does_not_let_two_in(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "log"
    with holder(lock, log, 1, 0.5) as process:
        wait_for_line(log)
        waiting = contextlib.ExitStack()
        thread = threading.Timer(0.2, lock.unlink)
        thread.start()
        with waiting:
            waiting.enter_context(exclusive(lock, lambda line: None))  # of the old file first, which is nobody's then
            assert process.wait() == 0 and lock.exists()


def test_the_lock_is_open_to_all_users_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with exclusive(tmp_path / "lock"):
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["folder", "link", "nowhere"])
def test_a_lock_that_cannot_be_opened_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":  # of somebody who wants another file to be written
        path.symlink_to(tmp_path / "victim")
        (tmp_path / "victim").write_text("as it was")
    else:
        path = tmp_path / "no" / "lock"
    with pytest.raises(ConfigError, match="PAGEGEN_TIMING_LOCK") as caught, exclusive(path):
        pass
    assert "\n" not in str(caught.value)
    assert kind != "link" or (tmp_path / "victim").read_text() == "as it was"


# --- disturbance -----------------------------------------------------------------------------------------------------


class FakeProc:
    """/proc with counters that a test moves, in seconds; and a clock whose speed it sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.slowness = folder, 0.0, 1.0
        self.user = self.idle = self.stolen = self.waited = 0.0
        self.write()

    def write(self) -> None:
        jiffies = [round(100 * value) for value in (self.user, 0, 0, self.idle, 0, 0, 0, self.stolen, 0, 0)]
        (self.folder / "stat").write_text(f"cpu  {' '.join(map(str, jiffies))}\ncpu0 0\n")
        task = self.folder / "self" / "task" / "7"
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"0 {round(1e9 * self.waited)} 5\n")

    def clock(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += 1e-5 * self.slowness

    def watch(self) -> Watch:
        return Watch(self.clock, self.work, self.folder)


def test_what_others_took_is_told_apart_from_what_was_stolen(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    proc.user, proc.idle, proc.stolen = 10.0, 9.0, 1.0
    proc.write()
    found = watch.disturbance()
    assert found.stolen == pytest.approx(0.05) and found.others == pytest.approx(0.5, abs=0.02)
    assert "5% of the cores' time went to other virtual machines" in found.line and "used by other processes" in found.line


def test_waiting_for_a_core_is_seen(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    proc.waited = 50.0  # in next to no time
    proc.write()
    assert watch.disturbance().waited > 1 and "waited for a core" in watch.disturbance().line


@pytest.mark.parametrize(("slowness", "seen"), [(1.0, False), (1.03, False), (1.2, True)])
def test_a_clock_that_slows_down_is_seen(slowness: float, seen: bool, tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    for tick in range(40):
        proc.slowness = slowness if 20 <= tick < 30 else 1.0
        watch.tick()
    found = watch.disturbance()
    assert found.drift == pytest.approx(slowness - 1, abs=1e-6) and bool(found.line) is seen


def test_one_interrupted_tick_is_no_drift(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    for tick in range(40):
        proc.slowness = 9.0 if tick == 20 else 1.0
        watch.tick()
    assert watch.disturbance().drift == pytest.approx(0.0, abs=1e-9)


def test_a_machine_that_tells_nothing_is_called_quiet(tmp_path: Path) -> None:
    assert Watch(proc=tmp_path).disturbance().line == "" and pinned_threads(tmp_path) == 0


def test_several_timings_are_weighed_by_their_time() -> None:
    parts = [Disturbance(1.0, others=0.4, switches=3, drift=0.1), Disturbance(3.0, others=0.0, switches=1, drift=0.2)]
    whole = Disturbance.over(parts)
    assert whole.others == pytest.approx(0.1) and whole.switches == 4 and whole.drift == 0.2 and whole.seconds == 4.0
    assert Disturbance(**whole.to_dict()) == whole and Disturbance.over([]) == Disturbance()


def test_threads_that_may_run_on_one_core_only_are_counted(tmp_path: Path) -> None:
    for number, cores in enumerate(("0", "1", "0-1", "0,2")):
        task = tmp_path / "self" / "task" / str(number)
        task.mkdir(parents=True)
        (task / "status").write_text(f"Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t{cores}\n")
    assert pinned_threads(tmp_path) == 2
