"""What a case must give, how far a kernel may be from it, and the verdict. Vendored into every kernel package.

**Tolerance of attend.** With u the unit roundoff of the output's dtype, u32 = 2**-24, A = sum_j p_j |v_j| (a row's mean of
|V| under its own softmax), D the head dim, n the longest context and S = scale |q| max|k| >= |any score|:

    |out - reference| <= u (2 |reference| + A) + 2 u32 ((sqrt(D) + 8) S + sqrt(n) + 8) A
    |lse - reference| <= u32 ((sqrt(D) + 8) S + sqrt(n) + 8 + 2 |reference|)

The first term is the rounding of the output on both sides, and of the probabilities to the output's dtype, which a kernel
on matrix units does. The second is fp32 arithmetic: a dot product of D terms and a sum of n, whose errors grow with the
square root of the length (Higham and Mary 2019, https://doi.org/10.1137/18M1226312), eight roundings for scale, maximum
and exp, and the factor 2 for numerator and denominator. A score's absolute error is a probability's relative error.
The other ops move bits: nothing is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..errors import KernelError
from ..kernel import TORCH_DTYPES, PagedKernels
from ..records import Status
from ..reference import ReferenceKernels, token_view
from ..spec import PAGED_OPS, KernelSpec, Op
from .suite import Case, suite_named
from .tensors import OUTPUTS, Tensors, flat, materialise

U32 = 2.0**-24


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A case that a kernel got wrong, and how."""

    case: Case
    message: str

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {"message": self.message, **self.case.to_dict()}


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """The gate's verdict. `failures` are ordered by the size of their input, the smallest first."""

    status: Status
    cases: int
    failures: tuple[Failure, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every case gave the right answer."""
        return self.status is Status.PASSED

    @property
    def reason(self) -> str:
        """One line: the smallest failing case and its message; empty if all passed."""
        return f"{self.failures[0].case.op.value}, {self.failures[0].case.name}: {self.failures[0].message}" if self.failures else ""

    @classmethod
    def of(cls, cases: int, failures: Iterable[Failure], status: Status = Status.INCORRECT) -> CheckReport:
        """PASSED without failures, otherwise `status`."""
        ordered = tuple(sorted(failures, key=lambda failure: failure.case.size))
        return cls(status if ordered else Status.PASSED, cases, ordered)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        failures = [failure.to_dict() for failure in self.failures]
        return {"status": self.status.value, "passed": self.passed, "cases": self.cases, "failures": failures}


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The outputs of a case, in the geometry `materialise` gave them, and a tolerance for each; None: the same bits."""

    outputs: Tensors
    tolerances: Mapping[str, torch.Tensor | None]


@functools.lru_cache(maxsize=128)
def expected(case: Case) -> Expected:
    """What the reference gives. Kept, because a tuner asks for the same cases with every config; not to be written to."""
    tensors = materialise(case)
    invoke(getattr(ReferenceKernels(case.spec), case.op.value), case, tensors)
    tolerances = _attend_tolerances(case, tensors) if case.op is Op.ATTEND else {}
    outputs = {name: tensors[name] for name in OUTPUTS[case.op] if name in tensors}
    return Expected(outputs, {name: tolerances.get(name) for name in outputs})


def invoke(operation: Callable[..., None], case: Case, tensors: Tensors) -> None:
    """Calls an op with a case's tensors."""
    scale = {"scale": case.scale} if case.op is Op.ATTEND else {}
    operation(**tensors, **scale)


def _attend_tolerances(case: Case, tensors: Tensors) -> dict[str, torch.Tensor | None]:
    spec = case.spec
    magnitude = torch.empty_like(tensors["out"])  # A of the formula above: attention over |V|
    inputs = {name: tensor for name, tensor in tensors.items() if name != "lse"}
    inputs |= {"out": magnitude.fill_(math.nan), "v_cache": tensors["v_cache"].abs()}
    invoke(ReferenceKernels(spec.replace(lse=False)).attend, case, inputs)
    scale = spec.softmax_scale if case.scale is None else case.scale
    scores = tensors["q"].double().norm(dim=-1) * _largest_key(spec, tensors) * scale
    terms = (math.sqrt(spec.head_dim) + 8) * scores + math.sqrt(max(case.context_lens, default=0)) + 8
    unit = torch.finfo(TORCH_DTYPES[spec.dtype]).eps / 2
    out = unit * (2 * tensors["out"].double().abs() + magnitude) + 2 * U32 * terms[..., None] * magnitude
    lse = U32 * (terms + 2 * tensors["lse"].double().abs().nan_to_num(posinf=0.0)) if "lse" in tensors else None
    return {"out": out, "lse": lse}


def _largest_key(spec: KernelSpec, tensors: Tensors) -> float:
    keys = token_view(spec.kv_layout.k_order, tensors["k_cache"])
    largest = 0.0
    for table, context in zip(tensors["block_table"], tensors["context_lens"].tolist(), strict=True):
        position = torch.arange(context)
        held = keys[table[position // spec.block_size].long(), position % spec.block_size]
        largest = max(largest, float(held.double().norm(dim=-1).max()) if context else 0.0)
    return largest


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(case: Case, outputs: Mapping[str, torch.Tensor]) -> str | None:
    """None if `outputs` (in the geometry of `materialise`, on the CPU) are right, else what is wrong in one line.

    Order: what must not be written, NaN and infinity, then the tolerance.
    """
    want = expected(case)
    for name, reference in want.outputs.items():
        tolerance = want.tolerances[name]
        if tolerance is None:
            message = _compare_bits(name, outputs[name], reference)
        else:
            message = _compare_gaps(name, outputs[name], reference) or _compare_values(name, outputs[name], reference, tolerance)
        if message:
            return message
    return None


def _compare_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    different = _bits(flat(got)) != _bits(flat(want))
    if not different.any():
        return None
    wrong = (_bits(got) != _bits(want)).nonzero()
    if len(wrong) == 0:
        return f"{name}: {int(different.sum())} elements between its rows were written"
    first = tuple(wrong[0].tolist())
    return f"{name}{list(first)}: got {got[first].item():g}, expected {want[first].item():g} ({len(wrong)} elements differ)"


def _compare_gaps(name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    written = torch.zeros(flat(want).shape, dtype=torch.bool).as_strided(want.shape, want.stride())
    written.fill_(True)
    different = (_bits(flat(got)) != _bits(flat(want))) & ~flat(written)
    return f"{name}: {int(different.sum())} elements between its rows were written" if different.any() else None


def _compare_values(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: torch.Tensor) -> str | None:
    untouched = want.isnan()  # rows of no sequence: they hold the NaN that materialise put there
    got, want = got.double(), want.double()
    error = (got - want).abs()
    problems = [
        ("written, though it belongs to no sequence", untouched & ~got.isnan()),
        ("is NaN", ~untouched & got.isnan()),
        ("is infinite", want.isfinite() & got.isinf()),
        ("is finite", ~untouched & want.isinf() & (got != want)),
        ("is off", ~untouched & want.isfinite() & ~(error <= tolerance.nan_to_num(0.0))),
    ]
    for word, where in problems:
        if where.any():
            wrong = where.nonzero()
            worst = tuple(wrong[int(torch.argmax((error / tolerance)[where]))].tolist()) if word == "is off" else tuple(wrong[0].tolist())
            return (
                f"{name}{list(worst)} {word}: got {got[worst].item():g}, expected {want[worst].item():g} "
                f"within {tolerance[worst].item():.1e} ({len(wrong)} of {where.numel()} elements)"
            )
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


# --- in process ------------------------------------------------------------------------------------------------------


def check_kernels(
    kernels: PagedKernels,
    suite: str = "quick",
    ops: Sequence[Op] = PAGED_OPS,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> CheckReport:
    """Runs a suite on loaded kernels, in this process. Faults are left out: refusing them is the C ABI's promise."""
    calls: dict[Op, Callable[..., None]] = {Op.ATTEND: kernels.attend, Op.WRITE_KV: kernels.write_kv, Op.COPY_BLOCKS: kernels.copy_blocks}
    cases = [case for case in suite_named(suite)(kernels.spec, None, seed) if case.op in ops and case.fault is None]
    return CheckReport.of(len(cases), check_calls(calls, cases, device))


def check_calls(
    calls: Mapping[Op, Callable[..., None]], cases: Iterable[Case], device: str | torch.device = "cpu"
) -> list[Failure]:
    """The failures of callables on cases; a KernelError is one."""
    failures = []
    for case in cases:
        tensors = materialise(case, device)
        try:
            invoke(calls[case.op], case, tensors)
        except KernelError as error:
            failures.append(Failure(case, f"refused: {error}"))
            continue
        changed = _changed_inputs(case, tensors)
        outputs = {name: _on_cpu(tensors[name]) for name in OUTPUTS[case.op] if name in tensors}
        message = f"{changed} was written" if changed else compare(case, outputs)
        if message:
            failures.append(Failure(case, message))
    return failures


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).cpu().as_strided(tensor.shape, tensor.stride(), 0)


def _changed_inputs(case: Case, tensors: Tensors) -> str | None:
    before = materialise(case)
    for name, tensor in tensors.items():
        if name not in OUTPUTS[case.op] and not torch.equal(flat(_on_cpu(tensor)).view(torch.uint8), flat(before[name]).view(torch.uint8)):
            return name
    return None
