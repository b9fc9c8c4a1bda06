"""What scheduling costs: `schedule` + `update` with block manager and prefix cache, beside a real decode step.

    python benchmarks/scheduler_cost.py                       # 64 to 10,000 running sequences, no model
    python benchmarks/scheduler_cost.py --model smollm2-135m  # and its share of that model's step at 256 sequences

Every sequence decodes; lengths are spread, so that a sixteenth of them needs a new block in each step. Medians and
the 90th percentile over the steps, of this thread's CPU time: what else runs on the machine stays out of it, garbage
collection does not. The model's step is wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.scheduler import Scheduler, SchedulerConfig
from pagegen.runtime.sequence import Request

T = TypeVar("T")
BLOCK_SIZE = 16
NUM_STEPS = 300


def timed(times: list[float], call: Callable[[], T], clock: Callable[[], float] = time.thread_time) -> T:
    """Calls, and adds the seconds it took to `times`."""
    begin = clock()
    result = call()
    times.append(clock() - begin)
    return result


def row(name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{name:42} {statistics.median(ordered) * 1e3:8.3f} {ordered[int(0.9 * len(ordered))] * 1e3:8.3f}"


def running(num_seqs: int, *, prefix_cache: bool, policy: str) -> Scheduler:
    """A scheduler whose sequences have all computed their prompts."""
    memory = make_memory_policy("paged", num_seqs * 40, BLOCK_SIZE, max_model_len=8192, prefix_cache=prefix_cache)
    scheduler = Scheduler(SchedulerConfig(num_seqs, 64 * num_seqs, policy), memory)
    for i in range(num_seqs):
        prompt = tuple(range(i, i + 20 + i % BLOCK_SIZE))
        scheduler.add(Request(str(i), prompt, len(prompt) + NUM_STEPS + 20))
    batch = scheduler.schedule()
    scheduler.update(batch, [1] * len(batch.rows))
    return scheduler


def measure(num_seqs: int, *, prefix_cache: bool, policy: str) -> None:
    scheduler = running(num_seqs, prefix_cache=prefix_cache, policy=policy)
    planning, updating = list[float](), list[float]()
    for step in range(NUM_STEPS):
        batch = timed(planning, scheduler.schedule)
        tokens = [step] * len(batch.rows)
        timed(updating, lambda batch=batch, tokens=tokens: scheduler.update(batch, tokens))
    both = [a + b for a, b in zip(planning, updating, strict=True)]
    cached = "prefix cache" if prefix_cache else "no prefix cache"
    print(row(f"{num_seqs:6} sequences, {policy}, {cached}", both))


def measure_model(name: str, num_seqs: int = 256, num_steps: int = 24) -> None:
    from pagegen.runtime.llm import LLM
    from pagegen.runtime.sampling_params import SamplingParams

    engine = LLM(name, max_num_seqs=num_seqs, max_num_batched_tokens=64 * num_seqs).engine
    params = SamplingParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), list(range(100 + i, 120 + i + i % BLOCK_SIZE)), params)
    engine.step()
    scheduler, own, steps = engine.scheduler, list[float](), list[float]()
    schedule, update = scheduler.schedule, scheduler.update
    scheduler.schedule = lambda: timed(own, schedule)  # type: ignore[method-assign]
    scheduler.update = lambda batch, sampled: timed(own, lambda: update(batch, sampled))  # type: ignore[method-assign]
    for _ in range(num_steps):
        timed(steps, engine.step, time.perf_counter)
    both = [a + b for a, b in zip(own[::2], own[1::2], strict=True)]
    share = statistics.median(both) / statistics.median(steps)
    print(row(f"{num_seqs:6} sequences of {name}: the whole step", steps))
    print(row(f"{num_seqs:6} sequences of {name}: scheduling", both) + f"   {share:.2%} of the step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a MODEL word; without it nothing is loaded")
    options = parser.parse_args()
    print(f"{'schedule + update, ms':42} {'median':>8} {'p90':>8}")
    for num_seqs in (64, 256, 1000, 10_000):
        for prefix_cache in (False, True):
            measure(num_seqs, prefix_cache=prefix_cache, policy="default")
    measure(1000, prefix_cache=False, policy="vllm-paper")
    measure(1000, prefix_cache=False, policy="orca")
    if options.model:
        measure_model(options.model)


if __name__ == "__main__":
    main()
