"""The gate's cases, chosen to sit on borders; tensors.py makes them real.

Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from enum import StrEnum

import torch

from ..errors import CheckError
from ..spec import KernelSpec, Op, Phase

LONG_CONTEXTS = (2049, 1025, 513, 257)  # one past every split border up to 2048; the first that fits LONG_BYTES
VERY_LONG = 33_000  # of the full suite, memory permitting: past a position of 16 bits
LONG_BYTES = 64 << 20  # of K and V in one sequence: what a check may cost in memory
QUICK_THREADS = 3  # more than most test machines have cores: threads without work are part of the test


class Poison(StrEnum):
    """What lies where nothing may be read. NaN shows in any sum; infinity and a huge number win any maximum."""

    NAN = "nan"
    INF = "inf"
    HUGE = "huge"

    def value_for(self, dtype: torch.dtype) -> float:
        """The value in an element of `dtype`."""
        return {"nan": math.nan, "inf": math.inf, "huge": min(1e30, torch.finfo(dtype).max)}[self.value]


class Fault(StrEnum):
    """An argument that the C ABI promises to refuse; `status` is the code of templates/cpp/abi.h it must answer."""

    ARGS_SIZE = "args_size"
    WORKSPACE = "workspace"
    CU_SEQLENS_START = "cu_seqlens_start"
    CU_SEQLENS_DECREASES = "cu_seqlens_decreases"
    CU_SEQLENS_END = "cu_seqlens_end"
    CONTEXT_NEGATIVE = "context_negative"
    CONTEXT_PAST_TABLE = "context_past_table"
    BLOCK_NEGATIVE = "block_negative"
    BLOCK_PAST_END = "block_past_end"
    SLOT_BELOW = "slot_below"
    SLOT_PAST_END = "slot_past_end"
    PAIR_NEGATIVE = "pair_negative"
    PAIR_PAST_END = "pair_past_end"

    @property
    def status(self) -> int:
        """PG_E_*."""
        codes = {"args": 1, "workspace": 2, "cu": 3, "context": 4, "block": 5, "slot": 6, "pair": 6}
        return codes[self.value.split("_")[0]]


_FAULTS = {
    Op.ATTEND: [fault for fault in Fault if fault.status < 6],
    Op.WRITE_KV: [Fault.ARGS_SIZE, Fault.SLOT_BELOW, Fault.SLOT_PAST_END],
    Op.COPY_BLOCKS: [Fault.ARGS_SIZE, Fault.PAIR_NEGATIVE, Fault.PAIR_PAST_END],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call of one op: equal cases make equal tensors.

    Sequence s brings query_lens[s] rows and has context_lens[s] keys. For write_kv the rows are the last ones of the
    context, those that fit; for copy_blocks every block of every sequence is copied to a free one, query_lens is empty.
    """

    name: str
    op: Op
    spec: KernelSpec
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seed: int = 0
    threads: int = QUICK_THREADS
    padding: int = 0  # rows of no sequence: at the end of q; slots of -1 among those of write_kv
    strided: bool = False  # gaps in every tensor that may have them; q's heads outside its tokens
    far: bool = False  # offsets past 32 and block ids past 16 bits; only the driver can: see check/driver.py
    gain: float = 1.0  # multiplies q: large scores make the softmax lean on its maximum
    scale: float | None = None  # passed as attend's argument
    poison: Poison = Poison.NAN
    fault: Fault | None = None

    @property
    def size(self) -> int:
        """How much there is to look at: what makes a failing input small."""
        return sum(self.query_lens) + sum(self.context_lens) + len(self.context_lens) + self.padding

    @property
    def phase(self) -> Phase:
        """DECODE without a query longer than 1, PREFILL without one shorter than 2, else MIXED."""
        if max(self.query_lens, default=0) <= 1:
            return Phase.DECODE
        return Phase.PREFILL if min(self.query_lens) > 1 else Phase.MIXED

    def replace(self, **changes: object) -> Case:
        """A copy with fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values with which the case can be made again; the spec as its slug."""
        return dataclasses.asdict(self) | {"spec": self.spec.slug}


# --- suites ----------------------------------------------------------------------------------------------------------


def quick_suite(spec: KernelSpec, phase: Phase | None = None, seed: int = 0) -> tuple[Case, ...]:
    """The cases every candidate must pass: all borders once, in well under a second. A phase leaves out the others'."""
    attend = [case for case in _attend_cases(spec, seed) if phase in (None, Phase.MIXED, case.phase)]
    return (*attend, *_write_kv_cases(spec, seed), *_copy_blocks_cases(spec, seed), *_fault_cases(spec, seed))


def full_suite(spec: KernelSpec, phase: Phase | None = None, seed: int = 0) -> tuple[Case, ...]:
    """The quick suite under three seeds and other thread counts, every poison, and random ragged batches."""
    cases: list[Case] = []
    for offset, threads in enumerate((QUICK_THREADS, 1, 7)):
        for case in quick_suite(spec, phase, seed + offset):
            name = f"{case.name} #{offset}" if offset else case.name
            cases.append(case.replace(name=name, threads=threads if offset else case.threads))
    for index in range(24):
        case = _random_case(spec, seed, index)
        if case.op is not Op.ATTEND or phase in (None, Phase.MIXED, case.phase):
            cases.append(case)
    long = min(VERY_LONG, LONG_BYTES // token_bytes(spec))
    cases.append(Case("very long", Op.ATTEND, spec, (1, 3), (long, long // 2), seed))
    return tuple(cases)


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
    return spec.kv_heads * (spec.head_dim + spec.dim_v) * spec.cache_dtype.itemsize


def _attend_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b, long = spec.block_size, longest_context(spec)
    many = max(4, min(61, 2048 // b))  # sequences; each holds at least a block
    edges = (0, 1, b - 1, b, b + 1, 2 * b + 1) if b <= 256 else (0, 1, b - 1, b, b + 1)
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
        case("large scores", query_lens=(1, 3, 1, 2), context_lens=(130, 67, 1, 2), gain=60.0),
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
    ]


def _write_kv_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b = spec.block_size
    case = functools.partial(Case, op=Op.WRITE_KV, spec=spec, seed=seed)
    return [
        case("one token", query_lens=(1,), context_lens=(1,), threads=1),
        case("decode tokens", query_lens=(1,) * 5, context_lens=(b, b + 1, 1, 2 * b, 3)),
        case("prompt over blocks", query_lens=(b + 3, 67), context_lens=(b + 3, 70 + b)),
        case("padded", query_lens=(3, 1), context_lens=(5, b + 1), padding=5),
        case("strided source and cache", query_lens=(19, 2), context_lens=(19, b + 2), strided=True, padding=2),
        case("far blocks", query_lens=(2, 1, 1), context_lens=(3 * b, 2 * b + 1, b), far=True),
        case("only padding", query_lens=(0,), context_lens=(b,), padding=3),
        case("no token", query_lens=(0,), context_lens=(1,)),
    ]


def _copy_blocks_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b = spec.block_size
    case = functools.partial(Case, op=Op.COPY_BLOCKS, spec=spec, seed=seed, query_lens=())
    return [
        case("one block", context_lens=(1,), threads=1),
        case("many blocks", context_lens=(b + 1, 2 * b, 1, 3 * b)),
        case("strided cache", context_lens=(2 * b, 1), strided=True),
        case("far blocks", context_lens=(3 * b, 1), far=True),
        case("no pair", context_lens=(0,)),
    ]


def _fault_cases(spec: KernelSpec, seed: int) -> list[Case]:
    b = spec.block_size
    queries = {Op.ATTEND: (1, 2), Op.WRITE_KV: (1, 2), Op.COPY_BLOCKS: ()}
    return [
        Case(f"refuses {fault.value}", op, spec, queries[op], (b + 1, b + 2), seed, fault=fault)
        for op, faults in _FAULTS.items()
        for fault in faults
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
    )
