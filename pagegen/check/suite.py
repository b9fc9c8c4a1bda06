"""The gate's cases, chosen to sit on borders: those of every spec, and those that an option of the spec brings.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

from ..errors import CheckError
from ..spec import KernelSpec, KVLayout, KVScale, Op, Order, Phase
from .case import QUICK_THREADS, Case, Fault, Part, Poison

LONG_CONTEXTS = (2049, 1025, 513, 257)  # one past every split border up to 2048; the first that fits LONG_BYTES
VERY_LONG = 33_000  # of the full suite, memory permitting: past a position of 16 bits
LONG_BYTES = 64 << 20  # of K and V in one sequence: what a check may cost in memory

_FAULTS = {
    Op.ATTEND: [fault for fault in Fault if fault.status < 6 or fault.status == 7],
    Op.WRITE_KV: [Fault.ARGS_SIZE, Fault.SLOT_BELOW, Fault.SLOT_PAST_END],
    Op.COPY_BLOCKS: [Fault.ARGS_SIZE, Fault.PAIR_NEGATIVE, Fault.PAIR_PAST_END],
    Op.GATHER_BLOCKS: [Fault.ARGS_SIZE, Fault.ROW_NEGATIVE, Fault.ROW_PAST_END],
    Op.SCATTER_BLOCKS: [Fault.ARGS_SIZE, Fault.ROW_NEGATIVE, Fault.ROW_PAST_END],
    Op.RELAYOUT: [Fault.ARGS_SIZE, Fault.SOURCE_PAST_END],
}


def quick_suite(spec: KernelSpec, phase: Phase | None = None, seed: int = 0) -> tuple[Case, ...]:
    """The cases every candidate must pass: all borders once, in well under a second. A phase leaves out the others'."""
    attend = [*_attend_cases(spec, seed), *_option_cases(spec, seed), *_twins(spec, seed)]
    attend = [case for case in attend if phase in (None, Phase.MIXED, case.phase)]
    return (*attend, *_write_kv_cases(spec, seed), *_move_cases(spec, seed), *_fault_cases(spec, seed))


def full_suite(spec: KernelSpec, phase: Phase | None = None, seed: int = 0) -> tuple[Case, ...]:
    """The quick suite under three seeds and other thread counts, every poison, and random ragged batches."""
    cases = list(quick_suite(spec, phase, seed))
    for offset, threads in ((1, 1), (2, 7)):
        for case in quick_suite(spec, phase, seed + offset):
            again = _again(case, offset, threads)
            if again.replace(like=None) != again.like:  # one that differs in threads only is itself now
                cases.append(again)
    for index in range(24):
        case = _random_case(spec, seed, index)
        if case.op is not Op.ATTEND or phase in (None, Phase.MIXED, case.phase):
            cases.append(case)
    long = min(VERY_LONG, LONG_BYTES // token_bytes(spec))
    cases.append(Case("very long", Op.ATTEND, spec, (1, 3), (long, long // 2), seed))
    return tuple(cases)


def _again(case: Case, offset: int, threads: int) -> Case:
    like = _again(case.like, offset, threads) if case.like else None
    return case.replace(name=f"{case.name} #{offset}", threads=threads, like=like)


Suite = Callable[[KernelSpec, Phase | None, int], tuple[Case, ...]]
SUITES: dict[str, Suite] = {"quick": quick_suite, "full": full_suite}


def suite_named(name: str) -> Suite:
    """The suite `quick` or `full`. Raises CheckError for another name."""
    if name not in SUITES:
        raise CheckError(f"suite {name!r} is not known; allowed: {', '.join(SUITES)}; change --suite")
    return SUITES[name]


def longest_context(spec: KernelSpec) -> int:
    """The longest context of the quick suite."""
    return next((tokens for tokens in LONG_CONTEXTS if tokens * token_bytes(spec) <= LONG_BYTES), LONG_CONTEXTS[-1])


def token_bytes(spec: KernelSpec) -> int:
    """K and V of one token."""
    return spec.kv_heads * (spec.k_width + spec.v_width) * spec.cache_dtype.itemsize


# --- attend ----------------------------------------------------------------------------------------------------------


def _attend_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b, long = spec.block_size, longest_context(spec)
    many = max(4, min(61, 2048 // b))  # sequences; each holds at least a block
    edges = (0, 1, b - 1, b, b + 1, 2 * b + 1) if b <= 256 else (0, 1, b - 1, b, b + 1)
    blocks = 2 if b <= 64 else 1  # of a shared prefix
    shared = blocks * b
    case = functools.partial(Case, op=Op.ATTEND, spec=spec, seed=seed)
    return [
        case("one key", query_lens=(1,), context_lens=(1,), threads=1),
        case("two unfinished pages", query_lens=(1, 1), context_lens=(1, 1)),
        case("decode at block borders", query_lens=(1,) * len(edges), context_lens=edges),
        case("decode at split borders", query_lens=(1,) * 5, context_lens=(long, 1, 256, 0, (long - 1) // 2)),
        case("decode one long", query_lens=(1,), context_lens=(long - 1,)),
        case("decode after long", query_lens=(1, 1), context_lens=(3, b + 2), threads=1),
        case("decode many", query_lens=(1,) * many, context_lens=tuple(1 + 7 * i % 43 for i in range(many))),
        case("decode strided", query_lens=(1,) * 3, context_lens=(b + 3, 70, 5), strided=True, padding=3, poison=Poison.INF),
        case("decode far", query_lens=(1,) * 3, context_lens=(3 * b, 2 * b + 1, b), far=True),
        case("huge poison", query_lens=(1, 2), context_lens=(b + 1, 5), poison=Poison.HUGE),
        case("poison in K only", query_lens=(1, 2, 1), context_lens=(b + 1, 5, 19), poisoned="k"),
        case("poison in V only", query_lens=(1, 2, 1), context_lens=(b + 1, 5, 19), poisoned="v", poison=Poison.INF),
        case("large scores", query_lens=(1, 3, 1, 2), context_lens=(130, 67, 1, 2), gain=60.0),
        case("scores of ten thousand", query_lens=(1, 3, 1), context_lens=(130, 67, 2), gain=3000.0),
        case("stated scale", query_lens=(1, 2), context_lens=(9, 21), scale=0.37),
        case("prefill whole", query_lens=(2, 17, b + 1, 67), context_lens=(2, 17, b + 1, 67)),
        case("prefill chunks", query_lens=(2, 5, 33, 70), context_lens=(5, 5 + b, 130, 300)),
        case("prefill tiles", query_lens=(131,), context_lens=(200,), threads=1),
        case("prefill strided", query_lens=(19, 3), context_lens=(40, 3), strided=True, padding=5, poison=Poison.INF),
        case("prefill long prefix", query_lens=(6,), context_lens=(long // 2 + 3,)),
        case("mixed with empty queries", query_lens=(0, 1, 0, 19, 1, 3, 0), context_lens=(7, b + 1, 0, 40, 129, 3, 2)),
        case("more rows than keys", query_lens=(4, 3, 2, 40), context_lens=(2, 0, 1, 33)),
        case("only empty queries", query_lens=(0, 0), context_lens=(3, 0)),
        case("no sequence", query_lens=(), context_lens=(), padding=2),
        case("shared prefix", query_lens=(1,) * 4, context_lens=(shared + 1, shared + b + 2, shared, shared + 7), shared_blocks=blocks),
        case("shared prefix, prompts", query_lens=(5, 1, 3), context_lens=(shared + 5, shared + 1, shared + 1), shared_blocks=blocks),
        case("shared prefix, more rows than keys", query_lens=(b + 1, 2), context_lens=(b, b + 1), shared_blocks=1),
        case("shared prefix, one", query_lens=(1,), context_lens=(shared + 3,), shared_blocks=blocks),
    ]


def _option_cases(spec: KernelSpec, seed: int) -> Iterator[Case]:
    """What windows and masks add."""
    b, long = spec.block_size, longest_context(spec)
    case = functools.partial(Case, op=Op.ATTEND, spec=spec, seed=seed)
    if spec.window is not None:
        w = spec.window
        contexts = tuple(dict.fromkeys(min(c, long) for c in (w - 1, w, w + 1, w + b + 1, 2 * w + 3)))
        yield case("decode at window borders", query_lens=(1,) * len(contexts), context_lens=contexts)
        queries = tuple(min(q, 50) for q in (w + 2, 2, b + 1))
        yield case("prefill over the window", query_lens=queries, context_lens=tuple(q + min(w, 100) + 1 for q in queries))
        at = [s + n for s in (256, 512, 1024, 2048) for n in (w, (w + 1) // 2)]  # at a split begins, and lies, a window
        splits = [context for context in at if context <= long]
        yield case("windows at splits", query_lens=(2,) * len(splits), context_lens=tuple(splits))
        yield case("window after window", query_lens=(3, 40), context_lens=(min(3 * w + 5, long), min(w + 40, long)))
    if spec.mask:
        yield case("draft trees", query_lens=(7, 1, 4, 16), context_lens=(7 + b, 1, 9, 40))
        yield case("mask wider than contexts", query_lens=(3, 2), context_lens=(5, 2), mask_width=20)
        yield case("mask of one column", query_lens=(3, 1), context_lens=(b + 3, 4), mask_width=1)
        yield case("mask of no column", query_lens=(3, 1), context_lens=(b + 3, 4), mask_width=0)
        yield case("mask over splits", query_lens=(1, 2, 1), context_lens=(long, 700, 600), mask_width=600)


def _twins(spec: KernelSpec, seed: int) -> Iterator[Case]:
    """Cases that must give the bits of another: blocks elsewhere, threads, and if deterministic alone and in chunks."""
    cases = {case.name: case for case in _attend_cases(spec, seed)}
    for name in ("decode at block borders", "prefill chunks"):
        yield cases[name].replace(reversed_blocks=True, like=cases[name])
    for name in ("decode at split borders", "prefill chunks"):
        yield cases[name].replace(threads=1, like=cases[name])
    if not spec.deterministic:
        return
    for name in ("decode at split borders", "shared prefix"):
        for sequence in range(len(cases[name].query_lens)):
            yield cases[name].replace(part=Part(sequence, 0, 1), like=cases[name])
    chunked = cases["prefill chunks"]
    yield chunked.replace(part=Part(1, 0, 5), like=chunked)
    over_splits = Case("prefill over splits", Op.ATTEND, spec, (21, 1), (longest_context(spec), 5), seed)
    yield over_splits
    if spec.causal:  # without, a later chunk's keys are seen by an earlier one's rows
        bounds = ((chunked, 3, (0, 32, 33, 70)), (over_splits, 0, (0, 1, 5, 21)), (cases["shared prefix, prompts"], 0, (0, 2, 5)))
        for whole, sequence, cuts in bounds:
            for first, last in itertools.pairwise(cuts):
                yield whole.replace(part=Part(sequence, first, last), like=whole)


# --- the other ops ---------------------------------------------------------------------------------------------------


def _write_kv_cases(spec: KernelSpec, seed: int) -> Iterator[Case]:
    b = spec.block_size
    case = functools.partial(Case, op=Op.WRITE_KV, spec=spec, seed=seed)
    yield case("one token", query_lens=(1,), context_lens=(1,), threads=1)
    yield case("decode tokens", query_lens=(1,) * 5, context_lens=(b, b + 1, 1, 2 * b, 3))
    yield case("prompt over blocks", query_lens=(b + 3, 67), context_lens=(b + 3, 70 + b))
    yield case("padded", query_lens=(3, 1), context_lens=(5, b + 1), padding=5)
    yield case("strided source and cache", query_lens=(19, 2), context_lens=(19, b + 2), strided=True, padding=2)
    yield case("far blocks", query_lens=(2, 1, 1), context_lens=(3 * b, 2 * b + 1, b), far=True)
    yield case("only padding", query_lens=(0,), context_lens=(b,), padding=3)
    yield case("no token", query_lens=(0,), context_lens=(1,))
    if spec.cache_dtype.quantised:
        yield case("values that saturate", query_lens=(3, 4), context_lens=(b + 1, 4), gain=3000.0)
        yield case("small values", query_lens=(3, 4), context_lens=(b + 1, 4), gain=1e-4)
    if spec.rope is not None:
        yield case("rotated in place", query_lens=(3, 1), context_lens=(b + 3, 4), padding=1, in_place=True)
        yield case("rotated in place, strided", query_lens=(5,), context_lens=(90,), strided=True, in_place=True)


def _move_cases(spec: KernelSpec, seed: int) -> Iterator[Case]:
    """copy_blocks, gather_blocks, scatter_blocks and relayout."""
    b = spec.block_size
    for op in (Op.COPY_BLOCKS, Op.GATHER_BLOCKS, Op.SCATTER_BLOCKS):
        case = functools.partial(Case, op=op, spec=spec, seed=seed, query_lens=())
        yield case("one block", context_lens=(1,), threads=1)
        yield case("many blocks", context_lens=(b + 1, 2 * b, 1, 3 * b))
        yield case("strided cache", context_lens=(2 * b, 1), strided=True)
        yield case("far blocks", context_lens=(3 * b, 1), far=True)
        yield case("no block", context_lens=(0,))
    relayout = functools.partial(Case, op=Op.RELAYOUT, spec=spec, seed=seed, query_lens=())
    other = _other_layout(spec)
    yield relayout("one token", context_lens=(1,), source=other, threads=1)
    yield relayout("tokens of many blocks", context_lens=(b + 1, 2 * b, 1), source=other, padding=4)
    yield relayout("strided caches", context_lens=(b + 3, 5), source=other, strided=True)
    yield relayout("far blocks", context_lens=(3 * b, 1), source=other, far=True)
    yield relayout("the same layout", context_lens=(2 * b + 1,), source=spec)
    yield relayout("no token", context_lens=(0,), source=other)


def _other_layout(spec: KernelSpec) -> KernelSpec:
    """The spec in another layout and block size, as little alike as its options allow."""
    plain = spec.v_in_k or spec.k_width < spec.head_dim
    if spec.kv_layout.k_order is Order.NHD:
        layout = KVLayout(Order.HND, Order.HND) if plain else KVLayout(Order.HDN, Order.HDN, 8)
    else:
        layout = KVLayout()
    return spec.replace(layout=layout, block_size=spec.block_size % 7 + 2)


def _fault_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b = spec.block_size
    more: dict[Op, list[Fault]] = {Op.WRITE_KV: [Fault.POSITION_NEGATIVE, Fault.POSITION_PAST_END] if spec.rope else []}
    if spec.kv_scale in (KVScale.TENSOR, KVScale.HEAD):
        more = {op: [*more.get(op, []), Fault.SCALE_ZERO, Fault.SCALE_NAN] for op in (Op.ATTEND, Op.WRITE_KV)}
    return [
        Case(
            f"refuses {fault.value}",
            op,
            spec,
            (1, 2) if op in (Op.ATTEND, Op.WRITE_KV) else (),
            (b + 1, b + 2),
            seed,
            shared_blocks=1 if fault.status == 7 else 0,
            source=_other_layout(spec) if op is Op.RELAYOUT else None,
            fault=fault,
        )
        for op, faults in _FAULTS.items()
        for fault in [*faults, *more.get(op, [])]
    ]


def _random_case(spec: KernelSpec, seed: int, index: int) -> Case:
    pick = random.Random(seed * 1009 + index)
    op = pick.choice([Op.ATTEND, Op.ATTEND, Op.ATTEND, Op.WRITE_KV])
    contexts = tuple(pick.choice([0, 1, pick.randrange(1, 40), pick.randrange(1, 700)]) for _ in range(pick.randrange(1, 9)))
    decode = pick.random() < 0.3
    queries = tuple(1 if decode else pick.choice([0, 1, c, pick.randrange(0, c + 4)]) for c in contexts)
    return Case(
        f"random {index}",
        op,
        spec,
        queries,
        contexts,
        seed + index,
        threads=pick.choice([1, 2, 3, 4, 5]),
        padding=pick.choice([0, 0, 4]),
        strided=pick.random() < 0.4,
        far=pick.random() < 0.2,
        gain=pick.choice([0.1, 1.0, 8.0]),
        poison=pick.choice(list(Poison)),
        poisoned=pick.choice(["kv", "kv", "k", "v"]),
        mask_width=pick.choice([None, 0, 3, 90]),
        shared_blocks=pick.choice([0, 0, min(contexts) // spec.block_size]) if op is Op.ATTEND else 0,
    )


__all__ = ["QUICK_THREADS", "SUITES", "Case", "Fault", "Poison", "full_suite", "longest_context", "quick_suite", "suite_named"]
