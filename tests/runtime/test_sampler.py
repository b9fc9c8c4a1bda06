"""Each row is sampled by itself: from its own distribution, with its own randomness, whatever stands beside it."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen.runtime.sampler import TOP_P_EPSILON, SampledToken, _filter, request_seed, sample, token_logprobs, uniform
from pagegen.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 400, seed: int = 1) -> list[int]:
    """`count` draws from one distribution, at as many positions."""
    rows = sample(logits.expand(count, -1), [params] * count, range(count), [seed] * count)
    return [row.token_id for row in rows if row.token_id is not None]


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0, 1e-38, 1e-8, 1e-5, 1e-3])
def test_tiny_temperatures_take_the_likeliest_token(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([2.875, 2.955, 11.0625, -2.44, -math.inf]).to(dtype)
    assert set(draws(logits, SamplingParams(temperature=temperature))) == {2}


def test_top_k_of_any_size_is_clamped_and_rows_do_not_mix() -> None:
    logits = torch.randn(128, generator=torch.Generator().manual_seed(0))
    off = [SamplingParams(top_k=k) for k in (0, -1, 128, 129, 9999999)]
    params = [GREEDY, SamplingParams(top_k=64), SamplingParams(top_k=127), SamplingParams(top_k=1), *off]
    for position in range(50):
        rows = sample(logits.expand(len(params), -1), params, [position] * len(params), [7] * len(params))
        tokens = [row.token_id for row in rows]
        assert tokens[0] == tokens[3] == int(logits.argmax())
        assert len(set(tokens[4:])) == 1


def test_top_k_keeps_the_k_likeliest_and_equals_in_order_of_their_ids() -> None:
    assert set(draws(log(0.1, 0.4, 0.1, 0.3, 0.1), SamplingParams(top_k=3))) == {0, 1, 3}
    assert set(draws(torch.zeros(6), SamplingParams(top_k=2))) == {0, 1}


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ((0.5, 0.41, 0.09), 0.9, {0, 1}),
        ((0.5, 0.25, 0.125, 0.125), 0.5, {0}),
        ((0.5, 0.25, 0.125, 0.125), 0.75, {0, 1}),
        ((0.5, 0.25, 0.125, 0.125), 0.76, {0, 1, 2}),
        ((0.5, 0.25, 0.125, 0.125), 1.0, {0, 1, 2, 3}),
        ((0.5, 0.25, 0.125, 0.125), 1e-9, {0}),
        ((0.25, 0.25, 0.25, 0.25), 0.5, {0, 1}),
        ((0.125, 0.5, 0.125, 0.25), 0.75, {1, 3}),
    ],
)
def test_the_nucleus_keeps_the_token_that_crosses_p(
    probabilities: tuple[float, ...], top_p: float, kept: set[int]
) -> None:
    assert set(draws(log(*probabilities), SamplingParams(top_p=top_p))) == kept


def test_top_p_is_taken_out_of_what_top_k_left() -> None:
    # of the two left, 5/9 and 4/9: the first reaches .55 alone, of the whole distribution it would not
    assert set(draws(log(0.5, 0.4, 0.1), SamplingParams(top_k=2, top_p=0.55))) == {0}
    assert set(draws(log(0.5, 0.4, 0.1), SamplingParams(top_k=2, top_p=0.9))) == {0, 1}


def test_temperature_comes_before_top_p() -> None:
    logits = log(0.5, 0.25, 0.125, 0.125)
    assert set(draws(logits, SamplingParams(temperature=0.01, top_p=0.76))) == {0}
    assert set(draws(logits, SamplingParams(temperature=100.0, top_p=0.76))) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1.0, 0.9999999])
def test_a_uniform_vocabulary_of_128256_stays_whole_and_indexable(top_p: float) -> None:
    rows = sample(torch.zeros(3, 128256), [SamplingParams(top_p=top_p)] * 3, [0, 1, 2], [1, 2, 3])
    assert all(row.token_id is not None and 0 <= row.token_id < 128256 for row in rows)
    assert max(row.token_id or 0 for row in rows) > 1024


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.001, 1),
    vocab=st.sampled_from([1, 2, 37, 1500]),
    grain=st.sampled_from([0.0, 0.5]),
)
def test_filters_agree_with_a_plain_sort(seed: int, top_k: int, top_p: float, vocab: int, grain: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    logits = (logits / grain).round() * grain if grain else logits  # a grain makes ties
    probabilities = logits.double().softmax(-1)
    chances = probabilities.tolist()
    order = sorted(range(vocab), key=lambda token: (-chances[token], token))[: top_k or vocab]
    total, before = sum(chances[token] for token in order), 0.0
    kept: set[int] = set()
    for token in order:
        if kept and top_p < 1 and before >= (top_p - TOP_P_EPSILON) * total:
            break
        kept.add(token)
        before += chances[token]
    params = SamplingParams(top_k=top_k, top_p=top_p)
    filtered = _filter(probabilities[None], [params])[0]
    assert set(filtered.nonzero().flatten().tolist()) == kept
    assert torch.equal(filtered[list(kept)], probabilities[list(kept)])


def test_frequencies_follow_the_distribution() -> None:
    probabilities = (0.5, 0.3, 0.15, 0.05)
    counts = Counter(draws(log(*probabilities), SamplingParams(), count=20000))
    chi_square = sum((counts[token] - 20000 * p) ** 2 / (20000 * p) for token, p in enumerate(probabilities))
    assert chi_square < 16.3  # 0.1 % level of 3 degrees of freedom


def test_a_draw_depends_on_seed_and_position_and_not_on_batch_mates() -> None:
    logits = torch.randn(9, 501, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p)
        for t, k, p in [
            (1, 0, 1),
            (0.7, 5, 1),
            (1, 0, 0.5),
            (0, 0, 1),
            (2, 50, 0.9),
            (1, 1, 1),
            (1, 0, 0.99),
            (1.5, 0, 1),
        ]
    ] + [GREEDY]
    positions, seeds = list(range(3, 12)), list(range(100, 109))
    together = sample(logits, params, positions, seeds)
    alone = [sample(logits[r : r + 1], [params[r]], [positions[r]], [seeds[r]])[0] for r in range(9)]
    backwards = sample(logits.flip(0), params[::-1], positions[::-1], seeds[::-1])[::-1]
    assert together == alone == backwards


def test_children_of_a_seeded_request_differ_and_repeat() -> None:
    params = SamplingParams(seed=42)

    def children(count: int) -> list[list[int]]:
        return [draws(torch.zeros(1000), params, count=8, seed=request_seed(params, child)) for child in range(count)]

    first = children(3)
    assert first == children(3)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert first[0] == children(1)[0] == draws(torch.zeros(1000), params, count=8, seed=42)


def test_an_unseeded_request_gets_a_seed_of_its_own_and_negative_seeds_work() -> None:
    assert request_seed(SamplingParams()) != request_seed(SamplingParams())
    assert 0 <= request_seed(SamplingParams(seed=-1)) < 2**64


def test_uniform_numbers_are_fixed_for_ever() -> None:
    assert uniform(0, 0) == uniform(0, 0) != uniform(0, 1) != uniform(1, 0)
    numbers = [uniform(5, position) for position in range(4000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert sum(numbers) / 4000 == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=2)])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([math.nan, 1.0, 2.0], "NaN"),
        ([math.nan] * 3, "NaN"),
        ([math.inf, 1.0, 2.0], r"\+inf"),
        ([-math.inf] * 3, "all -inf"),
    ],
)
def test_unusable_logits_end_their_row_only(params: SamplingParams, bad: list[float], said: str) -> None:
    good, broken, also_good = sample(
        torch.tensor([[0.0, 9.0, 0.0], bad, [9.0, 0.0, 0.0]]), [GREEDY, params, GREEDY], [0] * 3, [0] * 3
    )
    assert (good, also_good) == (SampledToken(1), SampledToken(0))
    assert broken.token_id is None and broken.error is not None
    assert re.search(said, broken.error)


def test_logprobs_are_of_the_raw_logits_in_natural_log() -> None:
    logits = log(0.5, 0.125, 0.25, 0.125)[None]
    row = sample(logits, [SamplingParams(temperature=0.1, top_k=1, logprobs=2)], [0], [0])[0]
    assert row.logprobs is not None
    assert row.logprobs.token_id == 0 and row.logprobs.rank == 1
    assert row.logprobs.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token for token, _ in row.logprobs.top] == [0, 2]
    assert row.logprobs.top[1][1] == pytest.approx(math.log(0.25), abs=1e-6)


def test_logprobs_zero_gives_the_token_itself_and_rows_without_get_none() -> None:
    rows = sample(torch.zeros(2, 5), [SamplingParams(temperature=0, logprobs=0), GREEDY], [0, 0], [0, 0])
    assert rows[0].logprobs is not None and rows[0].logprobs.top == ()
    assert rows[1].logprobs is None


def test_prompt_logprobs_rank_the_given_tokens() -> None:
    found = token_logprobs(log(0.5, 0.25, 0.125, 0.125)[None].expand(2, -1), torch.tensor([1, 0]), [3, 1])
    assert [(row.token_id, row.rank, len(row.top)) for row in found] == [(1, 2, 3), (0, 1, 1)]
    assert token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), []) == []


def test_more_logprobs_than_tokens_are_clipped() -> None:
    assert len(token_logprobs(torch.zeros(1, 4), torch.tensor([0]), [20])[0].top) == 4
