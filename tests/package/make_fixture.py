"""Writes tests/fixtures/package-format-<N> for the package format of this source: `python -m tests.package.make_fixture`.

Run once when a format is new, then never: the fixture shows that packages made long ago still load. It holds sources
only, since a binary in the repository could not be read, and names hardware that no machine has. So it is refused as it
stands; its test writes the hardware of the machine at hand into a copy of the manifest, which no hash covers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pagegen.loader import FORMAT
from pagegen.package import write_package
from pagegen.records import DispatchRow, DispatchTable
from pagegen.spec import Op, Phase, parse_slug
from pagegen.target import Fingerprint, parse_target
from tests.package.conftest import packaged

FIXTURES = Path(__file__).parents[1] / "fixtures"
HARDWARE = {"device": "no machine, but a fixture", "target": "cpu:scalar", "cores": 3, "affinity": 2, "quota": 1.5, "caches": {"L1d": 1}}
TOOLCHAIN = {"compiler": "none", "flags": "", "torch": "none"}


def main() -> int:
    """Exit status: 0 written, 1 it is there already."""
    place = FIXTURES / f"package-format-{FORMAT}"
    if place.exists():
        print(f"{place} stays as it is, for ever")
        return 1
    spec, target = parse_slug("fp32-d8-h6x2-b3-HDN2-lse")[0], parse_target("cpu:scalar")
    kernels = {
        "attend_0": packaged(Op.ATTEND, spec, target, binary=False),
        "attend_1": packaged(Op.ATTEND, spec, target, binary=False, tile_kv=16, split_kv=256),
        "write_kv": packaged(Op.WRITE_KV, spec, target, binary=False),
        "copy_blocks": packaged(Op.COPY_BLOCKS, spec, target, binary=False),
    }
    dispatch = {
        Op.ATTEND: DispatchTable((DispatchRow(Phase.DECODE, "attend_1", 1, 8, 0, 100),), "attend_0"),
        Op.WRITE_KV: DispatchTable((), "write_kv"),
        Op.COPY_BLOCKS: DispatchTable((), "copy_blocks"),
    }
    evidence = {"winner": [{"phase": "decode", "kernel": "attend_1", "speedup": 1.25}], "counts": {"PASSED": 2}}
    with tempfile.TemporaryDirectory(dir=FIXTURES) as folder:
        made = write_package(
            Path(folder),
            spec=spec,
            target=target,
            kernels=kernels,
            dispatch=dispatch,
            evidence=evidence,
            made_on=Fingerprint(HARDWARE, TOOLCHAIN),
        )
        made.rename(place)
    print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
