"""What a call of attend costs beyond the kernel: checks, packing, a package's dispatch, and the operator of torch around it.

    python benchmarks/call_overhead.py

The batch is tiny and on one thread, so that the kernel itself takes microseconds. All ways in turn; the overhead is the
difference to the library's function called with arguments that are ready, round by round. The package has one kernel for
attend and a table of five rows, the last of which holds the batch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pagegen import torch_op
from pagegen.abi import CppAttend
from pagegen.build import build_kernels
from pagegen.catalog import variant
from pagegen.kernel import allocate_cache
from pagegen.package import KernelPackage, Packaged, load_package, write_package
from pagegen.records import DispatchRow, DispatchTable
from pagegen.render import render
from pagegen.spec import PAGED_OPS, KernelSpec, Op, Phase, parse_slug
from pagegen.target import best_cpu
from pagegen.tuning.measure import geomean_of_medians, measure
from pagegen.tuning.workload import Inputs, Point, Pool

LAYERS = 32


def main() -> None:
    """Prints microseconds a way, and what they are beyond the kernel's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="bf16-d64-h9x3-b16-NHD")
    parser.add_argument("--batch", default="1x1@16", metavar="SEQSxQUERY@CONTEXT")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec, point = parse_slug(options.spec)[0], Point.parse(options.batch)
    with tempfile.TemporaryDirectory() as folder:
        package = _package(spec, Path(folder))
        measured = measure(_ways(spec, point, package), "kernel", seconds=options.seconds, max_rounds=20_000)
    print(f"{spec.slug}, {point.name}, one thread; microseconds a call [95 %]")
    own = measured.seconds["kernel"]
    for name, values in measured.seconds.items():
        taken = measured.timing(name)
        beyond = [max(mine - its, 1e-9) for mine, its in zip(values, own, strict=True)]
        found = geomean_of_medians([beyond], [1.0])
        extra = "" if name == "kernel" else f"  beyond the kernel {found.median * 1e6:.2f} [{found.low * 1e6:.2f}, {found.high * 1e6:.2f}]"
        print(f"{name:>26} {taken.median * 1e6:6.2f} [{taken.low * 1e6:.2f}, {taken.high * 1e6:.2f}]{extra}")
    print(measured.disturbance.line)


def _ways(spec: KernelSpec, point: Point, package: KernelPackage) -> dict[str, Callable[[], None]]:
    """Every way of making the same call, by its name."""
    attend = build_kernels(spec, best_cpu()).attend
    assert isinstance(attend, CppAttend)
    inputs = Inputs(Pool.for_points(spec, (point,), 0), point, warm=True)
    out, q, lse, extras, pool = inputs.out, inputs.q, inputs.lse, inputs.extras, inputs.pool
    k_cache, v_cache, table, lens, starts = pool.k_cache, pool.v_cache, inputs.block_tables[0], inputs.context_lens, inputs.cu_seqlens_q
    query, context = max(point.query_lens), max(point.context_lens)
    operator, number = torch.ops.pagegen.attend, torch_op.handle(attend, extras)

    def kernel() -> Callable[[], None]:
        """The library's function, with the arguments of a call that has been made."""
        attend(out, q, k_cache, v_cache, table, lens, starts, lse=lse, extras=extras)
        call = attend._thread.call
        assert call is not None
        run, arguments = attend._run, ctypes.byref(call.args)
        return lambda _kept=call: run(arguments)

    def model(attend: Callable[..., None]) -> Callable[[], None]:
        """The next layer of a step: caches of its own, and with the first layer other tables."""
        layers = [(out, q, *allocate_cache(spec, len(pool.permutation))) for _ in range(LAYERS)]
        steps = [(table.clone(), lens.clone(), starts.clone()) for _ in range(LAYERS)]
        turn = itertools.cycle((*layer, *step) for step in steps for layer in layers)
        return lambda: attend(*next(turn), lse=lse, extras=extras, max_query_len=query, max_context_len=context)

    return {
        "kernel": kernel(),
        "attend.prepared": attend.prepared(out, q, k_cache, v_cache, table, lens, starts, lse=lse, extras=extras),
        "attend": lambda: attend(
            out, q, k_cache, v_cache, table, lens, starts, lse=lse, extras=extras, max_query_len=query, max_context_len=context
        ),
        "attend, 32 layers": model(attend),
        "package": lambda: package.attend(
            out, q, k_cache, v_cache, table, lens, starts, lse=lse, extras=extras, max_query_len=query, max_context_len=context
        ),
        "package, lengths not said": lambda: package.attend(out, q, k_cache, v_cache, table, lens, starts, lse=lse, extras=extras),
        "package, 32 layers": model(package.attend),
        "torch.ops.pagegen.attend": lambda: operator(number, out, q, k_cache, v_cache, table, lens, starts, lse),
    }


def _package(spec: KernelSpec, folder: Path) -> KernelPackage:
    """The default kernels as a package whose table asks for more than one context and query."""
    target = best_cpu()
    kernels = {op.value: Packaged(render(variant(op, spec, target))) for op in PAGED_OPS}
    rows = (
        *(DispatchRow(phase, Op.ATTEND.value) for phase in (Phase.PREFILL, Phase.MIXED)),
        *(DispatchRow(Phase.DECODE, Op.ATTEND.value, min_context=least) for least in (8192, 1024)),
        DispatchRow(Phase.DECODE, Op.ATTEND.value),
    )
    dispatch = {op: DispatchTable(rows if op is Op.ATTEND else (), op.value) for op in PAGED_OPS}
    return load_package(write_package(folder, spec=spec, target=target, kernels=kernels, dispatch=dispatch, evidence={}))


if __name__ == "__main__":
    main()
