"""Running the command line in this process."""

from __future__ import annotations

import dataclasses
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from pagegen.cli import main


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


def run(*words: str) -> Result:
    """`pagegen WORDS`."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        status = main(words)
    return Result(status, stdout.getvalue(), stderr.getvalue())
