"""`pagegen plan`: the memory pie of a model, from its config alone."""

from __future__ import annotations

import pytest

from tests.cli.helpers import run


def test_a_13b_model_in_40_gb_has_the_pie_of_the_vllm_paper() -> None:
    (row,) = run("plan", "dummy:llama-13b", "--mem", "40G", "--dtype", "fp16", "--json").document["rows"]
    assert row["kv_bytes_per_token"] == 800 * 1024
    assert row["weight_bytes"] == pytest.approx(26e9, rel=0.01)
    assert row["shares"]["weights"] == pytest.approx(0.61, abs=0.05) and row["shares"]["kv_cache"] > 0.3
    assert row["num_slots"] == 16 * row["num_blocks"] == pytest.approx(17_500, rel=0.05)
    assert row["reserved"] == row["full_length"] == 8


def test_the_parts_sum_to_the_memory_and_half_as_wide_numbers_make_twice_the_tokens() -> None:
    rows = run("plan", "dummy:tiny", "--mem", "64M", "--json", "--block-size", "7", "--max-model-len", "300").document[
        "rows"
    ]
    wide, *narrow = rows
    assert [row["dtype"] for row in rows] == ["fp32", "bf16", "fp16"]
    for row in rows:
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["full_length"] == row["num_blocks"] // 43 > row["reserved"] == row["num_blocks"] // 64
    for row in narrow:
        assert row["kv_bytes_per_token"] * 2 == wide["kv_bytes_per_token"]
        assert row["num_blocks"] > 2 * wide["num_blocks"]


def test_a_quantised_cache_holds_more_tokens_in_the_same_memory() -> None:
    words = ("plan", "dummy:tiny", "--mem", "64M", "--dtype", "bf16", "--json")
    (wide,), (narrow,) = (run(*words, *more).document["rows"] for more in ((), ("--kv-dtype", "int4")))
    assert (wide["kv_dtype"], narrow["kv_dtype"]) == ("bf16", "int4")
    assert wide["kv_bytes_per_token"] / narrow["kv_bytes_per_token"] == 16 * 2 / (16 / 2 + 4)


def test_weights_in_fewer_bits_leave_more_to_the_cache() -> None:
    words = ("plan", "smollm2-135m", "--mem", "1G", "--dtype", "bf16", "--json")
    plain, int8, int4 = (
        run(*words, *more).document["rows"][0] for more in ((), ("--weights", "int8"), ("--weights", "int4"))
    )
    assert [row["weights"] for row in (plain, int8, int4)] == ["bf16", "int8", "int4"]
    head = 2 * 49152 * 576  # stays as it is
    shares = [(row["weight_bytes"] - head) / (plain["weight_bytes"] - head) for row in (int8, int4)]
    assert shares == [pytest.approx(1 / 2, abs=0.01), pytest.approx((4 + 1) / 16, abs=0.01)]
    assert plain["num_blocks"] < int8["num_blocks"] < int4["num_blocks"]


def test_what_does_not_fit_is_exit_1_and_said() -> None:
    result = run("plan", "dummy:llama-13b", "--mem", "20G")
    assert result.status == 1 and "no room for one sequence" in result.stderr and "fp16" in result.stdout


def test_without_a_size_it_is_about_this_machine() -> None:
    document = run("plan", "dummy:tiny", "--json").document
    assert document["memory_bytes"] > 2**20 and document["rows"][0]["fits"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("dummy:nobody",),
        ("dummy:tiny", "--mem", "much"),
        ("dummy:tiny", "--dtype", "int8"),
        ("dummy:tiny", "--kv-dtype", "int3"),
        ("dummy:tiny", "--weights", "fp8_e4m3"),
        ("dummy:tiny", "--max-model-len", "513"),
        ("dummy:tiny", "--max-model-len", "0"),
        ("dummy:tiny", "--block-size", "0"),
        ("dummy:tiny", "--other", "1"),
        ("dummy:tiny", "--length", "0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = run("plan", *words)
    assert result.status == 2 and result.stderr.count("\n") == 1 and not result.stdout
