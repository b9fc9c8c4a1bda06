"""A failing case as a program that anybody can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum

from ..catalog import Variant
from ..spec import KernelSpec
from .case import Case

HEAD = """from pagegen.catalog import Variant, template_for
from pagegen.check import check_cases
from pagegen.check.case import Case, Fault, Part, Poison
from pagegen.render import render
from pagegen.spec import KernelSpec, Op
from pagegen.target import parse_target
"""


def snippet(case: Case, variant: Variant) -> str:
    """Python text that renders, builds and judges the variant's kernel on the case, and prints what is wrong or `passed`."""
    return "\n".join(_lines(case, variant)) + "\n"


def _lines(case: Case, variant: Variant) -> Iterator[str]:
    yield HEAD
    yield f"spec = KernelSpec.from_dict({_fields_of(case.spec)})"
    if case.source is not None:
        yield f"source = KernelSpec.from_dict({_fields_of(case.source)})"
    yield f'target = parse_target("{variant.target.name}")'
    yield f"template = template_for({_word(case.op)}, spec, target)"
    yield f"config = template.space(spec, target).config({variant.config.to_dict()!r})"
    if case.like is not None:
        yield f"like = {_case(case.like)}"
    yield f"case = {_case(case)}"
    cases = "[like, case]" if case.like is not None else "[case]"
    yield f'print(check_cases(render(Variant(spec, target, template, config)), {cases}).reason or "passed")'


def _fields_of(spec: KernelSpec) -> dict[str, object]:
    """What a spec states beyond the defaults."""
    plain = KernelSpec(spec.q_heads, spec.kv_heads, spec.head_dim).to_dict()
    needed = ("q_heads", "kv_heads", "head_dim")
    return {name: value for name, value in spec.to_dict().items() if name in needed or value != plain[name]}


def _case(case: Case) -> str:
    words = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name in ("spec", "source", "like"):
            if value is not None:
                words.append(f"{field.name}={field.name}")
        elif value != field.default:
            words.append(f"{field.name}={_word(value)}")
    return f"Case({', '.join(words)})"


def _word(value: object) -> str:
    if isinstance(value, StrEnum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value)
