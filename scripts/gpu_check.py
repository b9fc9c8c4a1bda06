"""What scripts/gpu_check.sh runs: the Triton kernels on a GPU: judged, inspected, timed beside others, replayed as a CUDA
graph, tuned from a shortlist; records as JSON.

Needs torch, triton and jinja2; tuning also optuna and PyYAML. Each part has its share of the time and runs in a process of
its own, which is started again behind whatever took it down: what one kernel does to the device is no other's fault. With
--dry-run the same parts run without a GPU: kernels are interpreted, binaries are cross-compiled, and the times (of the
interpreter) prove the path, nothing else; the record says so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pagegen.build import triton as backend
from pagegen.catalog import variant
from pagegen.check.case import Case
from pagegen.check.compare import check_calls
from pagegen.check.suite import quick_suite
from pagegen.errors import PagegenError
from pagegen.paths import write_atomic
from pagegen.render import Source, render
from pagegen.resources import gpu_resources
from pagegen.spec import PAGED_OPS, KernelSpec, Op, parse_slug
from pagegen.target import Target, detect_gpu, parse_target
from pagegen.tuning.baselines import SdpaBaselines
from pagegen.tuning.workload import Inputs, Point, Pool

sys.path.insert(0, str(Path(__file__).parent))
from gpu_peers import PEERS

FORMAT = 2
GRACE = 15.0  # seconds beyond its share that a part's last piece of work gets
ROUNDS = 30
CORES = os.cpu_count() or 1
LANES = 4  # processes that judge kernels side by side: most of it is compiling
LAYERS = 8  # of the decode step that is replayed as a graph
CLOSE = 0.05  # a peer's numbers differ from ours by less
DONE, NO_TIME, AGAIN = 0, 3, 4  # exit status of a part's process: all, up to here, or: start again behind this

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
PEER_TIMED = ("1x1@16384", "64x1@4096", "256x1@512", "1x2048@2048")  # FlexAttention compiles for each
GRAPHED = ("1x1@1024", "16x1@2048", "64x1@4096")
TUNED = ("decode-bf16-d128-h32x8-b16-NHD", "decode-bf16-d64-h9x3-b16-NHD")
CANDIDATES, TRIALS = 64, 20  # compiled for the shortlist, and measured
DRY_CHECKED = ("bf16-d40-h5x1-b3-NHD-lse", "fp16-d16-h2x2-b16-HDN8_HDN")
DRY_TIMED = {"fp32-d16-h2x1-b16-NHD": ("2x1@40", "1x8@8")}
DRY_TUNED = ("decode-fp32-d16-h2x1-b16-NHD",)
DRY_TARGET = "cuda:sm_90"

Load = Callable[[Source], Callable[..., None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Where and how a part runs: everything that differs between a GPU and the dry run."""

    target: Target
    device: str
    load: Load
    dry: bool
    out: Path
    end: float  # of the part, by time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of the part's share."""
        return self.end - time.monotonic()

    def cases(self, spec: KernelSpec, op: Op) -> list[Case]:
        """The quick suite on a GPU; on the interpreter its few small cases."""
        cases = [case for case in quick_suite(spec) if case.op is op and case.fault is None]
        return [case for case in cases if case.size < 100][:6] if self.dry else cases

    def inputs(self, spec: KernelSpec, name: str) -> Inputs:
        """The tensors of a batch, in a pool twice as large as any L2."""
        point = Point.parse(name)
        return Inputs(Pool.for_points(spec, (point,), 0 if self.dry else 512 << 20, self.device), point)


def target_here(dry: bool) -> Target:
    """The GPU's row of the table, or the one that a dry run compiles for. Raises PagegenError where there is none."""
    found = parse_target(DRY_TARGET) if dry else detect_gpu()
    if found is None:
        raise PagegenError("torch sees no GPU of a known target (`pagegen targets` lists them); --dry-run needs none")
    return found


@contextlib.contextmanager
def started(dry: bool, out: Path, seconds: float) -> Iterator[Run]:
    """For a part of so many seconds."""
    end, target = time.monotonic() + seconds, target_here(dry)
    if dry:
        with backend.Interpreter() as worker:
            yield Run(target, "cpu", lambda source: worker.load(*_parts(source)), True, out, end)
    else:
        yield Run(target, "cuda", lambda source: backend.load(*_parts(source)), False, out, end)


def _parts(source: Source) -> tuple[str, str, KernelSpec, Op, dict[str, Any]]:
    made_of = source.variant
    return source.text, source.key, made_of.spec, made_of.template.op, made_of.config.to_dict()


def environment(target: Target, dry: bool) -> dict[str, Any]:
    """What the numbers were taken on."""
    device: dict[str, Any] = {"name": "none (dry run)"}
    if not dry:
        found = torch.cuda.get_device_properties(0)
        device = {
            "name": found.name,
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
            "l2": found.L2_cache_size,
        }
    return {"python": platform.python_version(), "target": target.name, "device": device, **backend.toolchain()}


# --- what parts do: each piece of work yields records ----------------------------------------------------------------


def correctness(run: Run, slug: str, word: str) -> Iterator[dict[str, Any]]:
    """An op of a spec against the reference."""
    spec, op, begin = parse_slug(slug)[0], Op(word), time.monotonic()
    cases = run.cases(spec, op)
    kernel = run.load(render(variant(op, spec, run.target)))
    failures = [failure.to_dict() for failure in check_calls({op: kernel}, cases, run.device)]
    yield {"op": word, "cases": len(cases), "failures": failures, "seconds": round(time.monotonic() - begin, 2)}


def resources(run: Run, slug: str) -> Iterator[dict[str, Any]]:
    """What the default config's binaries use."""
    source = render(variant(Op.ATTEND, parse_slug(slug)[0], run.target))
    for made in backend.compile_for(source):
        found = gpu_resources(made.target, made.binary, made.assembly, made.num_warps, made.shared_memory)
        yield {"kernel": made.name, "config": source.variant.config.to_dict(), **found.to_dict(), "failures": []}


def timings(run: Run, slug: str, name: str) -> Iterator[dict[str, Any]]:
    """The default config against SDPA's three forms: medians of interleaved rounds, L2 flushed before each call."""
    spec = parse_slug(slug)[0]
    inputs = run.inputs(spec, name)
    calls = {"pagegen": inputs.bind(run.load(render(variant(Op.ATTEND, spec, run.target)))), **SdpaBaselines(inputs).calls()}
    yield {"point": name, **_timed(run, calls, inputs), "failures": []}


def peers(run: Run, slug: str, name: str) -> Iterator[dict[str, Any]]:
    """The same against FlexAttention, FlashInfer and vLLM: as far as they are here, take the batch, and are right."""
    spec = parse_slug(slug)[0]
    inputs = run.inputs(spec, name)
    kernel = run.load(render(variant(Op.ATTEND, spec, run.target)))
    calls = {"pagegen": inputs.bind(kernel)}
    inputs.run(kernel, inputs.block_tables[0])
    ours, absent = inputs.out.clone(), dict[str, str]()
    for peer, made in PEERS.items():
        try:
            call = made(inputs)
            inputs.out.fill_(float("nan"))
            call()
            apart = float((inputs.out - ours).abs().max())
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            absent[peer] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        if apart < CLOSE:
            calls[peer] = call
        else:
            absent[peer] = f"its numbers differ from ours by {apart:.3g}"
    yield {"point": name, **_timed(run, calls, inputs), "absent": absent, "failures": []}


def graphs(run: Run, slug: str, name: str) -> Iterator[dict[str, Any]]:
    """A decode step of LAYERS layers, write_kv and attend each, captured as a CUDA graph: replayed on other values it must
    give the very bits of the calls. Without a GPU the calls stand in for the graph."""
    spec = parse_slug(slug)[0]
    inputs = run.inputs(spec, name)
    attend, write_kv = (run.load(render(variant(op, spec, run.target))) for op in (Op.ATTEND, Op.WRITE_KV))
    pool, table, device = inputs.pool, inputs.block_tables[0], inputs.q.device
    layers = 2 if run.dry else LAYERS
    last = inputs.context_lens.long() - 1
    blocks = table.long().gather(1, (last // spec.block_size)[:, None])[:, 0]
    slots = blocks * spec.block_size + last % spec.block_size
    k, v = (torch.randn(len(slots), spec.kv_heads, dim, device=device).to(inputs.q.dtype) for dim in (spec.head_dim, spec.dim_v))

    def step() -> None:
        for _ in range(layers):
            write_kv(k, v, pool.k_cache, pool.v_cache, slots)
            inputs.run(attend, table)

    replay = step if run.dry else _captured(step)
    for tensor in (inputs.q, k, v):
        tensor.copy_(torch.randn(tensor.shape, device=device))
    inputs.out.fill_(float("nan"))
    replay()
    replayed = inputs.out.clone()
    step()
    same = torch.equal(replayed, inputs.out)
    seconds = {word: _host_time(call, 3 if run.dry else ROUNDS, device) for word, call in (("calls", step), ("replay", replay))}
    failures = [] if same else [{"message": "the replayed step gives other numbers than its calls"}]
    yield {"point": name, "layers": layers, "stand_in": run.dry, "step_seconds": seconds, "failures": failures}


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()  # compiles, and asks for memory
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _host_time(call: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Median seconds until a call and what it launched has ended."""
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def tuning(run: Run, slug: str) -> Iterator[dict[str, Any]]:
    """A shortlist by the static model, then `pagegen tune --shortlist` on it. In a dry run, which has nothing to tune on,
    its configs are judged and timed by the interpreter."""
    from pagegen.tuning.job import tune
    from pagegen.tuning.shortlist import Shortlist
    from pagegen.tuning.static import tune_static
    from pagegen.tuning.workloads import select_phases

    (spec, phase), folder = parse_slug(slug), run.out / "tuning" / slug
    selection = select_phases(None, spec, phase, run.target)
    options = {"trials": 2, "workers": 1} if run.dry else {"trials": CANDIDATES, "workers": CORES}
    judged = tune_static(spec, run.target, selection, folder / "static", budget=run.left / 3, **options)
    (found,) = judged["phases"].values()
    path = Path(judged["shortlist"])
    yield {"shortlist": str(path), "candidates": judged["candidates"], "pruned": found["pruned"], "seconds": judged["seconds"], "failures": []}
    if not run.dry:
        document = tune(
            spec, target=run.target.name, phase=phase, trials=TRIALS, budget=max(10.0, run.left - 20), shortlist=path,
            warm_start=False, out=folder, say=lambda line: print(f"  {line}", flush=True),
        ).document  # fmt: skip
        kept = ("winner", "counts", "trials", "noise", "stopped", "package", "report")
        yield {**{name: document[name] for name in kept}, "failures": []}
        return
    (configs,) = Shortlist.read(path).configs_for(spec, run.target).values()
    made_of = variant(Op.ATTEND, spec, run.target)
    (name, *_), cases = DRY_TIMED[spec.slug], run.cases(spec, Op.ATTEND)
    inputs = run.inputs(spec, name)
    for config in configs:
        kernels = [run.load(render(dataclasses.replace(made_of, config=each))) for each in (config, made_of.config)]
        failures = [failure.to_dict() for failure in check_calls({Op.ATTEND: kernels[0]}, cases, run.device)]
        calls = {"pagegen": inputs.bind(kernels[0]), "default": inputs.bind(kernels[1])}
        yield {"config": config.to_dict(), "point": name, **_timed(run, calls, inputs), "failures": failures}


def _timed(run: Run, calls: Mapping[str, Callable[[], None]], inputs: Inputs) -> dict[str, Any]:
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


# --- the parts, and one clock for all --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """`share` is in seconds; what a part leaves of it is the next ones'. A piece of work is given to `work` as words; what is
    not timed may go in several lanes.
    """

    share: float
    work: Callable[..., Iterator[dict[str, Any]]]
    pieces: Sequence[tuple[str, ...]]
    dry: Sequence[tuple[str, ...]]
    lanes: int = 1


def _batches(timed: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(slug, name) for slug, names in timed.items() for name in names]


def _ops(slugs: Sequence[str]) -> list[tuple[str, str]]:
    return [(slug, op.value) for slug in slugs for op in PAGED_OPS]


FIRST = CHECKED[0]
PARTS = {
    "correctness": Part(150, correctness, _ops(CHECKED), _ops(DRY_CHECKED), LANES),
    "resources": Part(30, resources, [(s,) for s in TIMED], [(s,) for s in DRY_TIMED], LANES),
    "timings": Part(80, timings, _batches(TIMED), _batches(DRY_TIMED)),
    "peers": Part(80, peers, [(FIRST, name) for name in PEER_TIMED], _batches(DRY_TIMED)[:1]),
    "graphs": Part(40, graphs, [(FIRST, name) for name in GRAPHED], _batches(DRY_TIMED)[:1]),
    "tuning": Part(130, tuning, [(s,) for s in TUNED], [(s,) for s in DRY_TUNED]),
}  # 510 s; scripts/gpu_check.sh ends everything at 540


def serve(name: str, out: Path, dry: bool, first: int, step: int, seconds: float) -> int:
    """A part's process: every `step`th piece of work from number `first` on, a line of JSON a record; the exit status says
    how it ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a kernel that hangs must not outlive the check
    part = PARTS[name]
    pieces = part.dry if dry else part.pieces
    with started(dry, out, seconds) as run, _lines_of(out, name, first % step).open("a") as file:
        for number in range(first, len(pieces), step):
            if run.left <= 0:
                return NO_TIME
            words = pieces[number]
            _note(file, {"piece": number})
            try:
                for row in part.work(run, *words):
                    _note(file, {"piece": number, "row": {"spec": words[0], **row}})
                    print(f"  {name}: {_line({'spec': words[0], **row})}", flush=True)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded, and the others are tried
                row = {"spec": " ".join(words), "failures": [{"message": f"{type(error).__name__}: {error}"}]}
                _note(file, {"piece": number, "row": row})
                print(f"  {name}: {_line(row)}", flush=True)
                if not isinstance(error, PagegenError):  # the device may be of no use to this process any more
                    return AGAIN
    return DONE


def _lines_of(out: Path, name: str, lane: int) -> Path:
    return out / f"{name}.{lane}.jsonl"


def _note(file: Any, value: dict[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


class Check:
    """The record, and the clock: parts one after the other, each until its share and what was left before has passed."""

    def __init__(self, out: Path, dry: bool) -> None:
        self.out, self.dry, self.begin = out, dry, time.monotonic()
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "dry_run": dry,
            "environment": environment(target_here(dry), dry),
            "complete": False,
            "parts": {},
        }
        self._lost: dict[str, dict[int, str]] = {name: {} for name in PARTS}  # pieces that took their process down, and how
        self._kept: dict[str, tuple[Any, bool]] = {}  # what of each part is in the file
        self._lock = threading.Lock()  # lanes are threads

    def run(self) -> bool:
        """Whether every part came to its end and nothing failed."""
        end = self.begin
        for name, part in PARTS.items():
            end += part.share
            for old in self.out.glob(f"{name}.*.jsonl"):
                old.unlink()
            begin, lanes = time.monotonic(), max(1, min(part.lanes, CORES // 4))
            print(f"{begin - self.begin:5.0f} s  {name}", flush=True)
            with ThreadPoolExecutor(lanes) as pool:
                complete = all(pool.map(functools.partial(self._run_lane, name, end, lanes), range(lanes)))
            its = {"share": part.share, "seconds": round(time.monotonic() - begin, 1), "complete": complete}
            self.record["parts"][name] = its
            self._keep(name)
        rows = [row for name in PARTS for row in self.record[name]]
        self.record["complete"] = all(part["complete"] for part in self.record["parts"].values())
        self.record["passed"] = self.record["complete"] and not any(row["failures"] for row in rows)
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        self._write()
        return bool(self.record["passed"])

    def _run_lane(self, name: str, end: float, lanes: int, lane: int) -> bool:
        """Whether its pieces of work, every `lanes`th from number `lane` on, were done before `end`, by time.monotonic()."""
        first = lane
        while first < len(self._pieces(name)):
            seconds = end - time.monotonic()
            if seconds <= 0:
                return False
            words = ["--part", name, "--from", str(first), "--step", str(lanes), "--seconds", str(seconds), "--out", str(self.out)]
            status = self._wait(name, [sys.executable, sys.argv[0], *words, *(["--dry-run"] if self.dry else [])], end + GRACE)
            if status in (DONE, NO_TIME):
                return status == DONE
            begun = max([first, *(line["piece"] for line in self._lines(name, lane))])
            if status != AGAIN:
                how = "gave no answer within its share" if status is None else f"ended with {_ending(status)}"
                self._lost[name][begun] = f"the process {how}"
            first = begun + lanes
        return True

    def _wait(self, name: str, command: Sequence[str], until: float) -> int | None:
        """The exit status of a part's process, which is ended with all it started; None if it had to be. The record is kept
        up to date meanwhile."""
        process = subprocess.Popen(command, process_group=0)
        try:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
                self._keep(name)
            return process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _pieces(self, name: str) -> Sequence[tuple[str, ...]]:
        return PARTS[name].dry if self.dry else PARTS[name].pieces

    def _keep(self, name: str) -> None:
        """Writes the record if a part has something new."""
        with self._lock:
            rows = [line["row"] for lane in range(PARTS[name].lanes) for line in self._lines(name, lane) if "row" in line]
            for number, message in self._lost[name].items():
                rows.append({"spec": " ".join(self._pieces(name)[number]), "failures": [{"message": message}]})
            kept = (rows, name in self.record["parts"])
            if kept != self._kept.get(name):
                self._kept[name], self.record[name] = kept, rows
                self._write()

    def _lines(self, name: str, lane: int) -> list[dict[str, Any]]:
        try:
            text = _lines_of(self.out, name, lane).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _write(self) -> None:
        write_atomic(self.out / "gpu_check.json", json.dumps(self.record, indent=1) + "\n")


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 all right, 1 something failed (it is in the record), 2 the check cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: interpret and cross-compile")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        return serve(options.part, options.out, options.dry_run, options.first, options.step, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        check = Check(options.out, options.dry_run)
    except PagegenError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    passed = check.run()
    print(f"{'passed' if passed else 'FAILED'} in {check.record['seconds']:.0f} s: {options.out / 'gpu_check.json'}")
    return 0 if passed else 1


def _line(row: dict[str, Any]) -> str:
    what = f"{row['spec']} {row.get('op') or row.get('kernel') or row.get('point', '')}"
    if row["failures"]:
        return f"{what}: {len(row['failures'])} FAILED, first: {row['failures'][0]['message']}"
    if "cases" in row:
        return f"{what}: {row['cases']} cases right"
    if "registers" in row:
        return f"{what}: {row['registers']} registers, {row['spills']} spills, {row['shared_memory']} B shared"
    if "shortlist" in row:
        return f"{what}: {row['candidates']} candidates compiled, shortlist {row['shortlist']}"
    if "winner" in row:
        return f"{what}: " + ", ".join(f"{each['bucket']} {each['speedup']:.2f}x" for each in row["winner"])
    if "step_seconds" in row:
        return f"{what}: " + ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in row["step_seconds"].items())
    others = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["speedup"].items())
    return f"{what}: {row['seconds']['pagegen'] * 1e6:.1f} us, {row['kv_gb_per_s']:.0f} GB/s of KV, {others}"


if __name__ == "__main__":
    sys.exit(main())
