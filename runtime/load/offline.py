"""A load on an engine in this process, and where its time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagegen.errors import RequestError
from pagegen.kernel import Attend, CopyBlocks, PagedKernels, WriteKV
from pagegen.runtime.engine import Engine
from pagegen.runtime.load.metrics import Timing
from pagegen.runtime.load.requests import LoadRequest
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.spec import KernelSpec


def run_engine(
    engine: Engine,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    timings: list[Timing],
    *,
    max_concurrency: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> float:
    """Runs requests of token ids, each to its full length, from `times` seconds on; returns the seconds it took.

    `timings` gets one for each that was sent, so that an interrupt leaves what was measured. A chunk is a token here.
    `watch` is told how many have ended.
    """
    begin, waiting, ended = time.perf_counter(), 0, 0
    open_ones = dict[str, Timing]()
    while waiting < len(requests) or engine.has_work:
        now = time.perf_counter() - begin
        room = len(open_ones) < (max_concurrency or len(requests))
        while waiting < len(requests) and times[waiting] <= now and room:
            ended += _add(engine, str(waiting), requests[waiting], timings, open_ones)
            waiting += 1
            room = len(open_ones) < (max_concurrency or len(requests))
        if not engine.has_work:
            if waiting < len(requests):
                time.sleep(max(times[waiting] - (time.perf_counter() - begin), 0.0))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timing = open_ones[output.request_id]
            timing.chunks += [now] * bool(output.new_token_ids)
            if output.finish_reason is not None:
                timing.output_tokens, timing.error = len(output.token_ids), output.error
                del open_ones[output.request_id]
                ended += 1
        if watch:
            watch(ended)
    return time.perf_counter() - begin


def _add(engine: Engine, name: str, request: LoadRequest, timings: list[Timing], open_ones: dict[str, Timing]) -> int:
    """Queues a request; 1 if it was refused and has ended, else 0."""
    if isinstance(request.prompt, str):
        raise TypeError("an engine takes token ids")
    timing = Timing(len(request.prompt), time.perf_counter())
    timings.append(timing)
    params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
    try:
        engine.add_request(name, list(request.prompt), params)
    except RequestError as error:
        timing.error = str(error)
        return 1
    open_ones[name] = timing
    return 0


class TimedKernels:
    """The same kernels, and how long each of them took, by name, in seconds."""

    def __init__(self, kernels: PagedKernels) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._kernels = kernels
        self.attend: Attend = self._timed("attend", kernels.attend)
        self.write_kv: WriteKV = self._timed("write_kv", kernels.write_kv)
        self.copy_blocks: CopyBlocks = self._timed("copy_blocks", kernels.copy_blocks)

    @property
    def spec(self) -> KernelSpec:
        return self._kernels.spec

    def _timed(self, name: str, call: Callable[..., None]) -> Any:
        def timed(*arguments: Any, **options: Any) -> None:
            begin = time.perf_counter()
            call(*arguments, **options)
            self.seconds[name] += time.perf_counter() - begin

        return timed


PHASES = ("schedule", "move", "batch", "attend", "write_kv", "other layers", "sample", "record")


def profile(engine: Engine, kernels: TimedKernels, num_steps: int, before: Mapping[str, float]) -> list[dict[str, Any]]:
    """Where the time of `num_steps` steps went since the engine's `seconds` were `before`: seconds, share, ms a step.

    schedule plans an iteration, move swaps and copies blocks, batch builds its tensors; the model is attend, write_kv and
    all other layers; record takes tokens in, and makes texts of them.
    """
    seconds = defaultdict(float, {name: total - before.get(name, 0.0) for name, total in engine.seconds.items()})
    inside = {name: kernels.seconds[name] for name in ("attend", "write_kv")}
    split = {**seconds, **inside, "other layers": seconds["model"] - sum(inside.values())}
    total = sum(split[name] for name in PHASES)
    return [
        {
            "phase": name,
            "seconds": split[name],
            "share": split[name] / total if total else 0.0,
            "ms_per_step": 1e3 * split[name] / num_steps if num_steps else 0.0,
        }
        for name in PHASES
    ]
