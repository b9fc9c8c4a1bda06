"""The keys of JSON documents as docs/record-format.md says them, and as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "record-format.md"


def documented(*headings: str) -> set[str]:
    """What stands in the first column of the tables right under these headings."""
    sections = {text.partition("\n")[0]: text for text in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)}
    rows = [line for heading in headings for line in sections[heading].splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row.split("|")[1])}


def top(keys: set[str]) -> set[str]:
    """`winner` for `winner[]`, `stopped` for `stopped.<phase>`."""
    return {re.split(r"[.\[]", key)[0] for key in keys}


def keys_of(document: Mapping[str, Any], *lists: str) -> set[str]:
    """Its keys, and those of the first entry of each of `lists`, as `rows[].name`."""
    return {*document, *(f"{name}[].{key}" for name in lists for key in document[name][0])}
