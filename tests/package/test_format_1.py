"""Claims about packages of format 1, on one that stays as it was written: every later pagegen loads and runs it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from pagegen import cli
from pagegen.errors import KernelError, PackageError
from pagegen.kernel import PagedKernels, allocate_cache
from pagegen.loader import fingerprint
from pagegen.package import load_package, verify_package
from pagegen.reference import ReferenceKernels
from pagegen.target import parse_target
from tests.package.conftest import edit_manifest

FIXTURE = Path(__file__).parents[1] / "fixtures" / "package-format-1"
MANIFEST_SHA256 = "7788b4336da5f299077cb7a8ffb8e7d3c57b5d84d5360fcde32a3377d94ceadf"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy that nobody else can write, whatever umask the checkout was made under."""
    copied = Path(shutil.copytree(FIXTURE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__")))
    for path in (copied, *copied.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)
    return copied


def test_the_fixture_is_as_it_was_written() -> None:
    assert hashlib.sha256((FIXTURE / "manifest.json").read_bytes()).hexdigest() == MANIFEST_SHA256
    changed = [problem for problem in verify_package(FIXTURE) if "renders other text" not in problem and "does not render" not in problem]
    assert not changed


def test_it_is_refused_where_it_was_not_made(copy: Path) -> None:
    with pytest.raises(PackageError, match=r"device: 'no machine, but a fixture' there.*--target cpu:scalar"):
        load_package(copy)


def test_made_here_it_is_built_proved_and_right(copy: Path) -> None:
    hardware = dict(fingerprint(parse_target("cpu:scalar")).hardware)
    edit_manifest(copy, lambda manifest: manifest["fingerprint"].update(hardware=hardware))
    package = load_package(copy)  # builds its four sources and, the toolchain being another, runs its own suite
    spec, reference = package.spec, ReferenceKernels(package.spec)
    generator = torch.Generator().manual_seed(1)
    caches = [allocate_cache(spec, 7), allocate_cache(spec, 7)]
    k, v = (torch.randn(11, spec.kv_heads, 8, generator=generator) for _ in range(2))
    slots = torch.tensor([9, 10, 11, 3, 4, 5, 15, -1, 0, 1, 2])
    table = torch.tensor([[3, 1, 5], [0, 6, -1]], dtype=torch.int32)  # 6 is a copy of 1
    pair: tuple[PagedKernels, ...] = (package, reference)
    for kernels, cache in zip(pair, caches, strict=True):
        kernels.write_kv(k, v, *cache, slots)
        kernels.copy_blocks(*cache, torch.tensor([[1, 6]]))
    assert all(torch.equal(mine, its) for mine, its in zip(*caches, strict=True))
    for query_lens in ([1, 1], [4, 2]):  # decode goes to attend_1, prefill to attend_0
        q = torch.randn(sum(query_lens), spec.q_heads, 8, generator=generator)
        starts = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32)
        results = []
        for kernels in (package, package.default_kernels(), reference):
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
            kernels.attend(out, q, *caches[0], table, torch.tensor([7, 5], dtype=torch.int32), starts, lse=lse)
            results.append((out, lse))
        for result in results[:2]:
            for got, want in zip(result, results[2], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelError, match="slot"):
        package.write_kv(k[:1], v[:1], *caches[0], torch.tensor([21]))


def test_it_is_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["package", "show", str(FIXTURE)]) == 0
    out = capsys.readouterr().out
    assert "decode, 1 to 8 sequences, 0 to 100 tokens of context: attend_1" in out
