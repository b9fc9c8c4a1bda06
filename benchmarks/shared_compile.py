#!/usr/bin/env python3
"""A C++ compiler for `regret.py --measure`: attend kernels that differ only in some knobs are compiled once.

Those knobs (VARIABLE) decide how work is cut, not what the inner loops are. Here they are read from memory, where otherwise
they are constants, and each config's library is a copy of the shared one with its own values in it. Everything else that it
is asked to compile, and what it says of itself, is g++'s own. Shared libraries are kept in $REGRET_SHARED.
"""

import hashlib
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

VARIABLE = ("TILE_Q", "SPLIT_KV", "PACK_ROWS", "TILE_FEW")
MOST_Q = 64  # TILE_Q in the sizes of arrays
MARKS = struct.pack("4i", *(0x5EED0000 + place for place in range(len(VARIABLE))))
DECLARED = f"""extern "C" __attribute__((visibility("default"))) int pagegen_knobs[{len(VARIABLE)}];
int pagegen_knobs[{len(VARIABLE)}] = {{{", ".join(map(str, struct.unpack("4i", MARKS)))}}};
""" + "".join(f"#define {name} pagegen_knobs[{place}]\n" for place, name in enumerate(VARIABLE))


def shared(text: str) -> tuple[str, bytes]:
    """The text with its VARIABLE knobs read from memory, and their values as they lie there."""
    values = []
    for name in VARIABLE:
        (value,) = re.findall(rf"\b{name} = (\d+)[,;]", text)
        values.append(int(value))
        text = re.sub(rf"\b{name} = \d+, |, {name} = \d+(?=;)", "", text)
    text = text.replace("constexpr int SPLIT_Q", "#define SPLIT_Q_IS").replace(
        "constexpr int ROWS = TILE_Q *", f"constexpr int ROWS = {MOST_Q} *"
    )
    text = re.sub(r"#define SPLIT_Q_IS = (.*);\n", r"#define SPLIT_Q (\1)\n", text)
    text = re.sub(r"^// .*\n", "", text, flags=re.MULTILINE)  # the config's own words are a comment
    return re.sub(
        r"^constexpr int TILE_KV",
        f"}}\n{DECLARED}namespace {{\nconstexpr int TILE_KV",
        text,
        count=1,
        flags=re.MULTILINE,
    ), struct.pack("4i", *values)


def main(arguments: list[str]) -> int:
    """Compiles as g++ would; its exit status."""
    if "kernel.cpp" not in arguments or "pagegen_attend(" not in Path("kernel.cpp").read_text():
        return subprocess.run(["g++", *arguments], check=False).returncode
    text, values = shared(Path("kernel.cpp").read_text())
    key = hashlib.sha256("\0".join([text, *arguments]).encode()).hexdigest()[:24]
    library = Path(os.environ["REGRET_SHARED"]) / f"{key}.so"
    if not library.exists():
        Path("kernel.cpp").rename("asked.cpp")
        Path("kernel.cpp").write_text(text)
        status = subprocess.run(["g++", *arguments], check=False).returncode
        if status:
            return status
        binary = Path("kernel.so").read_bytes()
        if binary.count(MARKS) != 1:
            print("error: the knobs are not where they were put", file=sys.stderr)
            return 1
        library.parent.mkdir(parents=True, exist_ok=True)
        Path("kernel.so").rename(library)
        Path("asked.cpp").rename("kernel.cpp")
    Path("kernel.so").write_bytes(library.read_bytes().replace(MARKS, values))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
