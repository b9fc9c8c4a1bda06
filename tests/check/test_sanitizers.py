"""Address and undefined-behaviour sanitizers find nothing in the C++ templates, and would find something."""

from __future__ import annotations

import dataclasses

import pytest

from pagegen.catalog import variant
from pagegen.check import Sanitizer, check_sanitized
from pagegen.check.mutants import MUTANTS
from pagegen.records import Status
from pagegen.render import Source, render
from pagegen.spec import KernelSpec, Op
from pagegen.target import TARGETS, parse_target
from tests.check.conftest import SCALAR
from tests.conftest import needs

SPECS = {mutant.spec: mutant.kernel_spec() for mutant in MUTANTS} | {
    "latent": KernelSpec(5, 1, 40, head_dim_v=32, block_size=7, v_in_k=True, rope="interleaved", lse=True),  # type: ignore[arg-type]
    "packed": KernelSpec.from_dict({"q_heads": 7, "kv_heads": 7, "head_dim": 24, "block_size": 3, "layout": "HDN8_HDN", "dtype": "fp16"}),
}


@pytest.mark.parametrize("sanitizer", Sanitizer)
@pytest.mark.parametrize(
    ("name", "op", "target"),
    [
        ("int8", Op.WRITE_KV, SCALAR),
        *(
            pytest.param(name, op, target, marks=[pytest.mark.long, needs(target)], id=f"{name}-{op.value}-{target.name}")
            for name in SPECS
            for op in Op
            for target in TARGETS
            if target.kind == "cpu"
        ),
    ],
)
def test_a_kernel_is_clean(name: str, op: Op, target: object, sanitizer: Sanitizer) -> None:
    source = render(variant(op, SPECS[name], target))  # type: ignore[arg-type]
    report = check_sanitized(source, sanitizer)
    assert report.passed, report.reason


def spoiled(words: str) -> Source:
    source = render(variant(Op.COPY_BLOCKS, SPECS["wide"], parse_target("cpu:scalar")))
    before = "  return PG_OK;\n}"
    assert source.text.count(before) == 1
    return dataclasses.replace(source, text=source.text.replace(before, f"  {words}\n{before}"))


@pytest.mark.parametrize(
    ("sanitizer", "words", "told"),
    [
        (Sanitizer.ADDRESS, "char room[8]; for (volatile int i = 0; i < a.num_pairs + 8; ++i) room[i] = 1;", "stack-buffer-overflow"),
        (Sanitizer.UNDEFINED, "volatile int32_t most = 2147483647; if (a.num_pairs > 1) most = most + int32_t(a.num_pairs);", "kernel.cpp"),
    ],
)
def test_what_a_sanitizer_finds_is_told(sanitizer: Sanitizer, words: str, told: str) -> None:
    report = check_sanitized(spoiled(words), sanitizer)
    assert report.status is Status.RUN_ERROR
    assert told in report.reason
