"""Figures of the Orca and vLLM papers out of this scheduler and these memory policies, beside what is printed.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), OPT-13B on one A100-40GB; Yu et al. 2022
(https://www.usenix.org/conference/osdi22/presentation/yu).

`reproduced` rows depend on lengths and allocators alone: in saturation the step time cancels out. `modelled` ones hang on
`StepCosts` as well; of those only the papers' orderings are held to account, and the printed band is shown beside.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pagegen.errors import ConfigError
from pagegen.runtime.simulation import hardware_figures
from pagegen.runtime.simulation.experiment import Case, Load, Outcome, Results, Row, around, experiment
from pagegen.runtime.simulation.setup import SYSTEMS, Setup

# --- vLLM ------------------------------------------------------------------------------------------------------------

CHAT, INSTRUCTIONS = Load("sharegpt", 2.0, 1500), Load("alpaca", 30.0, 240)


def memory_split(results: Results) -> Iterator[Row]:
    """Figure 2: what the KV memory holds, ShareGPT at 2 requests a second, in percent.

    Of the pool; for vLLM, of the blocks that it has given. 'External' has all that is left over, free slots too.
    """
    printed: Mapping[str, tuple[float, ...]] = {
        "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
        "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
        "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    }

    def share(system: str, part: str, found: Outcome) -> float:
        split = found[system].split
        return 100 * (split[part] + (split["free"] if part == "external" else 0))

    for system, shares in printed.items():
        for part, paper in zip(("token", "reserved", "internal", "external"), shares, strict=True):
            value = functools.partial(share, system, part)
            yield results.row(f"{system}, {part}", value, paper, around(paper, points=2.5), "%")
    yield results.row("vLLM, token", lambda found: 100 * found["vLLM"].token_share, 96.3, around(96.3, points=2.5), "%")


BATCHED: Mapping[str, Case] = {
    f"{load.trace}, {system}": (load, setup) for load in (CHAT, INSTRUCTIONS) for system, setup in SYSTEMS.items()
}


def batched_requests(results: Results) -> Iterator[Row]:
    """Figure 13: requests that run together, ShareGPT at 2 and Alpaca at 30 requests a second.

    Of vLLM's own row, which is not saturated and so hangs on the step time, only that it has the most is required.
    """
    printed = (7.00, 9.81, 13.62, 30.42, 7.00, 43.24, 72.75, 132.44)

    def running(case: str, found: Outcome) -> float:
        return found[case].num_running

    def has_the_most(trace: str, found: Outcome) -> bool:
        return max(SYSTEMS, key=lambda system: running(f"{trace}, {system}", found)) == "vLLM"

    for (case, (load, setup)), paper in zip(BATCHED.items(), printed, strict=True):
        holds = functools.partial(has_the_most, load.trace) if setup == SYSTEMS["vLLM"] else None
        yield results.row(case, functools.partial(running, case), paper, around(paper, share=0.1), "reqs", holds)


# FasterTransformer is request-level batching with room for the longest output. Its prompts are computed in one
# iteration, and no other is taken in later.
_WHOLE_BATCH = dataclasses.replace(SYSTEMS["Orca (Max)"], policy="request", max_num_batched_tokens=8 * 2048)
RATES: Mapping[str, Case] = {
    system: (Load("sharegpt", 4.0, 900), setup)
    for system, setup in {"FasterTransformer": _WHOLE_BATCH, **SYSTEMS}.items()
}


def capacity(results: Results) -> Iterator[Row]:
    """Figure 12a: the request rate that is sustained, ShareGPT, as a ratio of vLLM's to the others'.

    What is served while more comes than can be, in output tokens a second: beyond that rate the queue, and with it the
    latency, grows without end.
    """
    for name, paper, band in (
        ("Orca (Oracle)", "1.7 to 2.7", (1.7, 2.7)),
        ("Orca (Max)", "2.7 to 8", (2.7, 8.0)),
        ("FasterTransformer", "up to 22", (2.7, 22.0)),
    ):
        yield results.faster("vLLM", name, paper, band)
    for worse, better in itertools.pairwise(RATES):
        yield results.faster(better, worse, "above 1", (1.0, math.inf))


SAMPLES: Mapping[str, Case] = {
    f"{trace}, {n} samples": (Load(trace, rate, seconds, n), SYSTEMS["vLLM"])
    for trace, n, rate, seconds in (
        ("alpaca", 2, 3.0, 240),
        ("alpaca", 4, 3.0, 240),
        ("alpaca", 6, 3.0, 240),
        ("sharegpt", 2, 0.5, 1500),
        ("sharegpt", 4, 0.25, 1500),
        ("sharegpt", 6, 0.15, 1500),
    )
}
BEAMS: Mapping[str, Case] = {
    f"{load.trace}, {load.n} beams": (dataclasses.replace(load, beams=True), setup) for load, setup in SAMPLES.values()
}


def sharing(results: Results) -> Iterator[Row]:
    """Figure 15: blocks that samples save by sharing the prompt, and beams by sharing what their parents said as well, of
    those needed without, in percent.
    """
    printed = {"alpaca, 2 samples": 6.09, "alpaca, 4 samples": 8.53, "alpaca, 6 samples": 9.79}
    printed_beams = {"alpaca, 2 beams": 37.56, "alpaca, 4 beams": 53.13, "alpaca, 6 beams": 55.16}

    def saved(case: str, found: Outcome) -> float:
        return 100 * found[case].saved_share

    for case in SAMPLES:
        paper, band = "16.2 to 30.5", (16.2 - 1.5, 30.5 + 1.5)
        if case in printed:
            paper, band = f"{printed[case]}", around(printed[case], points=1.5)
        yield results.row(case, functools.partial(saved, case), paper, band, "%")
    for case in BEAMS:
        paper, band = "44.3 to 66.3", (44.3, 66.3)
        if case in printed_beams:
            paper, band = f"{printed_beams[case]}", around(printed_beams[case], share=0.2)

        def more(found: Outcome, case: str = case, samples: str = case.replace("beams", "samples")) -> bool:
            return saved(case, found) > saved(samples, found)

        yield results.row(
            case,
            functools.partial(saved, case),
            paper,
            band,
            "%",
            more,
            note="parents are drawn as SmolLM2's beams have them, which part later than the paper's OPT-13B's",
        )


# --- Orca ------------------------------------------------------------------------------------------------------------

_EQUAL = Setup("orca", "reserve-on-paged", max_num_seqs=32, num_blocks=32 * 40, max_num_batched_tokens=32 * 512)
ITERATIONS: Mapping[str, Case] = {
    f"{trace}, {policy}": (Load(trace, rate, 300), dataclasses.replace(_EQUAL, policy=policy))
    for trace, rate in (("orca", 40.0), ("fixed:32x32", 40.0), ("fixed:256x256", 6.0))
    for policy in ("orca", "request")
}


def equal_lengths(results: Results) -> Iterator[Row]:
    """Orca's traces: the gain of iteration-level scheduling over request-level batching comes from unequal lengths.

    Output tokens a second in saturation, as a ratio; both batch up to 32 and have memory for all of them. The paper's 36.9x
    is at equal latency and against a system that cannot batch prompts of different lengths: that is not in here.
    """

    def gain(trace: str, found: Outcome) -> float:
        whole_batches = found[f"{trace}, request"].output_tokens_per_second
        return found[f"{trace}, orca"].output_tokens_per_second / whole_batches

    def is_gone(trace: str, found: Outcome) -> bool:
        return abs(gain(trace, found) - 1) < min(0.1, (gain("orca", found) - 1) / 2)

    unequal = functools.partial(gain, "orca")
    yield results.row("unequal lengths", unequal, "above 1", (1.0, math.inf), "x", lambda found: unequal(found) > 1.1)
    for trace in ("fixed:32x32", "fixed:256x256"):
        what, value = f"{trace.removeprefix('fixed:')} each", functools.partial(gain, trace)
        yield results.row(what, value, "about 1", (0.9, 1.1), "x", functools.partial(is_gone, trace))


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """An experiment, and what is read off it. Where rows hang on the step time, `varied` is the length of the runs that
    vary its constants, as a share of the others' (there are many of them); else 0.
    """

    title: str
    cases: Mapping[str, Case]
    read: Callable[[Results], Iterator[Row]]
    varied: float = 0.0

    def rows(self, scale: float = 1.0, watch: Callable[[int, int], None] | None = None) -> list[Row]:
        """Runs it; `watch` is told how many runs are done, of how many."""
        return list(self.read(experiment(self.cases, scale=scale, varied_scale=scale * self.varied, watch=watch)))


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "fig2": Figure(
            "vLLM, figure 2: where the KV memory is",
            {system: (CHAT, setup) for system, setup in SYSTEMS.items()},
            memory_split,
        ),
        "fig12": Figure("vLLM, figure 12a: sustained request rates", RATES, capacity, 0.25),
        "fig13": Figure("vLLM, figure 13: batched requests", BATCHED, batched_requests, 0.25),
        "fig15": Figure("vLLM, figure 15: blocks saved by sharing", {**SAMPLES, **BEAMS}, sharing, 0.1),
        "fig16": Figure(
            "vLLM, figure 16: a prefix that all share", hardware_figures.PREFIXES, hardware_figures.shared_prefix, 0.25
        ),
        "fig18": Figure(
            "vLLM, figure 18: the size of a block", hardware_figures.BLOCK_SIZES, hardware_figures.block_size, 0.5
        ),
        "fig19": Figure(
            "vLLM, figure 19: swapping and recomputing", hardware_figures.WAYS_BACK, hardware_figures.way_back, 0.5
        ),
        "orca": Figure("Orca: equal lengths take the gain away", ITERATIONS, equal_lengths, 0.25),
    }
)


def find_figure(name: str) -> Figure:
    """Raises ConfigError."""
    if name not in FIGURES:
        raise ConfigError(f"figure {name!r} is not known; allowed: {', '.join(FIGURES)}")
    return FIGURES[name]
