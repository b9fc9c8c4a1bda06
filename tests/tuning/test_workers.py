"""Claims about jobs in processes: each is answered, and one that kills or blocks its process costs nobody else anything."""

from __future__ import annotations

import os
import signal
import time

from pagegen.tuning.workers import Died, run_jobs


def work(job: str) -> tuple[int, str]:
    """Answers with its process, unless the job is to die or to hang."""
    match job:
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(600)
    return os.getpid(), job


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_job_is_answered_and_a_process_is_lost_with_its_own_job_only() -> None:
    jobs = ["a", "segfault", "b", "c", "hang", "exit", "d"]
    answers = dict(run_jobs(work, jobs, workers=2, timeout=6))
    died = {jobs[place]: answer.how for place, answer in answers.items() if isinstance(answer, Died)}
    assert died == {
        "segfault": "its process ended with SIGSEGV",
        "exit": "its process ended with exit status 3",
        "hang": "it took longer than 6 s",
    }
    done = [answer for answer in answers.values() if not isinstance(answer, Died)]
    assert sorted(word for _, word in done) == ["a", "b", "c", "d"]
    assert len(answers) == len(jobs) and all(gone(pid) for pid, _ in done)


def test_processes_are_used_again_and_end_with_the_loop() -> None:
    pids = set[int]()
    for done, (_, answer) in enumerate(run_jobs(work, ["x"] * 9, workers=1, timeout=60), 1):
        assert not isinstance(answer, Died)
        pids.add(answer[0])
        if done == 3:
            break
    (pid,) = pids
    assert gone(pid)


def test_no_jobs_start_no_process() -> None:
    assert list(run_jobs(work, [], workers=2, timeout=1)) == []
