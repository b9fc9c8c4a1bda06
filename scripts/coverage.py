"""Proves specs of the whole family on both backends and writes docs/coverage.md.

    python scripts/coverage.py [--cpp 600] [--triton 300] [--pairs 30] [--seed 0] [--workers 2]

Specs are drawn so that every two choices of different axes occur together (pagegen/check/grid.py). C++ kernels are built
and run on this machine's instruction sets in turn, Triton kernels interpreted. Exit status 1 if one was wrong.

A proof stays in the cache until a kernel's text, the cases or what judges them change: an interrupted run goes on where it
was, and after a change only what it touched is proven again.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pagegen import check
from pagegen.build.cpp import FLAGS
from pagegen.build.triton import Interpreter
from pagegen.check.cover import Outcome, prove_cpp, prove_pairs, prove_triton, refusal, sources
from pagegen.check.grid import AXES, Choice, Pair, all_pairs, pairs_of, probe, sample, spec_of, why_not
from pagegen.paths import cache_dir, write_atomic

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
LANGUAGES = ("cpp", "triton")
TITLES = {"cpp": "C++", "triton": "Triton", "pairs": "C++ and Triton, each two"}
CHECK = Path(check.__file__).parent
Job = tuple[str, int, Choice]  # backend, index, spec
JUDGES = (*(CHECK / f"{name}.py" for name in ("compare", "pool", "tensors", "tolerance")), CHECK.parent / "reference.py")
DRIVER = (CHECK / "files.py",)  # through which only C++ kernels are run

HEAD = """# Coverage

Written by `python scripts/coverage.py{options}`, which proves the specs it counts: each is rendered, built, and held to the
float64 reference by the gate's quick suite without its largest cases; every second spec with the template's default
config, the others with one at random. The first specs of a backend contain every two choices of different axes that it
allows together; the others are drawn at random. Where it says *each two*, the outputs of all instruction sets and of
Triton were also held against each other, within the sum of their bounds.

A number is how many of the proven specs have that choice; words are the reason why none can.
"""


def prove(job: Job) -> Outcome:
    """One job of a worker process."""
    torch.set_num_threads(1)
    kept = _kept(job)
    if kept.is_file():
        return Outcome(**json.loads(kept.read_text()))
    backend, index, choice = job
    match backend:
        case "cpp":
            outcome = prove_cpp(choice, index)
        case "triton":
            outcome = prove_triton(choice, index, _interpreter())
        case _:
            outcome = prove_pairs(choice, index, _interpreter())
    if not outcome.failures:
        write_atomic(kept, json.dumps(dataclasses.asdict(outcome)))
    return outcome


def _kept(job: Job) -> Path:
    """The file of a job's proof."""
    backend, index, choice = job
    kernels = [source.key for source in sources(backend, choice, index)]
    asked = (backend, choice, kernels, probe(spec_of(choice), index), [path.read_text() for path in JUDGES])
    if backend != "triton":
        asked += (FLAGS, [path.read_text() for path in DRIVER])
    folder = cache_dir() / "coverage"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:24]}.json"


@functools.cache
def _interpreter() -> Interpreter:
    return Interpreter()


def jobs(backend: str, count: int, seed: int) -> Iterator[Job]:
    """The first `count` specs of a backend."""
    for index, choice in enumerate(itertools.islice(sample(seed, functools.partial(refusal, backend)), count)):
        yield backend, index, choice


def page(outcomes: Sequence[tuple[str, Outcome]], options: str) -> Iterator[str]:
    """The page's lines."""
    yield HEAD.format(options=options)
    proven = {name: [outcome for found, outcome in outcomes if found == name and not outcome.failures] for name in TITLES}
    wrong = [(language, outcome) for language, outcome in outcomes if outcome.failures]
    yield from _summary(proven)
    yield f"\nWrong: {len(wrong)}.\n"
    yield from (f"- {language}, {outcome.target}: {spec_of(outcome.choice).slug}: {outcome.failures[0]}" for language, outcome in wrong)
    yield f"| axis | choice | {' | '.join(TITLES[language] for language in LANGUAGES)} |"
    yield "|---|---|---|---|"
    for axis, words in AXES.items():
        for word in words:
            cells = [_cell(language, axis, word, proven[language]) for language in LANGUAGES]
            yield f"| {axis} | {word} | {' | '.join(cells)} |"
    yield "\n## Pairs that no spec allows\n"
    yield from _refused_pairs()


def _summary(proven: dict[str, list[Outcome]]) -> Iterator[str]:
    yield "| backend | specs | where | cases | pairs of choices covered | of those allowed |"
    yield "|---|---|---|---|---|---|"
    for language, outcomes in proven.items():
        covered: set[Pair] = set().union(*(pairs_of(outcome.choice) for outcome in outcomes))
        allowed = {pair for pair in all_pairs() if why_not(dict(pair), functools.partial(refusal, language)) is None}
        where = collections.Counter(outcome.target for outcome in outcomes)
        places = ", ".join(f"{target} {count}" for target, count in sorted(where.items()))
        cases = sum(outcome.cases for outcome in outcomes)
        yield f"| {TITLES[language]} | {len(outcomes)} | {places} | {cases} | {len(covered & allowed)} | {len(allowed)} |"


def _cell(language: str, axis: str, word: str, proven: Sequence[Outcome]) -> str:
    count = sum(outcome.choice[axis] == word for outcome in proven)
    if count:
        return f"{count}"
    return f"refused: {why_not({axis: word}, functools.partial(refusal, language)) or 'not drawn'}"


def _refused_pairs() -> Iterator[str]:
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for pair in sorted(all_pairs()):
        (one, a), (other, b) = pair
        alone = [why_not({axis: word}, lambda spec: None) for axis, word in pair]
        reason = why_not(dict(pair), lambda spec: None)
        if reason is not None and alone == [None, None]:
            reasons[reason].append(f"{one} *{a}* with {other} *{b}*")
    yield from (f"- {', '.join(pairs)}: {reason}" for reason, pairs in reasons.items())


def main(words: Sequence[str]) -> int:
    """Exit status 1 if a spec was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpp", type=int, default=600, help="specs of C++")
    parser.add_argument("--triton", type=int, default=300, help="specs of Triton")
    parser.add_argument("--pairs", type=int, default=30, help="specs of both, held against each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(words)
    outcomes: list[tuple[str, Outcome]] = []
    todo = [job for backend in TITLES for job in jobs(backend, getattr(options, backend), options.seed)]
    with concurrent.futures.ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as workers:
        for job, outcome in zip(todo, workers.map(prove, todo), strict=True):
            outcomes.append((job[0], outcome))
            done = f"{len(outcomes)}/{len(todo)} {outcome.target} {outcome.seconds:.1f} s {spec_of(outcome.choice).slug}"
            print(done, *outcome.failures, sep="\n    ", flush=True)
    asked = "".join(f" --{name} {getattr(options, name)}" for name in (*TITLES, "seed") if getattr(options, name) != parser.get_default(name))
    PAGE.write_text("\n".join(page(outcomes, asked)) + "\n")
    return 1 if any(outcome.failures for _, outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
