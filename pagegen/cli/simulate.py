"""`pagegen simulate`: the scheduler and the memory policies in virtual time, or a recorded run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagegen.cli._common import JsonOption, as_path, note, print_json, print_table, progress, require_writable
from pagegen.errors import ConfigError
from pagegen.runtime.simulation.costs import StepCosts
from pagegen.runtime.simulation.setup import Setup

if TYPE_CHECKING:
    from pagegen.runtime.simulation.meter import Figures
    from pagegen.runtime.simulation.traces import TraceRow

_COSTS, _SETUP = StepCosts(), Setup()

EXAMPLE = "pagegen simulate --trace sharegpt --rate 2 --memory-policy paged --memory-policy orca-max"


def command(
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="T",
            help="sharegpt, alpaca, wmt16, code, documents, orca, fixed:INxOUT; a file of JSON lines with input, output "
            "and arrival, or none and --rate; or a JSON file of conversations as ShareGPT has them, and --model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Whose tokenizer counts the texts of a trace of conversations.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="LOG",
            parser=as_path,
            help="Repeat a recorded run bit for bit; with policies named, try those on its requests.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="P", help="default, vllm-paper, orca or request; repeatable. Default: vllm-paper."
        ),
    ] = None,
    memory_policy: Annotated[
        list[str] | None,
        typer.Option(
            "--memory-policy",
            metavar="M",
            help="paged, orca-max, orca-pow2, orca-oracle, contiguous-first-fit or reserve-on-paged; repeatable. "
            "Default: paged.",
        ),
    ] = None,
    preemption: Annotated[
        str, typer.Option("--preemption", metavar="WAY", help="recompute, swap, auto or none.")
    ] = _SETUP.preemption.value,
    rate: Annotated[float, typer.Option("--rate", help="Requests a second that arrive; inf is all at once.")] = 1.0,
    requests: Annotated[int, typer.Option("--requests", metavar="N", help="Requests of a synthetic trace.")] = 500,
    n: Annotated[int, typer.Option("--n", help="Samples of each request of a synthetic trace.")] = 1,
    prefix: Annotated[
        int,
        typer.Option("--prefix", metavar="N", help="Tokens that all prompts of a synthetic trace begin with, more."),
    ] = 0,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Keep prefixes for others, where the policy goes with that: default.")
    ] = _SETUP.prefix_cache,
    seed: Annotated[int, typer.Option("--seed", help="Seed of a synthetic trace.")] = 0,
    kv_blocks: Annotated[
        int, typer.Option("--kv-blocks", metavar="N", help="Blocks of the KV cache.")
    ] = _SETUP.num_blocks,
    block_size: Annotated[
        int, typer.Option("--block-size", metavar="N", help="Tokens of a block.")
    ] = _SETUP.block_size,
    host_blocks: Annotated[int, typer.Option("--host-blocks", metavar="N", help="Blocks of the swap space.")] = 0,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", help="Tokens of prompt and output.")
    ] = _SETUP.max_model_len,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences that run together.")
    ] = _SETUP.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Tokens of one iteration; default: 512, or a longest prompt where it is computed whole.",
        ),
    ] = None,
    step_base: Annotated[float, typer.Option("--step-base", help="Seconds of any iteration.")] = _COSTS.base,
    step_seq: Annotated[float, typer.Option("--step-seq", help="Seconds for each sequence in it.")] = _COSTS.per_seq,
    step_kv_token: Annotated[
        float, typer.Option("--step-kv-token", help="Seconds for each token of context.")
    ] = _COSTS.per_kv_token,
    step_kv_block: Annotated[
        float, typer.Option("--step-kv-block", help="Seconds for each block of context.")
    ] = _COSTS.per_kv_block,
    step_prefill_token: Annotated[
        float, typer.Option("--step-prefill-token", help="Seconds for each token of a prompt.")
    ] = _COSTS.per_prefill_token,
    step_swapped_token: Annotated[
        float, typer.Option("--step-swapped-token", help="Seconds for each token of a block that is swapped.")
    ] = _COSTS.per_swapped_token,
    step_swapped_block: Annotated[
        float, typer.Option("--step-swapped-block", help="Seconds for each block that is swapped, beside its tokens.")
    ] = _COSTS.per_swapped_block,
    warmup: Annotated[float, typer.Option("--warmup", metavar="SECONDS", help="Leave out of averages.")] = 0.0,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Virtual time to stop at; default: when all have ended.", show_default=False),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="LOG", parser=as_path, help="Write what the scheduler is told, for --replay.")
    ] = None,
    emit_workload: Annotated[
        Path | None,
        typer.Option("--emit-workload", metavar="FILE", parser=as_path, help="Write its batches as a workload for `pagegen tune`."),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            help="decode, prefill or mixed: only these for --emit-workload; default: all.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run the very scheduler and memory policies of the engine in virtual time, without a model.

    A step takes base + seq * sequences + kv-token * context + kv-block * its blocks + prefill-token * prompt tokens (+
    what is swapped). The defaults are guesses at OPT-13B on one A100-40GB, whose 15,728 KV slots are the default pool.
    """
    if (trace is None) == (replay is None):
        raise ConfigError("name one thing to run: --trace T, or --replay LOG")
    several = len(policy or ()) > 1 or len(memory_policy or ()) > 1
    if several and (record or emit_workload):
        raise ConfigError("--record and --emit-workload are about one run; name one --policy and one --memory-policy")
    costs = StepCosts(
        step_base, step_seq, step_kv_token, step_kv_block, step_prefill_token, step_swapped_token, step_swapped_block
    )
    job = Job(costs, warmup, math.inf if seconds is None else seconds, record, emit_workload, phase)
    if replay is not None:
        repeated, setup, rows = job.repeat(replay)
        if not policy and not memory_policy:
            _report(json, f"{replay} repeats bit for bit", job, [(setup, repeated)])
            return
        policies, memories = policy or [setup.policy], memory_policy or [setup.memory_policy]
    else:
        setup = Setup.from_dict(
            {
                "preemption": preemption,
                "num_blocks": kv_blocks,
                "block_size": block_size,
                "num_host_blocks": host_blocks,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "prefix_cache": prefix_cache,
            }
        )
        rows = _trace(
            trace or "",
            model,
            rate=rate,
            num_requests=requests,
            seed=seed,
            max_model_len=max_model_len,
            n=n,
            prefix=prefix,
        )
        policies, memories = policy or [_SETUP.policy], memory_policy or [_SETUP.memory_policy]
    setups = [dataclasses.replace(setup, policy=p, memory_policy=m) for p in policies for m in memories]
    runs = [(each, job.run(rows, each)) for each in setups]
    _report(json, f"{trace or replay}, {len(rows)} requests", job, runs)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is the same for every run of a command line."""

    costs: StepCosts
    warmup: float
    horizon: float
    record: Path | None
    emit_workload: Path | None
    phase: str | None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:
            raise ConfigError(f"--warmup {self.warmup} is no number of seconds; it must be 0 or more")
        if not self.horizon > 0:
            raise ConfigError(f"--seconds {self.horizon} ends before anything begins; it must be above 0")

    def run(self, rows: list[TraceRow], setup: Setup) -> Figures:
        from pagegen.runtime.simulate import simulate
        from pagegen.runtime.simulation.log import EventLog

        log = EventLog(self.record) if self.record else None
        if log:
            log.begin(setup)
        sampler, write = self._sampler()
        with progress(f"{setup.policy}, {setup.memory_policy}", len(rows)) as advance:
            figures = simulate(
                rows,
                setup,
                self.costs,
                warmup=self.warmup,
                horizon=self.horizon,
                recorder=log,
                observe=sampler,
                watch=lambda arrived: advance(arrived, ""),
            )
        if log:
            log.close()
        write()
        if figures.virtual_seconds <= self.warmup > 0:
            raise ConfigError(f"--warmup {self.warmup:g} leaves out the whole run of {figures.virtual_seconds:.0f} s; choose less")
        return figures

    def repeat(self, path: Path) -> tuple[Figures, Setup, list[TraceRow]]:
        from pagegen.runtime.simulate import replay
        from pagegen.runtime.simulation.log import read_log

        setup, events = read_log(path)
        sampler, write = self._sampler()
        figures, rows = replay(setup, events, self.costs, observe=sampler)
        write()
        return figures, setup, rows

    def _sampler(self) -> tuple[Any, Callable[[], None]]:
        """An observer for --emit-workload, and what writes the file afterwards."""
        from pagegen.runtime.simulation.batches import BatchSampler
        from pagegen.spec import Phase

        if self.phase is not None and self.phase not in set(Phase):
            raise ConfigError(f"--phase {self.phase} is not known; allowed: {', '.join(Phase)}")
        if self.emit_workload is None:
            if self.phase is not None:
                raise ConfigError(f"--phase {self.phase} is for --emit-workload FILE; name one, or leave it out")
            return None, lambda: None
        require_writable(self.emit_workload, "--emit-workload")
        sampler, file, phase = BatchSampler(), self.emit_workload, Phase(self.phase) if self.phase else None
        return sampler, lambda: sampler.write(file, phase)


def _trace(name: str, model: str | None, **options: Any) -> list[TraceRow]:
    from pagegen.runtime.simulation.traces import read_trace, synthesize

    if Path(name).is_file() or name.endswith((".jsonl", ".json")):
        return read_trace(Path(name), rate=options["rate"], seed=options["seed"], count=_counter(model))
    return synthesize(name, **options)


def _counter(model: str | None) -> Callable[[str], int] | None:
    """Counts tokens with a model's tokenizer."""
    if model is None:
        return None
    from pagegen.runtime.weights.resolve import resolve_model

    tokenizer = resolve_model(model).tokenizer()
    return lambda text: len(tokenizer.encode(text))


def _report(json: bool, title: str, job: Job, runs: list[tuple[Setup, Figures]]) -> None:
    if json:
        print_json(
            {
                "title": title,
                "costs": dataclasses.asdict(job.costs),
                "runs": [{"setup": setup.to_dict(), **figures.to_dict()} for setup, figures in runs],
            }
        )
        return
    columns = (
        "policy", "memory", "ended", "req/s", "running", "latency s/token", "token %", "reserved %", "internal %",
        "external %", "preempted", "scheduling ms/step",
    )  # fmt: skip
    print_table(
        title,
        columns,
        [
            (
                setup.policy,
                setup.memory_policy,
                f"{figures.num_finished}",
                f"{figures.requests_per_second:.2f}",
                f"{figures.num_running:.1f}",
                f"{figures.normalized_latency.mean:.3f}",
                *(f"{100 * figures.split[part]:.1f}" for part in ("token", "reserved", "internal", "external")),
                f"{figures.num_preemptions}",
                f"{1e3 * figures.scheduling_seconds.mean:.3f}",
            )
            for setup, figures in runs
        ],
    )
    note("virtual time on a cost model whose constants are guesses; memory in percent of the pool, the rest is free")
