"""Figures of the Orca and vLLM papers out of this scheduler and these memory policies, beside what is printed.

Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), OPT-13B on one A100-40GB; Yu et al. 2022
(https://www.usenix.org/conference/osdi22/presentation/yu). Every number is a mean over SEEDS.

`reproduced` rows depend on lengths and allocators alone: in saturation the step time cancels out. `modelled` ones hang on
`StepCosts` as well; of those only the papers' orderings are held to account, and the printed band is shown beside.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pagegen.errors import ConfigError
from pagegen.runtime.simulate import simulate
from pagegen.runtime.simulation.costs import StepCosts
from pagegen.runtime.simulation.meter import Figures
from pagegen.runtime.simulation.setup import Setup
from pagegen.runtime.simulation.traces import synthesize

SEEDS = (0, 1, 2)
NUM_SLOTS = 15_728  # 12 GiB of 800 KiB each

# Orca as section 6.1 models it reserves slots, not blocks: its pool is one of blocks of a single token.
SYSTEMS: Mapping[str, Setup] = MappingProxyType(
    {
        "Orca (Max)": Setup("orca", "orca-max", num_blocks=NUM_SLOTS, block_size=1),
        "Orca (Pow2)": Setup("orca", "orca-pow2", num_blocks=NUM_SLOTS, block_size=1),
        "Orca (Oracle)": Setup("orca", "orca-oracle", num_blocks=NUM_SLOTS, block_size=1),
        "vLLM": Setup("vllm-paper", "paged"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure. `seeds` has ours seed by seed, `band` what it may be around the printed one.

    `ok` says whether `ours` is in the band; where `modelled`, whether the ordering of the paper holds.
    """

    what: str
    ours: float
    paper: str
    band: tuple[float, float]
    in_band: bool
    ok: bool
    kind: str
    unit: str
    seeds: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _row(
    what: str,
    seeds: Sequence[float],
    paper: float | str,
    band: tuple[float, float],
    unit: str,
    *,
    holds: Callable[[float], bool] | None = None,
) -> Row:
    """A reproduced row, or a modelled one whose ordering `holds` or not."""
    ours = statistics.fmean(seeds)
    inside = band[0] <= ours <= band[1]
    ok = inside if holds is None else holds(ours)
    kind = "reproduced" if holds is None else "modelled"
    return Row(what, ours, f"{paper}", band, inside, ok, kind, unit, tuple(seeds))


def _around(value: float, *, points: float = 0.0, share: float = 0.0) -> tuple[float, float]:
    reach = points + share * value
    return (value - reach, value + reach)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A trace and for how long it is watched; `scale` shortens both, for a look or a test."""

    trace: str
    rate: float
    seconds: float
    n: int = 1

    def run(self, setup: Setup, seed: int, scale: float, costs: StepCosts | None = None) -> Figures:
        """Averages leave out the first third, in which the queue fills."""
        seconds = self.seconds * scale
        trace = synthesize(
            self.trace,
            rate=self.rate,
            num_requests=math.ceil(1.2 * self.rate * seconds) + 10,
            seed=seed,
            max_model_len=setup.max_model_len,
            n=self.n,
        )
        return simulate(trace, setup, costs, warmup=seconds / 3, horizon=seconds)


Tick = Callable[[], None]


def _each_seed(load: Load, setup: Setup, scale: float, tick: Tick, costs: StepCosts | None = None) -> list[Figures]:
    runs = []
    for seed in SEEDS:
        runs.append(load.run(setup, seed, scale, costs))
        tick()
    return runs


# --- vLLM ------------------------------------------------------------------------------------------------------------

CHAT, INSTRUCTIONS = Load("sharegpt", 2.0, 1500), Load("alpaca", 30.0, 240)


def memory_split(scale: float, tick: Tick) -> Iterator[Row]:
    """Figure 2: what the KV memory holds, ShareGPT at 2 requests a second, in percent.

    Of the pool; for vLLM, of the blocks that it has given. 'External' has all that is left over, free slots too.
    """
    printed: Mapping[str, tuple[float, ...]] = {
        "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
        "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
        "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    }
    for system, shares in printed.items():
        runs = _each_seed(CHAT, SYSTEMS[system], scale, tick)
        splits = [dict(run.split, external=run.split["external"] + run.split["free"]) for run in runs]
        for part, share in zip(("token", "reserved", "internal", "external"), shares, strict=True):
            seeds = [100 * split[part] for split in splits]
            yield _row(f"{system}, {part}", seeds, share, _around(share, points=2.5), "%")
    runs = _each_seed(CHAT, SYSTEMS["vLLM"], scale, tick)
    yield _row("vLLM, token", [100 * run.token_share for run in runs], 96.3, _around(96.3, points=2.5), "%")


def batched_requests(scale: float, tick: Tick) -> Iterator[Row]:
    """Figure 13: requests that run together, ShareGPT at 2 and Alpaca at 30 requests a second.

    Of vLLM's own row, which is not saturated and so hangs on the step time, only that it has the most is required.
    """
    for load, printed in ((CHAT, (7.00, 9.81, 13.62, 30.42)), (INSTRUCTIONS, (7.00, 43.24, 72.75, 132.44))):
        most = 0.0
        for (system, setup), paper in zip(SYSTEMS.items(), printed, strict=True):
            seeds = [run.num_running for run in _each_seed(load, setup, scale, tick)]
            holds = functools.partial(float.__lt__, most) if system == "vLLM" else None
            yield _row(f"{load.trace}, {system}", seeds, paper, _around(paper, share=0.1), "reqs", holds=holds)
            most = max(most, statistics.fmean(seeds))


def capacity(scale: float, tick: Tick) -> Iterator[Row]:
    """Figure 12a: the request rate that is sustained, ShareGPT, as a ratio of vLLM's to the others'.

    What ends in a second while more come than can be served: beyond that rate the queue, and with it the latency,
    grows without end. FasterTransformer is request-level batching with room reserved for the longest output.
    """
    load = Load("sharegpt", 4.0, 900)
    whole_batch = 8 * 2048  # its prompts are computed in one iteration, and no other is taken in later
    faster_transformer = dataclasses.replace(
        SYSTEMS["Orca (Max)"], policy="request", max_num_batched_tokens=whole_batch
    )
    systems = {**SYSTEMS, "FasterTransformer": faster_transformer}
    rates = {
        name: [run.requests_per_second for run in _each_seed(load, setup, scale, tick)]
        for name, setup in systems.items()
    }
    for name, paper, band in (
        ("Orca (Oracle)", "1.7 to 2.7", (1.7, 2.7)),
        ("Orca (Max)", "2.7 to 8", (2.7, 8.0)),
        ("FasterTransformer", "up to 22", (2.7, 22.0)),
    ):
        seeds = [ours / theirs for ours, theirs in zip(rates["vLLM"], rates[name], strict=True)]
        yield _row(f"vLLM over {name}", seeds, paper, band, "x", holds=functools.partial(float.__lt__, 1.0))
    order = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")
    for worse, better in itertools.pairwise(order):
        seeds = [more / less for more, less in zip(rates[better], rates[worse], strict=True)]
        yield _row(
            f"{better} over {worse}", seeds, "above 1", (1.0, math.inf), "x", holds=functools.partial(float.__lt__, 1.0)
        )


def sharing(scale: float, tick: Tick) -> Iterator[Row]:
    """Figure 15a: blocks that parallel sampling saves by sharing the prompt, of those needed without, in percent."""
    for n, paper in ((2, 6.09), (4, 8.53), (6, 9.79)):
        runs = _each_seed(Load("alpaca", 3.0, 240, n), SYSTEMS["vLLM"], scale, tick)
        seeds = [100 * run.saved_share for run in runs]
        yield _row(f"alpaca, {n} samples", seeds, paper, _around(paper, points=1.5), "%")
    for n, rate in ((2, 0.5), (4, 0.25), (6, 0.15)):
        runs = _each_seed(Load("sharegpt", rate, 1500, n), SYSTEMS["vLLM"], scale, tick)
        seeds = [100 * run.saved_share for run in runs]
        yield _row(f"sharegpt, {n} samples", seeds, "16.2 to 30.5", (16.2 - 1.5, 30.5 + 1.5), "%")


# --- Orca ------------------------------------------------------------------------------------------------------------


def equal_lengths(scale: float, tick: Tick) -> Iterator[Row]:
    """Orca's traces: the gain of iteration-level scheduling over request-level batching comes from unequal lengths.

    Requests a second in saturation, as a ratio; both batch up to 32 and have memory for all of them. The paper's 36.9x
    is at equal latency and against a system that cannot batch prompts of different lengths: that is not in here.
    """
    ratios = dict[str, list[float]]()
    setup = Setup("orca", "reserve-on-paged", max_num_seqs=32, num_blocks=32 * 40, max_num_batched_tokens=32 * 512)
    for trace in ("orca", "fixed:32x32", "fixed:256x256"):
        load = Load(trace, 40.0 if trace != "fixed:256x256" else 6.0, 300)
        iterations = _each_seed(load, setup, scale, tick)
        whole = _each_seed(load, dataclasses.replace(setup, policy="request"), scale, tick)
        ratios[trace] = [a.requests_per_second / b.requests_per_second for a, b in zip(iterations, whole, strict=True)]
    gain = statistics.fmean(ratios["orca"])
    yield _row(
        "unequal lengths", ratios["orca"], "above 1", (1.0, math.inf), "x", holds=functools.partial(float.__lt__, 1.1)
    )
    for trace in ("fixed:32x32", "fixed:256x256"):
        yield _row(
            f"{trace.removeprefix('fixed:')} each",
            ratios[trace],
            "about 1",
            (0.9, 1.1),
            "x",
            holds=lambda ours: abs(ours - 1) < min(0.1, (gain - 1) / 2),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """`num_runs` is how often `rows` calls its tick."""

    title: str
    rows: Callable[[float, Tick], Iterator[Row]]
    num_runs: int


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "fig2": Figure("vLLM, figure 2: where the KV memory is", memory_split, 12),
        "fig12": Figure("vLLM, figure 12a: sustained request rates", capacity, 15),
        "fig13": Figure("vLLM, figure 13: batched requests", batched_requests, 24),
        "fig15": Figure("vLLM, figure 15a: blocks saved by sharing", sharing, 18),
        "orca": Figure("Orca: equal lengths take the gain away", equal_lengths, 18),
    }
)


def find_figure(name: str) -> Figure:
    """Raises ConfigError."""
    if name not in FIGURES:
        raise ConfigError(f"figure {name!r} is not known; allowed: {', '.join(FIGURES)}")
    return FIGURES[name]
