"""When a search may stop before its total."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from pagegen.errors import ConfigError
from pagegen.records import Evaluation

TAIL = 10  # best scores that the bound on what is left is fitted to
PATIENCE = 20


@dataclasses.dataclass(frozen=True, slots=True)
class StopRule:
    """Stops a bucket when its best config is good enough, or when what is left promises less than can be told apart.

    `roofline_share`: of what the machine's measured limits allow; None: never. `patience`: trials in a row without a gain
    beyond the noise before the second rule is looked at; 0: never. Raises ConfigError for what is neither.
    """

    roofline_share: float | None = None
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        if self.roofline_share is not None and not 0 < self.roofline_share <= 1:
            raise ConfigError(f"--roofline-share {self.roofline_share} is not a share; allowed: above 0, up to 1")
        if self.patience < 0:
            raise ConfigError(f"--patience {self.patience} is less than 0; 0 never stops for lack of gains")

    def reason(self, evaluations: Sequence[Evaluation], total: int) -> str:
        """Why to stop after these, in the order of their trials, of `total` that were to be made; "" to go on."""
        passed = [found for found in evaluations if found.score is not None]
        best = min(passed, key=lambda found: found.score or math.inf, default=None)
        if best and self.roofline_share and (best.roofline or 0) >= self.roofline_share:
            return f"the best config reaches {best.roofline:.0%} of the roofline"
        return self._exhausted(evaluations, total) if self.patience else ""

    def _exhausted(self, evaluations: Sequence[Evaluation], total: int) -> str:
        noises = [found.noise for found in evaluations if found.noise]
        if not noises or len(evaluations) < self.patience or len(evaluations) >= total:
            return ""
        noise = statistics.median(noises)
        best, last = math.inf, 0  # in logarithms, and after how many trials it last fell beyond the noise
        for number, found in enumerate(evaluations, 1):
            if found.score is not None:
                if math.log(found.score) < best - noise:
                    last = number
                best = min(best, math.log(found.score))
        idle, left = len(evaluations) - last, total - len(evaluations)
        if idle < self.patience:
            return ""
        expected = expected_gain([math.log(found.score) for found in evaluations if found.score], left / len(evaluations))
        if expected >= noise:
            return ""
        return (
            f"no gain beyond the noise of {noise:.1%} in {idle} trials, and the {left} left are expected to gain {expected:.1%}"
        )


def expected_gain(scores: Sequence[float], more: float) -> float:
    """By how much the least of `scores` is expected to fall in `more` times as many further draws.

    The best TAIL of them (half of them at most) are taken for the exponential tail of what the search draws: their mean
    distance from the worst of them is its scale s, and the least of n draws then falls with log(n): s log(1 + more). Tails of
    running times are lighter than that, as no kernel takes no time, so this is a bound rather than a guess.
    """
    tail = sorted(scores)[: min(TAIL, len(scores) // 2)]
    if len(tail) < 2:
        return math.inf
    scale = statistics.mean(tail[-1] - score for score in tail[:-1])
    return scale * math.log1p(more)
