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
GAIN = 0.02  # what a table may lose to the best finalists: less is not worth more trials, nor is less than the noise
CHANCE = 0.02  # of more than that, below which a search ends


@dataclasses.dataclass(frozen=True, slots=True)
class StopRule:
    """Stops a bucket when its best config is good enough, or when what is left hardly promises more than GAIN.

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

    def reason(self, evaluations: Sequence[Evaluation], total: int, inherited: Sequence[Evaluation] = ()) -> str:
        """Why to stop after these, in the order of their trials, of `total` that were to be made; "" to go on.

        `inherited` are of another search, on top of both: what there is to gain is counted from the best of them, but how
        often one gained is not asked of them, for their search did not have the values that are new in this one.
        """
        passed = [found for found in [*inherited, *evaluations] if found.score is not None]
        best = min(passed, key=lambda found: found.score or math.inf, default=None)
        # More than the whole shows that the limits were measured while others used the machine: it says nothing of the best.
        if best and self.roofline_share and self.roofline_share <= (best.roofline or 0) <= 1:
            return f"the best config reaches {best.roofline:.0%} of the roofline"
        return self._exhausted(evaluations, total, inherited) if self.patience else ""

    def _exhausted(self, evaluations: Sequence[Evaluation], total: int, inherited: Sequence[Evaluation]) -> str:
        noises = [found.noise for found in evaluations if found.noise]
        if not noises or len(evaluations) < self.patience or len(evaluations) >= total:
            return ""
        noise = statistics.median(noises)
        best = min((math.log(found.score) for found in inherited if found.score is not None), default=math.inf)
        last = 0  # after how many trials the best, in logarithms, last fell beyond the noise
        for number, found in enumerate(evaluations, 1):
            if found.score is not None:
                if math.log(found.score) < best - noise:
                    last = number
                best = min(best, math.log(found.score))
        idle, left, gain = len(evaluations) - last, total - len(evaluations), max(noise, GAIN)
        if idle < self.patience:
            return ""
        scores = [found.score or found.partial for found in evaluations]  # without the pruned, all that is known is alike
        chance = chance_of(gain, [math.log(score) for score in scores if score], left / len(evaluations))
        if chance > CHANCE:
            return ""
        return (
            f"no gain beyond the noise of {noise:.1%} in {idle} trials, and one of more than {gain:.1%} among the {left} left has "
            f"a chance of {chance:.1%}"
        )


def chance_of(gain: float, scores: Sequence[float], more: float) -> float:
    """How likely the least of `scores` falls by more than `gain` in `more` times as many further draws.

    The best TAIL of them (half of them at most) are taken for the exponential tail of what the search draws: their mean
    distance from the worst of them is its scale s. A further draw is below the least of n with a chance of 1 / n, and by more
    than `gain` in exp(-gain / s) of these cases. Tails of running times are lighter than that, as no kernel takes no time, so
    this is a bound rather than a guess.
    """
    tail = sorted(scores)[: min(TAIL, len(scores) // 2)]
    if len(tail) < 2:
        return 1.0
    scale = statistics.mean(tail[-1] - score for score in tail[:-1])
    return -math.expm1(-more * math.exp(-gain / scale)) if scale > 0 else 0.0
