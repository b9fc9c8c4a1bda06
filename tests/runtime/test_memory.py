"""Memory that is not there is refused before it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.errors import ConfigError
from pagegen.memory import free_bytes
from pagegen.runtime import kv_cache
from pagegen.runtime.kv_cache import KVCache
from pagegen.spec import parse_slug

SPEC = parse_slug("fp32-d8-h2x1-b4-NHD")[0]


def free(tmp_path: Path, groups: str, limits: dict[str, str], meminfo: str = "MemAvailable:   1000 kB\n") -> int | None:
    """`free_bytes` of a made-up machine; `limits` are files below the root of its control groups."""
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(groups)
    (tmp_path / "meminfo").write_text(meminfo)
    return free_bytes(tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup")


def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert free(tmp_path, "0::/a\n", {"a/memory.max": "max"}) == 1_024_000
    assert free(tmp_path, "", {}, "MemTotal: 5 kB\n") is None


def test_the_tightest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    limits = {"a/b/memory.max": "900000", "a/memory.max": "700000", "memory.max": "max"}
    assert free(tmp_path, "0::/a/b\n", limits) == 700_000
    limits = {"memory/a/memory.limit_in_bytes": "500000", "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert free(tmp_path, "4:memory:/a\n9:name=systemd:/\n0::/\n", limits) == 500_000


def test_a_pool_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    size = kv_cache.block_bytes(SPEC, 3)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda: 10 * size)
    assert KVCache(SPEC, 3, 10).num_blocks == 10
    with pytest.raises(ConfigError, match=r"a KV pool of 11 blocks takes .* lower num_blocks or kv_cache_bytes"):
        KVCache(SPEC, 3, 11)
