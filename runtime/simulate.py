"""The engine's own scheduler and memory policies in virtual time, and recorded runs again, without a model.

A step takes what `StepCosts` says; what is sampled is what the trace says. Nothing else differs from a run of the
engine: there is no second scheduler here that could drift from the first.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.scheduler import PreemptionCosts, ScheduledBatch, ScheduledSequence
from pagegen.runtime.scheduling.events import Added, Branch, Planned, Sampled, SchedulerEvent
from pagegen.runtime.sequence import Request
from pagegen.runtime.simulation.beams import PARENTS, SimulatedBeams
from pagegen.runtime.simulation.costs import StepCosts
from pagegen.runtime.simulation.meter import Figures, Meter
from pagegen.runtime.simulation.setup import Setup
from pagegen.runtime.simulation.traces import TraceRow

Observer = Callable[[ScheduledBatch], None]
TOKEN, STOP = 0, 1  # what simulated sequences consist of, and what ends them


def simulate(
    trace: Sequence[TraceRow],
    setup: Setup,
    costs: StepCosts | None = None,
    *,
    warmup: float = 0.0,
    horizon: float = math.inf,
    recorder: Callable[[SchedulerEvent], None] | None = None,
    observe: Observer | None = None,
    watch: Callable[[int], None] | None = None,
) -> Figures:
    """Runs a trace, in order of arrival, to its end or to `horizon` seconds of virtual time.

    Averages begin after `warmup` seconds. `observe` sees every iteration before it is computed, `watch` how many
    requests have arrived. Raises ConfigError for a setup that serves nobody or a request that does not fit it.
    """
    costs = costs or StepCosts()
    scheduler = setup.scheduler(costs=lambda: _preemption_costs(costs, setup.block_size), recorder=recorder)
    meter = Meter(scheduler, costs, warmup=warmup, horizon=horizon)
    num_arrived, searches = 0, dict[str, SimulatedBeams]()
    while meter.now < horizon:
        while num_arrived < len(trace) and trace[num_arrived].arrival <= meter.now:
            request = request_of(num_arrived, trace[num_arrived], setup.max_model_len)
            try:
                scheduler.add(request)
            except RequestError as error:
                raise ConfigError(f"trace: {error}") from None
            meter.arrive(request.request_id, trace[num_arrived].arrival)
            num_arrived += 1
        if not scheduler.has_work:
            if num_arrived == len(trace):
                break
            meter.now = trace[num_arrived].arrival
            continue
        if watch:
            watch(num_arrived)
        began = time.thread_time()
        batch = scheduler.schedule()
        planned = time.thread_time()
        if batch.rows:
            meter.step(batch)
            if observe:
                observe(batch)
            sampled = [_sample(row, searches) for row in batch.rows]
            resumed = time.thread_time()
            scheduler.update(batch, sampled)
            meter.scheduling.append(time.thread_time() - resumed + planned - began)
        meter.leave(scheduler.take_released())
    return meter.figures()


def request_of(number: int, row: TraceRow, max_model_len: int) -> Request:
    """A row as the scheduler sees it. Prompts share their `prefix` and no more: they go on with the row's number."""
    promised = row.max_tokens if row.max_tokens is not None else max(max_model_len - row.input, 1)
    return Request(
        str(number),
        ((TOKEN,) * row.prefix + (number + 2,) + (TOKEN,) * row.input)[: row.input],
        row.input + promised,
        num_sequences=row.n,
        beams=row.beams,
        stop_token_ids=frozenset((STOP,)),
        final_num_tokens=row.input + row.output,
    )


def _sample(row: ScheduledSequence, searches: dict[str, SimulatedBeams]) -> Sampled:
    if not (num_samples := row.num_samples):
        return None
    sequence, request = row.sequence, row.sequence.group.request
    token = STOP if len(sequence.token_ids) + 1 == request.final_num_tokens else TOKEN
    if request.beams and num_samples > 1:
        searches[request.request_id] = SimulatedBeams(request.request_id, num_samples)
    if num_samples > 1:
        return (token,) * num_samples
    if not request.beams or token == STOP:
        return token
    search = searches[request.request_id]
    if not sequence.index:  # the beams of a request come in order
        search.step()
    parent = search.parents[sequence.index]
    return token if parent == sequence.index else Branch(parent, token)


def _preemption_costs(costs: StepCosts, block_size: int) -> PreemptionCosts:
    tiny = 1e-12  # what costs nothing
    return PreemptionCosts(1 / max(costs.swapping(1, block_size), tiny), 1 / max(costs.per_prefill_token, tiny))


def replay(
    setup: Setup, events: Iterable[SchedulerEvent], costs: StepCosts | None = None, *, observe: Observer | None = None
) -> tuple[Figures, list[TraceRow]]:
    """Repeats a recorded run, every iteration compared with what the log has; what it was, and the trace it makes.

    Virtual time is that of `costs`: the trace holds when each request came by that clock, and how long it turned out
    (of several samples, the longest), so that another policy can be tried on it; beams whose number the simulator has no
    shares for are samples in it. Raises ConfigError for a log that does not fit itself: it was cut, changed, or written by
    another version of the scheduler.
    """
    costs = costs or StepCosts()
    scheduler = setup.scheduler(costs=_unrecorded)
    meter = Meter(scheduler, costs)
    rows = dict[str, TraceRow]()
    for number, event in enumerate(events, 1):
        try:
            batch = scheduler.apply(event)
        except (RuntimeError, RequestError, ValueError, LookupError) as error:
            raise ConfigError(
                f"event {number} of the log does not repeat: {error}; it is damaged or of another version"
            ) from None
        if isinstance(event, Added):
            request = event.request
            meter.arrive(request.request_id, meter.now)
            most, n = request.max_num_tokens - len(request.prompt_token_ids), request.num_sequences
            row = TraceRow(meter.now, len(request.prompt_token_ids), 1, max(most, 1), n)
            rows[request.request_id] = dataclasses.replace(row, beams=request.beams and n in PARENTS)
        elif isinstance(event, Planned) and batch and batch.rows:
            meter.step(batch)
            if observe:
                observe(batch)
        released = scheduler.take_released()
        meter.leave(released)
        for sequence in released:
            row, num_output = rows[sequence.group.request_id], len(sequence.output_token_ids)
            if num_output > row.output:
                rows[sequence.group.request_id] = dataclasses.replace(row, output=num_output)
    return meter.figures(), list(rows.values())


def _unrecorded() -> PreemptionCosts:
    raise RuntimeError("the costs of preemption are asked for, and the log has none")
