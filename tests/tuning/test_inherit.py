"""A new study says why it is new, and takes over exactly the trials that still hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage

from pagegen import target
from pagegen.build import cpp
from pagegen.catalog import template_for, variant
from pagegen.loader import fingerprint
from pagegen.records import Evaluation, Status
from pagegen.render import Source, render
from pagegen.space import Config, ConfigSpace, Knob
from pagegen.spec import Op, Phase, parse_slug
from pagegen.target import parse_target
from pagegen.tuning import evaluate as evaluate_module
from pagegen.tuning import job, joining
from pagegen.tuning.carry import keep
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.inherit import comparable, differences, explained, inherit, source_hash
from pagegen.tuning.measure import Measurement
from pagegen.tuning.pruning import MIN_BATCHES
from pagegen.tuning.sampling import digest
from pagegen.tuning.search import search
from pagegen.tuning.shortlist import source_digest
from pagegen.tuning.stopping import StopRule
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workload import Point, Workload

from .fake_record import make_record, write

KEY = {"toolchain": {"compiler": "g++ 12"}, "hardware": {"quota": 2.0, "caches": {"L3": 32}}, "threads": 2, "templates": "a"}
SPACE = ConfigSpace((Knob("tile", (16, 32), 16), Knob("unroll", (1, 2), 1)))
MORE = ConfigSpace((Knob("tile", (16, 32, 64), 16), Knob("unroll", (1, 2), 1)))
KNOB = ConfigSpace((*SPACE.knobs, Knob("order", ("rows", "columns"), "rows")))


@pytest.fixture
def storage(tmp_path: Path) -> BaseStorage:
    return open_storage(None, tmp_path)


def source(config: Config) -> str:
    """What a config renders to: a knob that is not there is at its default."""
    return str({"order": "rows", **config.to_dict()})


def score(config: Config) -> Evaluation:
    if config.to_dict()["unroll"] == 2:
        return Evaluation(Status.INCORRECT, config.to_dict(), "wrong", source=source(config))
    return Evaluation(Status.PASSED, config.to_dict(), score=16 / int(config.to_dict()["tile"]), source=source(config))


def run(
    storage: BaseStorage, space: ConfigSpace, key: dict[str, Any], total: int = 4, source_of: Callable[[Config], str] = source
) -> tuple[BucketStudy, list[Config], list[str]]:
    """(study, what was evaluated in it, what older studies it tells of)."""
    seen: list[Config] = []

    def evaluate(config: Config, judge: object) -> Evaluation:
        seen.append(config)
        return score(config)

    study = BucketStudy(storage, "s/decode", space, key, total=total)
    told = explained({"decode": inherit(study, source_of)})
    search({"only": study}, {"only": evaluate})
    study.close()
    return study, seen, told


def test_a_value_more_costs_only_the_configs_that_have_it(storage: BaseStorage) -> None:
    run(storage, SPACE, KEY)
    study, seen, told = run(storage, MORE, KEY, total=2)
    assert {config.to_dict()["tile"] for config in seen} == {64} and len(seen) == 2  # the total counts what is new
    assert len(study.evaluations) == 6 and study.ranked()[0].config["tile"] == 64
    assert told[0].endswith("and 4 of its trials render to the same source, and count")
    assert len(told) == 2 and told[1].startswith("  space (config space): was ")
    again, seen, told_again = run(storage, MORE, KEY, total=2)
    assert not seen and not told_again and again.resumed == 6


def test_a_knob_more_keeps_the_configs_that_render_as_before(storage: BaseStorage) -> None:
    run(storage, SPACE, KEY)
    study, seen, _ = run(storage, KNOB, {**KEY, "templates": "b"})
    assert {config.to_dict()["order"] for config in seen} == {"columns"} and study.num_inherited == 4


def test_candidates_are_judged_beside_an_inherited_best_too(storage: BaseStorage) -> None:
    old = BucketStudy(storage, "s/decode", SPACE, KEY, total=1)
    claim = old.claim()
    assert claim
    for step in range(MIN_BATCHES):
        assert not old.judge(claim).hear(step, 1.0, 1.0)
    old.finish(claim, score(claim.config))
    old.close()
    new = BucketStudy(storage, "s/decode", MORE, KEY, total=1)
    inherit(new, source)
    candidate = new.claim()
    assert candidate and candidate.config != SPACE.default
    judge = new.judge(candidate)
    said = [judge.hear(step, 1.5, 1.0) for step in range(MIN_BATCHES)]
    assert said[-1].startswith("50% slower than the best so far")
    new.close()


def test_a_flat_inheritance_does_not_end_the_search_that_a_new_value_was_added_for(storage: BaseStorage) -> None:
    few = ConfigSpace((Knob("tile", tuple(range(25)), 0),))
    more = ConfigSpace((Knob("tile", tuple(range(30)), 0),))

    def evaluate(config: Config, judge: object = None) -> Evaluation:
        new = config not in set(few)
        return Evaluation(Status.PASSED, config.to_dict(), score=1 - 0.5 * new, noise=0.01, source=source(config))

    for space, total in ((few, 25), (more, 5)):
        study = BucketStudy(storage, "s/decode", space, KEY, total=total)
        inherit(study, source)
        search({"only": study}, {"only": evaluate}, rule=StopRule(patience=20 if space is more else 0))
        study.close()
    assert study.num_inherited == 25 and study.num_evaluated == 30 and study.ranked()[0].score == 0.5


def test_a_config_whose_source_changed_is_evaluated_again(storage: BaseStorage) -> None:
    run(storage, SPACE, KEY)

    def changed(config: Config) -> str:
        return source(config) + "2" * (config.to_dict()["tile"] == 32)

    study, seen, _ = run(storage, SPACE, {**KEY, "templates": "b"}, source_of=changed)
    assert {config.to_dict()["tile"] for config in seen} == {32} and study.num_inherited == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"toolchain": {"compiler": "g++ 13"}}, "toolchain.compiler: was g++ 12, is g++ 13"),
        ({"hardware": {"quota": None, "caches": {"L3": 32}}}, "hardware.quota: was 2.0, is None"),
        ({"threads": 4}, "threads (affinity, cut by the CPU quota): was 2, is 4"),
        ({"anchor": "x"}, "anchor (rendered source of the default config): was absent, is x"),
    ],
)
def test_under_another_toolchain_or_machine_nothing_holds_and_the_field_is_named(
    storage: BaseStorage, change: dict[str, Any], said: str
) -> None:
    run(storage, SPACE, KEY)
    study, seen, told = run(storage, SPACE, {**KEY, **change})
    assert len(seen) == 4 and not study.num_inherited
    assert told[0].endswith("its trials do not count here") and told[1:] == [f"  {said}"]


NAMES = ("Intel(R) Xeon(R) 8488C", "INTEL Xeon 8488C")  # one device as two firmwares spell it


def test_a_device_under_another_name_of_its_own_has_the_same_study(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, where = parse_slug("fp32-d8-h2x1-b4-NHD")[0], parse_target("cpu:scalar")
    workloads = {Phase.DECODE: Workload(Phase.DECODE, (Point.parse("1x1@8"),))}
    keys = {}
    for device in (*NAMES, "AMD EPYC 9R14"):
        made_on = dataclasses.replace(fingerprint(where), hardware={**fingerprint(where).hardware, "device": device})
        monkeypatch.setattr(evaluate_module, "fingerprint", lambda target, made_on=made_on: made_on)
        evaluator = Evaluator(spec, where, workloads)
        assert evaluator.environment["hardware"]["device"] == device  # the record has what the machine says
        keys[device] = joining.identity(evaluator, Phase.DECODE)
    assert keys[NAMES[0]] == keys[NAMES[1]] != keys["AMD EPYC 9R14"]


def test_trials_and_phases_of_a_device_hold_under_another_name_of_its_own(storage: BaseStorage, tmp_path: Path) -> None:
    one, other = ({**KEY, "hardware": {"device": device}} for device in NAMES)
    run(storage, SPACE, one)  # as pagegen named studies that knew one name only
    study, seen, told = run(storage, SPACE, comparable(other))
    assert not seen and study.num_inherited == 4 and len(told) == 1
    record = make_record()
    environment = {"hardware": {"device": NAMES[0]}, "toolchain": {}, "threads": 2}
    batches = {phase: workload.digest for phase, workload in record.workloads.items()}
    key = {**comparable(environment), "workload": batches[Phase.DECODE]}
    studies = {phase.value: f"s/{phase}/{digest({**key, 'workload': batches[phase]})}" for phase in record.workloads}
    write(tmp_path, dataclasses.replace(record, facts={**record.facts, "environment": environment, "studies": studies}))
    here = {**key, **comparable({**environment, "hardware": {"device": NAMES[1]}})}
    assert keep(tmp_path, here, [Phase.DECODE], record.workloads).phases == (Phase.PREFILL,)
    (lost,) = keep(tmp_path, {**here, **comparable({"hardware": {"device": "another"}})}, [Phase.DECODE], record.workloads).lines
    assert "lost from the record" in lost and "hardware.device: was xeon 8488c, is another" in lost


def test_nested_fields_are_compared_one_by_one() -> None:
    now = {**KEY, "hardware": {"quota": 2.0, "caches": {"L3": 64}}, "knobs": {"tile": [1]}, "space": "y"}
    assert differences({**KEY, "space": "x"}, now) == ["hardware.caches.L3: was 32, is 64", "knobs.tile: was absent, is [1]"]


def test_verdicts_that_depend_on_more_than_the_source_are_not_taken_over(storage: BaseStorage) -> None:
    old = BucketStudy(storage, "s/decode", SPACE, KEY, total=4)
    ends = {Status.TIMEOUT: (16, 2), Status.RUN_ERROR: (32, 1), Status.PRUNED: (32, 2)}
    statuses = {SPACE.config({"tile": tile, "unroll": unroll}): status for status, (tile, unroll) in ends.items()}

    def evaluate(config: Config, judge: object) -> Evaluation:
        status = statuses.get(config)
        return Evaluation(status, config.to_dict(), "so it ended", source=source(config)) if status else score(config)

    search({"only": old}, {"only": evaluate})
    old.close()
    study, seen, _ = run(storage, MORE, KEY, total=5)
    assert set(statuses) <= set(seen) and study.num_inherited == 1


def test_a_new_knob_does_not_change_the_hash_of_a_source_that_it_does_not_change() -> None:
    made_of = variant(Op.ATTEND, parse_slug("fp32-d8-h2x1-b4-NHD")[0], parse_target("cpu:scalar"))
    source = render(made_of)
    config = Config((*made_of.config.items, ("another", 1)))
    text = source.text.replace(made_of.config.slug, config.slug)
    assert source_hash(Source(dataclasses.replace(made_of, config=config), text)) == source_hash(source)
    space = template_for(Op.ATTEND, made_of.spec, made_of.target).space(made_of.spec, made_of.target)
    others = [render(dataclasses.replace(made_of, config=config)) for config in list(space)[:40]]
    assert len({source_hash(other) for other in others}) == len({other.text.replace(other.variant.config.slug, "") for other in others}) > 1


# --- what a user sees -------------------------------------------------------------------------------------------------


def test_who_tunes_again_after_a_change_reads_a_line_for_each_field_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler, fewer cores and a larger quota, an edited template: three runs after the first, and one more."""
    said: list[str] = []

    def evaluate(self: Evaluator, phase: Phase, config: Config, *_: object) -> Evaluation:
        said.append("timed")
        return Evaluation(Status.PASSED, config.to_dict(), score=1.0, source=self.source_of(config))

    def compare(self: Evaluator, configs: dict[str, Config], anchor: str, phase: Phase, *_: object, **__: object) -> object:
        return {point: Measurement(anchor, dict.fromkeys(configs, (1.0,) * 5)) for point in self.workloads[phase].points}

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(Evaluator, "compare", compare)
    monkeypatch.setattr(job, "install_package", lambda path: path)

    def again() -> list[str]:
        """What is said before the first trial."""
        said.clear()
        job.tune("fp32-d8-h2x1-b4-NHD", trials=3, target="cpu:scalar", out=tmp_path, say=said.append)
        return said[: said.index("timed")] if "timed" in said else said

    before = cpp.compiler_version(cpp.compiler())
    assert again() == [] and said.count("timed") == 3
    monkeypatch.setattr(cpp, "compiler_version", lambda path: "g++ 99")
    first, *fields = again()
    assert first.startswith("this is a new study") and first.endswith("its trials do not count here")
    assert fields == [f"  toolchain.compiler: was {before}, is g++ 99"]
    here = target.detect()
    for module in (target, evaluate_module):
        monkeypatch.setattr(module, "detect", lambda: dataclasses.replace(here, affinity=64, quota=64.0))
    quota = f"  hardware.quota: was {here.quota}, is 64.0"
    threads = f"  threads (affinity, cut by the CPU quota): was {here.threads}, is 64"
    assert again()[1:] == [f"  hardware.affinity: was {here.affinity}, is 64", quota, threads]
    digest = source_digest(template_for(Op.ATTEND, parse_slug("fp32-d8-h2x1-b4-NHD")[0], parse_target("cpu:scalar")))
    monkeypatch.setattr(joining, "source_digest", lambda template: "edited")
    first, *fields = again()
    assert fields == [f"  templates (template files): was {digest}, is edited"]
    assert first.endswith("3 of its trials render to the same source, and count")
    (line,) = again()  # the same key: that study is gone on with
    assert line == "no new trial: the finals were timed again, and decide anew"
