"""What the order costs in which pieces of memory are read: why a paged cache is read slower than memory in one piece.

    python benchmarks/block_order.py [--kib 6 32] [--seconds 4]

Pieces of the size of blocks are read in order, permuted within windows, and over all of the memory, as they are and with products and
prefetches like those of a kernel: in the smallest windows runs end, which the processor's own prefetchers follow, and nothing is far; in
larger ones jumps go further. Then loads that each wait for the one before go over as many lines of a cache, packed and far apart:
what translations cost that the processor has to look up.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable

import torch

from pagegen.memory import free_bytes, huge_page_share, zeros_in_huge_pages
from pagegen.target import best_cpu, detect
from pagegen.tuning.machine import pin_threads
from pagegen.tuning.measure import Interval, Measurement, measure
from pagegen.tuning.roofline import Limits, limits

PARTS = 4  # of the memory, read in turn
WINDOWS = {"in order": 1, "permuted within 32 KiB": 32 << 10, "permuted within 2 MiB": 2 << 20, "permuted within 128 MiB": 128 << 20}
WAYS = {"as they are": (0, 0), "6 products a vector, prefetched again": (6, 6)}  # products, and how often a line is prefetched again
LINE = 64
SPANS = {"packed": LINE, "one in 4 KiB": 4 << 10, "one in 32 KiB": 32 << 10}


def permuted(count: int, window: int) -> torch.Tensor:
    """The numbers below `count`, those of each `window` in a random order."""
    places = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (torch.arange(count) // window + places).argsort()


def reads(memory: torch.Tensor, piece: int, threads: int, loops: Limits) -> dict[str, Callable[[], None]]:
    """The plain read, and that of pieces in each order and way, of one part of the memory after the other."""
    count, begin, turn = len(memory) // piece // PARTS * PARTS, memory.data_ptr(), itertools.count()
    part = count // PARTS * piece

    def plain() -> None:
        loops.read(begin + next(turn) % PARTS * part, part, threads)

    def pieces(addresses: tuple[torch.Tensor, ...], products: int, again: int) -> None:
        mine = addresses[next(turn) % PARTS]
        loops.read_pieces(mine.data_ptr(), len(mine), piece, threads, products, again)

    calls: dict[str, Callable[[], None]] = {"plain read": plain}
    windows = {name: max(1, size // piece) for name, size in WINDOWS.items() if size == 1 or 2 * piece <= size < len(memory)}
    for name, window in {**windows, "permuted over all": count}.items():
        addresses = (begin + permuted(count, window) * piece).chunk(PARTS)
        for way, how in WAYS.items():
            calls[f"{name}, {way}"] = functools.partial(pieces, addresses, *how)
    return calls


def ring(memory: torch.Tensor, lines: int, span: int, word: int) -> int:
    """Has `word` of a random line in each of so many spans point to that of another, all in one ring; answers where it begins."""
    generator = torch.Generator().manual_seed(word)
    within = torch.randint(span // LINE, (lines,), generator=generator) * LINE  # a fixed place would use few sets of a cache
    places = (torch.arange(lines) * span + within + 8 * word)[torch.randperm(lines, generator=generator)]
    memory.view(torch.int64)[places // 8] = memory.data_ptr() + places.roll(-1)
    return memory.data_ptr() + int(places[0])


def follows(memory: torch.Tensor, lines: int, loops: Limits) -> dict[str, Callable[[], None]]:
    """A way round each ring. They share no word."""

    def follow(begin: int) -> None:
        loops.follow(begin, lines)

    return {name: functools.partial(follow, ring(memory, lines, span, word)) for word, (name, span) in enumerate(SPANS.items())}


def text_of(found: Interval, digits: int = 2) -> str:
    """A figure with its interval."""
    return f"{found.median:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def print_disturbance(measured: Measurement) -> None:
    """What disturbed a measurement, if anything did."""
    if measured.disturbance.line:
        print(measured.disturbance.line)


def main() -> None:
    """Prints the share of the plain read of each order, then the time of a load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[6, 32], help="of a piece, 1 to 1024; default: 6 32")
    parser.add_argument("--mib", type=int, default=1024, help="of memory, 64 and more, half of what is free at most; default: %(default)s")
    parser.add_argument("--threads", type=int, default=min(2, detect().threads), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size of pieces, and for the loads; default: %(default)s")
    options = parser.parse_args()
    half = max(64, (free_bytes() or 2 << 30) >> 21)
    for name, allowed in (("kib", range(1, 1025)), ("mib", range(64, half + 1)), ("threads", range(1, detect().threads + 1))):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value not in allowed:
                parser.error(f"--{name} {value}: {allowed[0]} to {allowed[-1]} are allowed")
    if not 0 < options.seconds < float("inf"):
        parser.error(f"--seconds {options.seconds:g}: a positive number is allowed")
    pin_threads()
    loops, memory = limits(best_cpu()), torch.frombuffer(zeros_in_huge_pages(options.mib << 20), dtype=torch.uint8)
    memory.fill_(1)  # else all pages are one
    share = huge_page_share(memory.data_ptr(), len(memory))
    pages = "" if share is None else f", {share:.0%} of it in pages of 2 MiB for this system"
    print(f"{options.mib} MiB{pages}; {options.threads} threads")
    for kib in options.kib:
        calls = reads(memory, kib << 10, options.threads, loops)
        measured = measure(calls, "plain read", seconds=options.seconds, min_rounds=7, max_rounds=400)
        rate = len(memory) / PARTS / measured.timing("plain read").median / 1e9
        print(f"\npieces of {kib} KiB; plain read {rate:.1f} GB/s")
        for name in list(calls)[1:]:
            ratio = measured.ratio(name)
            print(f"  {name:62s} {text_of(Interval(1 / ratio.median, 1 / ratio.high, 1 / ratio.low))} of the plain read")
        print_disturbance(measured)
    lines = len(memory) // max(SPANS.values())
    rings = follows(memory, lines, loops)
    measured = measure(rings, "packed", seconds=options.seconds, min_rounds=7, max_rounds=400)
    print(f"\n{lines} lines ({lines * LINE >> 10} KiB), each load waiting for the one before, on one thread")
    for name in rings:
        time = measured.timing(name)
        each = Interval(*(1e9 * seconds / lines for seconds in (time.median, time.low, time.high)))
        print(f"  {name:14s} {each.median:6.1f} ns a load, {text_of(measured.ratio(name))} of packed")
    print_disturbance(measured)
    print("That many lines lie in the same cache wherever they are: what loads far apart take longer goes to translations. Where all pages are")
    print("of 2 MiB, the three hardly differ; in a virtual machine the host's pages count, too, which may be smaller than its own.")


if __name__ == "__main__":
    main()
