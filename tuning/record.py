"""The record of a tuning run: all that was measured, so that everything decided from it can be decided again.

    results/<target>/<spec>/  tune.json          facts of the run and what was decided (docs/record-format.md)
                              trials.jsonl       every evaluation: its config, status and reason, timings, environment
                              unevaluated.jsonl  every other trial that ended, and why
                              timings.jsonl      every round of the finalists and of the contest, sample by sample
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.errors import ConfigError, PagegenError
from pagegen.paths import write_atomic
from pagegen.records import Evaluation
from pagegen.space import Config
from pagegen.spec import KernelSpec, Phase
from pagegen.tuning.dispatch import MAX_CELLS
from pagegen.tuning.machine import Disturbance, Setting
from pagegen.tuning.measure import Measurement
from pagegen.tuning.roofline import MEMORY, Roofline
from pagegen.tuning.shape import (
    ANY,
    CONFIG,
    EVALUATION,
    FLAG,
    INTERVAL,
    NULL,
    NUMBER,
    POSITIVE,
    REST,
    TEXT,
    WHOLE,
    Shape,
    has_format,
    parse,
    require,
)
from pagegen.tuning.workload import Point, Workload

FORMAT = 2
TUNE, TRIALS, UNEVALUATED, TIMINGS = "tune.json", "trials.jsonl", "unevaluated.jsonl", "timings.jsonl"
DISTURBANCE: Shape = {REST: NUMBER}
ENVIRONMENT: Shape = {"hardware": {REST: ANY}, "toolchain": {REST: ANY}, "threads": WHOLE}
ROOFLINE: Shape = {
    "levels": {MEMORY: {REST: POSITIVE}, REST: {REST: POSITIVE}},
    "bandwidth": {MEMORY: {REST: INTERVAL}, REST: {REST: INTERVAL}},
    "fp32": {REST: INTERVAL},
    "bf16": {REST: INTERVAL},
    "disturbance": DISTURBANCE,
}
CELL: Shape = [WHOLE, WHOLE, WHOLE]
FACTS: Mapping[str, Shape] = {  # of what `_check` and those who read a field look at more closely, as much as reports show
    "format": WHOLE,
    "spec": {name: ANY for name in ("dtype", "q_heads", "kv_heads", "head_dim", "layout", "block_size")},
    "target": TEXT,
    "environment": ENVIRONMENT,
    "workload": {
        "name": TEXT,
        "points": WHOLE,
        "timed": WHOLE,
        "digests": {REST: TEXT},
        "max_context?": (NULL, WHOLE),
        "cut?": WHOLE,
        "spans?": {REST: [CELL, CELL]},
        "moved?": {REST: NUMBER},
    },
    "workloads": {REST: {"points": {REST: POSITIVE}}},
    "studies": {REST: TEXT},
    "ancestors": {REST: [{"study": TEXT, "differences": [TEXT], "reused": WHOLE}]},
    "seed": NUMBER,
    "trials": {"resumed": WHOLE, "new": WHOLE, "lost": WHOLE},
    "finalists": {REST: {"default": CONFIG, REST: CONFIG}},
}
LATER: Mapping[str, Shape] = {  # facts that an older record may lack
    "roofline": (NULL, ROOFLINE),
    "stopped": {REST: TEXT},
    "warm_start": [{"phase": TEXT, "config": CONFIG, "source": TEXT}],
    "carried": {REST: WHOLE},
    "rooflines": {REST: (NULL, ROOFLINE)},
}
DECIDED: Mapping[str, Shape] = {  # what reports show of it
    "winner": [
        {
            **{name: TEXT for name in ("phase", "bucket", "kernel")},
            "config": CONFIG,
            **{name: POSITIVE for name in ("median", "speedup")},
            **{name: [POSITIVE, POSITIVE] for name in ("interval", "speedup_interval")},
            "confirmed": FLAG,
            "roofline": (NULL, NUMBER),
        }
    ],
    "noise": NUMBER,
    "rows": [
        {
            **{name: TEXT for name in ("phase", "point", "name")},
            **{name: INTERVAL for name in ("seconds", "ratio")},
            **{name: POSITIVE for name in ("gbs", "gflops")},
        }
    ],
    "package": TEXT,
    "counts?": {REST: WHOLE},
    "files?": {f"{name}?": TEXT for name in (TRIALS, UNEVALUATED, TIMINGS)},
}
DOCUMENT: Shape = {**FACTS, **{f"{name}?": shape for name, shape in LATER.items()}, **DECIDED}
LINES: Mapping[str, Shape] = {
    TRIALS: {"study": TEXT, "trial": WHOLE, **EVALUATION},
    UNEVALUATED: {"study": TEXT, "trial": WHOLE, "status": TEXT, "reason": TEXT, "config": (NULL, CONFIG)},
    TIMINGS: {
        **{name: TEXT for name in ("round", "phase", "point", "anchor")},
        "seconds": {REST: [POSITIVE]},
        "seed": NUMBER,
        "disturbance": DISTURBANCE,
        "setting": (
            NULL,
            {"warm": FLAG, "rotated_bytes": WHOLE, "threads": WHOLE, "pinned": FLAG, "huge_pages": (NULL, NUMBER)},
        ),
    },
}

Rounds = Mapping[Phase, Mapping[Point, Measurement]]


@dataclasses.dataclass(frozen=True)
class Record:
    """What was measured. `facts` are the fields of tune.json that nobody decides, `trials` belong to their phase's study."""

    facts: Mapping[str, Any]
    trials: Mapping[Phase, Sequence[tuple[int, Evaluation]]]
    finals: Rounds  # the finalists side by side, anchored at the default
    contest: Rounds  # fresh data: what the table serves, the default and torch SDPA
    unevaluated: Mapping[Phase, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)  # other trials, and why

    @functools.cached_property
    def spec(self) -> KernelSpec:
        """What was tuned."""
        return KernelSpec.from_dict(self.facts["spec"])

    @functools.cached_property
    def workloads(self) -> dict[Phase, Workload]:
        """What each phase was tuned for."""
        return {Phase(phase): Workload.from_dict(plain) for phase, plain in self.facts["workloads"].items()}

    @functools.cached_property
    def finalists(self) -> dict[Phase, dict[str, Config]]:
        """The configs of the last two rounds by the names that they have there."""
        return {
            Phase(phase): {name: Config(tuple(config.items())) for name, config in configs.items()}
            for phase, configs in self.facts["finalists"].items()
        }

    @functools.cached_property
    def rooflines(self) -> dict[Phase, Roofline | None]:
        """The machine's limits as each phase's own run measured them; None where they are not known."""
        plain = {phase: _limits_of(self.facts, phase) for phase in self.workloads}
        return {phase: Roofline.from_dict(its) if its else None for phase, its in plain.items()}


def by_limits(facts: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """(a roofline as plain values, the phases that were tuned in the run which measured it), where that is known."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for phase in facts["workloads"]:
        limits = _limits_of(facts, phase)
        if phases := next((phases for known, phases in found if known == limits), None):
            phases.append(phase)
        elif limits:
            found.append((dict(limits), [phase]))
    return found


def _limits_of(facts: Mapping[str, Any], phase: str) -> Mapping[str, Any] | None:
    limits: Mapping[str, Any] | None = facts.get("rooflines", {}).get(phase, facts.get("roofline"))
    return limits


def to_keep(measurement: Measurement) -> Measurement:
    """A measurement as the record keeps it, six digits a sample: what is decided is decided from these."""
    seconds = {name: tuple(float(f"{value:.6g}") for value in values) for name, values in measurement.seconds.items()}
    return dataclasses.replace(measurement, seconds=seconds)


def write_record(folder: Path, record: Record, decided: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the three files and answers what tune.json holds: the facts, `decided`, and which other files belong to it."""
    names = record.facts["studies"]
    trials = [(names[phase.value], *trial) for phase, found in record.trials.items() for trial in found]
    timings = [
        {"round": kind, "phase": phase.value, "point": point.name, **_plain(measurement)}
        for kind, rounds in (("finals", record.finals), ("contest", record.contest))
        for phase, measured in rounds.items()
        for point, measurement in measured.items()
    ]
    others = [(names[phase.value], other) for phase, found in record.unevaluated.items() for other in found]
    files = {
        TRIALS: write_trials(folder, trials),
        UNEVALUATED: write_unevaluated(folder, others),
        TIMINGS: _write_lines(folder / TIMINGS, timings),
    }
    document = {**record.facts, **decided, "files": files}
    write_atomic(folder / TUNE, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def write_trials(folder: Path, rows: Sequence[tuple[str, int, Evaluation]]) -> str:
    """Writes (study, trial number, evaluation) to trials.jsonl; answers the file's SHA-256."""
    return _write_lines(folder / TRIALS, [{"study": study, "trial": number, **found.to_dict()} for study, number, found in rows])


def write_unevaluated(folder: Path, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Writes (study, what `BucketStudy.unevaluated` says) to unevaluated.jsonl; answers the file's SHA-256."""
    return _write_lines(folder / UNEVALUATED, [{"study": study, **other} for study, other in rows])


def read_record(folder: Path) -> tuple[Record, dict[str, Any]]:
    """The record in `folder` and its tune.json as it is.

    Raises ConfigError if it is missing, of another format, damaged, or if its files are of several runs.
    """
    document = _document(folder)
    try:
        files = {TRIALS: None, TIMINGS: None, **document.get("files", {})}  # older records name none
        lines = {name: list(_lines(folder / name, digest)) for name, digest in files.items()}
        studies = {name: Phase(phase) for phase, name in document["studies"].items()}
        trials: dict[Phase, list[tuple[int, Evaluation]]] = {phase: [] for phase in studies.values()}
        for line in lines[TRIALS]:
            trials[studies[line.pop("study")]].append((line.pop("trial"), Evaluation.from_dict(line)))
        others: dict[Phase, list[Mapping[str, Any]]] = {}
        for line in lines.get(UNEVALUATED, ()):
            others.setdefault(studies[line.pop("study")], []).append(line)
        rounds: dict[str, dict[Phase, dict[Point, Measurement]]] = {"finals": {}, "contest": {}}
        points = {
            (phase, point): Point.parse(point, weight)
            for phase, plain in document["workloads"].items()
            for point, weight in plain["points"].items()
        }
        for line in lines[TIMINGS]:
            phase = line["phase"]
            rounds[line["round"]].setdefault(Phase(phase), {})[points[phase, line["point"]]] = _measurement(line)
        count, known = sum(map(len, trials.values())), sum(document.get("counts", {}).values())
        if count != known:  # all there is to go by in a record without digests
            raise OtherRun(f"{TRIALS} holds {count} trials, the decision was made from {known}")
        facts = {name: value for name, value in document.items() if name in FACTS or name in LATER}
        record = Record(facts, trials, **rounds, unevaluated=others)
        _check(record)
    except OtherRun as error:
        raise ConfigError(f"record {folder} is of several runs: {error}; run `pagegen tune` again, to its end") from None
    except (KeyError, TypeError, ValueError, RecursionError, PagegenError) as error:
        raise ConfigError(f"record {folder} is damaged ({type(error).__name__}: {error}); run `pagegen tune` again") from None
    return record, document


class OtherRun(Exception):
    """A file beside tune.json that is not the one that it was decided from."""


def _check(record: Record) -> None:
    """Raises KeyError or ValueError for a record that decisions cannot be made from, though each of its parts is what it has to be."""
    record.spec  # noqa: B018  # read now
    for suggestion in record.facts.get("warm_start", []):
        Phase(suggestion["phase"])
    if not record.workloads:
        raise ValueError("it has no phase")
    for phase, workload in record.workloads.items():
        names, points = record.finalists[phase], set(workload.points)
        if len({point.shape for point in points}) > MAX_CELLS:
            raise ValueError(f"{phase} has batches of more than {MAX_CELLS} shapes")
        passed = [found.config.keys() for _, found in record.trials[phase] if found.score is not None]
        if any(not passed[0] <= knobs for knobs in passed):
            raise ValueError(f"{TRIALS} lacks knobs of {phase}")
        rounds = [record.contest] + [record.finals] * (len(names) > 1)
        if any(its.get(phase, {}).keys() != points for its in rounds):
            raise ValueError(f"{TIMINGS} lacks batches of {phase}")
        finals, contest = record.finals.get(phase, {}).values(), record.contest[phase].values()
        for measured in (*finals, *contest):
            if not {"default", measured.anchor} <= measured.seconds.keys():
                raise ValueError(f"{TIMINGS} lacks the default")
            lengths = {len(values) for values in measured.seconds.values()}
            if len(lengths) > 1 or 0 in lengths:
                raise ValueError(f"{TIMINGS} has contenders of {phase} with other numbers of samples, or none")
        if any(measured.seconds.keys() != names.keys() for measured in finals):
            raise ValueError(f"{TIMINGS} has other finalists of {phase} than {TUNE}")
        if limits := record.rooflines[phase]:
            settings = [measured.setting for measured in contest if measured.setting]
            _check_limits(limits, {record.facts["environment"]["threads"], *(setting.threads for setting in settings)})


def _check_limits(limits: Roofline, threads: set[int]) -> None:
    rates = [limits.fp32, *[limits.bf16] * bool(limits.bf16), *limits.levels.values(), *limits.bandwidth.values()]
    if not limits.levels.keys() <= limits.bandwidth.keys() or any(not threads <= each.keys() for each in rates):
        raise ValueError(f"the roofline lacks limits of {', '.join(map(str, sorted(threads)))} threads")


def find_record(root: Path, spec_slug: str, target: str | None = None, workload: str = "default") -> Path:
    """Where the record of a spec lies under `root`; `target` is a slug, None any.

    Raises ConfigError if there is none, or one for each of several targets.
    """
    inside = f"{spec_slug}/{TUNE}" if workload == "default" else f"{spec_slug}/{workload}/{TUNE}"
    found = sorted(path.parent for path in root.glob(f"{target or '*'}/{inside}"))
    if len(found) == 1:
        return found[0]
    if found:
        targets = ", ".join(path.relative_to(root).parts[0].replace("-", ":", 1) for path in found)
        raise ConfigError(f"{root} has records of {spec_slug} for {targets}; name one with --target")
    for_what = [f" for {target}"] * bool(target) + [f" with workload {workload}"] * (workload != "default")
    raise ConfigError(f"{root} has no record of {spec_slug}{''.join(for_what)}; name its folder, or tune first")


def _document(folder: Path) -> dict[str, Any]:
    path = folder / TUNE
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} holds no record of a tuning run: {TUNE} cannot be read ({error.strerror}); name another folder") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"record {path} is damaged ({error}); run `pagegen tune` again") from None
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not has_format(document, FORMAT):
        raise ConfigError(f"record {path} has format {version!r}, this pagegen reads format {FORMAT}; run `pagegen tune` again")
    try:
        require(DOCUMENT, document)
    except ValueError as error:
        raise ConfigError(f"record {path} is damaged ({error}); run `pagegen tune` again") from None
    return dict(document)


def _lines(path: Path, digest: str | None) -> Iterator[dict[str, Any]]:
    """The lines of a file; `digest` is what its SHA-256 has to be, None if nobody said."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read ({error.strerror})") from None
    if digest not in (None, hashlib.sha256(data).hexdigest()):
        raise OtherRun(f"{path.name} is not the one that {TUNE} was decided from")
    for number, text in enumerate(data.decode().splitlines(), 1):
        try:
            line = parse(text)
            require(LINES[path.name], line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        yield line


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def _plain(measurement: Measurement) -> dict[str, Any]:
    return dataclasses.asdict(measurement)


def _measurement(line: Mapping[str, Any]) -> Measurement:
    return Measurement(
        line["anchor"],
        {name: tuple(values) for name, values in line["seconds"].items()},
        line["seed"],
        Disturbance(**line["disturbance"]),
        Setting(**line["setting"]) if line["setting"] else None,
    )
