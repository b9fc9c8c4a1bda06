"""Proves one spec of the grid on one backend: what `scripts/coverage.py` and its tests run many times."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence

from ..build.cpp import compile_library
from ..build.triton import Interpreter
from ..catalog import TEMPLATES, Variant, template_for, variant
from ..errors import PagegenError
from ..render import Source, render
from ..space import Config, ConfigSpace
from ..spec import PAGED_OPS, KernelSpec, Op
from ..target import TARGETS, Target, is_present, parse_target
from . import check_cases
from .case import Case
from .compare import CheckReport, check_calls
from .grid import Choice, probe, spec_of
from .pairs import compiled_outputs, disagreements, interpreted_outputs
from .pool import Tensors

MOVERS = (Op.COPY_BLOCKS, Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS, Op.RELAYOUT)
INTERPRETED = "cuda:sm_90"  # the text that is interpreted
INTERPRETED_WORK = 1e6  # multiplications of one interpreted case
INTERPRETED_ROWS = 100  # of write_kv, a program each


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A spec, where it ran, how long, and what was wrong: nothing, in a proof."""

    choice: Choice
    target: str
    seconds: float
    cases: int
    failures: tuple[str, ...]


def refusal(language: str, spec: KernelSpec) -> str | None:
    """Why the templates of a language do not serve a spec, or None; of both languages, for `pairs`."""
    if language == "pairs":
        return refusal("cpp", spec) or refusal("triton", spec)
    target = parse_target("cpu:scalar" if language == "cpp" else INTERPRETED)
    for op in PAGED_OPS:
        reasons = [row.supports(spec, target) for row in TEMPLATES if row.op is op and row.language == language]
        if None not in reasons:
            return next((f"{op.value}: {reason}" for reason in reasons if reason), f"there is no {op.value}")
    return None


def isas() -> tuple[Target, ...]:
    """The CPU targets that this machine runs."""
    return tuple(target for target in TARGETS if target.kind == "cpu" and is_present(target))


def sources(backend: str, choice: Choice, index: int) -> tuple[Source, ...]:
    """What proves a spec on `cpp` or `triton`: attend, write_kv and an op that moves a cache; those ops, targets and configs
    take turns. On `pairs`: attend and write_kv with their default configs for every target."""
    spec, gpu = spec_of(choice), parse_target(INTERPRETED)
    if backend == "pairs":
        return tuple(render(variant(op, spec, target)) for op in (Op.ATTEND, Op.WRITE_KV) for target in (*isas(), gpu))
    here = isas() if backend == "cpp" else (gpu,)
    target, movers = here[index % len(here)], [op for op in MOVERS if _has(backend, op)]
    ops = (Op.ATTEND, Op.WRITE_KV, movers[index % len(movers)])
    templates = [template_for(op, spec, target) for op in ops]
    return tuple(render(Variant(spec, target, template, _config(template.space(spec, target), index))) for template in templates)


def prove_cpp(choice: Choice, index: int) -> Outcome:
    """The kernels of `sources`, built for real."""
    return _prove(sources("cpp", choice, index), choice, lambda source: check_cases(source, probe(spec_of(choice), index)))


def prove_triton(choice: Choice, index: int, interpreter: Interpreter) -> Outcome:
    """The kernels of `sources`, interpreted."""

    def check(source: Source) -> CheckReport:
        variant, op = source.variant, source.variant.template.op
        kernel = interpreter.load(source.text, source.key, variant.spec, op, variant.config.to_dict())
        asked = [case for case in interpreted(variant.spec, index) if case.op is op]
        return CheckReport.of(len(asked), check_calls({op: kernel}, asked))

    return _prove(sources("triton", choice, index), choice, check, ", interpreted")


def prove_pairs(choice: Choice, index: int, interpreter: Interpreter) -> Outcome:
    """Every two of the instruction sets of this machine and interpreted Triton."""
    spec, begin = spec_of(choice), time.monotonic()
    count, failures = 0, []
    for op, made in itertools.groupby(sources("pairs", choice, index), lambda source: source.variant.template.op):
        cases = [case for case in interpreted(spec, index) if case.op is op and case.like is None]
        *compiled, kernel = made
        outputs: dict[str, list[Tensors]] = {}
        try:
            for source in compiled:
                target = source.variant.target
                outputs[target.name] = compiled_outputs(compile_library(source.text, target), op, target, cases)
            outputs[INTERPRETED] = interpreted_outputs(kernel, cases, interpreter)
        except PagegenError as error:
            failures.append(f"{op.value}: {error}")
            continue
        count += len(cases)
        failures += map(str, disagreements(cases, outputs))
    return Outcome(choice, f"{len(isas()) + 1} backends", time.monotonic() - begin, count, tuple(failures))


def interpreted(spec: KernelSpec, seed: int) -> list[Case]:
    """The probe's cases that an interpreter can be asked: small ones, without what only the driver does, and threads."""
    return [case for case in probe(spec, seed, INTERPRETED_WORK) if _can_be_interpreted(case)]


def _can_be_interpreted(case: Case) -> bool:
    threads_only = case.like is not None and case.like == case.replace(like=None, threads=case.like.threads)
    small = case.op is not Op.WRITE_KV or sum(case.query_lens) <= INTERPRETED_ROWS
    return small and not threads_only and not case.far and case.fault is None


def _prove(made: Sequence[Source], choice: Choice, check: Callable[[Source], CheckReport], how: str = "") -> Outcome:
    begin, cases, failures = time.monotonic(), 0, []
    for source in made:
        what = f"{source.variant.template.op.value} with {source.variant.config.slug}"
        try:
            report = check(source)
        except PagegenError as error:
            failures.append(f"{what}: {error}")
            continue
        cases += report.cases
        failures += [f"{what}: {failure.case.label}: {failure.message}" for failure in report.failures]
    return Outcome(choice, made[0].variant.target.name + how, time.monotonic() - begin, cases, tuple(failures))


def _has(language: str, op: Op) -> bool:
    return any(row.op is op and row.language == language for row in TEMPLATES)


def _config(space: ConfigSpace, index: int) -> Config:
    """The default for every second spec, else one at random that breaks no constraint."""
    if index % 2 == 0:
        return space.default
    pick = random.Random(index)
    for _ in range(100):
        values = {knob.name: pick.choice(knob.values) for knob in space.knobs}
        if space.broken(values) is None:
            return space.config(values)
    return space.default
