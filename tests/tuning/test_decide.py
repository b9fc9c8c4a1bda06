"""What follows from measurements: a table that is confirmed row by row, and the same again from the record."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pagegen.errors import ConfigError
from pagegen.records import BatchShape
from pagegen.spec import Phase
from pagegen.tuning.carry import Kept
from pagegen.tuning.decide import DEFAULT, Decision, decide, propose
from pagegen.tuning.html import write_html
from pagegen.tuning.machine import NO_DISTURBANCE, Setting
from pagegen.tuning.measure import Interval, Measurement
from pagegen.tuning.record import FORMAT, Record, find_record, read_record
from pagegen.tuning.replay import replay
from pagegen.tuning.roofline import Roofline
from pagegen.tuning.workload import Point
from tests.cli.helpers import run
from tests.documented import documented

from .fake_record import TILES, make_record, write

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tune-record-format-2"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "cpu-scalar" / "fp32-d8-h2x1-b4-NHD"))


def tiles(decision: Decision) -> dict[str, object]:
    """The tile that each measured batch is served by."""
    return {point: winner.config.to_dict()["tile"] for winner in decision.winners for point in winner.points}


def test_each_bucket_gets_what_is_fastest_there_and_the_default_where_nothing_is() -> None:
    decided = decide(make_record())
    assert tiles(decided) == {"1x1@16": 1, "1x1@2048": 1, "32x1@512": 2, "1x512@512": 0}
    table = decided.table(uniform=False)
    served = {seqs: decided.configs[table.select(BatchShape(Phase.DECODE, seqs, 512, 1))].to_dict()["tile"] for seqs in (1, 5, 6, 64)}
    assert served == {1: 1, 5: 1, 6: 2, 64: 2}  # the geometric middle of 1 and 32 sequences is 5.7
    assert table.select(BatchShape(Phase.PREFILL, 1, 512, 512)) == table.fallback == "attend_0"
    assert table.find(BatchShape(Phase.PREFILL, 1, 512, 512)) and not table.find(BatchShape(Phase.PREFILL, 1, 4096, 512))
    for winner in decided.winners:
        assert (winner.speedup.low > 1) is winner.confirmed and winner.confirmed is (winner.kernel != "attend_0")
    assert decided.document["dispatch"]["decode"]["regret"] <= 0.02 and decided.document["dispatch"]["decode"]["rows"] == 2


def test_a_deterministic_spec_gets_one_row_that_bounds_nothing() -> None:
    decided = decide(make_record({Phase.DECODE: TILES[Phase.DECODE]}, slug="fp32-d8-h2x1-b4-NHD-det"))
    assert tiles(decided) == {"1x1@16": 1, "1x1@2048": 1, "32x1@512": 1}  # the best typical batch, if not the least time
    assert decided.table(uniform=True).is_uniform


@pytest.mark.parametrize(
    ("default", "serves"),
    [([1.5, 1.6, 1.4, 1.5, 1.5], "attend_1"), ([0.5, 1.6, 0.9, 1.5, 0.8], "attend_0"), ([0.8, 0.8, 0.9, 0.8, 0.8], "attend_0")],
    ids=["clear", "noise", "slower"],
)
def test_a_row_leaves_the_default_only_for_a_gain_that_its_interval_confirms(default: list[float], serves: str) -> None:
    record = make_record({Phase.DECODE: {"1x1@16": {0: 9.0, 1: 5.0}}})
    (point,) = record.contest[Phase.DECODE]
    fresh = Measurement(DEFAULT, {"finalist 1": (1.0,) * 5, DEFAULT: tuple(default)})
    decided = decide(dataclasses.replace(record, contest={Phase.DECODE: {point: fresh}}))
    (winner,) = decided.winners
    assert winner.kernel == serves
    assert winner.confirmed or winner.speedup == Interval(1.0, 1.0, 1.0)
    ratios = {row.name: row.ratio.median for row in decided.rows}
    assert winner.confirmed or ratios[DEFAULT] == 1.0  # the rows are of the winner, not of who challenged it


def test_a_batch_on_which_a_confirmed_row_is_proven_slower_goes_back_to_the_default() -> None:
    record = make_record({Phase.DECODE: {"1x1@16": {0: 9.0, 1: 5.0}, "8x1@16": {0: 9.0, 1: 5.0}}})
    one, many = (Point.parse(name) for name in ("1x1@16", "8x1@16"))
    fresh = {one: {"finalist 1": (1.0,) * 9, DEFAULT: (2.0,) * 9}, many: {"finalist 1": (1.2,) * 9, DEFAULT: (1.0,) * 9}}
    contest = {point: Measurement(DEFAULT, seconds) for point, seconds in fresh.items()}
    assert tiles(decide(dataclasses.replace(record, contest={Phase.DECODE: contest}))) == {"1x1@16": 1, "8x1@16": 0}


def test_a_config_that_the_contest_did_not_meet_is_not_confirmed() -> None:
    record = make_record({Phase.DECODE: {"1x1@16": {0: 9.0, 1: 5.0}}})
    (point,) = record.contest[Phase.DECODE]
    contest = {point: Measurement(DEFAULT, {DEFAULT: (1.0,) * 5})}
    assert tiles(decide(dataclasses.replace(record, contest={Phase.DECODE: contest}))) == {"1x1@16": 0}


def test_a_config_that_is_proven_slower_than_the_default_is_not_proposed_there() -> None:
    one, many = (Point.parse(name, weight) for name, weight in (("1x1@16", 1), ("8x1@16", 100)))
    finals = {one: {DEFAULT: (1.0,) * 9, "finalist 1": (1.1,) * 9}, many: {DEFAULT: (9.0,) * 9, "finalist 1": (1.0,) * 9}}
    measured = {point: Measurement(DEFAULT, seconds) for point, seconds in finals.items()}
    assert propose(Phase.DECODE, (one, many), measured, uniform=False).assigned == {one: DEFAULT, many: "finalist 1"}


@pytest.mark.long
def test_under_heavy_tailed_noise_hardly_a_bucket_is_truly_slower_than_the_default() -> None:
    names = ["1x1@16", "1x1@512", "1x1@4096", "8x1@64", "8x1@2048", "32x1@512"]
    slower = buckets = 0
    for seed in range(60):
        dice = random.Random(seed)
        truth = {name: {0: 100.0, **{tile: 100.0 * dice.choice((0.6, 0.9, 0.99, 1.0, 1.03, 1.2)) for tile in range(1, 5)}} for name in names}
        for winner in decide(make_record({Phase.DECODE: truth}, seed=seed, noise=0.1, tail=0.1)).winners:
            times = [truth[point][int(winner.config.to_dict()["tile"])] for point in winner.points]
            buckets += 1
            slower += sum(times) > 1.02 * 100.0 * len(times)
    assert buckets > 60 and slower <= 0.05 * buckets


# --- the record ------------------------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    record = make_record(seed=1)
    write(tmp_path, record)
    assert read_record(tmp_path)[0] == record


def test_trials_without_an_evaluation_are_in_the_record_and_are_kept_with_their_phase(tmp_path: Path) -> None:
    lost = {"trial": 7, "status": "ENDED", "reason": "lost", "config": {"tile": 3}}
    refused = {"trial": 8, "status": "REFUSED", "reason": "too large", "config": None}
    record = dataclasses.replace(make_record(), unevaluated={Phase.DECODE: [lost], Phase.PREFILL: [refused]})
    write(tmp_path, record)
    assert read_record(tmp_path)[0] == record
    alone = make_record({Phase.DECODE: TILES[Phase.DECODE]})
    alone = dataclasses.replace(alone, facts={"warm_start": [], "stopped": {}, **alone.facts})
    assert Kept(record, (Phase.PREFILL,)).joined(alone).unevaluated == {Phase.PREFILL: [refused]}


def test_the_recorded_fixture_is_decided_again_byte_for_byte(copy: Path) -> None:
    (copy / "report.md").unlink()
    found = replay(copy)
    assert not found.differences
    for name in ("tune.json", "report.md"):
        assert (copy / name).read_bytes() == (FIXTURE / name).read_bytes()
    assert json.dumps(found.document, indent=1) + "\n" == (FIXTURE / "tune.json").read_text()


def test_replay_finds_the_record_of_a_spec_and_shows_it(copy: Path) -> None:
    words = ["tune", "fp32-d8-h2x1-b4-NHD", "--replay", "--out", str(copy.parents[1])]
    result = run(*words)
    assert result.status == 0 and "is the recorded one" in result.stderr and "decode, up to 5 sequences" in " ".join(result.stdout.split())
    result = run(*words, "--json")
    assert result.status == 0 and result.document["replay"] == {"same": True, "differences": []}
    assert result.document.keys() - json.loads((copy / "tune.json").read_text()).keys() == documented("tune --replay --json")
    assert run("tune", str(copy), "--replay").status == 0


def under(limits: float | None, phases: Sequence[Phase]) -> Record:
    """The record of a run of some phases on a machine that computes and reads `limits` a second; None: not measured."""
    rate = {2: Interval(limits, limits, limits)} if limits else {}
    roofline = Roofline({"memory": {2: 1 << 40}}, {"memory": rate}, rate, {}, NO_DISTURBANCE) if limits else None
    record = make_record({phase: TILES[phase] for phase in phases})
    contest = {
        phase: {point: dataclasses.replace(found, setting=Setting(False, 1, 2, True, None)) for point, found in measured.items()}
        for phase, measured in record.contest.items()
    }
    facts = {**record.facts, "roofline": roofline.to_dict() if roofline else None, "warm_start": [], "stopped": {}, "carried": {}}
    return dataclasses.replace(record, facts=facts, contest=contest)


def shares(record: Record) -> dict[str, set[float | None]]:
    rows = decide(record).rows
    return {phase.value: {row.roofline for row in rows if row.phase is phase} for phase in record.workloads}


def test_a_kept_phase_is_shown_under_the_limits_that_its_own_run_measured(tmp_path: Path) -> None:
    before, alone = under(1e12, list(TILES)), under(1e9, [Phase.DECODE])
    once = Kept(before, (Phase.PREFILL,)).joined(alone)
    twice = Kept(once, (Phase.PREFILL,)).joined(under(1e10, [Phase.DECODE]))
    for record in (once, twice):
        assert shares(record)["prefill"] == shares(before)["prefill"] != {None}
    assert shares(once)["decode"] == shares(alone)["decode"] != shares(before)["decode"]
    write(tmp_path, once)
    assert read_record(tmp_path)[0] == once and not replay(tmp_path).differences
    page, report = write_html(tmp_path).read_text(), (tmp_path / "report.md").read_text()
    for phase, rate in (("decode", "1.0"), ("prefill", "1000.0")):
        assert f"what was reached: {phase}</text>" in page
        assert f"| in the run that tuned {phase} |" in report and f"| memory, GB/s | {rate} |" in report


@pytest.mark.parametrize("limits", [None, 1e9], ids=["never measured", "of a record that carried it and does not say"])
def test_a_kept_phase_whose_limits_are_not_known_has_no_share(limits: float | None) -> None:
    before = under(limits, list(TILES))
    before = dataclasses.replace(before, facts={**before.facts, "carried": {"prefill": 5} if limits else {}})
    assert shares(Kept(before, (Phase.PREFILL,)).joined(under(1e9, [Phase.DECODE])))["prefill"] == {None}


def test_a_decision_that_differs_is_named_and_nothing_is_written(copy: Path) -> None:
    path = copy / "tune.json"
    path.write_text(path.read_text().replace('"confirmed": true', '"confirmed": false', 1))
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    result = run("tune", str(copy), "--replay")
    assert result.status == 1 and "differs from the recorded one in winner" in result.stderr
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


def cut(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def change(folder: Path, **facts: object) -> None:
    document = json.loads((folder / "tune.json").read_text())
    (folder / "tune.json").write_text(json.dumps({**document, **facts}))


def change_line(folder: Path, name: str, **values: object) -> None:
    first, *others = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([json.dumps({**json.loads(first), **values}), *others, ""]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "tune.json").unlink(), "holds no record"),
        (lambda folder: (folder / "tune.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "timings.jsonl").unlink(), "timings.jsonl cannot be read"),
        (lambda folder: (folder / "timings.jsonl").write_text("{}\n"), "is damaged"),
        (lambda folder: change(folder, warm_start=[{}]), "is damaged (warm_start[0].phase is missing)"),
        (lambda folder: change(folder, stopped=[]), "is damaged (stopped is [], not a mapping)"),
        (lambda folder: change(folder, rows=[None]), "is damaged (rows[0] is None, not a mapping)"),
        (lambda folder: change(folder, noise=float("nan")), "is damaged (Out of range float values are not JSON compliant"),
        (lambda folder: change(folder, target="\ud800"), "surrogates not allowed"),
        (lambda folder: change(folder, workloads={}), "is damaged"),
        (lambda folder: change_line(folder, "timings.jsonl", seconds={"default": []}), "with other numbers of samples, or none"),
        (lambda folder: change_line(folder, "timings.jsonl", seconds={"default": ["1"]}), "timings.jsonl, line 1: seconds.default[0] is '1'"),
        (lambda folder: change_line(folder, "trials.jsonl", config={"tile": {}}), "trials.jsonl, line 1: config.tile is {}, not a knob's value"),
        (lambda folder: change(folder, format=FORMAT - 1), f"has format {FORMAT - 1}, this pagegen reads format {FORMAT}"),
        (lambda folder: cut(folder, "timings.jsonl"), "timings.jsonl lacks batches of prefill"),
        (lambda folder: cut(folder, "trials.jsonl"), "trials, the decision was made from"),
    ],
)
def test_a_record_that_cannot_be_replayed_is_refused_in_one_line(copy: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(copy)
    for words in (["tune", str(copy), "--replay"], ["report", str(copy)]):
        result = run(*words)
        assert result.status == 2 and said in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("written", ["trials.jsonl", "timings.jsonl"])
def test_a_record_whose_rerun_was_killed_between_two_files_is_refused_in_one_line(written: str, tmp_path: Path) -> None:
    """The new run has as many trials, and batches of the same names: nothing but a digest tells them apart."""
    folder, other = tmp_path / "record", tmp_path / "rerun"
    write(folder, make_record(seed=1))
    write(other, make_record(seed=2))
    assert run("tune", str(folder), "--replay").status == 0
    shutil.copy(other / written, folder / written)
    for words in (["tune", str(folder), "--replay"], ["report", str(folder)]):
        result = run(*words)
        said = f"is of several runs: {written} is not the one that tune.json was decided from; run `pagegen tune` again, to its end"
        assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_a_spec_without_a_record_or_with_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record of fp32-d8-h2x1-b4-NHD"):
        find_record(tmp_path, "fp32-d8-h2x1-b4-NHD")
    with pytest.raises(ConfigError, match="no record of s for cpu-avx2 with workload chat;"):
        find_record(tmp_path, "s", "cpu-avx2", "chat")
    for target in ("cpu-scalar", "cpu-avx2"):
        write(tmp_path / target / "s", make_record())
    with pytest.raises(ConfigError, match="for cpu:avx2, cpu:scalar; name one with --target"):
        find_record(tmp_path, "s")
    assert find_record(tmp_path, "s", "cpu-avx2") == tmp_path / "cpu-avx2" / "s"
