"""What attention_cpu.py makes of its records: a table with a summary, and the roofline with a dot for each batch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagegen.paths import write_atomic
from pagegen.spec import DType
from pagegen.tuning.machine import Disturbance
from pagegen.tuning.measure import Interval, geomean_of_medians
from pagegen.tuning.report import roofline_svg
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.workload import RUN, Order

RESIDENT_BYTES = 200 * 10**6  # from here on a batch lies in memory, whatever the caches are
MM_SIZE = 2048  # of the matrix product that prefill is compared with
OURS = "pagegen"  # the default
SDPA = ("sdpa_gqa", "sdpa_folded")  # on contiguous memory
OF_BLOCKS = {"blocks": "read of its blocks", "loop": "loop over its blocks"}  # contenders that older records may lack
ORDERS = {Order.RUNS: f"in runs of {RUN} blocks", Order.ORDERED: "in the order of memory"}  # the default so, which they may lack, too


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a record says."""

    record: dict[str, Any]

    def seconds(self, name: str) -> float:
        return float(self.record["contenders"][name]["seconds"]["median"])

    def rounds(self, name: str) -> list[float]:
        return list(self.record["contenders"][name]["rounds"])

    def _fastest_of(self, *kinds: str) -> str | None:
        """Of the contenders with these names, but for a page size at their end."""
        return min((name for name in self.record["contenders"] if name.rstrip("0123456789") in kinds), key=self.seconds, default=None)

    @property
    def peer(self) -> str | None:
        """The fastest peer."""
        return self._fastest_of(*SDPA, "vllm_")

    @property
    def vllm(self) -> str | None:
        """The fastest of vLLM's."""
        return self._fastest_of("vllm_")

    @property
    def ordered_peer(self) -> str | None:
        """The fastest peer that reads in the order of memory, where ours did so, too."""
        return self._fastest_of(*SDPA, "vllm_ordered_") if Order.ORDERED in self.record["contenders"] else None

    def rate_over_mm(self) -> float:
        """Operations a second over those of torch.mm."""
        return float(self.record["flops"]) / self.seconds(OURS) * self.seconds("torch_mm") / (2 * MM_SIZE**3)

    def ratio(self, name: str, over: str) -> Interval:
        """`name`'s time over that of `over`, round by round."""
        ratios = [a / b for a, b in zip(self.rounds(name), self.rounds(over), strict=True)]
        return geomean_of_medians([ratios], [1.0])

    @property
    def fastest(self) -> str:
        """The default in the layout that is the fastest of those measured."""
        return min((name for name in self.record["contenders"] if name == OURS or name.startswith("layout=")), key=self.seconds)

    @property
    def in_memory(self) -> bool:
        """Whether the batch is larger than what any cache here is sure to hold."""
        return int(self.record["kv_bytes"]) >= RESIDENT_BYTES

    @property
    def configs(self) -> list[str]:
        """The contenders with knobs changed."""
        return [name for name in self.record["contenders"] if "=" in name]

    @property
    def kv_dtype(self) -> str:
        """The element type of the cache."""
        return str(self.record["spec"].get("kv_dtype") or self.record["spec"]["dtype"])

    def floor(self, roofline: Roofline) -> float:
        """Seconds that no kernel can beat: the read measured beside it, or the arithmetic at the measured peak."""
        peak = roofline.peak(DType(self.record["spec"]["dtype"]), self.record["threads"])
        return max(self.seconds("read"), float(self.record["flops"]) / peak)


def line_of(result: Result, roofline: Roofline) -> list[str]:
    """Cells of the table."""
    record, mine, floor = result.record, result.seconds(OURS), result.floor(roofline)
    cells = [
        f"{record['name']}",
        f"{record['kv_bytes'] / 1e6:.1f}",
        f"{mine * 1e6:.0f}",
        f"{record['kv_bytes'] / mine / 1e9:.1f}",
        f"{record['flops'] / mine / 1e9:.0f}",
        _interval(result.ratio("read", OURS)),
        *(_interval(result.ratio("read", order)) if order in record["contenders"] else "" for order in ORDERS),
        *(_interval(result.ratio(name, OURS)) if name in record["contenders"] else "" for name in OF_BLOCKS),
        f"{floor / mine:.2f}",
        f"{(mine - floor) * 1e6:.0f}",
        f"{result.fastest.removeprefix('layout=')} {_interval(result.ratio('read', result.fastest))}" if result.fastest != OURS else "",
        _interval(result.ratio(OURS, "tuned")) if "tuned" in record["contenders"] else "",
        result.peer or "",
    ]
    return [*cells, *(_interval(result.ratio(peer, OURS)) if peer else "" for peer in (result.peer, result.vllm))]


COLUMNS = (
    "batch", "KV MB", "us", "GB/s", "GFLOP/s", "share of read", *ORDERS.values(), "of blocks read", "of the loop", "share of floor",
    "us above it", "faster layout, its share of read", "tuned gain", "best peer", "its time over ours", "vLLM's time over ours",
)  # fmt: skip


def _interval(found: Interval) -> str:
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def report(folder: Path, roofline: Roofline) -> Path:
    """Writes table.md and roofline.svg from the records of a folder."""
    results = [Result(json.loads(path.read_text())) for path in sorted(folder.glob("*-*.json"))]
    if not results:
        raise SystemExit(f"{folder} has no records; measure first, without --report")
    cells = [line_of(result, roofline) for result in results]
    filled = [any(column) for column in zip(*cells, strict=True)]  # what no record has gets no column
    head, *rows = (list(itertools.compress(row, filled)) for row in (COLUMNS, *cells))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    for title, chosen, ours in _summaries(results):
        if chosen:
            lines += ["", f"{title}: best peer's time over ours {_geomean(chosen, lambda each: each.peer, ours)}."]
    if prefill := [result for result in results if result.record["phase"] == "prefill"]:
        rates = [result.rate_over_mm() for result in prefill]
        lines += ["", f"prefill: {min(rates):.2f} to {max(rates):.2f} of the rate of torch.mm."]
    if with_vllm := [result for result in prefill if result.vllm]:
        lines += ["", f"prefill: vLLM's time over ours {_geomean(with_vllm, lambda each: each.vllm)}."]
    for title, chosen in _by_kv_dtype(results):
        lines += ["", f"{title}: share of the plain read {_geomean(chosen, lambda _: 'read')}."]
        if any(result.fastest != OURS for result in chosen):
            lines += ["", f"{title}: share of the plain read, each in its fastest layout, {_geomean(chosen, lambda _: 'read', _fastest)}."]
        for order, what in ORDERS.items():
            if timed := [result for result in chosen if order in result.record["contenders"]]:
                lines += ["", f"{title}: share of the plain read {what} {_geomean(timed, lambda _: 'read', lambda _, order=order: order)}."]
        if with_peer := [result for result in chosen if result.ordered_peer]:
            lines += ["", f"{title}: best peer's time over ours, both in the order of memory, {_geomean(with_peer, _ordered_peer, _ordered)}, {_least(with_peer)}."]
        for name, what in OF_BLOCKS.items():
            if read := [result for result in chosen if name in result.record["contenders"]]:
                lines += ["", f"{title}: share of the {what} {_geomean(read, lambda _, name=name: name)}."]
        for config in sorted({name for result in chosen for name in result.configs}):
            lines += ["", f"{title}: time with {config} {_geomean([r for r in chosen if config in r.configs], lambda _, name=config: name)}."]
    found = [Disturbance(**result.record["disturbance"]) for result in results]
    others, waited, drift = (statistics.median(getattr(each, name) for each in found) for name in ("others", "waited", "drift"))
    disturbed = sum(bool(each.reasons) for each in found)
    typical = f"other processes used {others:.0%} of the cores, threads waited for one {waited:.0%} of the time, and the clock drifted by {drift:.0%}"
    lines += ["", f"The machine was disturbed in {disturbed} of {len(found)} batches. In the median batch {typical}."]
    write_atomic(folder / "table.md", "\n".join(lines) + "\n")
    threads = max(roofline.fp32)
    dots = [
        (result.record["phase"], r["flops"] / r["kv_bytes"], r["flops"] / result.seconds(OURS), r["name"])
        for result in results
        for r in [result.record]
    ]
    write_atomic(folder / "roofline.svg", roofline_svg(roofline, threads, dots))
    return folder / "table.md"


def _summaries(results: list[Result]) -> Iterator[tuple[str, list[Result], Callable[[Result], str]]]:
    """Titles, batches, and which of our contenders is meant."""
    with_peer = [result for result in results if result.peer]
    for phase, dtype in itertools.product(("decode", "prefill"), ("bf16", "fp32")):
        chosen = [r for r in with_peer if r.record["phase"] == phase and r.record["spec"]["dtype"] == dtype]
        yield f"{phase} {dtype}", chosen, _default
        if phase == "decode":
            resident = [r for r in chosen if r.in_memory]
            yield f"{phase} {dtype}, KV of 200 MB and more", resident, _default
            if any(r.fastest != OURS for r in resident):
                yield f"{phase} {dtype}, KV of 200 MB and more, each in its fastest layout", resident, _fastest


def _default(_: Result) -> str:
    return OURS


def _fastest(result: Result) -> str:
    return result.fastest


def _ordered(_: Result) -> str:
    return Order.ORDERED


def _ordered_peer(result: Result) -> str | None:
    return result.ordered_peer


def _least(results: list[Result]) -> str:
    """The least time of the best peer over ours, in the order of memory."""
    ratios = {result.record["name"]: result.ratio(result.ordered_peer or "", Order.ORDERED) for result in results}
    name = min(ratios, key=lambda name: ratios[name].median)
    return f"at least {_interval(ratios[name])} ({name})"


def _geomean(results: list[Result], name_of: Callable[[Result], str | None], ours: Callable[[Result], str] = _default) -> str:
    """The time of the contender that `name_of` answers for each, over that of ours."""
    groups = [[b / a for a, b in zip(r.rounds(ours(r)), r.rounds(name_of(r) or ""), strict=True)] for r in results]
    found = _interval(geomean_of_medians(groups, [1.0] * len(groups)))
    return f"{found} (geometric mean of {len(groups)} batches)" if len(groups) > 1 else f"{found} (one batch)"


def _by_kv_dtype(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Decode batches by the type of their KV, with a title: all, and those that surely lie in memory."""
    decode = [result for result in results if result.record["phase"] == "decode"]
    for dtype in sorted({result.kv_dtype for result in decode}):
        chosen = [result for result in decode if result.kv_dtype == dtype]
        yield f"decode, {dtype} KV", chosen
        if resident := [result for result in chosen if result.in_memory]:
            yield f"decode, {dtype} KV of 200 MB and more", resident
