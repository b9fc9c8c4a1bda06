"""One engine, every memory policy: the same requests on a real model under paging, Orca's reservations and whole batches.

    python benchmarks/memory_policies.py                       # some 12 minutes on 2 cores; writes a record and a plot
    python benchmarks/memory_policies.py --requests 40         # a look

200 requests with the lengths of the vLLM paper's ShareGPT trace, all there from the start. The paper's proportions are
kept and its sizes divided by --shrink (8): sequences of at most 2048 / 8 tokens, and a pool of 15,728 / 8 slots, so that
memory is what is short, in blocks of 8 tokens. Prompts are pieces of pagegen's own documents; outputs are greedy, in
fp32, and as long as the trace says, which an oracle may know. Policies take turns of a second on one copy of the weights,
so that what else the machine does hits all alike; each one's clock runs in its own turns only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen import __version__
from pagegen.loader import fingerprint
from pagegen.paths import write_atomic
from pagegen.plotting import save
from pagegen.runtime.engine import Engine, EngineConfig
from pagegen.runtime.launcher import launch
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.simulation.setup import NUM_SLOTS
from pagegen.runtime.simulation.traces import TraceRow, synthesize
from pagegen.spec import DType
from pagegen.target import best_cpu

ROOT = Path(__file__).parents[1]
TURN_SECONDS = 1.0
NEAR_TIE = 1e-3  # of the log-probabilities of the two likeliest tokens: rounding decides between them
POLICIES: Mapping[str, tuple[str, str]] = {  # scheduling and memory policy
    "paged": ("vllm-paper", "paged"),
    "orca-oracle": ("orca", "orca-oracle"),
    "orca-pow2": ("orca", "orca-pow2"),
    "orca-max": ("orca", "orca-max"),
    "request": ("request", "orca-max"),
}
PARTS = ("token", "reserved", "internal", "external", "free")


class Runner:
    """One policy's engine, its clock, and averages over the time in which requests wait."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], rows: Sequence[TraceRow]) -> None:
        self.engine, self.seconds, self.tokens = engine, 0.0, dict[str, tuple[int, ...]]()
        self._loaded = self._batch = 0.0
        self._slots = dict.fromkeys(PARTS, 0.0)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            params = SamplingParams(max_tokens=row.output, temperature=0.0, ignore_eos=True)
            engine.add_request(str(i), prompt, params)

    def turn(self) -> None:
        """Steps for about TURN_SECONDS."""
        end = self.seconds + TURN_SECONDS
        while self.engine.has_work and self.seconds < end:
            begin = time.perf_counter()
            outputs = self.engine.step()
            took = time.perf_counter() - begin
            self.seconds += took
            for output in outputs:
                if output.finish_reason:
                    assert output.error is None, output.error
                    self.tokens[output.request_id] = output.token_ids
            self._observe(took)

    def _observe(self, took: float) -> None:
        pool = self.engine.scheduler.pool
        if pool.waiting.head is None:
            return
        self._loaded += took
        self._batch += took * sum([bool(group.live) for group in pool.running])
        split = self.engine.memory.split(pool.demand(pool.waiting.head))
        for part in PARTS:
            self._slots[part] += took * getattr(split, part)

    def result(self) -> dict[str, Any]:
        """Plain JSON values."""
        stats, num_tokens = self.engine.stats(), sum(map(len, self.tokens.values()))
        pool_size = sum(self._slots.values()) or 1.0
        return {
            "seconds": self.seconds,
            "output_tokens": num_tokens,
            "output_tokens_per_second": num_tokens / self.seconds,
            "mean_batch": self._batch / (self._loaded or 1.0),
            "split": {part: value / pool_size for part, value in self._slots.items()},
            "steps": stats.num_steps,
            "computed_tokens": stats.num_computed_tokens,
            "preemptions": stats.num_preemptions,
            "idle_slot_iterations": stats.num_idle_slot_iterations,
        }


def pieces(tokens: Sequence[int], rows: Sequence[TraceRow]) -> list[list[int]]:
    """Prompts of the trace's lengths from a text, one after the other and round again."""
    begin, prompts = 0, []
    for row in rows:
        begin = begin if begin + row.input <= len(tokens) else 0
        prompts.append(list(tokens[begin : begin + row.input]))
        begin += row.input
    return prompts


def shrunk(rows: Sequence[TraceRow], shrink: int) -> list[TraceRow]:
    """The same requests, `shrink` times shorter, all there at once."""
    short = [(max(row.input // shrink, 1), max(row.output // shrink, 1)) for row in rows]
    return [TraceRow(0.0, num_input, num_output) for num_input, num_output in short]


def disagreements(engine: Engine, prompts: Sequence[list[int]], runs: Mapping[str, Runner]) -> dict[str, dict[str, int]]:
    """For each policy, requests whose tokens differ from paging's, and those of them that part at a near tie.

    The margin is that of the two likeliest tokens after what both have in common, computed alone.
    """
    found = dict[str, dict[str, int]]()
    for name, run in runs.items():
        differ = [i for i in run.tokens if run.tokens[i] != runs["paged"].tokens[i]]
        ties = 0
        for i in differ:
            mine, theirs = run.tokens[i], runs["paged"].tokens[i]
            at = next(place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2)
            engine.add_request("margin", [*prompts[int(i)], *mine[:at]], params)
            output = engine.step()[-1]
            while not output.finish_reason:
                output = engine.step()[-1]
            assert output.logprobs is not None
            best, second = sorted((logprob for _, logprob in output.logprobs[-1].top), reverse=True)[:2]
            ties += best - second < NEAR_TIE
        found[name] = {"differ": len(differ), "near_ties": ties}
    return found


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """Throughput as a ratio of paging's, requests that run together, and the memory split."""
    from matplotlib.figure import Figure

    policies = record["policies"]
    names = list(policies)
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    rate, batch, memory = figure.subplots(1, 3)
    rate.bar(names, [policies["paged"]["output_tokens_per_second"] / policies[n]["output_tokens_per_second"] for n in names])
    rate.set_title("throughput: paged over this")
    batch.bar(names, [policies[name]["mean_batch"] for name in names])
    batch.set_title("requests that run together")
    bottom = [0.0] * len(names)
    for part in PARTS:
        shares = [100 * policies[name]["split"][part] for name in names]
        memory.bar(names, shares, bottom=bottom, label=part)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    memory.set_title("KV memory, %")
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    for axes in (rate, batch, memory):
        axes.tick_params(axis="x", rotation=30)
    figure.suptitle(f"{record['model']}, {record['requests']} requests of ShareGPT's lengths / {record['shrink']}")
    save(figure, path)


def show(record: Mapping[str, Any]) -> None:
    head = ("policy", "tokens/s", "paged over it", "batch", *(f"{part} %" for part in PARTS), "preempted", "differ (ties)")
    print("".join(f"{cell:>14}" for cell in head))
    paged = record["policies"]["paged"]["output_tokens_per_second"]
    for name, run in record["policies"].items():
        tokens = record["tokens"][name]
        cells = [name, f"{run['output_tokens_per_second']:.1f}", f"{paged / run['output_tokens_per_second']:.2f}"]
        cells += [f"{run['mean_batch']:.2f}", *(f"{100 * run['split'][part]:.1f}" for part in PARTS)]
        cells += [f"{run['preemptions']}", f"{tokens['differ']} ({tokens['near_ties']})"]
        print("".join(f"{cell:>14}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a MODEL word")
    parser.add_argument("--kernels", type=Path, help="a kernel package; default: what generate would take")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--shrink", type=int, default=8, help="what the paper's lengths and pool are divided by")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: results/<target>/memory_policies")
    options = parser.parse_args()

    longest = 2048 // options.shrink
    trace = synthesize("sharegpt", rate=1.0, num_requests=options.requests, seed=options.seed, max_model_len=2048)
    rows = shrunk(trace, options.shrink)
    base = EngineConfig(
        max_num_seqs=64,
        max_model_len=longest,
        num_blocks=NUM_SLOTS // options.shrink // options.block_size,
        dtype=DType.FP32,
        prefix_cache=False,
        max_num_batched_tokens=8 * longest,
    )
    launched = launch(options.model, options.kernels, base, options.block_size)
    model, kernels, tokenizer = launched.engine.model, launched.engine.kernels, launched.tokenizer
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "docs/papers.md"))
    prompts = pieces(tokenizer.encode(text), rows)
    print(launched.message)
    runs = {
        name: Runner(
            Engine(model, kernels, None, dataclasses.replace(base, policy=policy, memory_policy=memory_policy)), prompts, rows
        )
        for name, (policy, memory_policy) in POLICIES.items()
    }
    while any(run.engine.has_work for run in runs.values()):
        for run in runs.values():
            run.turn()

    target = best_cpu()
    made_on = fingerprint(target)
    record = {
        "format": 1,
        "pagegen": __version__,
        "environment": {"hardware": made_on.hardware, "toolchain": made_on.toolchain},
        "threads": len(os.sched_getaffinity(0)),
        "model": options.model,
        "kernels": launched.message,
        "requests": options.requests,
        "shrink": options.shrink,
        "seed": options.seed,
        "slots": base.num_blocks * options.block_size if base.num_blocks else 0,
        "block_size": options.block_size,
        "max_model_len": longest,
        "input_tokens": sum(row.input for row in rows),
        "output_tokens": sum(row.output for row in rows),
        "policies": {name: run.result() for name, run in runs.items()},
        "tokens": disagreements(launched.engine, prompts, runs),
    }
    out = options.out or ROOT / "results" / target.slug / "memory_policies"
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "record.json", json.dumps(record, indent=1, allow_nan=False, default=dict) + "\n")
    draw(out / "memory_policies.png", record)
    show(record)
    print(f"record and plot: {out}")


if __name__ == "__main__":
    main()
