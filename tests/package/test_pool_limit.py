"""Claims about a package and the size of the cache it is given: it knows how far its indices reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagegen.errors import PackageError
from pagegen.kernel import allocate_cache
from pagegen.loader import PackagedKernels
from pagegen.offsets import max_blocks
from tests.package.conftest import edit_manifest
from tests.test_offsets import endless


def test_the_smallest_pool_that_a_package_refuses_is_one_past_the_limit(package: Path) -> None:
    kernels = PackagedKernels(package)
    assert kernels.max_blocks == max_blocks(kernels.spec) == 2**31
    pairs = torch.zeros(0, 2, dtype=torch.int64)
    kernels.copy_blocks(*endless(kernels.spec, 2**31), pairs)
    with pytest.raises(PackageError, match=r"cache has 2147483649 blocks, and indices are proven to fit up to 2147483648"):
        kernels.copy_blocks(*endless(kernels.spec, 2**31 + 1), pairs)


def test_every_operation_of_a_package_refuses_a_pool_that_is_too_large(package: Path) -> None:
    edit_manifest(package, lambda manifest: manifest.update(max_blocks=3))
    kernels = PackagedKernels(package)
    k, v = allocate_cache(kernels.spec, 4)
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(PackageError, match=r"4 blocks, .* up to 3"):
        kernels.write_kv(torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), k, v, none)
    q, table = torch.zeros(0, 6, 16), torch.zeros(0, 1, dtype=torch.int32)
    with pytest.raises(PackageError, match=r"4 blocks, .* up to 3"):
        kernels.attend(q, q, k, v, table, none.int(), torch.zeros(1, dtype=torch.int32))


def test_a_manifest_without_the_number_is_one_of_before(package: Path) -> None:
    edit_manifest(package, lambda manifest: manifest.pop("max_blocks"))
    assert PackagedKernels(package).max_blocks is None
    edit_manifest(package, lambda manifest: manifest.update(max_blocks="many"))
    with pytest.raises(PackageError, match=r"'max_blocks' is no int"):
        PackagedKernels(package)
