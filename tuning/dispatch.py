"""Which config serves which batches: the smallest table that is nearly as fast as the best config for every batch.

A batch is dispatched by three numbers (`records.BatchShape`): sequences, longest context, longest query. Measured batches
with the same numbers are one **cell**: no table can tell them apart. A row of the table is a box over cells, rows are tried
in order, and the last row of a phase holds everything in the measured range. Bounds between measured numbers lie in their
geometric middle; the range ends a factor of `REACH` beyond the outermost, or further where the workload has batches there
that others stand for.

The search is exact. Let f(r, S) be the least time of the cells outside S with r rows, where S is what earlier rows hold:

    f(1, S) = best(all - S)        f(r, S) = min over boxes B of best(B - S) + f(r - 1, S + B)

with best(X) the least time of the cells X under one config. With at most `MAX_CELLS` cells that is a few arrays of
2^cells numbers, whatever the number of configs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pagegen.records import DispatchRow, Evaluation
from pagegen.space import Config
from pagegen.spec import Phase
from pagegen.tuning.workload import Point

MAX_REGRET = 0.02  # time of a table over that of the best config at each point, minus one
MAX_ROWS = 6  # of a phase
MAX_CELLS = 14
REACH = 2
ROUNDING = 1e-9  # of sums of times that were added up in different orders

Cell = tuple[int, int, int]  # `Point.shape`
Span = tuple[Cell, Cell]  # the least and the greatest of each of its numbers
Times = npt.NDArray[np.float64]  # [cells, configs]: weighted seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """The table of a phase. Kernels go by the names of the contenders."""

    rows: tuple[DispatchRow, ...]
    regret: float
    assigned: Mapping[Point, str]  # what each measured batch is served by


def fit(
    phase: Phase,
    seconds: Mapping[Point, Mapping[str, float]],
    *,
    max_regret: float = MAX_REGRET,
    max_rows: int = MAX_ROWS,
) -> Fit:
    """The table with the fewest rows whose regret is at most `max_regret`, and of those the fastest; if `max_rows` do not
    suffice, the smallest of the fastest tables of that size.

    `seconds` of every contender at every point; infinite where it may not serve. At least one is finite at all points.
    Raises ValueError for more than MAX_CELLS different shapes.
    """
    best = sum(point.weight * min(taken.values()) for point, taken in seconds.items())
    names = list(next(iter(seconds.values())))
    times = _by_cell({point: [point.weight * taken[name] for name in names] for point, taken in seconds.items()})
    rows, assigned = _table(phase, times, names, best * (1 + max_regret), max_rows)
    chosen = {point: assigned[point.shape] for point in seconds}
    return Fit(rows, regret(seconds, chosen), chosen)


def span_of(points: Iterable[Point]) -> Span:
    """Between which shapes batches lie."""
    axes = list(zip(*(point.shape for point in points), strict=True))
    least, greatest = ([choose(axis) for axis in axes] for choose in (min, max))
    return (least[0], least[1], least[2]), (greatest[0], greatest[1], greatest[2])


def encode(phase: Phase, assigned: Mapping[Point, str], span: Span | None = None) -> tuple[DispatchRow, ...]:
    """The fewest rows that serve every point with its config, and whatever lies within `span` with the nearest one's. Points of
    one cell must have the same one.
    """
    names = list(dict.fromkeys(assigned.values()))
    wrong = _by_cell({point: [float(name != own) for name in names] for point, own in assigned.items()})
    return _table(phase, wrong, names, 0.0, len(wrong), span)[0]


def regret(seconds: Mapping[Point, Mapping[str, float]], assigned: Mapping[Point, str]) -> float:
    """Weighted time with `assigned` over that with the best config at each point, minus one."""
    mine = sum(point.weight * taken[assigned[point]] for point, taken in seconds.items())
    best = sum(point.weight * min(taken.values()) for point, taken in seconds.items())
    return mine / best - 1


def portfolio(ranked: Sequence[Evaluation], default: Config, points: Sequence[Point], size: int) -> list[Evaluation]:
    """At most `size` evaluations whose configs, with the default, make the fastest tables; `ranked` are best first.

    The best one, then again and again the one that takes most off the workload's time, then the next best. A time counts
    with the upper end of its interval, so that a place is not won by luck, and relative to the default that was timed
    beside it, so that a slow hour of the machine does not count.
    """
    times = [_beside_default(found, points) for found in ranked]
    is_default = [dict(found.config) == default.to_dict() for found in ranked]
    least = min((row for row, its in zip(times, is_default, strict=True) if its), key=np.sum, default=np.full(len(points), np.inf))
    left = [place for place, its in enumerate(is_default) if not its]
    chosen: list[int] = []
    while left and len(chosen) < size:
        best = min(left, key=lambda place: np.minimum(least, times[place]).sum()) if chosen else left[0]
        left.remove(best)
        chosen.append(best)
        least = np.minimum(least, times[best])
    return [ranked[place] for place in chosen]


def _beside_default(found: Evaluation, points: Sequence[Point]) -> Times:
    """Weighted upper ends of the times at the points, over the typical time of the default in the same trial."""
    if found.score is None or any(point.name not in found.timings for point in points):
        return np.full(len(points), np.inf)
    weights = np.array([point.weight for point in points])
    medians, highs = (np.array([getattr(found.timings[point.name], end) for point in points]) for end in ("median", "high"))
    typical = math.exp(float(weights @ np.log(medians) / weights.sum()))
    beside: Times = weights * highs * found.score / typical
    return beside


# --- the exact search ------------------------------------------------------------------------------------------------


def _by_cell(costs: Mapping[Point, Sequence[float]]) -> dict[Cell, Times]:
    """Costs of every config, points of one cell added up, in the order of the cells."""
    summed: dict[Cell, Times] = {}
    for point, row in sorted(costs.items(), key=lambda item: item[0].shape):
        summed[point.shape] = summed.get(point.shape, np.zeros(len(row))) + np.array(row)
    return summed


def _table(
    phase: Phase, times: Mapping[Cell, Times], names: Sequence[str], limit: float, max_rows: int, span: Span | None = None
) -> tuple[tuple[DispatchRow, ...], dict[Cell, str]]:
    cells = list(times)
    table = _smallest(np.stack(list(times.values())), _boxes(cells), limit * (1 + ROUNDING), max_rows)
    rows = tuple(_row(phase, cells, box, names[config], span) for box, config in table)
    served = {cell: next(config for box, config in table if box >> place & 1) for place, cell in enumerate(cells)}
    return rows, {cell: names[config] for cell, config in served.items()}


def _smallest(times: Times, boxes: Sequence[int], limit: float, max_rows: int) -> list[tuple[int, int]]:
    """(box, config) of each row in order: as few rows as bring the time to `limit`, else the fewest of the least time."""
    everything = (1 << len(times)) - 1
    best, which = _best_of_sets(times)
    covered = np.arange(everything + 1)
    least = [best[everything & ~covered]]
    choices: list[npt.NDArray[np.int64]] = []
    while least[-1][0] > limit and len(least) < max_rows:
        now, choice = least[-1].copy(), np.full(everything + 1, -1)  # -1: one row less does as well
        for box in boxes:
            time = best[box & ~covered] + least[-1][covered | box]
            better = time < now * (1 - ROUNDING)
            now[better], choice[better] = time[better], box
        if now[0] == least[-1][0]:  # all that a row can gain is gained: any cell that is served ill could have one of its own
            break
        least.append(now)
        choices.append(choice)
    table, held = list[tuple[int, int]](), 0
    for choice in reversed(choices):
        if (box := int(choice[held])) >= 0:
            table.append((box, int(which[box & ~held])))
            held |= box
    if held != everything:
        table.append((everything, int(which[everything & ~held])))
    return table


def _best_of_sets(times: Times) -> tuple[Times, npt.NDArray[np.int64]]:
    """(least time, config) of every set of cells served by one config; of equal ones the first."""
    sums = np.zeros((1 << len(times), times.shape[1]))
    for place, row in enumerate(times):
        sums[1 << place : 2 << place] = sums[: 1 << place] + row
    return sums.min(axis=1), sums.argmin(axis=1)


def _boxes(cells: Sequence[Cell]) -> list[int]:
    """Every set of cells that ranges can cut out, the largest first."""
    if len(cells) > MAX_CELLS:
        raise ValueError(f"{len(cells)} different shapes are more than a table is fitted to; allowed: {MAX_CELLS}")
    axes = []
    for axis in range(3):
        values = sorted({cell[axis] for cell in cells})
        ranges = itertools.combinations_with_replacement(values, 2)
        axes.append({sum(1 << i for i, cell in enumerate(cells) if low <= cell[axis] <= high) for low, high in ranges})
    found = {a & b & c for a, b in itertools.product(*axes[:2]) if a & b for c in axes[2]} - {0}
    return sorted(found, key=lambda box: (-box.bit_count(), box))


def _row(phase: Phase, cells: Sequence[Cell], box: int, kernel: str, span: Span | None) -> DispatchRow:
    members = [cell for place, cell in enumerate(cells) if box >> place & 1]
    bounds: list[int | None] = []
    for axis in range(3):
        values, inside = sorted({cell[axis] for cell in cells}), [cell[axis] for cell in members]
        ends = (span[0][axis], span[1][axis]) if span else (values[0], values[-1])
        bounds += _bounds(values, min(inside), max(inside), *ends)
    if phase is Phase.DECODE:
        bounds[4:] = None, None  # its queries are one token by definition
    return DispatchRow(phase, kernel, *bounds)


def _bounds(values: Sequence[int], low: int, high: int, least: int, greatest: int) -> tuple[int | None, int | None]:
    """Inclusive bounds of the range from `low` to `high`, two of the sorted measured `values`, the outermost of which reach to
    `least` and `greatest` at least; None: nothing is smaller."""
    before, after = values.index(low) - 1, values.index(high) + 1
    lowest = math.isqrt(values[before] * low) + 1 if before >= 0 else min(low // REACH, least)
    highest = math.isqrt(high * values[after]) if after < len(values) else max(high * REACH, greatest)
    return (lowest if lowest > 1 else None), highest
