"""Claims about the build cache: whole entries or none, one build a key, and one line for everything that is missing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from pagegen.build import build, cpp
from pagegen.catalog import variant
from pagegen.errors import BuildError, ConfigError, KernelError
from pagegen.kernel import allocate_cache
from pagegen.paths import cache_dir, kernel_cache, lock_of, locked
from pagegen.render import Source, render
from pagegen.spec import KernelSpec, Op, parse_slug
from pagegen.target import parse_target

ROOT = Path(cpp.__file__).parents[2]
SCALAR = parse_target("cpu:scalar")
SPEC = parse_slug("fp32-d8-h3x1-b3-NHD")[0]

STUB = """#!/bin/sh
# A slow compiler whose every output differs.
if [ "$1" = --version ]; then echo "stub 1.0"; exit 0; fi
while [ "$1" != -o ]; do shift; done
echo x >> "$STUB_LOG"
head -c 2000 /dev/urandom > "$2"
sleep "${STUB_SECONDS:-0.0$(od -An -N1 -tu1 /dev/urandom | tr -d ' ')}"  # 0 to 0.1
head -c 2000 /dev/urandom >> "$2"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("PAGEGEN_CACHE", str(path))
    return path


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the stub the compiler; returns the log with one line a compile."""
    script, log = tmp_path / "c++", tmp_path / "log"
    script.write_text(STUB)
    script.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PAGEGEN_CXX", str(script))
    monkeypatch.setenv("STUB_LOG", str(log))
    return log


def compiles(log: Path) -> int:
    return len(log.read_text().splitlines())


def source(op: Op = Op.WRITE_KV, spec: KernelSpec = SPEC) -> Source:
    return render(variant(op, spec, SCALAR))


def check_write(kernels_source: Source) -> None:
    k_cache, v_cache = allocate_cache(SPEC, 2)
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    build(kernels_source)(k, v, k_cache, v_cache, torch.tensor([4, -1]))  # type: ignore[call-arg, arg-type]
    assert torch.equal(k_cache[1, 1], k[0]) and torch.equal(v_cache[1, 1], v[0])
    assert int(k_cache.count_nonzero()) == 8  # -1 wrote nothing


def test_a_build_is_found_again_and_its_text_lies_beside_it(stub: Path) -> None:
    first = cpp.compile_library("one", SCALAR)
    assert cpp.compile_library("one", SCALAR) == first and compiles(stub) == 1
    assert (first.parent / "kernel.cpp").read_text() == "one"
    assert json.loads((first.parent / "build.json").read_text())["target"] == "cpu:scalar"


def test_text_target_and_compiler_each_make_a_key_of_their_own(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {cpp.compile_library(text, parse_target(target)) for text in "ab" for target in ("cpu:scalar", "cpu:avx2")}
    other = stub.with_name("other-c++")
    other.write_text(STUB.replace("stub 1.0", "stub 1.1"))
    other.chmod(0o755)
    monkeypatch.setenv("PAGEGEN_CXX", str(other))
    paths.add(cpp.compile_library("a", SCALAR))
    assert len(paths) == compiles(stub) == 5


def test_no_flag_means_whatever_this_machine_is() -> None:
    flags = [*cpp.FLAGS, *(flag for arch in ("scalar", "avx2", "avx512", "avx512_bf16", "amx") for flag in parse_target(f"cpu:{arch}").flags)]
    assert not [flag for flag in flags if "native" in flag]


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "no library", "no record", "record is half"])
def test_a_damaged_entry_is_a_miss_with_one_warning(damage: str) -> None:
    library = cpp.compile_library(source().text, SCALAR)
    record, data = library.with_name("build.json"), library.read_bytes()
    match damage:
        case "empty":
            library.write_bytes(b"")
        case "half":
            library.write_bytes(data[: len(data) // 2])
        case "flipped":
            library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "no library":
            library.unlink()
        case "no record":
            record.unlink()
        case "record is half":
            record.write_text(record.read_text()[:20])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        check_write(source())
        check_write(source())
    assert [str(warning.message) for warning in caught] == [f"cached kernel {library.parent.name} is damaged; building it again"]


def test_a_killed_builder_leaves_no_lock(stub: Path, cache: Path) -> None:
    code = (
        "from pagegen.build import cpp; from pagegen.target import parse_target;"
        "cpp.compile_library('killed', parse_target('cpu:scalar'))"
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "STUB_SECONDS": "60", "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not compiles(stub) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    assert list(cache.glob("kernels/*.lock")) and not list(cache.glob("kernels/*/build.json"))  # it held the lock, half done
    begin = time.monotonic()
    library = cpp.compile_library("killed", SCALAR)
    assert time.monotonic() - begin < 10
    assert len(library.read_bytes()) == 4000 and compiles(stub) == 2
    assert not list(cache.glob("kernels/.*"))  # what the dead one left is gone


def _build_all(rounds: int, umask: int, barrier: Barrier, results: multiprocessing.Queue[list[str]]) -> None:
    os.umask(umask)
    digests = []
    for i in range(rounds):
        barrier.wait(120)
        digests.append(cpp.file_sha256(cpp.compile_library(f"text {i}", SCALAR)))
    results.put(digests)


@pytest.mark.parametrize(
    ("processes", "rounds"), [(2, 6), pytest.param(8, 20, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_parallel_builders_of_one_key_share_one_build(stub: Path, cache: Path, processes: int, rounds: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(processes), spawn.Queue()
    workers = [
        spawn.Process(target=_build_all, args=(rounds, 0o077 if i else 0o022, barrier, results)) for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    digests = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(own == digests[0] for own in digests)  # nobody saw another's half
    records = [json.loads(path.read_text())["sha256"] for path in cache.glob("kernels/*/build.json")]
    assert sorted(records) == sorted(digests[0])
    assert compiles(stub) == rounds
    assert not list(cache.glob("kernels/.*"))


def test_a_missing_compiler_is_one_line_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*PAGEGEN_CXX"):
        cpp.compile_library("x", SCALAR)
    monkeypatch.delenv("PAGEGEN_CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"g\+\+ and clang\+\+.*install"):
        cpp.compile_library("x", SCALAR)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\nexit 3\n", r"broken-c\+\+ does not run"),
        ("no script at all", r"broken-c\+\+ does not run"),
        ("#!/bin/sh\nexit 0\n", "says nothing to --version"),
        ("#!/bin/sh\nprintf '\\377 1.0\\n'\n", "wrote nothing"),
        ("#!/bin/sh\n[ $1 = --version ] && echo 1.0 || exit 3\n", r"failed \(exit status 3\)"),
        ("#!/bin/sh\n[ $1 = --version ] && echo 1.0 || kill -9 $$\n", r"failed \(signal 9\)"),
        ("#!/bin/sh\n[ $1 = --version ] && echo 1.0 || { printf 'error: \\377' >&2; exit 1; }\n", "failed .error: \ufffd"),
    ],
)
def test_a_compiler_that_is_none_is_told_in_one_line(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setenv("PAGEGEN_CXX", str(broken))
    with pytest.raises(BuildError, match=said):
        cpp.compile_library("x", SCALAR)


def test_a_cache_that_is_cleared_all_the_time_is_filled_again(
    stub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever moment the clearing hits: the file's read, its time stamp, its load."""
    load, removed = cpp.load, list[Path]()

    def cleared(path: Path, spec: KernelSpec, op: Op) -> object:
        if len(removed) < 3:
            removed.append(path)
            shutil.rmtree(cache)
            raise KernelError("cannot be loaded")
        return path.read_bytes()

    monkeypatch.setattr(cpp, "load", cleared)
    assert len(cpp.build("a", SCALAR, SPEC, Op.ATTEND)) == 4000 and compiles(stub) == 4  # type: ignore[arg-type]
    monkeypatch.setattr(cpp, "load", load)
    with pytest.raises(KernelError, match="cannot be loaded"):  # there, but no library: no second try helps
        cpp.build("b", SCALAR, SPEC, Op.ATTEND)
    assert compiles(stub) == 5

    utime, emptied = os.utime, list[Path]()

    def emptying(path: Path) -> None:
        if not emptied:
            emptied.append(path)
            shutil.rmtree(cache)
        utime(path)

    monkeypatch.setattr(os, "utime", emptying)
    assert cpp.compile_library("a", SCALAR).is_file() and compiles(stub) == 6


def test_a_full_disk_is_one_line(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cpp, "_build", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*make room, or set PAGEGEN_CACHE"):
        cpp.compile_library("a", SCALAR)


def test_a_failing_compile_keeps_the_compilers_log_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(BuildError) as caught:
        cpp.compile_library("int main( { return 0; }", SCALAR)
    assert "\n" not in str(caught.value) and "kernel.cpp:1" in caught.value.log
    assert not list(cache.glob("kernels/*/kernel.so")) and not list(cache.glob("kernels/.*"))


@pytest.mark.parametrize("place", ["a file", "below a file", "a folder that cannot be made", "open to all"])
def test_a_cache_that_cannot_be_used_names_the_setting(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shared = tmp_path / "file", tmp_path / "shared"
    file.touch()
    shared.mkdir()
    shared.chmod(0o777)
    paths = {
        "a file": file,
        "below a file": file / "cache",
        "a folder that cannot be made": Path("/proc/pagegen"),
        "open to all": shared,
    }
    monkeypatch.setenv("PAGEGEN_CACHE", str(paths[place]))
    with pytest.raises(ConfigError, match="set PAGEGEN_CACHE"):
        cpp.compile_library("x", SCALAR)


def test_a_folder_inside_the_cache_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o755)
    (cache / "kernels").mkdir()
    (cache / "kernels").chmod(0o777)
    with pytest.raises(ConfigError, match=r"kernels is not yours alone.*mode 0777"):
        cpp.compile_library("x", SCALAR)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("folder", ["", "kernels"])
def test_a_cache_of_another_user_is_refused(folder: str, cache: Path) -> None:
    (cache / folder).mkdir(mode=0o700, parents=True)
    os.chown(cache / folder, 12345, -1)
    with pytest.raises(ConfigError, match=r"not yours alone \(owner 12345.*set PAGEGEN_CACHE"):
        cpp.compile_library("x", SCALAR)


def test_without_a_setting_the_cache_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "pagegen"
    assert cache_dir().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache() == tmp_path / "xdg" / "pagegen" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match="set PAGEGEN_CACHE"):
        cache_dir()


def test_paths_with_spaces_and_accents_build_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "größe 1" / "cache"))
    check_write(source())


def test_the_installation_is_never_written() -> None:
    def tree() -> dict[Path, int]:
        folders = [ROOT / name for name in ("pagegen", "templates")]
        found = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
        return {path: path.stat().st_mtime_ns for path in found if path.is_file()}

    before = tree()
    check_write(source())
    assert tree() == before


def test_a_library_of_another_abi_or_none_is_refused(tmp_path: Path) -> None:
    text = source().text.replace("return PAGEGEN_ABI_VERSION;", "return 99;")
    with pytest.raises(KernelError, match="C ABI 99"):
        cpp.load(cpp.compile_library(text, SCALAR), SPEC, Op.WRITE_KV)
    (tmp_path / "no.so").write_bytes(b"not a library")
    with pytest.raises(KernelError, match="cannot be loaded"):
        cpp.load(tmp_path / "no.so", SPEC, Op.WRITE_KV)


def test_the_least_recently_used_builds_make_room(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "CACHE_ENTRIES", 2)
    first, second = (cpp.compile_library(text, SCALAR).parent for text in "ab")
    os.utime(first, (0, 0))
    os.utime(second, (1, 1))
    cpp.compile_library("a", SCALAR)  # used again, so it is `second` that goes
    third = cpp.compile_library("c", SCALAR).parent
    assert sorted(path.name for path in kernel_cache().glob("[!.]*/")) == sorted(path.name for path in (first, third))
    assert not lock_of(second).exists()


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with locked(path):
            order.append(path.exists())

    with locked(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.05)
        path.unlink()
    waiter.join(10)
    assert order == [True], "it holds a file that others will lock too"
