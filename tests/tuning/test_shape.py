"""Claims about documents that anybody may have edited: whatever stands in one of their places, a command ends in one line."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagegen.errors import ConfigError
from pagegen.records import Evaluation, Status
from pagegen.spec import Phase
from pagegen.tuning import measure
from pagegen.tuning.html import write_html
from pagegen.tuning.machine import NO_DISTURBANCE, Setting
from pagegen.tuning.record import Record, read_record
from pagegen.tuning.replay import replay
from pagegen.tuning.roofline import Roofline
from tests.tuning.fake_record import make_record, write

WRONG: tuple[object, ...] = (None, 0, "", [])
REMOVED = object()

Place = tuple[str | int, ...]


def places(document: Any, place: Place = ()) -> Iterator[Place]:
    """Every place of a document; of a list, or of a mapping of which each key names a batch or a phase, the last item's."""
    yield place
    items = list(document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ())
    if isinstance(document, list) or any("@" in str(key) or key in tuple(Phase) for key, _ in items):
        items = items[-1:]
    for key, item in items:
        yield from places(item, (*place, key))


def with_wrong(document: Any, place: Place, wrong: object) -> Any:
    if not place:
        return wrong
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if wrong is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = wrong
    return changed


def full_record(tiles: int) -> Record:
    """One with everything that a record may have; with ten configs of a phase it is said what mattered."""
    rate = {2: measure.Interval(1e12, 1e12, 1e12)}
    roofline = Roofline({"memory": {2: 1 << 40}}, {"memory": rate}, rate, rate, NO_DISTURBANCE).to_dict()
    decode = {"1x1@16": dict.fromkeys(range(tiles), 5.0), "9x1@64": dict.fromkeys(range(tiles), 9.0) | {1: 1.0}}
    record = make_record({Phase.DECODE: decode, Phase.PREFILL: {"1x512@512": dict.fromkeys(range(2), 9.0)}}, rounds=2)
    settings = Setting(False, 1, 2, True, 0.5)
    contest = {
        phase: {point: dataclasses.replace(found, setting=settings) for point, found in measured.items()}
        for phase, measured in record.contest.items()
    }
    config = {"tile": 1, "name": "x", "flag": True}
    later = {
        "workload": {**record.facts["workload"], "max_context": 2048, "cut": 1, "spans": {"decode": [[1, 1, 1], [64, 4096, 1]]}, "moved": {"decode": 0.5}},
        "ancestors": {"decode": [{"study": "older", "differences": ["x"], "reused": 1}]},
        "roofline": roofline,
        "stopped": {"decode": "it was enough"},
        "warm_start": [{"phase": "decode", "config": config, "source": "elsewhere"}],
        "carried": {"prefill": 5},
        "rooflines": {"prefill": roofline},
    }
    other = {"trial": 7, "status": "ENDED", "reason": "lost", "config": None}
    pruned = Evaluation(Status.PRUNED, {"tile": 11}, "worse", partial=1.5, gate_seconds=0.1, noise=0.1, roofline=0.5)
    trials = {**record.trials, Phase.DECODE: [*record.trials[Phase.DECODE], (99, pruned)]}
    return dataclasses.replace(record, facts={**record.facts, **later}, contest=contest, trials=trials, unevaluated={Phase.DECODE: [other]})


def ends_in_one_line(command: Callable[[Path], object], folder: Path, what: str) -> bool:
    """Whether it ends well; else in a ConfigError of one line, or the test fails."""
    try:
        command(folder)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1, what
        str(error).encode()
        return False
    except Exception as error:
        raise AssertionError(f"{command.__name__} of a record with {what}") from error
    return True


def vouch_for(path: Path, text: str) -> None:
    """Writes a file of a record, whose tune.json then says that it is the one."""
    path.write_text(text)
    tune = path.with_name("tune.json")
    document = json.loads(tune.read_text())
    document["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    tune.write_text(json.dumps(document))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESAMPLES", 10)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["tune.json", "trials.jsonl", "unevaluated.jsonl", "timings.jsonl"])
def test_whatever_stands_in_a_place_of_a_record_replay_and_report_end_in_one_line(name: str, tmp_path: Path) -> None:
    write(tmp_path, full_record(10 if name == "trials.jsonl" else 2))
    assert not replay(tmp_path).differences
    path = tmp_path / "tune.json"
    document = json.loads(path.read_text())
    if name != "tune.json":
        path = tmp_path / name
        document = [json.loads(line) for line in path.read_text().splitlines()]
    refused = 0
    for place in places(document):
        for wrong in (*WRONG, REMOVED):
            if wrong is REMOVED and not place:
                continue
            changed = with_wrong(document, place, wrong)
            if name == "tune.json":
                path.write_text(json.dumps(changed))
            elif isinstance(changed, list):
                vouch_for(path, "".join(json.dumps(line) + "\n" for line in changed))
            what = f"{name} {place}: {'removed' if wrong is REMOVED else repr(wrong)[:20]}"
            read = ends_in_one_line(read_record, tmp_path, what)
            refused += not read
            if read:
                ends_in_one_line(replay, tmp_path, what)
                ends_in_one_line(write_html, tmp_path, what)
    assert refused > 20
