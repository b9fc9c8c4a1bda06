"""Tables in a terminal of any width: every word can be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.cli._common import _fit, print_table

COLUMNS = ("batch", "package us", "GB/s", "GFLOP/s", "default", "sdpa gather", "sdpa gqa", "sdpa folded", "remark")
ROWS = [
    ("1x1@8192", "15951", "10.4", "291.6", "0.97", "12.84", "5.53", "1.27", ""),
    ("1x37@37 + 1x200@200 + 1x131@387", "646", "0.7", "224.7", "0.98", "3.45", "3.07", "3.06", ""),
]


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_word_of_a_table_is_cut_short(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("a title longer than the narrow terminal is wide", COLUMNS, ROWS)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "a title longer than the narrow terminal is wide"
    words = set(" ".join(lines).split())
    assert {word for row in (COLUMNS[:-1], *ROWS) for cell in row for word in cell.split()} <= words
    assert max(map(len, lines)) <= max(width, 80), "these columns fit into 80"


def test_numbers_stand_right_and_an_empty_column_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("kernel", "spills", "remedy"), [("attend", "8", ""), ("merge", "110", "")])
    heading, _, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert "remedy" not in heading
    assert first.endswith("  8") and second.endswith("110")


def test_a_table_without_rows_keeps_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("kind", "name"), [])
    assert "kind" in capsys.readouterr().out


@given(
    st.lists(st.lists(st.text("ab ", max_size=40), min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 200)
)
def test_columns_give_way_only_as_far_as_needed(cells: list[list[str]], room: int) -> None:
    columns = [("name", column) for column in cells]
    widths, natural = _fit(columns, room), _fit(columns, 10**6)
    assert all(width <= full for width, full in zip(widths, natural, strict=True))
    assert sum(widths) >= min(room, sum(natural))
