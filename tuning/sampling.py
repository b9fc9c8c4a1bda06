"""Who proposes configs, by name, and how a config is written as a trial's parameters."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from pagegen.space import Config, ConfigSpace, Knob, Value


def make_sampler(name: str, seed: str, startup: int) -> BaseSampler:
    """Optuna's sampler, which draws its first `startup` proposals at random. The same text seeds it alike."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "tpe":  # constant_liar: what other workers are evaluating is not proposed again
                return TPESampler(seed=number, multivariate=True, constant_liar=True, n_startup_trials=startup)
            case "gp":
                return GPSampler(seed=number, n_startup_trials=startup)
            case _:
                return RandomSampler(seed=number)


class Coding:
    """Configs of a space as parameters of trials, and back.

    Numbers are sampled by their place in order, so that neighbours are neighbours; anything else is a category.
    """

    def __init__(self, space: ConfigSpace) -> None:
        self._knobs = space.knobs
        self._ordinal = {knob.name: _in_order(knob) for knob in space.knobs if _is_ordinal(knob)}
        self.distributions: dict[str, BaseDistribution] = {knob.name: _distribution(knob) for knob in space.knobs}
        knobs = {knob.name: [repr(value) for value in _in_order(knob)] for knob in space.knobs}
        self.digest = digest({"knobs": knobs, "constraints": sorted(rule.reason for rule in space.constraints)})

    def encode(self, config: Config) -> dict[str, Any]:
        """The parameters of a config."""
        values = config.to_dict()
        names, ordinal = (knob.name for knob in self._knobs), self._ordinal
        return {name: ordinal[name].index(values[name]) if name in ordinal else values[name] for name in names}

    def decode(self, params: Mapping[str, Any]) -> Config:
        """The config of parameters. Raises ValueError for one that is out of its range."""
        for name, distribution in self.distributions.items():
            if not distribution._contains(distribution.to_internal_repr(params[name])):
                raise ValueError(f"knob {name} is out of its range: {params[name]!r}")
        names, ordinal = (knob.name for knob in self._knobs), self._ordinal
        return Config(tuple((name, ordinal[name][params[name]] if name in ordinal else params[name]) for name in names))

    def fits(self, params: Mapping[str, Any]) -> bool:
        """Whether every knob, and nothing else, has a parameter: not so while a trial is being chosen."""
        return params.keys() == self.distributions.keys()


def digest(value: Mapping[str, Any]) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _is_ordinal(knob: Knob) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in knob.values)


def _distribution(knob: Knob) -> BaseDistribution:
    return IntDistribution(0, len(knob.values) - 1) if _is_ordinal(knob) else CategoricalDistribution(_in_order(knob))


def _in_order(knob: Knob) -> list[Value]:
    return sorted(knob.values, key=lambda value: (str(type(value)), value))
