"""Claims about `pagegen report`: one page that needs nothing else and says what the record says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pagegen import plotting
from pagegen.records import Evaluation, Status
from pagegen.tuning import plots
from pagegen.tuning.html import write_html
from pagegen.tuning.importance import importances
from pagegen.tuning.machine import NO_DISTURBANCE
from tests.cli.helpers import run

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tune-record-format-2"
VOID = {"meta", "rect", "path", "circle", "polyline"}


class Balance(HTMLParser):
    """Whether tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the fixture, with limits of a machine whose name is a trap."""
    made = Path(shutil.copytree(FIXTURE, tmp_path / "record"))
    document = json.loads((made / "tune.json").read_text())
    rate = {"2": {"median": 2e10, "low": 2e10, "high": 2e10}}
    document["environment"]["hardware"]["device"] = "<b>a & b</b>"
    document["roofline"] = {
        "levels": {"memory": {"2": 1 << 26}},
        "bandwidth": {"memory": rate},
        "fp32": rate,
        "bf16": {},
        "disturbance": NO_DISTURBANCE.to_dict(),
    }
    (made / "tune.json").write_text(json.dumps(document))
    return made


def test_the_page_is_whole_and_says_what_the_record_says(folder: Path) -> None:
    page = write_html(folder).read_text()
    parser = Balance()
    parser.feed(page)
    assert not parser.open
    document = json.loads((folder / "tune.json").read_text())
    for winner in document["winner"]:
        assert winner["bucket"] in page
    for row in document["rows"]:
        assert f"<td>{row['phase']} {row['point']}</td><td>{row['name']}</td>" in page
    assert "the default stays" in page and page.count("<polyline") >= 4  # two roofs, two histories
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in page and "<b>" not in page


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = write_html(folder).read_text()
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_the_knob_that_decides_is_the_one_that_mattered() -> None:
    found = [
        Evaluation(Status.PASSED, {"tile": tile, "order": order, "same": 1}, score=1.0 + tile / 10 + (order == "a") / 1000)
        for tile in range(8)
        for order in ("a", "b", "c")
    ]
    shares = importances(found)
    assert next(iter(shares)) == "tile" and shares["tile"] > 0.8 and set(shares) == {"tile", "order"}
    assert importances(found[:3]) == {}


def test_the_command_writes_the_page_or_says_in_one_line_why_not(folder: Path, tmp_path: Path) -> None:
    result = run("report", str(folder), "--json")
    assert result.status == 0 and Path(result.document["report"]).is_file()
    assert "report.html" in run("report", str(folder)).stdout
    refused = run("report", str(tmp_path))
    assert refused.status == 2 and "holds no record" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_plots_show_every_contender_on_every_batch_and_every_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: dict[str, Any] = {}

    def noted(figure: Any, path: Path) -> None:
        drawn[path.name] = figure.axes
        plotting.save(figure, path)

    monkeypatch.setattr(plots, "save", noted)
    result = run("report", str(folder), "--png", "--json")
    assert result.document["plots"] == [str(folder / "roofline.png"), str(folder / "history.png")], result.stderr
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in result.document["plots"])
    document = json.loads((folder / "tune.json").read_text())
    (roofline,) = drawn["roofline.png"]
    lines = {line.get_label(): line for line in roofline.get_lines()}
    for name in {row["name"] for row in document["rows"]}:
        reached = [row["gflops"] for row in document["rows"] if row["name"] == name]
        assert list(lines[name.replace("_", " ")].get_ydata()) == reached
    assert "memory: 20 GB/s" in lines and "fp32 FMA: 20 GFLOP/s" in lines
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    for axes, study in zip(drawn["history.png"], document["studies"].values(), strict=True):
        scores = [trial["score"] for trial in trials if trial["study"] == study and trial["score"] is not None]
        shown = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert shown["trial"] == scores and shown["best so far"][-1] == min(scores) and len(shown["build_error"]) == 1


def test_without_limits_there_is_no_roofline_and_without_matplotlib_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    document = json.loads((folder / "tune.json").read_text())
    (folder / "tune.json").write_text(json.dumps({**document, "roofline": None}))
    assert run("report", str(folder), "--png", "--json").document["plots"] == [str(folder / "history.png")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = run("report", str(folder), "--png")
    assert refused.status == 2 and "pip install 'pagegen[plots]'" in refused.stderr and refused.stderr.count("\n") == 1
