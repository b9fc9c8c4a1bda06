"""Finds the fastest correct kernels of a spec for this machine and packages them.

python examples/tune.py [SPEC [TRIALS [OUT]]]
"""

import sys

from pagegen import tune


def main(spec: str = "decode-fp32-d64-h9x3-b16-NHD", trials: str = "8", out: str = "results") -> None:
    result = tune(spec, trials=int(trials), out=out)
    for winner in result.winners:
        print(f"{winner.phase}: {winner.config.slug}, {winner.speedup.median:.2f} times as fast as the default")
    print(f"package: {result.package}")


if __name__ == "__main__":
    main(*sys.argv[1:])
