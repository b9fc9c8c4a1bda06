"""Decides a tuning run again from its record: no device, no timing, no storage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagegen.tuning.contest import Conditions, Row
from pagegen.tuning.decide import DEFAULT, choose_finalists, decide
from pagegen.tuning.record import Record, read_record
from pagegen.tuning.report import write_report


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """What the record leads to now. `differences` names the fields of tune.json that were decided otherwise."""

    folder: Path
    document: Mapping[str, Any]
    rows: tuple[Row, ...]
    conditions: Conditions | None
    differences: tuple[str, ...]


def replay(folder: Path) -> Replay:
    """Finalists, winners, table and report of the record in `folder`, decided again.

    The report is written anew if the decisions are those recorded, byte for byte; the record is never written. Raises
    ConfigError for a record that is missing, of another format, damaged, or of several runs.
    """
    record, recorded = read_record(folder)
    decided = decide(record)
    document = {**recorded, **decided.document, "finalists": _finalists(record)}
    differences = tuple(name for name in document if _text(document[name]) != _text(recorded.get(name)))
    if not differences:
        write_report(folder, document, decided.rows, decided.conditions)
    return Replay(folder, document, decided.rows, decided.conditions, differences)


def _finalists(record: Record) -> dict[str, Any]:
    chosen = {}
    for phase, workload in record.workloads.items():
        evaluations = [found for _, found in record.trials[phase]]
        configs = choose_finalists(evaluations, record.finalists[phase][DEFAULT], workload.points)
        chosen[phase.value] = {name: config.to_dict() for name, config in configs.items()}
    return chosen


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
