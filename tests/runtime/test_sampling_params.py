"""Sampling options check themselves and name the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.errors import RequestError
from pagegen.runtime.sampling_params import MAX_LOGPROBS, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [NAN, INF, -INF, -1, -1e-9, True, "1", None, 10**400, 10**5000]),
        ("top_p", [NAN, INF, -INF, -1, 0, 1.0001, True, "1", None]),
        ("top_k", [-2, 1.0, NAN, True, "5", None]),
        ("max_tokens", [0, -1, 1.5, NAN, True, None, 2**31, 10**5000]),
        ("seed", [1.0, True, "1", 2**64, -(2**63) - 1]),
        ("ignore_eos", [0, 1, None, "yes"]),
        ("logprobs", [-1, True, 1.0, MAX_LOGPROBS + 1, 500]),
        ("prompt_logprobs", [-1, True, 1.0, 128]),
        ("stop", ["", [""], ["x", ""], 5, [5], None, ["x"] * 100, "x" * 1_000_000, {"x": 1}]),
        ("stop_token_ids", [[-1], [1.5], [True], ["1"], 5, None, "12"]),
    ],
)
def test_bad_values_are_refused_naming_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("a", "b") and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=[]).stop == ()  # type: ignore[arg-type]


def test_minus_one_turns_top_k_off_as_zero_does() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_whole_numbers_count_as_temperatures() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-38).greedy


@pytest.mark.parametrize(
    ("params", "field"),
    [(SamplingParams(stop_token_ids=(151645,)), "stop_token_ids"), (SamplingParams(logprobs=11), "logprobs")],
)
def test_what_depends_on_the_vocabulary_is_checked_against_it(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        params.validate_for(10)
    assert caught.value.param == field
    SamplingParams(stop_token_ids=(9,), logprobs=10).validate_for(10)


def test_a_number_is_called_out_of_range_rather_than_infinite() -> None:
    with pytest.raises(RequestError, match=r"length_penalty=1e\+308 is out of range"):
        SamplingParams(beam_width=2, length_penalty=1e308)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=3)
)


@given(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), ANYTHING)
def test_no_value_of_any_field_raises_anything_else(field: str, value: Any) -> None:
    try:
        params = SamplingParams(**{field: value})
    except RequestError as error:
        assert error.param == field
    else:
        assert math.isfinite(params.temperature) and 0 < params.top_p <= 1
