"""Backends held against each other: no two of them may be further apart than the sum of their bounds.

Two that are right cannot be. The reference's values play no part in it, so where it agrees with one kernel and another
does not, this says whether they agree among themselves. What is moved or quantised is held to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..build.triton import Interpreter
from ..errors import CheckError
from ..render import Source
from ..spec import Op
from ..target import Target
from .case import Case
from .compare import CheckReport, compare, invoke, written
from .driver import library_outputs
from .pool import Tensors
from .tensors import materialise


@dataclasses.dataclass(frozen=True, slots=True)
class Disagreement:
    """Two backends, a case in which they are apart, and how: what the first gave, where the second's was expected."""

    backends: tuple[str, str]
    case: Case
    message: str

    def __str__(self) -> str:
        return f"{' and '.join(self.backends)} differ in {self.case.op.value}, {self.case.label}: {self.message}"


def disagreements(cases: Sequence[Case], outputs: Mapping[str, Sequence[Tensors]]) -> Iterator[Disagreement]:
    """Where two backends differ; `outputs` are a backend's for each case, in the geometry of `materialise`."""
    for (one, left), (other, right) in itertools.combinations(outputs.items(), 2):
        for case, got, want in zip(cases, left, right, strict=True):
            message = compare(case, got, want)
            if message:
                yield Disagreement((one, other), case, message)


def compiled_outputs(library: Path, op: Op, target: Target, cases: Sequence[Case]) -> list[Tensors]:
    """What a C++ kernel gives for cases of its op. Raises CheckError if it ends otherwise."""
    found = library_outputs(library, op, target, cases)
    if isinstance(found, CheckReport):
        raise CheckError(f"{op.value} on {target.name} gave nothing to compare: {found.status.value}, {found.reason}")
    return found


def interpreted_outputs(source: Source, cases: Sequence[Case], interpreter: Interpreter) -> list[Tensors]:
    """The same of a Triton kernel under the interpreter. Raises CheckError if it fails there."""
    variant, outputs = source.variant, []
    kernel = interpreter.load(source.text, source.key, variant.spec, variant.template.op, variant.config.to_dict())
    for case in cases:
        tensors = materialise(case)
        invoke(kernel, case, tensors)
        outputs.append(written(case, tensors))
    return outputs
