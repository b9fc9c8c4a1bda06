"""What won elsewhere is tried first, if it is for the same template and this space has it; bad records are passed over."""

import itertools
import json
from pathlib import Path
from typing import Any

from pagegen.catalog import template_for
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import parse_target
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.warm_start import MOST, suggestions

TARGET = parse_target("cpu:avx2")
SPEC = KernelSpec(q_heads=8, kv_heads=2, head_dim=64)
SPACE = template_for(Op.ATTEND, SPEC, TARGET).space(SPEC, TARGET)
OTHERS = [config for config in itertools.islice(SPACE, 100) if config != SPACE.default]


def record(folder: Path, spec: KernelSpec, values: dict[str, Any], target: str = "cpu:avx2", **winner: Any) -> None:
    folder.mkdir(parents=True)
    won = {"phase": "decode", "config": values, "confirmed": True, **winner}
    (folder / "tune.json").write_text(json.dumps({"spec": spec.to_dict(), "target": target, "winner": [won]}))


def test_the_nearest_confirmed_winners_come_first_and_each_once(tmp_path: Path) -> None:
    near, far = KernelSpec(q_heads=8, kv_heads=2, head_dim=32), KernelSpec(q_heads=4, kv_heads=4, head_dim=32)
    record(tmp_path / "a", far, OTHERS[0].to_dict())
    record(tmp_path / "b", near, OTHERS[1].to_dict())
    record(tmp_path / "c" / "chat", far, OTHERS[1].to_dict())
    record(tmp_path / "d", near, OTHERS[2].to_dict(), confirmed=False)
    record(tmp_path / "e", near, OTHERS[3].to_dict(), phase="prefill")
    record(tmp_path / "f", SPEC, SPACE.default.to_dict())
    found = suggestions(tmp_path, SPEC, TARGET, SPACE, Phase.DECODE)
    assert [each.config for each in found] == [OTHERS[1], OTHERS[0]]
    assert found[0].source == f"{near.slug} on cpu:avx2" and found[0].to_dict()["source"] == found[0].source
    assert [each.config for each in suggestions(tmp_path, SPEC, TARGET, SPACE, Phase.PREFILL)] == [OTHERS[3]]


def test_there_are_few_of_them(tmp_path: Path) -> None:
    for number, config in enumerate(OTHERS[: MOST + 3]):
        record(tmp_path / str(number), SPEC, config.to_dict())
    assert len(suggestions(tmp_path, SPEC, TARGET, SPACE, Phase.DECODE)) == MOST


def test_another_template_s_winners_and_bad_records_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path / "gpu", SPEC, OTHERS[0].to_dict(), "cuda:sm_90")
    record(tmp_path / "knob", SPEC, {"no such knob": 1})
    record(tmp_path / "value", SPEC, {SPACE.knobs[0].name: 12345})
    record(tmp_path / "phase", SPEC, OTHERS[0].to_dict(), phase="dusk")
    for number, text in enumerate(["", "{", "[]", "{}", '{"spec": {}, "target": 5}']):
        (tmp_path / f"bad{number}").mkdir()
        (tmp_path / f"bad{number}" / "tune.json").write_text(text)
    assert suggestions(tmp_path, SPEC, TARGET, SPACE, Phase.DECODE) == []
    assert suggestions(tmp_path / "nowhere", SPEC, TARGET, SPACE, Phase.DECODE) == []


def test_suggestions_are_tried_right_after_the_default_and_once(tmp_path: Path) -> None:
    for _ in range(2):
        study = BucketStudy(open_storage(None, tmp_path), "s", SPACE, {}, total=9)
        study.suggest(OTHERS[5], "elsewhere")
        study.suggest(SPACE.default, "elsewhere")
        study.close()
    claims = [study.claim() for study in [BucketStudy(open_storage(None, tmp_path), "s", SPACE, {}, total=9)] for _ in range(3)]
    assert [claim.config for claim in claims if claim][:2] == [SPACE.default, OTHERS[5]]
    assert claims[2] and claims[2].config not in (SPACE.default, OTHERS[5])
