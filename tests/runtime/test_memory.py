"""A KV pool for which there is no memory is refused before it is taken."""

from __future__ import annotations

import pytest

from pagegen.errors import ConfigError
from pagegen.runtime import kv_cache
from pagegen.runtime.kv_cache import KVCache
from pagegen.spec import parse_slug

SPEC = parse_slug("fp32-d8-h2x1-b4-NHD")[0]


def test_a_pool_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    size = kv_cache.block_bytes(SPEC, 3)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda: 10 * size)
    assert KVCache(SPEC, 3, 10).num_blocks == 10
    with pytest.raises(ConfigError, match=r"a KV pool of 11 blocks takes .* lower num_blocks or kv_cache_bytes"):
        KVCache(SPEC, 3, 11)
