"""JSON documents that anybody may have edited: read, and held against what they have to be like before anything is made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

MOST = 1e30  # of a number's size, so that products of a few stay finite
REST = "*"  # in a shape: every name that is not in it


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is no list and no mapping, and what it is called."""

    words: str
    holds: Callable[[Any], bool]


# {"field": shape, "may be missing?": shape, REST: shape}: other fields may be anything without REST; [of each item], or
# [first, second] for so many; (one, or another)
Shape = Leaf | Mapping[str, Any] | list[Any] | tuple[Any, ...]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


TEXT = Leaf("a text", lambda value: isinstance(value, str))
FLAG = Leaf("true or false", lambda value: isinstance(value, bool))
NULL = Leaf("null", lambda value: value is None)
NUMBER = Leaf("a number", _is_number)
POSITIVE = Leaf("a positive number", lambda value: _is_number(value) and value >= 1 / MOST)
WHOLE = Leaf("a whole number of 0 or more", lambda value: _is_number(value) and isinstance(value, int) and value >= 0)
KNOB = Leaf("a knob's value: a whole number, a text, true or false", lambda value: isinstance(value, int | str))
ANY = Leaf("", lambda value: True)

CONFIG: Shape = {REST: KNOB}
INTERVAL: Mapping[str, Shape] = {name: POSITIVE for name in ("median", "low", "high")}
EVALUATION: Mapping[str, Shape] = {  # `pagegen.records.Evaluation` as records and storages have it
    **{name: TEXT for name in ("status", "reason")},
    "config": CONFIG,
    "score": (NULL, POSITIVE),
    "timings": {REST: {**INTERVAL, "rounds": WHOLE}},
    **{f"{name}?": {REST: ANY} for name in ("environment", "conditions", "kernels", "estimate")},
    **{f"{name}?": NUMBER for name in ("seconds", "gate_seconds")},
    **{f"{name}?": (NULL, NUMBER) for name in ("noise", "roofline", "partial")},
    "source?": TEXT,
}


def has_format(values: Mapping[str, Any], number: int) -> bool:
    """Whether a document's `format` is this number; true is not 1."""
    return type(values.get("format")) is int and values["format"] == number


def parse(text: str) -> Any:
    """JSON that can be written again: ValueError for NaN, for a number too large for a float and for half a character."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


def require(shape: Shape, value: Any, place: str = "") -> None:
    """Raises ValueError naming the first place, seen from `place`, where `value` is not as `shape` says."""
    named = place.removeprefix(".") or "it"
    match shape:
        case Leaf():
            if not shape.holds(value):
                raise ValueError(f"{named} is {_short(value)}, not {shape.words}")
        case tuple():
            first, *others = shape
            try:
                require(first, value, place)
            except ValueError:
                if not others:
                    raise
                require(tuple(others), value, place)
        case list():
            if not isinstance(value, list) or len(shape) not in (1, len(value)):
                raise ValueError(f"{named} is {_short(value)}, not a list{f' of {len(shape)}' if len(shape) > 1 else ''}")
            for index, item in enumerate(value):
                require(shape[index % len(shape)], item, f"{place}[{index}]")
        case _:
            if not isinstance(value, dict):
                raise ValueError(f"{named} is {_short(value)}, not a mapping")  # noqa: TRY004  # of a document, not an argument
            keys = {name.removesuffix("?"): name for name in shape if name != REST}
            if missing := [name for name, key in keys.items() if name == key and name not in value]:
                raise ValueError(f"{f'{place}.{missing[0]}'.removeprefix('.')} is missing")
            for name, item in value.items():
                if name in keys or REST in shape:
                    require(shape[keys.get(name, REST)], item, f"{place}.{_short(name)[1:-1]}")


def _short(value: Any) -> str:
    return f"{value!r:.40}"
