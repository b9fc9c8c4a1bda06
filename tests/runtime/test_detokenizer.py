"""Streamed text is the text: nothing of a stop string leaks, nothing real is lost, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagegen.runtime.detokenizer import Detokenizer, StopChecker
from pagegen.runtime.weights.dummy import DummyModel

TOKENIZER = DummyModel("tiny").tokenizer()


def run(pieces: list[str], *stop: str) -> tuple[list[str], str | None]:
    """Deltas, the flush among them if it has text, and the stop string found."""
    checker = StopChecker(stop)
    deltas = [checker.push(piece) for piece in pieces]
    return [delta for delta in [*deltas, checker.flush()] if delta], checker.matched


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "matched"),
    [
        (["A", "B", "C", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["x", "DEF", "Z"], ["DEFGHIJ"], "xDEFZ", None),
        (["x", "DEF"], ["DEFGHIJ"], "xDEF", None),
        (["?\n"], ["\n"], "?", "\n"),
        (["x", "ab", "c"], ["ab", "abc"], "x", "ab"),
        (["x", "abc"], ["abc", "ab"], "x", "ab"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["xabc"], ["bc", "abc"], "x", "abc"),
        (["one stop two stop"], ["stop"], "one ", "stop"),
        (["plain"], [], "plain", None),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], text: str, matched: str | None) -> None:
    deltas, found = run(pieces, *stop)
    assert "".join(deltas) == text
    assert found == matched


def test_text_that_cannot_begin_a_stop_is_not_held_back() -> None:
    checker = StopChecker(["DEFGHIJ"])
    assert [checker.push(piece) for piece in ("A", "xD", "E", "x")] == ["A", "x", "", "DEx"]


def test_nothing_comes_after_a_match() -> None:
    checker = StopChecker(["b"])
    assert [checker.push("ab"), checker.push("c"), checker.flush()] == ["a", "", ""]


def first_stop(text: str, stop: list[str]) -> str:
    """The meaning, read off character by character."""
    for end in range(1, len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@example(pieces=["aab", "ab"], stop=["abab", "ba"])
def test_the_split_into_pieces_does_not_matter(pieces: list[str], stop: list[str]) -> None:
    expected = first_stop("".join(pieces), stop)
    assert "".join(run(pieces, *stop)[0]) == expected
    assert "".join(run(["".join(pieces)], *stop)[0]) == expected


def test_the_prompt_is_not_searched() -> None:
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode("wait STO"), stop=["STOP"])
    assert "".join(map(detokenizer.push, TOKENIZER.encode("P now"))) + detokenizer.flush() == "P now"
    assert detokenizer.stopped is None


def test_a_stop_string_of_characters_that_are_split_over_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["🙂!"])
    deltas = [detokenizer.push(token) for token in TOKENIZER.encode("é🙂?🙂!x")]
    assert "".join(deltas) == detokenizer.text == "é🙂?"
    assert detokenizer.stopped == "🙂!"


def test_a_half_character_at_the_end_is_one_replacement_mark_once() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(0xF0), detokenizer.push(0x9F), detokenizer.flush(), detokenizer.flush()] == [
        "",
        "",
        "\ufffd",
        "",
    ]
    assert detokenizer.text == "\ufffd"


@given(st.text(max_size=30), st.lists(st.text("abc🙂é", min_size=1, max_size=3), max_size=2))
def test_streamed_text_is_the_text(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    deltas = [detokenizer.push(token) for token in TOKENIZER.encode(text)]
    assert "".join(deltas) + detokenizer.flush() == detokenizer.text == first_stop(text, stop)
