"""What a call of attend costs beyond the kernel: checks, packing, and the operator of torch around it.

    python benchmarks/call_overhead.py

The batch is tiny and on one thread, so that the kernel itself takes microseconds. All ways in turn; the overhead is the
difference to the library's function called with arguments that are ready, round by round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from pagegen import torch_op
from pagegen.abi import CppAttend
from pagegen.build import build_kernels
from pagegen.kernel import allocate_cache
from pagegen.spec import parse_slug
from pagegen.target import best_cpu
from pagegen.tuning.measure import geomean_of_medians, measure
from pagegen.tuning.workload import Inputs, Point, Pool


def main() -> None:
    """Prints microseconds a way, and what they are beyond the kernel's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="bf16-d64-h9x3-b16-NHD")
    parser.add_argument("--batch", default="1x1@16", metavar="SEQSxQUERY@CONTEXT")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec, point = parse_slug(options.spec)[0], Point.parse(options.batch)
    attend = build_kernels(spec, best_cpu()).attend
    assert isinstance(attend, CppAttend)
    inputs = Inputs(Pool.for_points(spec, (point,), 0), point, warm=True)
    pool, table = inputs.pool, inputs.block_tables[0]
    caches = (pool.k_cache, pool.v_cache)
    rest = (table, inputs.context_lens, inputs.cu_seqlens_q)
    number = torch_op.handle(attend, inputs.extras)
    operator = torch.ops.pagegen.attend
    layers = [allocate_cache(spec, len(pool.permutation)) for _ in range(32)]
    turn = iter(range(10**12))

    def model() -> None:
        """A step's layers: other caches in each, other tables once in a while."""
        at = next(turn)
        tables = tuple(tensor.clone() for tensor in rest) if at % 32 == 0 else model.tables  # type: ignore[attr-defined]
        model.tables = tables  # type: ignore[attr-defined]
        attend(inputs.out, inputs.q, *layers[at % 32], *tables, lse=inputs.lse, extras=inputs.extras)

    ways: dict[str, Callable[[], None]] = {
        "kernel": _ready(attend, inputs),
        "attend.prepared": attend.prepared(inputs.out, inputs.q, *caches, *rest, lse=inputs.lse, extras=inputs.extras),
        "attend": lambda: attend(inputs.out, inputs.q, *caches, *rest, lse=inputs.lse, extras=inputs.extras),
        "attend, 32 layers": model,
        "torch.ops.pagegen.attend": lambda: operator(number, inputs.out, inputs.q, *caches, *rest, inputs.lse),
    }
    measured = measure(ways, "kernel", seconds=options.seconds, max_rounds=20_000)
    print(f"{spec.slug}, {point.name}, one thread; microseconds a call [95 %]")
    own = measured.seconds["kernel"]
    for name, values in measured.seconds.items():
        taken = measured.timing(name)
        beyond = [max(mine - its, 1e-9) for mine, its in zip(values, own, strict=True)]
        found = geomean_of_medians([beyond], [1.0])
        extra = "" if name == "kernel" else f"  beyond the kernel {found.median * 1e6:.1f} [{found.low * 1e6:.1f}, {found.high * 1e6:.1f}]"
        print(f"{name:>26} {taken.median * 1e6:6.1f} [{taken.low * 1e6:.1f}, {taken.high * 1e6:.1f}]{extra}")
    print(measured.disturbance.line)


def _ready(attend: CppAttend, inputs: Inputs) -> Callable[[], None]:
    """The library's function with the arguments of a call that has been made."""
    run, packed = attend._run, []

    def keep(arguments: bytes) -> int:
        packed.append(arguments)
        return int(run(arguments))

    attend._run = keep
    inputs.run(attend, inputs.block_tables[0])
    attend._run = run
    return lambda: run(packed[-1])


if __name__ == "__main__":
    main()
