"""How much memory this process may still take: what is asked for beyond that is refused, not left to the OOM killer."""

from __future__ import annotations

import re
from pathlib import Path


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    own: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> int | None:
    """What the machine has available, or the tightest limit of this process's control groups if that is less.

    None where neither can be read. A limit is taken whole: what a group uses is largely page cache, which it gives back.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(meminfo), re.MULTILINE)
    found = [int(available[1]) * 1024] if available else []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        base = root / "memory" if v1 else root
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = _read(group / ("memory.limit_in_bytes" if v1 else "memory.max")).strip()
            found += [int(limit)] if limit.isdigit() else []  # "max" is none
            if group == base:
                break
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
