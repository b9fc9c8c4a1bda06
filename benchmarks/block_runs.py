"""What it brings that block tables grow in runs of consecutive blocks, beside tables whose every block lies where it will.

    python benchmarks/block_runs.py                       # how long runs are, and what the prefix cache loses; no model
    python benchmarks/block_runs.py --model smollm2-135m  # and what that model's decode step takes

So many sequences at a time, with the lengths of a trace of `pagegen simulate`, are begun, grow a token in each round and
end; those of `shared` begin with one of 200 prompts of 640 tokens, by Zipf's law. Blocks a run are those of all tables,
over all rounds. The step: 16 sequences of 1900 tokens and more decode in a pool that others have half filled, after many have come and
gone. Engines of both kinds take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from pagegen.runtime import block_pool
from pagegen.runtime.policies import Allocation, Demand, MemoryPolicy, make_memory_policy
from pagegen.runtime.simulation.traces import synthesize

BLOCK_SIZE, MAX_LEN = 16, 2048
LOADS = (  # lengths, sequences at a time, blocks, prefix cache
    ("alpaca", 64, 4000, False),
    ("sharegpt", 32, 4000, False),
    ("sharegpt", 64, 4000, False),
    ("sharegpt", 64, 4000, True),
    ("sharegpt", 96, 4000, True),
    ("sharegpt", 256, 4000, True),  # more than the pool holds
    ("documents", 16, 4000, True),
    ("shared", 16, 2000, True),
    ("shared", 32, 4000, True),
)


@dataclasses.dataclass
class Served:
    """What tables looked like."""

    num_blocks: int = 0
    num_runs: int = 0
    num_queried: int = 0
    num_hits: int = 0

    @property
    def mean(self) -> float:
        return self.num_blocks / self.num_runs

    def look(self, table: Sequence[int]) -> None:
        self.num_blocks += len(table)
        self.num_runs += 1 + sum(after != block + 1 for block, after in itertools.pairwise(table))


def requests(name: str, seed: int = 0) -> Iterator[tuple[list[int], int]]:
    """Prompts, and the length that each will have."""
    rng = random.Random(seed)
    if name == "shared":
        weights = [(i + 1) ** -0.9 for i in range(200)]
        for number in itertools.count():
            prompt = [rng.choices(range(200), weights)[0]] * 640 + [1000 + number] * rng.randint(1, 64)
            yield prompt, len(prompt) + rng.randint(16, 320)
    for number, row in enumerate(synthesize(name, rate=1.0, num_requests=100_000, seed=seed, max_model_len=MAX_LEN)):
        yield [1000 + number] * row.input, row.input + row.output


def serve(memory: MemoryPolicy, name: str, num_seqs: int, num_requests: int, most_blocks: int | None = None) -> Served:
    """Sequences come, grow and go; the last ones stay. No more than `most_blocks` are used."""
    served, running = Served(), dict[int, tuple[list[int], int]]()
    waiting = enumerate(itertools.islice(requests(name), num_requests), 1_000_000)
    following = next(waiting, None)
    while following:
        seq_id, (tokens, end) = following
        demand = Demand(tokens, end)
        within = most_blocks is None or memory.num_used_blocks + end // memory.block_size < most_blocks
        if len(running) < num_seqs and within and memory.can_allocate(demand) is Allocation.OK:
            served.num_hits += memory.allocate(seq_id, demand, len(tokens))
            served.num_queried += len(tokens)
            memory.commit(seq_id, tokens, len(tokens))
            running[seq_id] = list(tokens), end
            following = next(waiting, None)
            continue
        for seq_id, (tokens, end) in list(running.items()):
            if len(tokens) == end or not memory.can_append(seq_id):
                memory.free(seq_id)
                del running[seq_id]
                continue
            tokens.append(seq_id)
            memory.append(seq_id)
            memory.commit(seq_id, tokens, len(tokens) - 1)
            served.look(memory.block_table(seq_id))
    return served


def loads(longest: Sequence[int]) -> None:
    print(f"{'lengths, at a time, blocks, prefix cache':44}" + "".join(f"{f'runs of up to {n}':>32}" for n in longest))
    for name, num_seqs, num_blocks, cache in LOADS:
        row = f"{name}, {num_seqs}, {num_blocks}, {'yes' if cache else 'no'}".ljust(44)
        for block_pool.LONGEST_RUN in longest:
            memory = make_memory_policy("paged", num_blocks, BLOCK_SIZE, max_model_len=MAX_LEN, prefix_cache=cache)
            served = serve(memory, name, num_seqs, 600)
            hits = f", {served.num_hits / served.num_queried:.1%} hits" if cache else ""
            row += f"{f'{served.mean:.1f} blocks a run{hits}':>32}"
        print(row, flush=True)


def steps(model: str, longest: Sequence[int], seconds: float) -> None:
    from pagegen.runtime.llm import LLM
    from pagegen.runtime.sampling_params import SamplingParams
    from pagegen.tuning.measure import measure

    engines = {}
    for block_pool.LONGEST_RUN in longest:
        engine = LLM(model, num_blocks=4096, block_size=BLOCK_SIZE, prefix_cache=False, max_num_seqs=64).engine
        engines[f"runs of up to {block_pool.LONGEST_RUN}"] = engine
        serve(engine.memory, "sharegpt", 64, 2000, most_blocks=2048)
        for i in range(16):
            engine.add_request(str(i), list(range(100 + i, 2000 + i)), SamplingParams(max_tokens=6000, ignore_eos=True))
        while any(not group.sequences[0].output_token_ids for group in engine.scheduler.groups.values()):
            engine.step()
    timed = measure({name: engine.step for name, engine in engines.items()}, next(iter(engines)), seconds=seconds, max_rounds=100)
    for name, engine in engines.items():
        served, ratio = Served(), timed.ratio(name)
        for group in engine.scheduler.groups.values():
            served.look(engine.memory.block_table(group.sequences[0].seq_id))
        print(
            f"{model}, {name}: {served.mean:.1f} blocks a run, a step of {timed.timing(name).median * 1e3:.1f} ms, "
            f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of the first's"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a MODEL word; without it nothing is loaded")
    parser.add_argument("--longest", type=int, nargs="+", default=[1, block_pool.LONGEST_RUN], help="blocks of a run, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing steps")
    options = parser.parse_args()
    if wrong := [n for n in options.longest if n < 1]:
        parser.error(f"--longest {wrong[0]}: 1 and more are allowed")
    if options.model:  # first: one that is not there is told at once
        steps(options.model, options.longest, options.seconds)
    loads(options.longest)


if __name__ == "__main__":
    main()
