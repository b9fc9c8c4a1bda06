"""The kernel family as axes, and specs drawn from them so that every pair of choices occurs: what coverage is counted on.

All-pairs sampling (Cohen et al. 1997, https://doi.org/10.1109/32.605761): most faults need one or two options to meet.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..spec import KernelSpec, Op
from .case import Case
from .suite import quick_suite

Choice = Mapping[str, str]  # axis to the word for one of its values
Pair = tuple[tuple[str, str], tuple[str, str]]

_HEADS = ("6x2", "1x1", "4x4", "3x1", "5x1", "14x2", "8x8", "16x1", "32x1")
_LAYOUTS = ("NHD", "HND", "HDN", "HDN2", "HDN8", "HDN8_HDN", "NHD_HDN", "HND_NHD")

# Each axis with its words and what they change; the first word of each is the plainest, and fits every other.
AXES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dtype": {word: {"dtype": word} for word in ("bf16", "fp32", "fp16")},
    "cache": {
        "as q": {},
        "another float": {"kv_dtype": "fp16"},
        **{f"{kind}, {by}": {"kv_dtype": kind, "kv_scale": by} for kind in ("fp8_e4m3", "fp8_e5m2") for by in ("tensor", "head", "token_head")},
        **{kind: {"kv_dtype": kind} for kind in ("int8", "int4")},
        **{f"{kind}, zero points": {"kv_dtype": kind, "kv_zero": True} for kind in ("int8", "int4")},
    },
    "heads": {
        **{word: dict(zip(("q_heads", "kv_heads"), map(int, word.split("x")), strict=True)) for word in _HEADS},
        **{f"{count}x1, V in K": {"q_heads": count, "kv_heads": 1, "v_in_k": True} for count in (5, 16)},
    },
    "head dim": {str(dim): {"head_dim": dim} for dim in (64, 8, 16, 24, 40, 80, 96, 120, 128, 192, 256, 576)},
    "V's head dim": {"the same": {}, **{str(dim): {"head_dim_v": dim} for dim in (8, 48, 128, 512)}},
    "block": {str(size): {"block_size": size} for size in (16, 1, 3, 24, 48, 128, 544, 1024)},
    "layout": {word: {"layout": word} for word in _LAYOUTS},
    "sight": {
        "causal": {},
        "all": {"causal": False},
        **{f"causal, window {w}": {"window": w} for w in (1, 16, 5000)},
        "window 7 and 3": {"causal": False, "window": 7, "window_right": 3},
        "right window 0": {"causal": False, "window_right": 0},
    },
    "mask": {"none": {}, "a tree": {"mask": True}},
    "soft cap": {"none": {}, "5": {"soft_cap": 5.0}},
    "ALiBi": {"no": {}, "yes": {"alibi": True}},
    "sinks": {"no": {}, "yes": {"sinks": True}},
    "score_mod": {
        "none": {},
        "relative": {"score_mod": "score - 0.1 * abs(q_idx - k_idx) * (head + 1)"},
        "dropping": {"score_mod": "where(k_idx < 3 or q_idx - k_idx < 40, score, -inf)"},
        "every function": {"score_mod": "max(min(tanh(score), 0.9), -sqrt(2)) + log(1 + exp(-abs(score) / 8)) - floor(k_idx / 7)"},
    },
    "lse": {"no": {}, "yes": {"lse": True}},
    "deterministic": {"no": {}, "yes": {"deterministic": True}},
    "write_kv": {
        "as is": {},
        "neox": {"rope": "neox"},
        "interleaved, 8 dims": {"rope": "interleaved", "rotary_dim": 8},
        "norm and neox": {"rope": "neox", "qk_norm": True},
    },
}
PLAIN: Choice = {axis: next(iter(words)) for axis, words in AXES.items()}
# Words that PLAIN does not fit, or not beside every other, with those that they need.
COMPANIONS: Mapping[tuple[str, str], Choice] = {
    ("head dim", "576"): {"heads": "16x1, V in K"},
    ("V's head dim", "512"): {"heads": "16x1, V in K", "head dim": "576"},
    ("V's head dim", "128"): {"head dim": "128"},
}


def spec_of(choice: Choice) -> KernelSpec:
    """The spec of one word an axis. Raises SpecError if there is no such spec."""
    fields: dict[str, Any] = {}
    for axis, word in choice.items():
        fields |= AXES[axis][word]
    return KernelSpec.from_dict(fields)


def pairs_of(choice: Choice) -> set[Pair]:
    """Every two of its words."""
    return set(itertools.combinations(choice.items(), 2))


def all_pairs() -> set[Pair]:
    """Every two words of different axes."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[one], AXES[other])
    }


def sample(seed: int, refusal: Callable[[KernelSpec], str | None]) -> Iterator[Choice]:
    """Endless choices whose specs are not refused, the first ones covering every pair that can be; then at random.

    `refusal` says why a backend does not serve a spec, or None. Pairs that are refused even beside the plainest words of
    the other axes are not looked for.
    """
    pick = random.Random(seed)
    missing = {pair for pair in all_pairs() if why_not(dict(pair), refusal) is None}
    while True:
        start = pick.choice(sorted(missing)) if missing else ()
        best: Choice | None = None
        for _ in range(12):
            choice = _complete(dict(start), missing, pick)
            if why_not(choice, refusal) is None and (best is None or _gain(choice, missing) > _gain(best, missing)):
                best = choice
        if best is None:
            best = _filled(dict(start))
            if why_not(best, refusal) is not None:
                missing.discard(start)
                continue
        missing -= pairs_of(best)
        yield best


def why_not(words: Choice, refusal: Callable[[KernelSpec], str | None]) -> str | None:
    """Why a spec with these words, and the plainest that fit on the other axes, is refused; None if it is not."""
    try:
        return refusal(spec_of(_filled(words)))
    except SpecError as error:
        return str(error)


def _filled(words: Choice) -> Choice:
    needed: dict[str, str] = {}
    for item in words.items():
        needed |= COMPANIONS.get(item, {})
    return {**PLAIN, **needed, **words}


def _complete(words: dict[str, str], missing: set[Pair], pick: random.Random) -> Choice:
    """Words for the other axes in a random order, each the one of a few that covers most with those before it."""
    for axis in pick.sample(list(AXES), len(AXES)):
        if axis not in words:
            candidates = pick.sample(list(AXES[axis]), min(4, len(AXES[axis])))
            words[axis] = max(candidates, key=lambda word: _gain({**words, axis: word}, missing))
    return {axis: words[axis] for axis in AXES}


def _gain(choice: Choice, missing: set[Pair]) -> int:
    ordered = [(axis, choice[axis]) for axis in AXES if axis in choice]
    return sum(pair in missing for pair in itertools.combinations(ordered, 2))


def probe(spec: KernelSpec, seed: int = 0, most: float = 2e7) -> list[Case]:
    """The quick suite without cases of more than `most` multiplications in q . k and p . v: many specs, little time."""
    return [case for case in quick_suite(spec, None, seed) if work_of(case) <= most]


def work_of(case: Case) -> float:
    """Multiplications of attend; elements written or moved of the other ops."""
    spec, width = case.spec, case.spec.head_dim + case.spec.dim_v
    if case.op is not Op.ATTEND:
        return float(sum(case.context_lens) * spec.kv_heads * width)
    return float(sum(q * c for q, c in zip(case.query_lens, case.context_lens, strict=True)) * spec.q_heads * width)
