"""Default and tuned kernels and the three SDPA forms on a few shapes, interleaved, on this machine's CPU.

    python benchmarks/attention_cpu.py                                    # default configs of three specs
    python benchmarks/attention_cpu.py --package DIR                      # a tuned package of one spec

Prints microseconds, GB/s of KV and GFLOP/s of the first contender, then the time of the others over its.
"""

from __future__ import annotations

import argparse

import torch

from pagegen.build import build_kernels
from pagegen.kernel import PagedKernels
from pagegen.package import load_package
from pagegen.spec import Phase, parse_slug
from pagegen.target import Target, best_cpu, detect
from pagegen.tuning.contest import bench, table
from pagegen.tuning.evaluate import preset

SLUGS = ("bf16-d64-h9x3-b16-NHD", "bf16-d128-h32x8-b16-NHD", "fp32-d64-h9x3-b16-HND")


def contenders(package: str | None) -> list[tuple[Target, dict[str, PagedKernels]]]:
    """What is timed: a package beside its default, or the default of every slug."""
    if package:
        loaded = load_package(package)
        return [(loaded.target, {"package": loaded, "default": loaded.default_kernels()})]
    target = best_cpu()
    return [(target, {"default": build_kernels(parse_slug(slug)[0], target)}) for slug in SLUGS]


def main() -> None:
    """Reads the options and prints a table a spec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", help="folder of a kernel package")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one batch, all contenders together")
    options = parser.parse_args()
    torch.set_num_threads(detect().threads)
    for target, named in contenders(options.package):
        spec = next(iter(named.values())).spec
        workloads = [preset(phase, spec) for phase in Phase]
        columns, lines = table(bench(named, target, workloads, with_sdpa=True, seconds=options.seconds))
        print(f"\n{spec.slug} on {target.name}, {torch.get_num_threads()} threads")
        widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
        for line in (columns, *lines):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
