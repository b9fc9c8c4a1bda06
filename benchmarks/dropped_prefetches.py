"""Which part of the lines that a loop prefetches is not there afterwards: why attend prefetches them again.

    python benchmarks/dropped_prefetches.py

A piece of memory that no cache holds is prefetched line by line, once or several times over, and read 50 us later, when all
that were asked for have come: of those that were dropped the read takes as long as if none had been asked for.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch

from pagegen.memory import zeros_in_huge_pages
from pagegen.target import best_cpu
from pagegen.tuning.machine import Watch, exclusive
from pagegen.tuning.roofline import limits

PASSES = (0, 1, 2, 3, 4, 7, -1)  # -1: read before


def main() -> None:
    """Prints the time of the read and the part that is missing, a row for each number of passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, default=256, choices=(16, 32, 64, 128, 256), help="of a piece, to stay in the second cache")
    parser.add_argument("--rounds", type=int, default=300, help="pieces a row, 1 to 500; default: %(default)s")
    options = parser.parse_args()
    if not 1 <= options.rounds <= 500:
        parser.error(f"--rounds {options.rounds}: 1 to 500 are allowed")
    memory, piece, loops = torch.frombuffer(zeros_in_huge_pages(1 << 30), dtype=torch.uint8), options.kib << 10, limits(best_cpu())
    memory.fill_(1)  # else all pages are one
    pieces = random.Random(0).sample(range(len(memory) // piece - 1), len(PASSES) * options.rounds)
    taken: dict[int, list[int]] = {passes: [] for passes in PASSES}
    with exclusive():
        watch = Watch()
        for i, index in enumerate(pieces):
            passes = PASSES[i % len(PASSES)]
            if passes == PASSES[0]:
                watch.tick()
            taken[passes].append(loops.read_prefetched(memory.data_ptr() + index * piece, piece, passes))
        disturbed = watch.disturbance().line
    cold, warm = (statistics.median(taken[passes]) for passes in (0, -1))
    if cold < 2 * warm:
        parser.error(f"--kib {options.kib}: what was read before does not stay in the second cache here; take less")
    print(f"{options.kib} KiB, each row of {len(taken[0])} pieces")
    for passes, times in taken.items():
        median = statistics.median(times)
        how = "read before" if passes < 0 else f"prefetched {passes} times over"
        print(f"{how:26s} {median / 1000:7.2f} us  {(median - warm) / (cold - warm):4.0%} missing")
    if disturbed:
        print(disturbed)


if __name__ == "__main__":
    main()
