"""How to compute it: knobs, the space they span with its default and constraints, and one choice of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

from .errors import ConfigError

Value = int | str | bool


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """A named tunable with its allowed values, in order, and what it is for."""

    name: str
    values: tuple[Value, ...]
    default: Value
    help: str = ""

    def __post_init__(self) -> None:
        if self.default not in self.values:
            raise ConfigError(f"knob {self.name}: default {self.default!r} is not among {list(self.values)}")


def power_of_two(name: str, low: int, high: int, default: int, help: str = "") -> Knob:
    """A knob over low, 2 low, ... high."""
    values = tuple(itertools.takewhile(lambda v: v <= high, (low << i for i in itertools.count())))
    return Knob(name, values, default, help)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """One choice of every knob; equal configs hash equal."""

    items: tuple[tuple[str, Value], ...]

    def to_dict(self) -> dict[str, Value]:
        """Knob name to value."""
        return dict(self.items)

    @property
    def slug(self) -> str:
        """`tile_kv=64 unroll=4`: readable, in the space's order."""
        return " ".join(f"{name}={value}" for name, value in self.items)


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that a config must satisfy, and the words to refuse it with."""

    rule: Callable[[Mapping[str, Value]], bool]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigSpace:
    """A template's knobs. The default always satisfies the constraints (checked here)."""

    knobs: tuple[Knob, ...]
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        self.config({})

    def config(self, changes: Mapping[str, Value]) -> Config:
        """The default with `changes`. Raises ConfigError naming the knob and its values, or the broken constraint."""
        by_name = {knob.name: knob for knob in self.knobs}
        for name, value in changes.items():
            if name not in by_name:
                known = ", ".join(f"{knob.name} (default {knob.default})" for knob in self.knobs)
                raise ConfigError(f"knob {name!r} is not known; allowed: {known or 'none for this template'}")
            knob = by_name[name]
            if value not in knob.values or isinstance(value, bool) != isinstance(knob.default, bool):
                meaning = f" ({knob.help})" if knob.help else ""
                raise ConfigError(f"knob {name}={value!r} is not allowed{meaning}; allowed: {', '.join(map(str, knob.values))}")
        values = {knob.name: changes.get(knob.name, knob.default) for knob in self.knobs}
        broken = self.broken(values)
        if broken:
            raise ConfigError(f"{' '.join(f'{k}={v}' for k, v in values.items())}: {broken}")
        return Config(tuple(values.items()))

    def parse(self, words: Mapping[str, str]) -> Config:
        """The same from text, as `--set name=value` gives it."""
        by_name = {knob.name: knob for knob in self.knobs}
        return self.config({name: _parse(by_name.get(name), text) for name, text in words.items()})

    def broken(self, values: Mapping[str, Value]) -> str | None:
        """The first constraint that `values` break, in words; None if they break none."""
        return next((constraint.reason for constraint in self.constraints if not constraint.rule(values)), None)

    @property
    def default(self) -> Config:
        """The choice that is good without tuning."""
        return self.config({})

    def __iter__(self) -> Iterator[Config]:
        """Every config that breaks no constraint."""
        names = [knob.name for knob in self.knobs]
        for choice in itertools.product(*(knob.values for knob in self.knobs)):
            values = dict(zip(names, choice, strict=True))
            if not self.broken(values):
                yield Config(tuple(values.items()))


def _parse(knob: Knob | None, text: str) -> Value:
    for value in knob.values if knob else ():
        if str(value).lower() == text.lower():
            return value
    return text
