"""Writes docs/cli.md from the commands' own --help; with --check, says whether it is current."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from pagegen.cli import COMMANDS, main, subcommands

DOCS = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """# The command line

Written by `scripts/gen_cli_docs.py` from `--help`; a test holds the two together. `pagegen` and `python -m pagegen` are
the same.

People read tables on stdout and progress on stderr: a bar on a terminal, elsewhere a line every half minute at most; with
`--json` stdout carries one JSON document and nothing else.
Exit status: 0 done; 1 the work was done and the answer is "no"; 2 the request was wrong, said in one line on stderr;
130 interrupted. `--debug`, anywhere on the line, shows the traceback of an error.
"""


def help_of(*words: str) -> str:
    """What `pagegen WORDS --help` prints, 80 columns wide whatever the terminal."""
    os.environ["COLUMNS"] = "80"
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def document() -> str:
    """The page."""
    parts = [HEAD, f"```\n{help_of()}\n```\n"]
    for row in COMMANDS:
        for words in subcommands(row):
            parts.append(f"## pagegen {' '.join(words)}\n\n```\n{help_of(*words)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    current = document()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if DOCS.is_file() and DOCS.read_text() == current else f"{DOCS.name} is stale; run {sys.argv[0]}")
    DOCS.write_text(current)
