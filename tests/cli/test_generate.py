"""`pagegen generate` and `pagegen chat` on a model of random weights."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagegen.runtime.engine import Engine, RequestOutput
from tests.cli.helpers import Result, run

pytestmark = pytest.mark.usefixtures("reference_kernels")
TINY = ("dummy:tiny", "--dtype", "fp32", "--ignore-eos")


def generate(*words: str) -> Result:
    return run("generate", *TINY, *words)


def generate_lines(tmp_path: Path, lines: Sequence[object], *words: str) -> Result:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return generate("--input", str(file), "--json", *words)


def test_people_see_the_text_its_speed_and_its_memory() -> None:
    result = generate("--prompt", "abc", "--max-tokens", "6", "--temperature", "0")
    assert result.status == 0
    assert result.stdout.count("\n") == 1 or "\n" in result.stdout[:-1]  # random bytes may hold line breaks
    assert "kernels: default config, fp32-d16-h6x2-b16-NHD" in result.stderr and "pagegen tune" in result.stderr
    assert "tokens/s" in result.stderr and "KV cache at its peak" in result.stderr


def test_programs_get_one_document_with_everything() -> None:
    result = generate("--prompt", "abc", "--max-tokens", "20", "--json")
    document = result.document
    (output,) = document["outputs"]
    assert output["prompt_token_ids"] == list(b"abc")
    assert len(output["token_ids"]) == 20 and output["finish_reason"] == "length" and output["error"] is None
    assert document["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 20,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
        "blocks_saved_by_sharing": 0,
    }
    assert document["speed"]["output_tokens_per_second"] > 0
    memory = document["memory"]
    assert set(memory["split"]) == {"token_states", "reserved", "internal_fragmentation", "external_fragmentation"}
    assert sum(memory["split"].values()) == memory["kv_bytes_peak"] <= memory["kv_bytes_total"]


def test_a_quantised_cache_takes_a_share_of_the_bytes_and_gives_nearly_the_same() -> None:
    words = ("--prompt", "abcdefgh" * 6, "--max-tokens", "3", "--temperature", "0", "--kv-blocks", "8", "--logprobs", "0")
    plain, int8 = (generate(*words, *more, "--json").document for more in ((), ("--kv-dtype", "int8")))
    assert "-kvint8 " in int8["kernels"]
    assert plain["memory"]["kv_bytes_total"] / int8["memory"]["kv_bytes_total"] == 16 * 4 / (16 + 4)  # and a scale a head
    first, other = (document["outputs"][0]["logprobs"][0]["logprob"] for document in (plain, int8))
    assert first != other == pytest.approx(first, abs=0.05)


def test_quantised_weights_give_nearly_the_same() -> None:
    words = ("--prompt", "abcdefgh", "--max-tokens", "2", "--temperature", "0", "--logprobs", "0", "--json")
    found = [generate(*words, *more).document["outputs"][0] for more in ((), ("--weights", "int8"), ("--weights", "int4"))]
    first, int8, int4 = (output["logprobs"][0]["logprob"] for output in found)
    assert first != int8 == pytest.approx(first, abs=0.1) and first != int4 == pytest.approx(first, abs=1.0)


def test_a_chat_goes_through_the_template() -> None:
    document = generate("--chat", "hi", "--max-tokens", "1", "--json").document
    assert document["outputs"][0]["prompt_token_ids"][0] == 256
    assert document["outputs"][0]["prompt_token_ids"][-10:] == list(b"assistant\n")


def test_a_seed_makes_sampling_repeatable_and_options_arrive() -> None:
    words = (
        "--prompt",
        "abc",
        "--temperature",
        "2",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--seed",
        "3",
        "--json",
        "--max-tokens",
        "12",
    )
    first, second = (generate(*words).document["outputs"][0]["token_ids"] for _ in range(2))
    assert first == second
    greedy = generate("--prompt", "abc", "--json", "--max-tokens", "12", "--logprobs", "2").document["outputs"][0]
    assert greedy["token_ids"] != first
    assert all(
        row["rank"] == 1 and len(row["top"]) == 2 and row["token_id"] == row["top"][0][0] for row in greedy["logprobs"]
    )


def test_beams_are_given_best_first_and_say_what_they_share() -> None:
    words = ("--prompt", "abc" * 7, "--max-tokens", "9", "--beam", "3", "--json")
    document = generate(*words, "--n", "2", "--length-penalty", "0", "--early-stopping", "never").document
    first, second = document["outputs"]
    assert first["score"] > second["score"] and first["token_ids"] != second["token_ids"]
    assert document["usage"]["blocks_saved_by_sharing"] >= 2  # of three beams, the prompt's full block
    assert document["usage"]["completion_tokens"] == 18
    (one,) = generate("--prompt", "abc", "--max-tokens", "9", "--beam", "1", "--json").document["outputs"]
    (greedy,) = generate("--prompt", "abc", "--max-tokens", "9", "--json").document["outputs"]
    assert one["token_ids"] == greedy["token_ids"] and one["score"] is greedy["score"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--beam", "2", "--n", "3"), "beam_width=2 is out of range; allowed: 3 to 128"),
        (("--beam", "2", "--temperature", "0.5"), "temperature=0.5 does not go with beam_width"),
        (
            ("--beam", "2", "--early-stopping", "soon"),
            "--early-stopping soon is not known; allowed: true, false, never",
        ),
        (("--length-penalty", "2"), "length_penalty is for a beam search and none is asked for"),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    result = generate("--prompt", "abc", *words)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_stop_text_ends_the_answer_before_it() -> None:
    whole = generate("--prompt", "abc", "--max-tokens", "30", "--json").document["outputs"][0]["text"]
    stop = next(character for character in whole[5:] if character != "\ufffd" and whole.index(character) > 3)
    cut = generate("--prompt", "abc", "--max-tokens", "30", "--json", "--stop", stop).document["outputs"][0]
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


def test_lines_are_answered_in_their_order_and_a_bad_one_in_its_place(tmp_path: Path) -> None:
    lines = [
        {"prompt": "abc", "max_tokens": 9},
        "not json",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "",
        {"prompt_token_ids": [97, 98, 99], "max_tokens": 3, "logprobs": 0},
        {"prompt": ""},
        {"prompt": "a", "prompt_token_ids": [97]},
        {"prompt": "a", "colour": "red"},
        {"prompt": 5},
        {"prompt_token_ids": [99999]},
        {"prompt": "a", "temperature": -1},
        '{"prompt": "a", "temperature": NaN}',
        {"prompt": "a" * 600},
        [1, 2],
        {"messages": []},
    ]
    result = generate_lines(tmp_path, lines, "--max-tokens", "1")
    assert result.status == 1
    outputs = result.document["outputs"]
    assert [output["index"] for output in outputs] == list(range(14))  # the empty line is none
    assert [len(outputs[i]["token_ids"]) for i in (0, 2, 3)] == [9, 2, 3]
    assert outputs[0]["token_ids"][:3] == outputs[3]["token_ids"]  # the same prompt, greedily
    assert [i for i, output in enumerate(outputs) if output["error"]] == [1, *range(4, 14)]
    for index, number in ((1, 2), (4, 6), (9, 11), (11, 13), (13, 15)):
        assert outputs[index]["error"].startswith(f"line {number}: ")
        assert outputs[index]["finish_reason"] == "error"
    assert "'colour'" in outputs[6]["error"] and "99999" in outputs[8]["error"] and "512" in outputs[11]["error"]


def test_together_they_give_what_each_gives_alone(tmp_path: Path) -> None:
    lines = [{"prompt": "x" * n, "max_tokens": 20 - n} for n in (1, 15, 16, 17, 2)]
    together = generate_lines(tmp_path, lines).document["outputs"]
    alone = [generate_lines(tmp_path, [line]).document["outputs"][0] for line in lines]
    assert [output["token_ids"] for output in together] == [output["token_ids"] for output in alone]


def test_a_small_pool_preempts_and_still_answers_everything(tmp_path: Path) -> None:
    lines = [{"prompt": f"prompt {i}", "max_tokens": 12} for i in range(4)]  # two blocks each
    few = generate_lines(tmp_path, lines, "--kv-blocks", "5").document
    many = generate_lines(tmp_path, lines).document
    assert few["memory"]["num_blocks"] == 5
    assert [o["token_ids"] for o in few["outputs"]] == [o["token_ids"] for o in many["outputs"]]


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a"}\n{"prompt": "b"}'))
    assert len(generate("--input", "-", "--json", "--max-tokens", "1").document["outputs"]) == 2


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def interrupted(self: Engine) -> list[RequestOutput]:
        if self.stats().num_steps == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = generate_lines(tmp_path, [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 50}])
    assert result.status == 130
    done, cut = result.document["outputs"]
    assert done["finish_reason"] == "length" and cut["finish_reason"] is None and len(cut["token_ids"]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--prompt TEXT, --chat TEXT or --input FILE.jsonl"),
        (("--prompt", "a", "--chat", "b"), "one source of prompts"),
        (("--prompt", ""), "no tokens"),
        (("--prompt", "a" * 600), "512"),
        (("--prompt", "a" * 100, "--kv-blocks", "2"), "KV"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens=0"),
        (("--prompt", "a", "--temperature", "nan"), "temperature"),
        (("--prompt", "a", "--top-p", "1.5"), "top_p"),
        (("--prompt", "a", "--stop", ""), "stop"),
        (("--prompt", "a", "--kv-blocks", "0"), "num_blocks"),
        (("--prompt", "a", "--kv-blocks", "9" * 30), "KV pool"),
        (("--prompt", "a", "--dtype", "fp8"), "fp32, bf16, fp16"),
        (("--prompt", "a", "--weights", "int3"), "--weights int3 is not known; allowed: int8, int4"),
        (("--prompt", "a", "--kv-dtype", "int3"), "allowed: fp32, fp8_e4m3, fp8_e5m2, int8, int4"),
        (("--prompt", "a", "--kv-dtype", "bf16"), "--kv-dtype bf16 is not possible with --dtype fp32"),
        (("--prompt", "a", "--kernels", "/nowhere"), "/nowhere"),
        (("--input", "/nowhere.jsonl"), "/nowhere.jsonl"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(words: tuple[str, ...], said: str) -> None:
    result = generate(*words)
    assert result.status == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", ""), "--host is empty"),
        (("--api-key", ""), "--api-key is empty"),
        (("--port", "70000"), "port 70000"),
        (("--max-queued-requests", "-1"), "--max-queued-requests -1"),
        (("--shutdown-timeout", "nan"), "--shutdown-timeout nan"),
        (("--shutdown-timeout", "-1"), "--shutdown-timeout -1"),
        (("--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--kv-cache-memory", "all"), "--kv-cache-memory 'all'"),
    ],
)
def test_serve_refuses_in_one_line(words: tuple[str, ...], said: str) -> None:
    result = run("serve", "dummy:tiny", "--port", "0", *words)
    assert result.status == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_closed_standard_input_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    refused, chat = generate("--input", "-"), run("chat", "dummy:tiny", "--dtype", "fp32")
    assert (refused.status, refused.stderr.count("\n")) == (2, 1) and "closed" in refused.stderr
    assert chat.status == 0


def test_what_is_typed_in_another_encoding_ends_the_chat_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfc\xdfe\n"), encoding="utf-8"))
    result = run("chat", "dummy:tiny", "--dtype", "fp32")
    assert result.status == 2 and result.stderr.splitlines()[-1].startswith(
        "pagegen: standard input is not text in utf-8"
    )


def test_an_unknown_model_says_which_words_are_known() -> None:
    result = run("generate", "gpt-9", "--prompt", "a")
    assert result.status == 2 and "dummy:NAME" in result.stderr


def test_chat_keeps_the_conversation_until_it_is_told_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    add = Engine.add_request

    def recorded(self: Engine, request_id: str, prompt_token_ids: list[int], params: Any) -> None:
        prompts.append(prompt_token_ids)
        add(self, request_id, prompt_token_ids, params)

    monkeypatch.setattr(Engine, "add_request", recorded)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n" + "x" * 600 + "\nfour\n"))
    result = run("chat", "dummy:tiny", "--dtype", "fp32", "--max-tokens", "3", "--system", "S")
    texts = [bytes(token for token in prompt if token < 256).decode(errors="replace") for prompt in prompts]
    assert result.status == 0
    assert texts[0] == "system\nS\nuser\none\nassistant\n"
    assert texts[1].startswith("system\nS\nuser\none\nassistant\n") and texts[1].endswith("\nuser\ntwo\nassistant\n")
    assert texts[2] == "system\nS\nuser\nthree\nassistant\n"
    assert "/new forgets" in result.stderr.splitlines()[-1] and "512" in result.stderr
    assert "x" * 600 not in texts[-1] and texts[-1].endswith("user\nfour\nassistant\n")  # refused, and not remembered
