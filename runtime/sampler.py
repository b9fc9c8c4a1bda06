"""From logits to tokens, each row by itself: its draw depends on its logits, options, seed and position alone.

The order is temperature, top-k, top-p. Randomness is counter-based: one uniform number a token, a hash of (seed,
position), turned into a token by inverting the cumulative distribution. Batch mates, preemption and the number of
steps taken so far cannot change it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import struct
from collections.abc import Sequence

import torch

from pagegen.runtime.sampling_params import MAX_LOGPROBS, SamplingParams

# fp32 logits do not resolve cumulative probabilities further; a token whose predecessors reach top_p within this is out
TOP_P_EPSILON = 1e-7
NUCLEUS_WIDTH = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the raw logits: no temperature, no top-k, no top-p.

    `rank` counts from 1; `top` holds the likeliest tokens with their log-probabilities, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """The outcome of one row: a token, or the reason why there is none. `parent` is the beam that the token goes on."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    parent: int | None = None


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], seeds: Sequence[int]
) -> list[SampledToken]:
    """Samples one token a row from logits [R, V] of any float dtype.

    `positions` are the positions of the tokens to be drawn, `seeds` come from `request_seed`. A row with NaN or
    +inf, or with nothing but -inf, gets an error and no token; the other rows do not notice.
    """
    tokens = logits.argmax(-1)
    errors = unusable(logits)
    random_rows = [row for row, options in enumerate(params) if row not in errors and not options.greedy]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        tokens[index] = _draw(
            logits[index],
            [params[row] for row in random_rows],
            [uniform(seeds[row], positions[row]) for row in random_rows],
        )
    wanted = [row for row, options in enumerate(params) if row not in errors and options.logprobs is not None]
    found: dict[int, TokenLogprobs] = {}
    if wanted:
        index = torch.tensor(wanted, device=logits.device)
        counts = [params[row].logprobs or 0 for row in wanted]
        found = dict(zip(wanted, token_logprobs(logits[index], tokens[index], counts), strict=True))
    return [
        SampledToken(None, error=errors[row]) if row in errors else SampledToken(token, found.get(row))
        for row, token in enumerate(tokens.tolist())
    ]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of token_ids [R] under logits [R, V], and of the counts[r] likeliest tokens of each row."""
    if not counts:
        return []
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), -1)  # not max(counts): it may decide which equals are found
    rows = zip(token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    best = zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for (token, logprob, rank), (ids, values, count) in zip(rows, best, strict=True)
    ]


def top_logprobs(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of each row of logits [R, V] with their log-probabilities, likeliest first."""
    top = torch.log_softmax(logits.float(), -1).topk(count, -1)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def request_seed(params: SamplingParams, child: int = 0) -> int:
    """The seed of one sequence of a request: 64 bits, different for each child, child 0 being the request itself.

    Without a stated seed it is random, drawn once per request and kept for its life.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
    return seed if child == 0 else _hash(seed, child, b"child")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments on every machine."""
    return (_hash(seed, position, b"token") >> 11) * 2.0**-53


def _hash(seed: int, counter: int, purpose: bytes) -> int:
    digest = hashlib.blake2b(struct.pack("<QQ", seed, counter), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Token ids [R] for usable logits [R, V], by inversion of the cumulative distribution in float64."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    shifted = logits.double()
    shifted -= shifted.amax(-1, keepdim=True)  # first: any temperature then leaves the best token at exactly 0
    probabilities = (shifted / column([options.temperature for options in params])).softmax(-1)
    filtered = [row for row, options in enumerate(params) if options.top_k > 0 or options.top_p < 1]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        probabilities[index] = _filter(probabilities[index], [params[row] for row in filtered])
    cumulative = probabilities.cumsum(-1)
    thresholds = column(uniforms) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, thresholds, right=True)  # the first entry above: never one of probability 0
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(drawn, last)[:, 0]  # the threshold may round up to the whole sum


def _filter(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zeroes what top-k and top-p cut from float64 probabilities [R, V]; equals are kept in order of their ids.

    A token stays within top-p while those before it, out of the top-k's sum, have not reached p: the token that
    crosses p stays, and there is always one. The largest values tell how many stay; only a nucleus wider than
    NUCLEUS_WIDTH needs the whole vocabulary in order.
    """
    vocab_size, device = probabilities.shape[-1], probabilities.device
    top_k = torch.tensor([min(options.top_k or vocab_size, vocab_size) for options in params], device=device)
    top_p = torch.tensor([options.top_p for options in params], dtype=torch.float64, device=device)[:, None]
    stated = max((options.top_k for options in params), default=0)
    width = min(max(stated, NUCLEUS_WIDTH), vocab_size)
    values, num_kept = _count_kept(probabilities, top_k[:, None], top_p, width)
    if width < vocab_size and bool(((num_kept == width) & (top_k > width)).any()):
        values, num_kept = _count_kept(probabilities, top_k[:, None], top_p, vocab_size)
    smallest = values.gather(-1, num_kept[:, None] - 1)
    above, equal = probabilities > smallest, probabilities == smallest
    room = num_kept[:, None] - above.sum(-1, keepdim=True)
    return probabilities.where(above | (equal & (equal.cumsum(-1) <= room)), 0.0)


def _count_kept(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest values of each row in order, and how many of them stay, [R]; top_k and top_p are [R, 1]."""
    vocab_size = probabilities.shape[-1]
    values = probabilities.topk(width, -1).values
    within = torch.arange(width, device=values.device) < top_k
    candidates = values.where(within, 0.0)
    cumulative = candidates.cumsum(-1)  # one after the other: zeros behind, of a batch mate's width, change no bit
    total = cumulative[:, -1:].where(top_k < vocab_size, probabilities.cumsum(-1)[:, -1:])
    before = cumulative - candidates
    kept = within & ((before < (top_p - TOP_P_EPSILON) * total) | (top_p >= 1))
    return values, kept.sum(-1).clamp(min=1)


def unusable(logits: torch.Tensor) -> dict[int, str]:
    """Why rows of logits [R, V] give no token, by row; of those that do there is nothing to say."""
    peaks = logits.amax(-1)  # NaN if there is one in the row
    bad = (~torch.isfinite(peaks)).nonzero()[:, 0].tolist()
    return {row: _why_unusable(peaks[row]) for row in bad}


def _why_unusable(peak: torch.Tensor) -> str:
    if torch.isnan(peak):
        return "the model's logits contain NaN"
    return "the model's logits contain +inf" if peak > 0 else "the model's logits are all -inf"
