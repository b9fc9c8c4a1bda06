"""Counts which beams go on in real searches: the shares of runtime/simulation/beams.py, and what sharing saves.

    python scripts/beam_parents.py

SmolLM2-135M-Instruct in fp32, greedy beams of eight instructions of Alpaca's kind, prompts cut to their last 20 tokens,
58 output tokens each. Prints PARENTS[width][rank of the child][rank of the parent], and beside the searches' own saved
share of blocks that of searches whose parents are drawn from the table.
"""

from __future__ import annotations

import collections

import torch

from pagegen.runtime.beam_search import Beam, BeamSearch
from pagegen.runtime.engine import Engine
from pagegen.runtime.launcher import default_kernels
from pagegen.runtime.llm import LLM
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.simulate import simulate
from pagegen.runtime.simulation.beams import PARENTS
from pagegen.runtime.simulation.setup import Setup
from pagegen.runtime.simulation.traces import TraceRow
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType

MODEL = "smollm2-135m"
PROMPT, OUTPUT = 20, 58  # tokens, the means of the Alpaca trace
INSTRUCTIONS = (
    "Give three tips for staying healthy.",
    "Describe the structure of an atom.",
    "How can we reduce air pollution?",
    "Write a short story about a lost dog.",
    "Explain why the sky is blue.",
    "Rewrite this sentence in the past tense: She walks to school every day.",
    "Name a famous painter and one of his works.",
    "Write a recipe for pancakes.",
)

Counts = collections.Counter[tuple[int, int]]  # (rank of a child, rank of its parent)


def by_score(search: BeamSearch) -> list[Beam]:
    return sorted(search._beams, key=lambda beam: -beam.score)


def search_all(engine: Engine, prompts: list[list[int]], width: int) -> tuple[Counts, float]:
    """Runs a search of each prompt together; the parents of all steps but the first, and the share of blocks saved."""
    params = SamplingParams(max_tokens=OUTPUT, beam_width=width, ignore_eos=True, early_stopping="never")
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{width}-{number}", prompt, params)
    counts, saved, used = Counts(), 0, 0
    while engine.has_work:
        before = {search: by_score(search) for request in engine._requests.values() if (search := request.search)}
        engine.step()
        for search, parents in before.items():
            if len(parents) == width and not search.done:
                counts.update((rank, parents.index(child.parent)) for rank, child in enumerate(by_score(search)) if child.parent)
        saved += engine.memory.blocks_saved()
        used += engine.memory.num_used_blocks
    return counts, saved / (saved + used)


def main() -> None:
    torch.set_num_threads(1)
    kernels = default_kernels(resolve_model(MODEL).config.kernel_spec(DType.FP32))
    llm = LLM(MODEL, kernels=kernels, dtype=DType.FP32, kv_cache_bytes=1 << 28, prefix_cache=False)
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}])[-PROMPT:] for text in INSTRUCTIONS]
    for width in PARENTS:
        counts, share = search_all(llm.engine, prompts, width)
        drawn = simulate([TraceRow(100.0 * i, PROMPT, OUTPUT, n=width, beams=True) for i in range(40)], Setup())
        print(f"{width} beams: {share:.1%} of the blocks saved; {drawn.saved_share:.1%} with drawn parents")
        for child in range(width):
            total = sum(counts[child, parent] for parent in range(width))
            print("   ", *(f"{counts[child, parent] / total:.3f}" for parent in range(width)))


if __name__ == "__main__":
    main()
