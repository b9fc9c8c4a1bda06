"""What `--deterministic` costs: steps of a model with it and without it, one after the other in one run.

    python benchmarks/deterministic_cost.py smollm2-135m --dtype bf16

Decode steps at 1, 8 and 32 sequences of some 100 tokens, and a prompt of 512 tokens in one step, each through the
whole engine. The ratio is the time with it over the time without it: the median of pairs of neighbouring steps, with
the quartiles of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from pagegen.runtime.engine import Engine, EngineConfig
from pagegen.runtime.launcher import default_kernels
from pagegen.runtime.models import build_model
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.weights.resolve import ModelSource, resolve_model
from pagegen.spec import DType
from pagegen.target import detect

PROMPT = 100  # tokens before a decode step
PREFILL = 512


def engine_of(source: ModelSource, dtype: DType, deterministic: bool) -> Engine:
    """On the default kernels, whatever this user has tuned; nothing is cached from one prompt to the next."""
    model = build_model(source.config, source.weights(), dtype, deterministic)
    kernels = default_kernels(source.config.kernel_spec(dtype).replace(deterministic=deterministic))
    config = EngineConfig(dtype=dtype, prefix_cache=False, deterministic=deterministic, max_num_batched_tokens=4096)
    return Engine(model, kernels, None, config)


def step(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin


def add(engine: Engine, num_seqs: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), [(7 * i + 3 * j) % 1000 for j in range(length)], params)


def decode(engines: list[Engine], num_seqs: int, num_steps: int) -> list[tuple[float, ...]]:
    """Seconds of each engine's steps, in turns."""
    for engine in engines:
        add(engine, num_seqs, PROMPT, num_steps + 2)
        engine.step()  # the prompts
        engine.step()
    times = [tuple(step(engine) for engine in engines) for _ in range(num_steps)]
    for engine in engines:
        for i in range(num_seqs):
            engine.abort(str(i))
    return times


def prefill(engines: list[Engine], num_steps: int) -> list[tuple[float, ...]]:
    times = list[tuple[float, ...]]()
    for _ in range(num_steps + 1):
        for engine in engines:
            add(engine, 1, PREFILL, 1)
        times.append(tuple(step(engine) for engine in engines))
    return times[1:]


def row(name: str, times: list[tuple[float, ...]]) -> str:
    plain, kept = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    low, middle, high = statistics.quantiles([kept / plain for plain, kept in times], n=4)
    return f"{name:22} {plain:9.2f} {kept:14.2f} {middle:7.2f}   {low:.2f} to {high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a MODEL word")
    parser.add_argument("--dtype", type=DType, default=DType.BF16)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(detect().threads)
    source = resolve_model(options.model)
    engines = [engine_of(source, options.dtype, deterministic) for deterministic in (False, True)]
    print(f"{source.name}, {options.dtype}, {torch.get_num_threads()} threads")
    print(f"{'a step, ms':22} {'plain':>9} {'deterministic':>14} {'ratio':>7}   quartiles")
    for num_seqs in (1, 8, 32):
        print(row(f"decode, {num_seqs} sequences", decode(engines, num_seqs, options.steps)), flush=True)
    print(row(f"prefill, {PREFILL} tokens", prefill(engines, options.steps // 3)))


if __name__ == "__main__":
    main()
