"""`pagegen simulate`: one document, tables of several policies, logs and workloads as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen.tuning.workloads import read_workloads
from tests.cli.helpers import run

QUICK = ("--trace", "alpaca", "--rate", "8", "--requests", "20")


def test_each_pair_of_policies_is_a_run_of_the_same_trace() -> None:
    document = run("simulate", *QUICK, "--memory-policy", "paged", "--memory-policy", "orca-max", "--json").document
    assert [each["setup"]["memory_policy"] for each in document["runs"]] == ["paged", "orca-max"]
    assert {each["num_finished"] for each in document["runs"]} == {20}
    table = run("simulate", *QUICK)
    assert table.status == 0 and "paged" in table.stdout and "guesses" in table.stderr


def test_a_recorded_run_repeats_and_can_be_tried_under_another_policy(tmp_path: Path) -> None:
    log, workload = str(tmp_path / "run.log"), tmp_path / "w.yaml"
    first = run("simulate", *QUICK, "--record", log, "--emit-workload", str(workload), "--json").document["runs"][0]
    again = run("simulate", "--replay", log, "--json").document["runs"][0]
    assert again["num_steps"] == first["num_steps"]
    assert again["split"] == pytest.approx(first["split"])  # the clock of the repeated run skips the idle times
    other = run("simulate", "--replay", log, "--policy", "request", "--json").document["runs"][0]
    assert other["num_finished"] == 20 and other["num_idle_slot_iterations"] > 0
    assert {"decode", "mixed"} <= read_workloads(workload).keys()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--trace", "sharegpt", "--replay", "x.log"),
        ("--trace", "nobody"),
        ("--trace", "nowhere.jsonl"),
        ("--replay", "nowhere.log"),
        ("--trace", "alpaca", "--policy", "fair"),
        ("--trace", "alpaca", "--memory-policy", "infinite"),
        ("--trace", "alpaca", "--preemption", "gently"),
        ("--trace", "alpaca", "--rate", "0"),
        ("--trace", "alpaca", "--rate", "nan"),
        ("--trace", "alpaca", "--step-base", "-1"),
        ("--trace", "alpaca", "--warmup", "nan"),
        ("--trace", "alpaca", "--warmup", "-1"),
        ("--trace", "alpaca", "--requests", "2", "--warmup", "1e9"),
        ("--trace", "alpaca", "--seconds", "0"),
        ("--trace", "alpaca", "--seconds", "nan"),
        ("--trace", "alpaca", "--kv-blocks", "0"),
        ("--trace", "alpaca", "--kv-blocks", "2000000000"),
        ("--trace", "fixed:9000x1"),
        ("--trace", "fixed:0x8"),
        ("--trace", "alpaca", "--phase", "later"),
        ("--trace", "alpaca", "--phase", "decode"),
        ("--trace", "alpaca", "--emit-workload", "nowhere/w.yaml"),
        ("--trace", "alpaca", "--record", "nowhere/run.log"),
        ("--trace", "alpaca", "--policy", "orca", "--policy", "default", "--record", "x.log"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = run("simulate", *words)
    assert result.status == 2 and result.stderr.count("\n") == 1 and not result.stdout


def test_what_generate_records_repeats_without_the_model(tmp_path: Path, reference_kernels: None) -> None:
    log, prompts = str(tmp_path / "run.log"), tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt_token_ids": {[*range(30 * i, 33 * i + 40)]}, "n": {1 + i // 5}}}\n' for i in range(1, 6))
    )
    first = run(
        "generate", "dummy:tiny", "--dtype", "fp32", "--input", str(prompts), "--max-tokens", "24", "--ignore-eos",
        "--kv-blocks", "8", "--temperature", "1", "--record", log, "--json",
    )  # fmt: skip
    assert first.status == 0
    again = run("simulate", "--replay", log, "--json").document["runs"][0]
    assert again["setup"]["num_blocks"] == 8 and again["num_finished"] == 5
    assert again["num_preemptions"] == first.document["memory"]["num_preemptions"] > 0
