"""Memory that is not there is refused before it is taken; what is large lies in pages of 2 MiB where the system grants them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.kernel import allocate_bytes, allocate_cache
from pagegen.memory import HUGE_PAGE, free_bytes, huge_page_share
from pagegen.spec import parse_slug


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


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_is_zeroed_and_what_is_large_begins_at_a_huge_page(num_bytes: int) -> None:
    memory = allocate_bytes(num_bytes)
    assert len(memory) == num_bytes and not memory.any()
    memory.fill_(7)
    assert num_bytes < HUGE_PAGE or memory.data_ptr() % HUGE_PAGE == 0
    assert int(memory.sum()) == 7 * num_bytes


def test_memory_outlives_the_view_that_was_taken_of_it() -> None:
    k, v = allocate_cache(parse_slug("fp32-d8-h2x1-b4-NHD")[0], 50_000)
    k.fill_(1.0)
    address = k.data_ptr()
    tail = v[-1]
    del k, v
    assert not tail.any() and tail.data_ptr() > address


def test_k_and_v_of_a_block_lie_side_by_side_with_nothing_between() -> None:
    for slug in ("fp32-d8-h2x1-b1-NHD", "bf16-d24v40-h4x2-b3-NHD-kvint4", "bf16-d16-h4x2-b4-HDN8_HDN"):
        k, v = allocate_cache(parse_slug(slug)[0], 7)
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and k._base is v._base
        assert v.data_ptr() == k.data_ptr() + k[0].nbytes and k.untyped_storage().nbytes() == k.nbytes + v.nbytes
        assert k.stride(0) == v.stride(0) == k[0].numel() + v[0].numel()


def test_a_cache_of_no_blocks_has_the_shape_of_one() -> None:
    k, v = allocate_cache(parse_slug("bf16-d16-h4x2-b4-NHD")[0], 0)
    assert k.shape == v.shape == (0, 4, 2, 16)


def test_an_address_space_that_is_not_there_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        allocate_bytes(1 << 62)


def test_the_share_of_huge_pages_is_that_of_the_mappings_that_hold_the_memory(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "00100000-00500000 rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages: 2048 kB\n"
        "00500000-00600000 rw-p 00000000 00:00 0 [heap]\nRss: 1024 kB\nAnonHugePages: 0 kB\n"
    )
    assert huge_page_share(0x200000, 100, smaps) == 0.5
    assert huge_page_share(0x200000, 0x350000, smaps) == 0.4
    assert huge_page_share(0x700000, 100, smaps) is None and huge_page_share(0, 1, tmp_path / "none") is None


def test_where_the_system_gives_huge_pages_they_are_used() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no huge pages")
    memory = allocate_bytes(16 * HUGE_PAGE).fill_(1)
    share = huge_page_share(memory.data_ptr(), len(memory))
    assert share is not None and share > 0.0
