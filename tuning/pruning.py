"""Whether a candidate need not be timed to its end, because it is clearly worse than the best one so far.

The test is Wilcoxon's signed-rank test for pairs (1945), over the batches that both were timed on. Optuna's WilcoxonPruner
is the same idea; here a loss must exceed MARGIN, as the best of many noisy candidates looks better than it is, and the
p-value is exact, which a handful of batches with ties needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

MARGIN = 0.02  # a candidate within this share of the best one's time is never pruned
P_VALUE = 0.1  # of a loss beyond the margin by chance: four batches, all worse, are 1/16
MIN_BATCHES = 4


class Judge:
    """Hears of a candidate's batches one by one. `incumbent` has the best one's ratios by step; empty: nothing is pruned."""

    def __init__(
        self, incumbent: Mapping[int, float] | None = None, report: Callable[[int, float], None] | None = None
    ) -> None:
        self._incumbent, self._report = incumbent or {}, report
        self._worse: list[tuple[float, float]] = []  # (weight, log of its ratio over the incumbent's)

    def hear(self, step: int, ratio: float, weight: float) -> str:
        """A batch was timed: `ratio` is the candidate's time over the default's. Says why to stop, or ""."""
        if self._report:
            self._report(step, ratio)
        if step in self._incumbent:
            self._worse.append((weight, math.log(ratio / self._incumbent[step])))
        if len(self._worse) < MIN_BATCHES:
            return ""
        total = sum(weight for weight, _ in self._worse)
        loss = sum(weight * worse for weight, worse in self._worse) / total
        p_value = signed_rank([worse - math.log1p(MARGIN) for _, worse in self._worse])
        serves_some = min(worse for _, worse in self._worse) < -math.log1p(MARGIN)  # a dispatch table may want it there
        if serves_some or loss <= math.log1p(MARGIN) or p_value > P_VALUE:
            return ""
        return f"{math.expm1(loss):.0%} slower than the best so far over {len(self._worse)} batches (p = {p_value:.2g})"


def signed_rank(differences: Sequence[float]) -> float:
    """The exact probability of as large a sum of positive ranks if `differences` lie evenly around zero. Zeros are left out."""
    values = sorted((value for value in differences if value), key=abs)
    sizes = [abs(value) for value in values]
    doubled = [2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes]  # twice the rank: ties share the mean
    reached = sum(rank for rank, value in zip(doubled, values, strict=True) if value > 0)
    ways = Counter({0: 1})  # sums of the ranks of any subset
    for rank in doubled:
        for total, count in list(ways.items()):
            ways[total + rank] += count
    return sum(count for total, count in ways.items() if total >= reached) / (1 << len(values))
