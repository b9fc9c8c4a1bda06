"""NEON kernels pass the quick gate: on AArch64 itself, elsewhere cross-compiled and in an emulator, through the C driver."""

from __future__ import annotations

import pytest

from pagegen.build import build
from pagegen.build.cpp import compile_library, cross_compiler
from pagegen.catalog import variant
from pagegen.check import check_library, quick_suite
from pagegen.errors import BuildError, KernelError
from pagegen.records import Status
from pagegen.render import render
from pagegen.spec import Op, parse_slug
from pagegen.target import is_native, parse_target
from tests.conftest import NEON

pytestmark = pytest.mark.neon


@pytest.mark.parametrize(
    ("op", "slug"),
    [
        (Op.ATTEND, "bf16-d24-h6x2-b5-NHD"),  # token-major, in place
        (Op.WRITE_KV, "bf16-d40v24-h7x7-b3-NHD-kvint8"),
        (Op.COPY_BLOCKS, "bf16-d64-h9x3-b16-NHD"),
        *(
            pytest.param(op, slug, marks=pytest.mark.long)
            for op, slug in [
                (Op.ATTEND, "bf16-d64-h9x3-b16-NHD"),
                (Op.ATTEND, "fp16-d40v24-h7x7-b3-HDN2-lse"),  # pairs of 16-bit dims
                (Op.ATTEND, "fp32-d80-h8x1-b24-HDN8_HDN"),  # everything packed first
                (Op.ATTEND, "fp16-d256-h4x2-b1-HND"),
                (Op.ATTEND, "bf16-d40v24-h6x3-b5-NHD-kvint4-w9-cap20-sinks-lse"),
                (Op.ATTEND, "bf16-d40v24-h6x3-b5-HDN4_HDN-kvfp8_e4m3-alibi-det"),
                (Op.WRITE_KV, "fp16-d40v24-h7x7-b3-HDN2"),
                (Op.WRITE_KV, "fp32-d40v24-h7x7-b3-HND-kvint4"),
            ]
        ),
    ],
)
def test_the_quick_gate_passes(op: Op, slug: str) -> None:
    spec = parse_slug(slug)[0]
    library = compile_library(render(variant(op, spec, NEON)).text, NEON)
    report = check_library(library, op, NEON, quick_suite(spec), timeout=300)
    assert report.status is Status.PASSED, report.reason


@pytest.mark.parametrize("rope", ["neox", pytest.param("interleaved", marks=pytest.mark.long)])
def test_write_kv_with_everything_passes_the_quick_gate(rope: str) -> None:
    spec = parse_slug("bf16-d40-h6x3-b5-NHD-kvint8")[0].replace(rope=rope, rotary_dim=24, qk_norm=True, kv_zero=True)
    library = compile_library(render(variant(Op.WRITE_KV, spec, NEON)).text, NEON)
    report = check_library(library, Op.WRITE_KV, NEON, quick_suite(spec), timeout=300)
    assert report.status is Status.PASSED, report.reason


@pytest.mark.skipif(is_native(NEON), reason="this machine runs NEON")
def test_a_foreign_kernel_is_compiled_and_not_loaded() -> None:
    source = render(variant(Op.COPY_BLOCKS, parse_slug("bf16-d64-h9x3-b16-NHD")[0], NEON))
    with pytest.raises(KernelError, match="cannot be loaded"):
        build(source)


def test_a_missing_cross_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        BuildError, match=r"cpu:neon: looked for aarch64-linux-gnu-g\+\+; .*apt-get install g\+\+-aarch64-linux-gnu"
    ):
        cross_compiler(NEON)
    with pytest.raises(BuildError, match="apt-get install g\\+\\+-x86-64-linux-gnu"):
        cross_compiler(parse_target("cpu:avx2"))
