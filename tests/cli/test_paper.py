"""`pagegen paper`: rows with ours, paper, band and ok; exit 1 if a bar is missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import run


def test_a_figure_carries_rows_and_its_exit_status_says_whether_all_bars_are_met(tmp_path: Path) -> None:
    result = run("paper", "orca", "--scale", "0.1", "--json", "--plots", str(tmp_path))
    rows = result.document["rows"]
    assert {"what", "ours", "paper", "band", "ok", "kind", "seeds"} <= rows[0].keys()
    assert all(len(row["seeds"]) == 3 for row in rows)
    assert result.status == (0 if all(row["ok"] for row in rows) else 1)
    assert rows[0]["ours"] > rows[1]["ours"] == pytest.approx(1, abs=0.2)
    assert all(row["varied"][0] <= row["ours"] <= row["varied"][1] for row in rows)
    assert (tmp_path / "orca.png").read_bytes().startswith(b"\x89PNG")


def test_plots_that_cannot_be_drawn_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("paper", "fig12", "--plots", str(tmp_path / "file" / "plots"))  # it would take minutes
    assert result.status == 2 and result.stderr.count("\n") == 1 and "--plots" in result.stderr


@pytest.mark.parametrize("words", [("fig3",), ("fig2", "--scale", "0"), ("fig2", "--scale", "1e-9"), ()])
def test_what_is_no_figure_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = run("paper", *words)
    assert result.status == 2 and result.stderr.count("\n") == 1
