"""Which knobs mattered to a search, from its record: no device, no study.

PED-ANOVA (Watanabe, Bansal and Hutter 2023, https://arxiv.org/abs/2304.10255) as Optuna computes it: the share of what
tells the best tenth of the configs from the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from pagegen.records import Evaluation, Status

LEAST = 10  # configs that passed, below which nothing is said


def importances(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Knob to its share, the largest first; nothing where too few passed, or all are alike."""
    passed = [found for found in evaluations if found.status is Status.PASSED]
    if len(passed) < LEAST:
        return {}
    seen = {name: sorted({found.config[name] for found in passed}, key=lambda value: (str(type(value)), value)) for name in passed[0].config}
    varied = {name: values for name, values in seen.items() if len(values) > 1}
    if not varied or len({found.score for found in passed}) < 2:
        return {}
    kinds = {name: _distribution(values) for name, values in varied.items()}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for found in passed:
        params = {
            name: varied[name].index(found.config[name]) if isinstance(kind, IntDistribution) else found.config[name]
            for name, kind in kinds.items()
        }
        study.add_trial(create_trial(params=params, distributions=kinds, value=found.score))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return dict(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))


def _distribution(values: Sequence[object]) -> BaseDistribution:
    """Numbers by their place in order, anything else as categories."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return IntDistribution(0, len(values) - 1)
    return CategoricalDistribution(values)  # type: ignore[arg-type]
