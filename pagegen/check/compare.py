"""What a case must give, and the verdict: tolerances are tolerance.py's, and ops that move bits are held to the bit.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..errors import KernelError, UntunedShapeWarning
from ..kernel import PagedKernels
from ..records import Status
from ..reference import ReferenceKernels, dequantise, store_tokens, token_view
from ..spec import PAGED_OPS, KVScale, Op
from .case import Case
from .pool import Tensors
from .suite import suite_named
from .tensors import arguments, flat, materialise, move, outputs_of, views_of
from .tolerance import attend_tolerances, rotated_tolerance, store_tolerance


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
    seconds: float = dataclasses.field(default=0.0, compare=False)  # what judging took, after compilation

    @property
    def passed(self) -> bool:
        """Whether every case gave the right answer."""
        return self.status is Status.PASSED

    @property
    def reason(self) -> str:
        """One line: the smallest failing case and its message; empty if all passed."""
        return f"{self.failures[0].case.op.value}, {self.failures[0].case.label}: {self.failures[0].message}" if self.failures else ""

    @classmethod
    def of(cls, cases: int, failures: Iterable[Failure], status: Status = Status.INCORRECT) -> CheckReport:
        """PASSED without failures, otherwise `status`."""
        ordered = tuple(sorted(failures, key=lambda failure: failure.case.size))
        return cls(status if ordered else Status.PASSED, cases, ordered)

    def timed(self, begin: float) -> CheckReport:
        """The same, with the seconds since `begin` on the monotonic clock."""
        return dataclasses.replace(self, seconds=time.monotonic() - begin)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        failures = [failure.to_dict() for failure in self.failures]
        return {"status": self.status.value, "passed": self.passed, "cases": self.cases, "seconds": self.seconds, "failures": failures}


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """A case's tensors after the reference, in the geometry of `materialise`, and bounds of those that are computed."""

    tensors: Tensors
    tolerances: Mapping[str, torch.Tensor]


@functools.lru_cache(maxsize=256)
def expected(case: Case) -> Expected:
    """What the reference gives. Kept, because a tuner asks for the same cases with every config; not to be written to."""
    before = materialise(case) if case.op is Op.WRITE_KV else {}
    tensors = materialise(case)
    invoke(getattr(ReferenceKernels(case.spec), case.op.value), case, tensors)
    tolerances: dict[str, torch.Tensor] = {}
    if case.op is Op.ATTEND:
        tolerances = attend_tolerances(case, tensors)
    elif case.op is Op.WRITE_KV and case.spec.rope is not None:
        tolerances = {"k": rotated_tolerance(case.spec, before["k"], before.get("k_weight"), 1e-6)}
        error = rotated_tolerance(case.spec, before["q"], before.get("q_weight"), 1e-6)
        tolerances["q_out"] = store_tolerance(case.spec, case.spec.dtype, tensors["q_out"].double(), error, None)
    return Expected(tensors, tolerances)


def invoke(operation: Callable[..., None], case: Case, tensors: Tensors) -> None:
    """Calls an op with a case's tensors."""
    operation(**arguments(case, tensors))


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(case: Case, outputs: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor] | None = None) -> str | None:
    """None if `outputs` (in the geometry of `materialise`, on the CPU) are right, else what is wrong in one line.

    Order: what must not be written, NaN and infinity, then the tolerance. `want` are another kernel's outputs instead of
    the reference's: then the tolerance is the sum of both kernels'.
    """
    found, kernels = expected(case), 1 if want is None else 2
    want = {**found.tensors, **(want or {})}
    outputs = dict(outputs)
    if "k" in found.tolerances:
        message = _compare_rotated(case, outputs, want, found.tolerances["k"], kernels)
        if message:
            return message
    for name in outputs_of(case):
        if name not in outputs or (name == "v_cache" and case.spec.v_in_k):  # the same memory as k_cache
            continue
        tolerance = found.tolerances.get(name)
        if tolerance is None:
            message = _compare_bits(name, outputs[name], want[name])
        else:
            message = _compare_gaps(name, outputs[name], want[name]) or _compare_values(name, outputs[name], want[name], kernels * tolerance)
        if message:
            return message
    return None


def compare_like(case: Case, like: Case, outputs: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> str | None:
    """None if attend's rows have the bits of the same rows of the case it is like, else what is wrong."""
    begin = sum(case.query_lens[: case.part.sequence]) + case.part.first if case.part else 0
    for name, got in outputs.items():
        want = whole[name][begin : begin + len(got)]
        different = (_bits(got) != _bits(want)).nonzero()
        if len(different):
            first = tuple(different[0].tolist())
            told = f"got {got[first].item():.9g}, but {want[first].item():.9g} in {like.label!r}"
            return f"{name}{list(first)}: {told} ({len(different)} elements differ)"
    return None


class Verdicts:
    """Judges cases one after the other, and keeps the outputs of those that later ones are like."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._wanted = {case.like for case in cases if case.like}
        self._kept: dict[Case, dict[str, torch.Tensor]] = {}

    def of(self, case: Case, outputs: Mapping[str, torch.Tensor]) -> str | None:
        """None if right, else what is wrong in one line."""
        if case in self._wanted:
            self._kept.setdefault(case, dict(outputs))
        message = compare(case, outputs)
        if message is None and case.like is not None and case.like in self._kept:
            message = compare_like(case, case.like, outputs, self._kept[case.like])
        return message


def _compare_rotated(
    case: Case, got: dict[str, torch.Tensor], want: Mapping[str, torch.Tensor], error: torch.Tensor, kernels: int
) -> str | None:
    """Rotated keys are compared by value; then they are taken as right, and the rest is left to the comparison of bits."""
    spec, order, slots = case.spec, case.spec.kv_layout.k_order, want["slot_mapping"]
    rows = (slots >= 0).nonzero()[:, 0]
    at = slots[rows] // spec.block_size, slots[rows] % spec.block_size
    (values, _), (right, scale) = (_keys(case, tensors, at) for tensors in ({**want, **got}, want))
    bound = kernels * store_tolerance(spec, spec.cache_dtype, right, error[rows], scale)
    off = ~((values - right).abs() <= bound)
    if off.any():
        first = tuple(off.nonzero()[0].tolist())
        told = f"got {values[first].item():g}, expected {right[first].item():g} within {bound[first].item():.1e}"
        return f"k of row {int(rows[first[0]])} {list(first[1:])} is off: {told} ({int(off.sum())} elements)"
    for name in ("k_cache", "k_scale", "k_zero"):
        if name in got:
            got[name] = move(got[name], "cpu")
            if name == "k_cache":
                store_tokens(order, got[name], at, token_view(order, want[name])[at])
            else:
                got[name][at] = want[name][at]
    return None


def _keys(
    case: Case, tensors: Mapping[str, torch.Tensor], at: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float64 keys `[T, kv_heads, head_dim]` at (block, token in it), and the scales they were divided by."""
    spec, scale, zero = case.spec, tensors.get("k_scale"), tensors.get("k_zero")
    stored = token_view(spec.kv_layout.k_order, tensors["k_cache"])[at]
    if scale is None:
        return stored.double(), None
    if spec.kv_scale is KVScale.TOKEN_HEAD:
        scale = scale[at]
    return dequantise(spec, stored, scale, None if zero is None else zero[at]), scale


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
    open_ = tolerance.isinf()
    got, want = got.double(), want.double()
    error = (got - want).abs()
    problems = [
        ("written, though it belongs to no sequence", untouched & ~open_ & ~got.isnan()),
        ("is NaN", ~untouched & ~open_ & got.isnan()),
        ("is infinite", want.isfinite() & ~open_ & got.isinf()),
        ("is finite", ~untouched & ~open_ & want.isinf() & (got != want)),
        ("is off", ~untouched & ~open_ & want.isfinite() & ~(error <= tolerance)),
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
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


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
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedShapeWarning)  # cases are odd shapes on purpose
        return CheckReport.of(len(cases), check_calls(calls, cases, device)).timed(begin)


def check_calls(
    calls: Mapping[Op, Callable[..., None]], cases: Iterable[Case], device: str | torch.device = "cpu"
) -> list[Failure]:
    """The failures of callables on cases; a KernelError is one."""
    cases = list(cases)
    failures, verdicts = [], Verdicts(cases)
    for case in cases:
        tensors = materialise(case, device)
        try:
            invoke(calls[case.op], case, tensors)
        except KernelError as error:
            failures.append(Failure(case, f"refused: {error}"))
            continue
        changed = _changed_inputs(case, tensors)
        message = f"{changed} was written" if changed else verdicts.of(case, written(case, tensors))
        if message:
            failures.append(Failure(case, message))
    return failures


def written(case: Case, tensors: Tensors) -> Tensors:
    """What a call wrote, on the CPU."""
    return {name: _on_cpu(tensors[name]) for name in outputs_of(case) if name in tensors}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).cpu().as_strided(tensor.shape, tensor.stride(), 0)


def _changed_inputs(case: Case, tensors: Tensors) -> str | None:
    before, outputs = materialise(case), {*outputs_of(case)}
    outputs |= {of for view, of in views_of(case).items() if view in outputs}
    for name, tensor in tensors.items():
        if name not in outputs and not torch.equal(flat(_on_cpu(tensor)).view(torch.uint8), flat(before[name]).view(torch.uint8)):
            return name
    return None
