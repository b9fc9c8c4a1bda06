"""Proves one spec of the grid on one backend: what `scripts/coverage.py` and its tests run many times."""

from __future__ import annotations

import dataclasses
import random
import time

from ..build.triton import Interpreter
from ..catalog import TEMPLATES, Variant, template_for
from ..errors import PagegenError, SpecError
from ..render import render
from ..space import Config, ConfigSpace
from ..spec import PAGED_OPS, KernelSpec, Op
from ..target import TARGETS, Target, is_present, parse_target
from . import check_cases
from .compare import CheckReport, check_calls
from .grid import Choice, probe, spec_of

MOVERS = (Op.COPY_BLOCKS, Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS, Op.RELAYOUT)
INTERPRETED = "cuda:sm_90"  # the text that is interpreted
INTERPRETED_WORK = 3e5  # multiplications of one interpreted case


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A spec, where it ran, how long, and what was wrong: nothing, in a proof."""

    choice: Choice
    target: str
    seconds: float
    cases: int
    failures: tuple[str, ...]


def refusal(language: str, spec: KernelSpec) -> str | None:
    """Why the templates of a language do not serve a spec, or None."""
    target = parse_target("cpu:scalar" if language == "cpp" else INTERPRETED)
    for op in PAGED_OPS:
        reasons = [row.supports(spec, target) for row in TEMPLATES if row.op is op and row.language == language]
        if None not in reasons:
            return next((f"{op.value}: {reason}" for reason in reasons if reason), f"there is no {op.value}")
    return None


def isas() -> tuple[Target, ...]:
    """The CPU targets that this machine runs."""
    return tuple(target for target in TARGETS if target.kind == "cpu" and is_present(target))


def prove_cpp(choice: Choice, index: int) -> Outcome:
    """attend, write_kv and one op that moves a cache, as built for real; targets and configs take turns."""
    spec, here = spec_of(choice), isas()
    target, begin = here[index % len(here)], time.monotonic()
    cases, failures = 0, []
    for op in (Op.ATTEND, Op.WRITE_KV, MOVERS[index % len(MOVERS)]):
        template = template_for(op, spec, target)
        config = _config(template.space(spec, target), index)
        try:
            report = check_cases(render(Variant(spec, target, template, config)), probe(spec, index))
        except SpecError:
            raise
        except PagegenError as error:
            failures.append(f"{op.value} with {config.slug}: {error}")
            continue
        cases += report.cases
        failures += [f"{op.value} with {config.slug}: {f.case.label}: {f.message}" for f in report.failures]
    return Outcome(choice, target.name, time.monotonic() - begin, cases, tuple(failures))


def prove_triton(choice: Choice, index: int, interpreter: Interpreter) -> Outcome:
    """The three ops of PagedKernels, interpreted; configs take turns."""
    spec, target, begin = spec_of(choice), parse_target(INTERPRETED), time.monotonic()
    cases, failures = 0, []
    for op in PAGED_OPS:
        template = template_for(op, spec, target)
        config = _config(template.space(spec, target), index)
        made = render(Variant(spec, target, template, config))
        kernel = interpreter.load(made.text, made.key, spec, op, config.to_dict())
        asked = [c for c in probe(spec, index, INTERPRETED_WORK) if c.op is op and not c.far and c.fault is None and c.like is None]
        report = CheckReport.of(len(asked), check_calls({op: kernel}, asked))
        cases += report.cases
        failures += [f"{op.value} with {config.slug}: {f.case.label}: {f.message}" for f in report.failures]
    return Outcome(choice, f"{INTERPRETED}, interpreted", time.monotonic() - begin, cases, tuple(failures))


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
