"""A recorded run on disk: a line for the setup, then one for each event, in the order the scheduler was told of them.

JSON lines, each a list whose first word is the kind. The log holds the token ids of prompts and outputs: who can read it
can read what was said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from pagegen.errors import ConfigError
from pagegen.runtime.scheduling.events import (
    Added,
    Branch,
    Ended,
    Finished,
    Measured,
    Pinned,
    Planned,
    Sampled,
    SchedulerEvent,
    Updated,
)
from pagegen.runtime.scheduling.preemption import PreemptionCosts
from pagegen.runtime.sequence import FinishReason, Request
from pagegen.runtime.simulation.setup import Setup, check_types

LOG_FORMAT = 1
T = TypeVar("T")


class EventLog:
    """A recorder that writes to a file; `begin` before the first event. A context manager, or call `close`.

    A run goes on where its log cannot: what was written until then repeats, and one warning says where it ends.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)  # line by line, for who is killed
        except OSError as error:
            raise ConfigError(f"log {path} cannot be written: {error.strerror}") from None
        self._path, self._broken = path, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, setup: Setup) -> None:
        """Writes what the run is made with. Raises ConfigError if that cannot be done."""
        try:
            self._write(["pagegen", LOG_FORMAT, setup.to_dict()])
        except OSError as error:
            raise ConfigError(f"log {self._path} cannot be written: {error.strerror}") from None

    def __call__(self, event: SchedulerEvent) -> None:
        if self._broken:
            return
        try:
            self._write(encode(event))
        except OSError as error:  # a full disk is no reason to end what is served
            self._broken = True
            warnings.warn(f"log {self._path} ends here: {error.strerror}; the run goes on", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it tries once more to write what it could not
            self._file.close()

    def _write(self, values: list[Any]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


def encode(event: SchedulerEvent) -> list[Any]:
    """An event as JSON values; `decode` is the inverse."""
    match event:
        case Added(request):
            values = {field.name: getattr(request, field.name) for field in dataclasses.fields(Request)}
            defaults = {field.name: field.default for field in dataclasses.fields(Request)}
            values = {name: value for name, value in values.items() if value != defaults[name]}
            if "stop_token_ids" in values:
                values["stop_token_ids"] = sorted(request.stop_token_ids)
            return ["add", values]
        case Planned(digest):
            return ["plan", digest]
        case Updated(sampled):
            return ["update", [dataclasses.asdict(s) if isinstance(s, Branch) else s for s in sampled]]
        case Finished(request_id, index, reason):
            return ["finish", request_id, index, reason.value]
        case Ended(request_id, reason, error):
            return ["end", request_id, reason.value, error]
        case Pinned(token_ids, salt, keep):
            return ["pin", token_ids, salt, keep]
        case Measured(costs):
            return ["measure", costs.blocks_per_second, costs.tokens_per_second]


def decode(values: list[Any]) -> SchedulerEvent:
    """Raises ValueError, TypeError or KeyError for what `encode` has not made."""
    match values:
        case ["add", dict(fields)]:
            fields = {**fields, "prompt_token_ids": tuple(fields["prompt_token_ids"])}
            if "stop_token_ids" in fields:
                fields["stop_token_ids"] = frozenset(fields["stop_token_ids"])
            return Added(_checked(Request(**fields)))
        case ["plan", str(digest)]:
            return Planned(digest)
        case ["update", list(sampled)]:
            return _checked(Updated(tuple(map(_decode_sampled, sampled))))
        case ["finish", str(request_id), int(index), reason]:
            return _checked(Finished(request_id, index, FinishReason(reason)))
        case ["end", str(request_id), reason, error]:
            return _checked(Ended(request_id, FinishReason(reason), error))
        case ["pin", list(token_ids), str(salt), bool(keep)]:
            return _checked(Pinned(tuple(token_ids), salt, keep))
        case ["measure", float(blocks), float(tokens)]:
            return Measured(PreemptionCosts(blocks, tokens))
    raise ValueError("no event of the scheduler")


def _decode_sampled(value: Any) -> Sampled:
    match value:
        case int() | None:
            return value
        case list():
            return tuple(value)
        case dict():
            return _checked(Branch(**value))
    raise ValueError("a row sampled what is no token")


def _checked(value: T) -> T:
    """The value, if every field is of the type that its class states. Raises TypeError."""
    kind: type = type(value)
    hints = _hints(kind)
    check_types({name: getattr(value, name) for name in hints}, hints)
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read_log(path: Path) -> tuple[Setup, Iterator[SchedulerEvent]]:
    """The setup, and the events one after the other as they are read. Raises ConfigError, the iterator too.

    A last line without an end is left out: a run that was killed wrote it.
    """
    lines = _lines(path)
    match next(lines, None):
        case (_, ["pagegen", int(version), dict(values)]):
            if version != LOG_FORMAT:
                raise ConfigError(f"log {path} has format {version}; this version reads {LOG_FORMAT}")
            return Setup.from_dict(values), _events(path, lines)
    raise ConfigError(f"log {path} does not begin like a recorded run; `pagegen generate --record FILE` writes one")


def _events(path: Path, lines: Iterator[tuple[int, Any]]) -> Iterator[SchedulerEvent]:
    for number, values in lines:
        try:
            yield decode(values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"log {path}, line {number} holds no event: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, json.loads(line)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no text
        raise ConfigError(f"log {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
