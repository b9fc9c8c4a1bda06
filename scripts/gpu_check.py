"""What scripts/gpu_check.sh runs: the Triton kernels on a GPU, judged, inspected and timed; records as JSON.

Needs torch, triton and jinja2. With --dry-run the same steps run without a GPU: kernels are interpreted, binaries are
cross-compiled, and the times (of the interpreter) prove the path, nothing else; the record says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pagegen.build import triton as backend
from pagegen.catalog import variant
from pagegen.check.case import Case
from pagegen.check.compare import check_calls
from pagegen.check.suite import quick_suite
from pagegen.errors import BuildError, PagegenError
from pagegen.kernel import Attend
from pagegen.render import Source, render
from pagegen.resources import gpu_resources
from pagegen.spec import PAGED_OPS, KernelSpec, Op, parse_slug
from pagegen.target import Target, detect_gpu, parse_target
from pagegen.tuning.baselines import SdpaBaselines
from pagegen.tuning.workload import Inputs, Point, Pool

FORMAT = 1
BUDGET = 420.0  # seconds after which no new piece of work begins; the shell ends everything at 480
ROUNDS = 30

# Every dtype, kind of group, block size, width of head and order of K and V; the likeliest first.
CHECKED = (
    "bf16-d128-h32x8-b16-NHD",
    "bf16-d64-h9x3-b16-NHD",
    "fp16-d80-h10x2-b24-HND-lse",
    "fp16-d128-h16x2-b16-HDN8_HDN",
    "fp32-d64-h9x3-b16-NHD-lse",
    "bf16-d96v64-h8x8-b1-HDN",
    "fp16-d8-h3x1-b3-NHD",
    "bf16-d256-h16x2-b32-NHD",
    "fp32-d128-h4x1-b64-HDN4",
    "bf16-d40-h32x1-b1024-HND",
)
TIMED = {
    "bf16-d128-h32x8-b16-NHD": (
        "1x1@1024",
        "1x1@16384",
        "16x1@2048",
        "64x1@4096",
        "256x1@512",
        "1x2048@2048",
        "4x512@4096",
        "32x1@2048+1x512@1024",
    ),
    "bf16-d64-h9x3-b16-NHD": ("1x1@2048", "64x1@1024", "1x1024@1024"),
}
DRY_CHECKED = ("bf16-d40-h5x1-b3-NHD-lse", "fp16-d16-h2x2-b16-HDN8_HDN")
DRY_TIMED = {"fp32-d16-h2x1-b16-NHD": ("2x1@40", "1x8@8")}
DRY_TARGET = "cuda:sm_90"

Load = Callable[[Source], Callable[..., None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Where and how: everything that differs between a GPU and the dry run."""

    target: Target
    device: str
    load: Load
    dry: bool
    begin: float

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.begin

    def cases(self, spec: KernelSpec, op: Op) -> list[Case]:
        """The quick suite on a GPU; on the interpreter its few small cases."""
        cases = [case for case in quick_suite(spec) if case.op is op and case.fault is None]
        return [case for case in cases if case.size < 100][:6] if self.dry else cases


@contextlib.contextmanager
def started(dry: bool) -> Iterator[Run]:
    """Raises PagegenError where there is no GPU of the table."""
    begin = time.monotonic()
    if dry:
        with backend.Interpreter() as worker:
            yield Run(parse_target(DRY_TARGET), "cpu", lambda source: worker.load(*_parts(source)), True, begin)
        return
    target = detect_gpu()
    if target is None:
        raise PagegenError("torch sees no GPU of a known target (`pagegen targets` lists them); --dry-run needs none")
    yield Run(target, "cuda", lambda source: backend.load(*_parts(source)), False, begin)


def _parts(source: Source) -> tuple[str, str, KernelSpec, Op, dict[str, Any]]:
    made_of = source.variant
    return source.text, source.key, made_of.spec, made_of.template.op, made_of.config.to_dict()


def environment(run: Run) -> dict[str, Any]:
    """What the numbers were taken on."""
    device: dict[str, Any] = {"name": "none (dry run)"}
    if not run.dry:
        found = torch.cuda.get_device_properties(0)
        device = {
            "name": found.name,
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
            "l2": found.L2_cache_size,
        }
    return {"python": platform.python_version(), "target": run.target.name, "device": device, **backend.toolchain()}


# --- steps: each yields records ----------------------------------------------------------------------------------


def correctness(run: Run) -> Iterator[dict[str, Any]]:
    """Every op of every spec against the reference."""
    for slug in DRY_CHECKED if run.dry else CHECKED:
        spec = parse_slug(slug)[0]
        for op in PAGED_OPS:
            begin, cases = time.monotonic(), run.cases(spec, op)
            try:
                kernel = run.load(render(variant(op, spec, run.target)))
                failures = [failure.to_dict() for failure in check_calls({op: kernel}, cases, run.device)]
            except (PagegenError, RuntimeError) as error:  # a failing launch spoils the context: what follows fails too
                failures = [{"message": f"{type(error).__name__}: {error}"}]
            seconds = round(time.monotonic() - begin, 2)
            yield {"spec": slug, "op": op.value, "cases": len(cases), "failures": failures, "seconds": seconds}


def resources(run: Run) -> Iterator[dict[str, Any]]:
    """What the default configs' binaries use."""
    for slug in DRY_TIMED if run.dry else TIMED:
        source = render(variant(Op.ATTEND, parse_slug(slug)[0], run.target))
        config = source.variant.config.to_dict()
        try:
            for made in backend.compile_for(source):
                found = gpu_resources(made.target, made.binary, made.assembly, made.num_warps, made.shared_memory)
                yield {"spec": slug, "kernel": made.name, "config": config, **found.to_dict(), "failures": []}
        except BuildError as error:
            yield {"spec": slug, "config": config, "failures": [{"message": str(error)}]}


def timings(run: Run) -> Iterator[dict[str, Any]]:
    """The default config against SDPA's three forms: medians of interleaved rounds, L2 flushed before each call."""
    for slug, names in (DRY_TIMED if run.dry else TIMED).items():
        spec = parse_slug(slug)[0]
        kernel = run.load(render(variant(Op.ATTEND, spec, run.target)))
        points = tuple(map(Point.parse, names))
        pool = Pool.for_points(spec, points, 0 if run.dry else 512 << 20, run.device)
        for point in points:
            yield {"spec": slug, "point": point.name, **_timed(run, kernel, Inputs(pool, point)), "failures": []}


def _timed(run: Run, kernel: Attend, inputs: Inputs) -> dict[str, Any]:
    calls = {"pagegen": inputs.bind(kernel), **SdpaBaselines(inputs).calls()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = _wall_clock if run.dry else _DeviceClock()
    for call in calls.values():
        call()  # compiles
        call()
    order, shuffler = list(calls), random.Random(0)
    for _ in range(3 if run.dry else ROUNDS):
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(clock(calls[name]))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    mine, point = medians["pagegen"], inputs.point
    return {
        "seconds": medians,
        "quartiles": {name: statistics.quantiles(values, n=4)[::2] for name, values in samples.items()},
        "speedup": {name: median / mine for name, median in medians.items() if name != "pagegen"},
        "kv_gb_per_s": point.kv_bytes(inputs.spec) / mine / 1e9,
        "tflop_per_s": point.flops(inputs.spec) / mine / 1e12,
    }


class _DeviceClock:
    """Seconds of a call by CUDA events, with L2 flushed and the host a good way ahead of the device."""

    def __init__(self) -> None:
        size = max(256 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flush.zero_()
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # a millisecond, in which the host enqueues the rest
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _wall_clock(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


STEPS = {"correctness": correctness, "resources": resources, "timings": timings}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 all right, 1 something failed (it is in the record), 2 the check cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: interpret and cross-compile")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with started(options.dry_run) as run:
            return _report(run, options.out / "gpu_check.json")
    except PagegenError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


def _report(run: Run, path: Path) -> int:
    record: dict[str, Any] = {"format": FORMAT, "dry_run": run.dry, "environment": environment(run), "complete": False}
    for name, step in STEPS.items():
        rows: list[dict[str, Any]] = []
        record[name] = rows
        for row in step(run):
            rows.append(row)
            print(f"{run.seconds:5.0f} s  {name}: {_line(row)}", flush=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
            if run.seconds > BUDGET:
                break
    record["complete"] = run.seconds <= BUDGET
    record["passed"] = record["complete"] and not any(row["failures"] for name in STEPS for row in record[name])
    record["seconds"] = round(run.seconds, 1)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'passed' if record['passed'] else 'FAILED'} in {run.seconds:.0f} s: {path}")
    return 0 if record["passed"] else 1


def _line(row: dict[str, Any]) -> str:
    what = f"{row['spec']} {row.get('op') or row.get('kernel') or row.get('point', '')}"
    if row["failures"]:
        return f"{what}: {len(row['failures'])} FAILED, first: {row['failures'][0]['message']}"
    if "cases" in row:
        return f"{what}: {row['cases']} cases right"
    if "registers" in row:
        return f"{what}: {row['registers']} registers, {row['spills']} spills, {row['shared_memory']} B shared"
    others = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["speedup"].items())
    return f"{what}: {row['seconds']['pagegen'] * 1e6:.1f} us, {row['kv_gb_per_s']:.0f} GB/s of KV, {others}"


if __name__ == "__main__":
    sys.exit(main())
