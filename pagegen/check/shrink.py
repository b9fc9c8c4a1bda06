"""A failing case made smaller while it keeps failing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from .case import Case
from .compare import CheckReport, Failure

ATTEMPTS = 40  # runs of the kernel: a crash costs one each


def shrink(report: CheckReport, run: Callable[[Sequence[Case]], CheckReport]) -> CheckReport:
    """The report with its first failure replaced by the smallest one found; `run` judges cases as the report was made."""
    if not report.failures or report.failures[0].case.fault is not None or report.failures[0].case.like is not None:
        return report
    best, attempts = report.failures[0], 0
    again = True
    while again:
        again = False
        for case in _smaller(best.case):
            if case.shared_prefix_len > min(case.context_lens, default=0):
                continue  # refused, and rightly
            if attempts == ATTEMPTS:
                break
            attempts += 1
            failures = run([case]).failures
            if failures:
                best, again = Failure(case, failures[0].message), True
                break
    return dataclasses.replace(report, failures=(best, *report.failures[1:]))


def _smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first: one sequence, no extras, half, one less."""
    pairs = list(zip(case.query_lens or [0] * len(case.context_lens), case.context_lens, strict=True))
    if len(pairs) > 1:
        for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
            yield case.of_sequences(*zip(*half, strict=True))
    simple = case.replace(padding=0, strided=False, far=False, gain=1.0, scale=None, in_place=False, shared_blocks=0)
    if simple != case:
        yield simple
    for index, (query, context) in enumerate(pairs):
        cuts = [(query, context // 2), (query // 2, context), (query, context - 1), (query - 1, context)]
        for cut in dict.fromkeys(cuts):
            if cut != (query, context) and min(cut) >= 0 and cut[0] >= min(query, 1):
                yield case.of_sequences(*zip(*pairs[:index], cut, *pairs[index + 1 :], strict=True))
