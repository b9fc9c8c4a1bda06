"""Claims about the verdict: the reference passes, each way of being wrong is told, and tolerances are as tight as stated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from pagegen.check import Case, check_kernels, quick_suite
from pagegen.check.compare import CheckReport, Failure, check_calls, compare, expected, invoke
from pagegen.check.pool import Tensors
from pagegen.check.tensors import materialise
from pagegen.errors import KernelError
from pagegen.kernel import KVScales, PagedKernels
from pagegen.records import Status
from pagegen.reference import ReferenceKernels
from pagegen.spec import PAGED_OPS, KernelSpec, Op, parse_slug

SPEC = parse_slug("bf16-d16v24-h6x2-b5-HND-lse")[0]
CASE = Case("three sequences", Op.ATTEND, SPEC, (1, 0, 4), (7, 3, 2), padding=2, strided=True)
COPY = Case("copies", Op.COPY_BLOCKS, SPEC, (), (7, 3), strided=True)


def outputs_of(case: Case) -> Tensors:
    tensors = materialise(case)
    invoke(getattr(ReferenceKernels(case.spec), case.op.value), case, tensors)
    return tensors


@pytest.mark.parametrize("slug", ["fp32-d8-h3x1-b1-NHD", "bf16-d16v24-h6x2-b5-HND-lse", "fp16-d16-h4x4-b16-HDN2_HDN"])
def test_the_reference_passes_its_own_suite(slug: str) -> None:
    spec = parse_slug(slug)[0]
    report = check_kernels(ReferenceKernels(spec))
    assert report.passed, report.reason
    assert report.cases == sum(case.fault is None and case.op in PAGED_OPS for case in quick_suite(spec))


def test_the_ops_can_be_chosen() -> None:
    report = check_kernels(ReferenceKernels(SPEC), ops=[Op.COPY_BLOCKS], seed=5)
    assert report == CheckReport(Status.PASSED, 5)


def change(name: str, index: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name][index] = value

    return apply


def into_a_gap(tensors: Tensors) -> None:
    out = tensors["out"]
    out.as_strided((1,), (1,), out.stride(1) - 1)[0] = 0.0


@pytest.mark.parametrize(
    ("apply", "told"),
    [
        (change("out", (1, 2, 3), math.nan), "out[1, 2, 3] is NaN"),
        (change("out", (0, 0, 0), math.inf), "out[0, 0, 0] is infinite"),
        (change("out", (4, 5, 23), 9.0), "out[4, 5, 23] is off: got 9, expected"),
        (change("out", (6, 0, 0), 0.0), "out[6, 0, 0] written, though it belongs to no sequence"),
        (change("lse", (0, 1), 1e4), "lse[0, 1] is off"),
        (change("lse", (1, 0), -50.0), "lse[1, 0] is finite"),  # a row before the first key: -inf
        (change("lse", (1, 0), math.nan), "lse[1, 0] is NaN"),
        (change("lse", (5, 0), 0.0), "lse[5, 0] written"),
        (into_a_gap, "out: 1 elements between its rows were written"),
    ],
)
def test_each_way_of_being_wrong_is_told(apply: Callable[[Tensors], None], told: str) -> None:
    tensors = outputs_of(CASE)
    assert compare(CASE, tensors) is None
    apply(tensors)
    message = compare(CASE, tensors)
    assert message is not None
    assert message.startswith(told)


def test_nan_is_refused_before_the_tolerance_and_the_worst_element_is_named() -> None:
    tensors = outputs_of(CASE)
    tensors["out"][0, 0, 0], tensors["out"][0, 0, 1], tensors["out"][0, 0, 2] = 5.0, 500.0, 50.0
    assert str(compare(CASE, tensors)).startswith("out[0, 0, 1] is off")
    assert "(3 of" in str(compare(CASE, tensors))
    tensors["out"][3, 0, 0] = math.nan
    assert str(compare(CASE, tensors)).startswith("out[3, 0, 0] is NaN")


def test_ops_that_move_bits_are_held_to_the_bit() -> None:
    tensors = outputs_of(COPY)
    assert compare(COPY, tensors) is None
    poisoned = tuple(tensors["v_cache"].isnan().nonzero()[0].tolist())
    tensors["v_cache"].view(torch.int16)[poisoned] ^= 1  # a NaN becomes another NaN
    assert str(compare(COPY, tensors)).startswith(f"v_cache{list(poisoned)}: got nan, expected nan (1 elements")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rounding_is_allowed_and_half_a_percent_is_not(dtype: str) -> None:
    """One unit in the last place passes; an error of a few units, which no rounding explains, does not."""
    case = Case("one", Op.ATTEND, parse_slug(f"{dtype}-d16-h3x1-b4-NHD")[0], (1, 3), (40, 9))
    tensors = outputs_of(case)
    out, tolerance = tensors["out"], expected(case).tolerances["out"]
    assert tolerance is not None
    unit = torch.finfo(out.dtype).eps
    tensors["out"] = (out.double() * (1 + unit / 2)).to(out.dtype)
    assert compare(case, tensors) is None
    tensors["out"] = (out.double() + 3 * tolerance).to(out.dtype)
    assert compare(case, tensors) is not None
    assert float(tolerance.max()) < {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.005}[dtype]


class Wrong(ReferenceKernels):
    """Refuses one batch size, scribbles on the queries of another, forgets V in copies."""

    def attend(self, out: torch.Tensor, q: torch.Tensor, *rest: torch.Tensor, **options: object) -> None:
        if len(q) == 5:
            raise KernelError("five rows: got 5, expected another number")
        super().attend(out, q, *rest, **options)  # type: ignore[arg-type]
        if len(q) == 131:
            q[0] = 0

    def copy_blocks(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor, *, scales: KVScales | None = None
    ) -> None:
        super().copy_blocks(k_cache, v_cache.clone(), pairs, scales=scales)


def test_failures_of_loaded_kernels_are_told_the_smallest_first() -> None:
    spec = KernelSpec(3, 1, 8, block_size=4)
    kernels: PagedKernels = Wrong(spec)
    report = check_kernels(kernels)
    messages = {failure.case.name: failure.message for failure in report.failures}
    assert report.status is Status.INCORRECT
    assert messages["decode at split borders"].startswith("refused: five rows")
    assert messages["prefill tiles"] == "q was written"
    assert messages["one block"].startswith("v_cache[")
    assert report.reason.startswith("copy_blocks, one block: v_cache[")


def test_a_report_is_json() -> None:
    report = CheckReport.of(3, [Failure(CASE, "is off")], Status.RUN_ERROR)
    document = json.loads(json.dumps(report.to_dict()))
    assert (document["status"], document["passed"], document["cases"]) == ("RUN_ERROR", False, 3)
    assert document["failures"][0]["message"] == "is off"
    assert document["failures"][0]["context_lens"] == [7, 3, 2]
    assert CheckReport.of(3, []).to_dict() == {"status": "PASSED", "passed": True, "cases": 3, "seconds": 0.0, "failures": []}


def test_callables_can_be_checked_one_op_at_a_time() -> None:
    assert check_calls({Op.ATTEND: ReferenceKernels(SPEC).attend}, [CASE]) == []


def test_values_inside_rotated_keys_may_be_off_as_far_as_the_keys() -> None:
    fields = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "head_dim_v": 8, "dtype": "fp32", "block_size": 4}
    spec = KernelSpec.from_dict({**fields, "v_in_k": True, "rope": "neox", "rotary_dim": 16})
    case = Case("rotated", Op.WRITE_KV, spec, (3,), (3,))
    outputs = outputs_of(case)
    written = outputs["k_cache"].isfinite() & (outputs["k_cache"] != 0)
    outputs["k_cache"][written] = outputs["k_cache"][written].nextafter(torch.tensor(9.0))
    assert compare(case, outputs) is None
    outputs["k_cache"][written] *= 1.01
    assert "is off" in (compare(case, outputs) or "")
