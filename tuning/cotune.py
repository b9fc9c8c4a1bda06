"""Which block size and KV layout to take, for a spec whose layout is `auto`: every pair tuned, then all side by side.

The study, record and package of a pair are those of `pagegen tune` on its spec. What pairs are compared by is measured
afresh, in the same rounds, on the batches of a workload, which stand for the trace that it was made from:

- the expected step, a weighted mean over the batches: seconds, a layer, of the package's attend and of write_kv for the
  batch's tokens, and of copy_blocks for COPIES of its sequences;
- memory: the bytes of blocks that hold a token of context, which are more than the token's own, as the last block of a
  sequence is filled in part only.

Of a pool that is full, what a pair saves in memory is sequences that run besides. So a pair costs its step times its bytes
a token, and the rule is: the least cost; of pairs whose costs the paired interval does not tell apart from the least, the
one that wastes the least memory. The record marks the Pareto front of step and memory, for who has another rule.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.catalog import variant
from pagegen.errors import ConfigError, SpecError
from pagegen.package import install_package
from pagegen.paths import write_atomic
from pagegen.render import environment
from pagegen.spec import KernelSpec, KVLayout, Op, Phase
from pagegen.target import Target, parse_target, require_present
from pagegen.transfer import block_bytes
from pagegen.tuning.asked import require_budget
from pagegen.tuning.beside import compare
from pagegen.tuning.contest import Conditions
from pagegen.tuning.job import TuneResult, results_folder, tune
from pagegen.tuning.measure import Interval, Measurement, mean_of_medians
from pagegen.tuning.record import ENVIRONMENT
from pagegen.tuning.search import Progress
from pagegen.tuning.shape import ANY, FLAG, INTERVAL, NUMBER, POSITIVE, REST, TEXT, Shape, has_format, parse, require
from pagegen.tuning.workload import Point
from pagegen.tuning.workloads import Selection, select_phases

FORMAT = 1
RECORD = "cotune.json"
BLOCK_SIZES = (16, 32, 64)  # the spec's own beside them
COPIES = 1 / 256  # of a sequence's blocks a step: each is forked once in so many tokens, and its last block copied
RULE = "least step x bytes a token; of those that noise does not tell apart from it, the least memory wasted"
DOCUMENT: Shape = {  # what reports show of it
    "spec": {name: ANY for name in ("dtype", "q_heads", "kv_heads", "head_dim")},
    "environment": ENVIRONMENT,
    **{name: TEXT for name in ("target", "rule", "chosen")},
    "pairs": [
        {
            "name": TEXT,
            "step": INTERVAL,
            **{name: NUMBER for name in ("attend", "write_kv", "copies", "wasted", "bytes_per_token")},
            "cost": POSITIVE,
            "front": FLAG,
        }
    ],
    "refused": {REST: TEXT},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A block size and layout, what it takes, and what it is worth. Seconds are of a layer."""

    block_size: int
    layout: str
    step: Interval  # seconds, expected
    attend: float  # of it
    write_kv: float
    copies: float
    wasted: float  # share of the memory that sequences hold
    bytes_per_token: float  # of the pool, K and V of a layer
    cost: float  # step x bytes_per_token
    front: bool  # no other is both faster and smaller

    @property
    def name(self) -> str:
        """`b16-NHD`."""
        return f"b{self.block_size}-{self.layout}"


def cotune(
    spec: KernelSpec,
    workload: str | None,
    *,
    target: str = "auto",
    phase: Phase | None = None,
    max_context: int | None = None,
    block_sizes: Sequence[int] | None = None,
    layouts: Sequence[str] | None = None,
    budget: float | None = None,
    out: Path | str | None = None,
    watch: Callable[[float, str], None] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Tunes every pair for a spec without a layout, chooses one, installs its package, and answers the JSON record.

    `options` are those of `tune`, for each pair; `budget` is for all together. `watch` is told after each evaluation which
    share of the pairs' tuning is done, and which pair it was. Results go to `out`/<target>/<spec> of each
    pair, the comparison to that of `spec`. Raises ConfigError or SpecError for what cannot be tuned: no workload, a block
    size or layout that is not known, and if no pair is served.
    """
    if workload is None:
        raise SpecError(
            "layout is `auto`, which is chosen for a trace: name its batches with --workload (a preset, or a file of `pagegen "
            "simulate --trace T --emit-workload FILE`), or one layout with --layout NHD"
        )
    require_budget(budget)
    where = parse_target(target)
    require_present(where)
    pairs, refused = served_pairs(spec, where, block_sizes or sorted({spec.block_size, *BLOCK_SIZES}), layouts or usual_layouts(spec, where))
    begin, tuned = time.monotonic(), dict[str, TuneResult]()
    for number, (name, each) in enumerate(pairs.items()):
        left = None if budget is None else max(1.0, (budget - (time.monotonic() - begin)) / (len(pairs) - number))
        if say:
            say(f"pair {number + 1} of {len(pairs)}: {name}")

        def told(state: Progress, number: int = number, name: str = name) -> None:
            if watch:
                watch((number + state.done / state.total) / len(pairs), name)

        tuned[name] = tune(
            each, target=where.name, phase=phase, workload=workload, max_context=max_context, budget=left, out=out, say=say,
            watch=told, install=False, **options,
        )  # fmt: skip
    selection = select_phases(workload, next(iter(pairs.values())), phase, where, max_context=max_context, pools=len(pairs))
    points = [point for each in selection.workloads.values() for point in each.points]
    measured, copies = compare({name: tuned[name].package for name in pairs}, pairs, where, selection)
    steps = {name: step_rounds(name, points, measured, copies) for name in pairs}
    judged = judge(pairs, points, steps, measured, copies)
    chosen = choose(judged, points, steps)
    return _record(spec, where, selection, out, judged, refused, chosen, tuned, Conditions.of(list(measured.values())))


def usual_layouts(spec: KernelSpec, target: Target) -> tuple[str, ...]:
    """Layouts that are tried where none is named: token-major by token and by head, and K dim-major as the target loads it."""
    if target.kind != "cpu":
        return "NHD", "HND", "HDN8"
    return "NHD", "HND", "HDN2" if spec.cache_dtype.itemsize == 2 else "HDN"


def served_pairs(
    spec: KernelSpec, target: Target, block_sizes: Sequence[int], layouts: Sequence[str]
) -> tuple[dict[str, KernelSpec], dict[str, str]]:
    """(specs of the pairs by name, why the others are not served). Raises SpecError if none is, or a word is not known."""
    pairs, refused = dict[str, KernelSpec](), dict[str, str]()
    for layout, block_size in itertools.product(map(KVLayout.parse, layouts), block_sizes):
        name = f"b{block_size}-{layout.name}"
        try:
            each = spec.replace(block_size=block_size, layout=layout)
            for op in (Op.ATTEND, Op.WRITE_KV, Op.COPY_BLOCKS):
                variant(op, each, target)
            pairs[name] = each
        except SpecError as error:
            refused[name] = str(error)
    if not pairs:
        raise SpecError(f"no pair of block size and layout is served: {next(iter(refused.values()))}; change --block-sizes or --layouts")
    return pairs, refused


# --- memory ----------------------------------------------------------------------------------------------------------


def held_tokens(context: int, block_size: int) -> float:
    """Tokens that fit into the blocks of a sequence of about `context` tokens: the mean over lengths to either side of it, a
    block's worth, as a sequence of a batch stands for others like it.
    """
    around = min(block_size // 2, context - 1)
    lengths = range(context - around, context + around + 1)
    return sum(-(-length // block_size) * block_size for length in lengths) / len(lengths)


def memory(spec: KernelSpec, points: Sequence[Point]) -> tuple[float, float]:
    """(share of the memory held that is wasted, bytes held a token of context), over the sequences of weighted batches."""
    held = sum(point.weight * held_tokens(context, spec.block_size) for point in points for context in point.context_lens)
    own = sum(point.weight * sum(point.context_lens) for point in points)
    return 1 - own / held, held / own * block_bytes(spec) / spec.block_size


# --- the choice ------------------------------------------------------------------------------------------------------


def step_rounds(
    name: str, points: Sequence[Point], measured: Mapping[Point, Measurement], copies: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """A pair's seconds on every batch, round by round: attend, write_kv, and its share of copies."""
    found = []
    for point in points:
        copied = COPIES * len(point.context_lens) * copies[name]
        rounds = (measured[point].seconds[f"{name} {word}"] for word in ("attend", "write_kv"))
        found.append(tuple(attend + write + copied for attend, write in zip(*rounds, strict=True)))
    return found


def judge(
    pairs: Mapping[str, KernelSpec],
    points: Sequence[Point],
    steps: Mapping[str, Sequence[tuple[float, ...]]],
    measured: Mapping[Point, Measurement],
    copies: Mapping[str, float],
) -> dict[str, Pair]:
    """What every pair takes, and whether it is on the front."""
    whole = sum(point.weight for point in points)
    sequences = sum(point.weight * len(point.context_lens) for point in points) / whole
    found = dict[str, Pair]()
    for name, spec in pairs.items():
        wasted, size = memory(spec, points)
        step = mean_of_medians(steps[name], [point.weight for point in points])
        attend, write_kv = (
            sum(point.weight * statistics.median(measured[point].seconds[f"{name} {word}"]) for point in points) / whole
            for word in ("attend", "write_kv")
        )
        copy, cost = COPIES * sequences * copies[name], step.median * size
        found[name] = Pair(spec.block_size, spec.kv_layout.name, step, attend, write_kv, copy, wasted, size, cost, front=True)
    beaten = {name for name, pair in found.items() if any(_beats(other, pair) for other in found.values())}
    return {name: dataclasses.replace(pair, front=name not in beaten) for name, pair in found.items()}


def _beats(one: Pair, other: Pair) -> bool:
    mine, its = (one.step.median, one.bytes_per_token), (other.step.median, other.bytes_per_token)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def choose(judged: Mapping[str, Pair], points: Sequence[Point], steps: Mapping[str, Sequence[tuple[float, ...]]]) -> str:
    """The name of the pair that RULE takes."""
    best = min(judged, key=lambda name: judged[name].cost)

    def costs(name: str) -> list[list[float]]:
        return [[judged[name].bytes_per_token * seconds for seconds in rounds] for rounds in steps[name]]

    def tied(name: str) -> bool:
        """Whether the interval of the costs' difference, round by round, holds zero."""
        pairs = zip(costs(name), costs(best), strict=True)
        apart = [[its - least for its, least in zip(*rounds, strict=True)] for rounds in pairs]
        return mean_of_medians(apart, [point.weight for point in points]).low <= 0

    among = [name for name in judged if name == best or tied(name)]
    return min(among, key=lambda name: (judged[name].wasted, judged[name].cost))


# --- the record ------------------------------------------------------------------------------------------------------


def _record(
    spec: KernelSpec,
    target: Target,
    selection: Selection,
    out: Path | str | None,
    judged: Mapping[str, Pair],
    refused: Mapping[str, str],
    chosen: str,
    tuned: Mapping[str, TuneResult],
    conditions: Conditions | None,
) -> dict[str, Any]:
    """Installs what was chosen; writes cotune.json and report.md."""
    folder, result = results_folder(out, target, spec, selection), tuned[chosen]
    installed = install_package(result.package)
    document = {
        "format": FORMAT,
        "spec": spec.to_dict(),
        "target": target.name,
        "environment": result.document["environment"],
        "workload": selection.to_dict(),
        "rule": RULE,
        "copies_per_sequence_and_step": COPIES,
        "pairs": [
            {"name": name, **dataclasses.asdict(pair), "folder": str(tuned[name].report.parent)}
            for name, pair in sorted(judged.items(), key=lambda item: item[1].cost)
        ],
        "conditions": conditions.to_dict() if conditions else None,
        "refused": dict(refused),
        "chosen": chosen,
        **{key: result.document[key] for key in ("winner", "counts", "trials")},
        "package": str(result.package),
        "installed": str(installed),
        "report": str(folder / "report.md"),
    }
    write_atomic(folder / RECORD, json.dumps(document, indent=1, allow_nan=False) + "\n")
    text = environment().get_template("report/cotune.md.jinja").render(
        document=document, conditions=conditions
    )
    write_atomic(folder / "report.md", text)
    return document


def read_cotuned(folder: Path) -> dict[str, Any]:
    """What `cotune` wrote. Raises ConfigError for a file that is damaged or of another format."""
    path = folder / RECORD
    try:
        document = parse(path.read_text(encoding="utf-8"))
        require({"format": ANY}, document)
        version = document["format"]
        if has_format(document, FORMAT):
            require(DOCUMENT, document)
            if not any(pair["front"] for pair in document["pairs"]):
                raise ValueError("pairs has none on the front")
            return dict(document)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"record {path} cannot be read ({type(error).__name__}: {error}); run `pagegen tune` again") from None
    raise ConfigError(f"record {path} has format {version!r}, this pagegen reads format {FORMAT}; run `pagegen tune` again")
