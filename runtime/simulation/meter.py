"""What is read off a run in virtual time: latencies, batch sizes, the memory split, what scheduling itself cost."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence as SequenceOf
from typing import Any

from pagegen.runtime.policies import MemorySplit
from pagegen.runtime.scheduler import ScheduledBatch, Scheduler
from pagegen.runtime.sequence import GroupStatus, Sequence
from pagegen.runtime.simulation.costs import StepCosts


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds; all 0 if there is nothing to take them of."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: SequenceOf[float]) -> Percentiles:
        if not values:
            return cls()
        ordered = sorted(values)
        return cls(statistics.fmean(ordered), statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1])


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers. Averages are over the virtual time of the window, so long iterations count for more.

    `num_running` counts requests with blocks that have not ended. `split` has the shares of the pool that are token,
    reserved, internal, external and free, a request at the head of the queue making free runs that are too short for it
    external; `token_share` is that of tokens in the blocks that are not free, as far as they are anyone's. `saved_share`
    is the blocks saved by sharing as a share of those that would be needed without. `normalized_latency` is seconds from
    arrival to the end, per output token. `requests_per_second` counts what ended in the window,
    `output_tokens_per_second` what was sampled in it. `scheduling_seconds` is
    this machine's CPU time in `schedule` and `update`, a step.
    """

    num_requests: int
    num_finished: int
    num_failed: int
    num_steps: int
    num_preemptions: int
    num_swaps: int
    num_idle_slot_iterations: int
    num_computed_tokens: int
    virtual_seconds: float
    num_running: float
    num_waiting: float
    max_running_sequences: int
    split: dict[str, float]
    token_share: float
    saved_share: float
    requests_per_second: float
    output_tokens_per_second: float
    normalized_latency: Percentiles
    time_to_first_token: Percentiles
    scheduling_seconds: Percentiles

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Meter:
    """Keeps the virtual time of a scheduler's run; told of arrivals, iterations and what ended.

    Nothing before `warmup` or after `horizon` seconds goes into averages; latencies are those of all that ended.
    """

    def __init__(
        self, scheduler: Scheduler, costs: StepCosts, *, warmup: float = 0.0, horizon: float = math.inf
    ) -> None:
        self.now = 0.0
        self.scheduling = list[float]()  # CPU seconds of each step
        self._scheduler, self._costs, self._warmup, self._horizon = scheduler, costs, warmup, horizon
        self._arrivals, self._first_tokens = dict[str, float](), dict[str, float]()
        self._num_requests = self._num_finished = self._num_failed = self._num_ended_inside = 0
        self._num_steps = self._num_computed = self._num_output_inside = self._most_sequences = 0
        self._normalized, self._time_to_first = list[float](), list[float]()
        self._weight = self._running = self._waiting = self._saved = self._used = 0.0
        self._slots = [0.0] * 5

    def arrive(self, request_id: str, at: float) -> None:
        self._num_requests += 1
        self._arrivals[request_id] = at

    def step(self, batch: ScheduledBatch) -> None:
        """The batch is planned, and is computed from now on; before the scheduler is told of its tokens."""
        began = self.now
        self.now += self._costs.seconds(batch, self._scheduler.memory.block_size)
        self._num_steps += 1
        self._most_sequences = max(self._most_sequences, len(batch.rows))
        inside = self._warmup <= self.now <= self._horizon
        for row in batch.rows:
            sequence, start, num_tokens = row
            self._num_computed += num_tokens
            self._num_output_inside += row.num_samples * inside
            prompt_len = sequence.group.prompt_len
            if start + num_tokens == prompt_len == len(sequence.token_ids):
                request_id = sequence.group.request_id
                self._first_tokens[request_id] = self.now
                self._time_to_first.append(self.now - self._arrivals[request_id])
        weight = min(self.now, self._horizon) - max(began, self._warmup)
        if weight > 0:
            self._average(weight)

    def leave(self, sequences: SequenceOf[Sequence]) -> None:
        """What has ended and left, as `take_released` gives it."""
        inside = self._warmup <= self.now <= self._horizon
        for sequence in sequences:
            group, num_output = sequence.group, len(sequence.token_ids) - sequence.group.prompt_len
            if group.status is not GroupStatus.FINISHED or group.request_id not in self._arrivals:
                continue
            arrival = self._arrivals.pop(group.request_id)
            if sequence.error is not None:
                self._num_failed += 1
                continue
            self._num_finished += 1
            self._num_ended_inside += inside
            self._normalized.append((self.now - arrival) / max(num_output, 1))

    def _average(self, weight: float) -> None:
        scheduler, memory = self._scheduler, self._scheduler.memory
        pool, head = scheduler.pool, scheduler.pool.waiting.head
        waits = head is not None and head.status is GroupStatus.WAITING
        split = memory.split(pool.demand(head) if head and waits else None)
        self._weight += weight
        self._running += weight * sum([bool(group.live) for group in pool.running])
        self._waiting += weight * len(pool.waiting)
        self._saved += weight * memory.blocks_saved()
        self._used += weight * memory.num_used_blocks
        for i, name in enumerate(_PARTS):
            self._slots[i] += weight * getattr(split, name)

    def figures(self) -> Figures:
        """All of it, as of now."""
        weight, slots = self._weight or 1.0, dict(zip(_PARTS, self._slots, strict=True))
        owned = slots["token"] + slots["reserved"] + slots["internal"]
        pool_size = sum(slots.values())
        window = max(min(self.now, self._horizon) - self._warmup, 0.0)
        return Figures(
            num_requests=self._num_requests,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_swaps=self._scheduler.pool.num_swaps,
            num_idle_slot_iterations=self._scheduler.policy.num_idle_slot_iterations,
            num_computed_tokens=self._num_computed,
            virtual_seconds=self.now,
            num_running=self._running / weight,
            num_waiting=self._waiting / weight,
            max_running_sequences=self._most_sequences,
            split={name: value / (pool_size or 1.0) for name, value in slots.items()},
            token_share=slots["token"] / (owned or 1.0),
            saved_share=self._saved / (self._saved + self._used or 1.0),
            requests_per_second=self._num_ended_inside / (window or 1.0),
            output_tokens_per_second=self._num_output_inside / (window or 1.0),
            normalized_latency=Percentiles.of(self._normalized),
            time_to_first_token=Percentiles.of(self._time_to_first),
            scheduling_seconds=Percentiles.of(self.scheduling),
        )


_PARTS = tuple(field.name for field in dataclasses.fields(MemorySplit))
