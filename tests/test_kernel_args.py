"""Claims about the calling convention: what does not fit is refused by name, and the ctypes structs are those of abi.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagegen.abi import ABI_VERSION, AttendArgs, CopyBlocksArgs, WriteKVArgs
from pagegen.build.cpp import run_compiler
from pagegen.errors import KernelError
from pagegen.kernel import (
    allocate_cache,
    check_attend,
    check_copy_blocks,
    check_write_kv,
    k_strides,
    v_strides,
)
from pagegen.paths import TEMPLATES
from pagegen.reference import token_view
from pagegen.spec import KernelSpec, parse_slug

SPEC = parse_slug("bf16-d16v8-h6x2-b4-HND-lse")[0]
ABI = TEMPLATES / "cpp/abi.h"

Tensors = dict[str, Any]  # named arguments, of which some tests leave out or add one
Change = Callable[[torch.Tensor], torch.Tensor]


def attend_args(spec: KernelSpec = SPEC) -> Tensors:
    k_cache, v_cache = allocate_cache(spec, 5)
    return {
        "out": torch.zeros(7, 6, 8, dtype=torch.bfloat16),
        "q": torch.zeros(7, 6, 16, dtype=torch.bfloat16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
        "context_lens": torch.zeros(3, dtype=torch.int32),
        "cu_seqlens_q": torch.zeros(4, dtype=torch.int32),
        "lse": torch.zeros(7, 6),
    }


def write_kv_args() -> Tensors:
    k_cache, v_cache = allocate_cache(SPEC, 5)
    return {
        "k": torch.zeros(3, 2, 16, dtype=torch.bfloat16),
        "v": torch.zeros(3, 2, 8, dtype=torch.bfloat16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }


def copy_blocks_args(pairs: list[list[int]]) -> Tensors:
    k_cache, v_cache = allocate_cache(SPEC, 5)
    return {"k_cache": k_cache, "v_cache": v_cache, "pairs": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)}


CHANGES: dict[str, Change] = {
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "another dtype": lambda t: t.to(torch.float16),
    "another rank": lambda t: t[None],
    "a strided last dimension": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


def test_what_fits_is_accepted_and_the_blocks_are_counted() -> None:
    assert check_attend(SPEC, **attend_args()) == 5
    assert check_write_kv(SPEC, **write_kv_args()) == 5
    assert check_copy_blocks(SPEC, **copy_blocks_args([[0, 1], [0, 2], [4, 3]])) == 5
    assert check_copy_blocks(SPEC, **copy_blocks_args([])) == 5


def test_strides_are_free_but_for_the_last() -> None:
    tensors = attend_args()
    for name in ("q", "out"):
        tensors[name] = torch.cat([tensors[name]] * 2, dim=-1)[..., : tensors[name].shape[-1]].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("k_cache", "v_cache"):
        tensors[name] = torch.cat([tensors[name]] * 2, dim=1)[:, :2]
    assert check_attend(SPEC, **tensors) == 5


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["out", "q", "k_cache", "v_cache", "block_table", "context_lens", "cu_seqlens_q", "lse"])
def test_attend_refuses_what_does_not_fit_by_name(name: str, change: str) -> None:
    tensors = attend_args()
    tensors[name] = CHANGES[change](tensors[name])
    with pytest.raises(KernelError, match=r": got .*, expected ") as caught:
        check_attend(SPEC, **tensors)
    told = str(caught.value).split()[0]
    # With another number of rows, blocks or sequences the tensor that is checked against it may be the one named.
    related = {"q": {"out", "lse"}, "k_cache": {"v_cache"}, "context_lens": {"block_table", "cu_seqlens_q"}, "block_table": {"context_lens"}}
    assert told in {name, *related.get(name, set())}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "slot_mapping"])
def test_write_kv_refuses_what_does_not_fit_by_name(name: str, change: str) -> None:
    tensors = write_kv_args()
    tensors[name] = CHANGES[change](tensors[name])
    with pytest.raises(KernelError, match=r": got .*, expected "):
        check_write_kv(SPEC, **tensors)


def test_lse_is_given_exactly_if_the_spec_has_it() -> None:
    tensors = attend_args()
    with pytest.raises(KernelError, match="lse tensor: got given"):
        check_attend(SPEC.replace(lse=False), **tensors)
    with pytest.raises(KernelError, match="lse tensor: got none"):
        check_attend(SPEC, **{name: tensor for name, tensor in tensors.items() if name != "lse"}, lse=None)


def test_tensors_on_two_devices_are_refused() -> None:
    tensors = attend_args()
    tensors["q"] = tensors["q"].to("meta")
    with pytest.raises(KernelError, match="q device: got meta, expected cpu"):
        check_attend(SPEC, **tensors)


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([[0, 1], [2, 1]], "a destination twice"),
        ([[0, 1], [1, 2]], "block 1 as source and destination"),
        ([[3, 3]], "block 3 as source and destination"),
    ],
)
def test_copies_that_depend_on_their_order_are_refused(pairs: list[list[int]], told: str) -> None:
    with pytest.raises(KernelError, match=told):
        check_copy_blocks(SPEC, **copy_blocks_args(pairs))


@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN", "HDN2", "HDN8_HDN", "NHD_HDN"])
def test_strides_lead_to_every_element(layout: str) -> None:
    """Address = block, token, head and dim strides; a step of dim is x elements that lie together."""
    spec = KernelSpec(2, 2, 16, head_dim_v=8, block_size=3, layout=None).replace(layout=parse_slug(f"bf16-d16-h1x1-b1-{layout}")[0].layout)
    k_cache, v_cache = allocate_cache(spec, 4)
    for cache, order, strides, x in (
        (k_cache, spec.kv_layout.k_order, k_strides(spec.kv_layout, k_cache), spec.kv_layout.x),
        (v_cache, spec.kv_layout.v_order, v_strides(spec.kv_layout, v_cache), 1),
    ):
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).reshape(cache.shape))  # < 256: exact in bf16
        tokens = token_view(order, cache)
        for index in [(0, 0, 0, 0), (0, 2, 1, 5), (0, 1, 0, 7), (1, 0, 1, 3)]:
            block, token, head, dim = index
            offset = block * strides[0] + token * strides[1] + head * strides[2] + dim // x * strides[3] + dim % x
            assert tokens[index] == cache.as_strided((), (), cache.storage_offset() + offset)


# --- the C ABI -------------------------------------------------------------------------------------------------------


def test_the_structs_are_those_of_the_header(tmp_path: Path) -> None:
    """A C program prints sizeof and offsetof of everything; ctypes must say the same, field by field."""
    structs = {"pg_attend_args": AttendArgs, "pg_write_kv_args": WriteKVArgs, "pg_copy_blocks_args": CopyBlocksArgs}
    lines, expected = ["#include <stddef.h>", "#include <stdio.h>", ABI.read_text(), "int main(void) {"], []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, kind in struct._fields_:  # type: ignore[misc]  # bit fields have three items, these do not
            lines.append(f'printf("{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));')
            expected.append(f"{field} {getattr(struct, field).offset} {ctypes.sizeof(kind)}")
    lines.append('printf("version %d\\n", PAGEGEN_ABI_VERSION); return 0; }')
    (tmp_path / "abi.c").write_text("\n".join(lines))
    run_compiler(["-xc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "abi.c", "-o", "abi"], tmp_path)
    printed = subprocess.run([tmp_path / "abi"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [*expected, f"version {ABI_VERSION}"]


@pytest.mark.parametrize("struct", [AttendArgs, WriteKVArgs, CopyBlocksArgs])
def test_every_field_of_the_header_is_in_the_struct_in_order(struct: type[ctypes.Structure]) -> None:
    name = {AttendArgs: "attend", WriteKVArgs: "write_kv", CopyBlocksArgs: "copy_blocks"}[struct]
    found = re.search(rf"typedef struct pg_{name}_args \{{(.*?)\}}", ABI.read_text(), re.DOTALL)
    assert found
    body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    declared = [word for line in body.split(";") for word in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert declared == [field[0] for field in struct._fields_]


def test_the_header_is_c_and_cpp(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(ABI.read_text() + "\nint main() { return PG_OK; }\n")
    run_compiler(["-std=c++17", "-Wall", "-Wextra", "-Werror", "a.cpp", "-o", "a"], tmp_path)
