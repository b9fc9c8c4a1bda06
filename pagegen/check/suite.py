"""The gate's cases, chosen to sit on borders, and how a case becomes tensors.

What a kernel must not read is poisoned: free blocks and the tails of last pages with NaN, infinity or a huge number,
table entries past the context with ids of no block. What it must not write is filled beforehand and compared afterwards.
Vendored into every kernel package: relative imports, torch and the standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch

from ..errors import CheckError
from ..kernel import TORCH_DTYPES
from ..spec import KernelSpec, Op, Order, Phase

Tensors = dict[str, torch.Tensor]  # the arguments of an op by their names in pagegen.kernel

OUTPUTS: dict[Op, tuple[str, ...]] = {
    Op.ATTEND: ("out", "lse"),
    Op.WRITE_KV: ("k_cache", "v_cache"),
    Op.COPY_BLOCKS: ("k_cache", "v_cache"),
}
SPARE_BLOCKS = 3  # that belong to no sequence
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


# --- tensors ---------------------------------------------------------------------------------------------------------


def materialise(case: Case, device: str | torch.device = "cpu") -> Tensors:
    """Fresh tensors for a case, made on the CPU from its seed and moved with their strides.

    `scale` is not among them. Outputs of attend hold NaN.
    """
    made = _CaseMaker(case)
    tensors = {Op.ATTEND: made.attend, Op.WRITE_KV: made.write_kv, Op.COPY_BLOCKS: made.copy_blocks}[case.op]()
    if case.fault is not None:
        _spoil(case.fault, tensors, case.spec)
    return {name: move(tensor, device) for name, tensor in tensors.items()}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between the first and the last element of a view, gaps included, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


def move(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A private copy on `device` with the same strides and the same bytes in its gaps."""
    return flat(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), 0)


def blocks_of(spec: KernelSpec, context: int) -> int:
    """Blocks that hold `context` tokens."""
    return -(-context // spec.block_size)


class _CaseMaker:
    """Draws a case's tensors in a fixed order from one generator."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec = case, case.spec
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {case.op}".encode()) * 64 + case.seed)
        self.counts = [blocks_of(self.spec, context) for context in case.context_lens]
        copies = sum(self.counts) if case.op is Op.COPY_BLOCKS else 0
        self.num_blocks = sum(self.counts) + copies + SPARE_BLOCKS
        self.free: list[int] = torch.randperm(self.num_blocks, generator=self.generator).tolist()
        self.tables = [[self.free.pop() for _ in range(count)] for count in self.counts]

    def attend(self) -> Tensors:
        case, spec = self.case, self.spec
        tokens, dtype = sum(case.query_lens) + case.padding, TORCH_DTYPES[spec.dtype]
        q = self.normal(tokens, spec.q_heads, spec.head_dim) * case.gain
        # Flat, ordinary and peaked softmaxes side by side: each hides mistakes that another shows.
        q *= torch.tensor([0.25, 1.0, 3.0])[torch.arange(tokens)[:, None] % 3 - torch.arange(spec.q_heads) % 3][..., None]
        q[tokens - case.padding :] = math.nan
        out = torch.full((tokens, spec.q_heads, spec.dim_v), math.nan)
        k_cache, v_cache = self.caches([*case.context_lens])
        tensors = {
            "out": self.rows(out, dtype),
            "q": self.rows(q, dtype, heads_outside=True),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": self.block_table(),
            "context_lens": torch.tensor(case.context_lens, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32),
        }
        if spec.lse:
            tensors["lse"] = self.rows(torch.full((tokens, spec.q_heads), math.nan), torch.float32)
        return tensors

    def write_kv(self) -> Tensors:
        case, spec = self.case, self.spec
        new = [min(query, context) for query, context in zip(case.query_lens, case.context_lens, strict=True)]
        held = [context - count for context, count in zip(case.context_lens, new, strict=True)]
        slots = [
            table[position // spec.block_size] * spec.block_size + position % spec.block_size
            for table, first, context in zip(self.tables, held, case.context_lens, strict=True)
            for position in range(first, context)
        ]
        slots += [-1] * case.padding
        order = torch.randperm(len(slots), generator=self.generator)
        dtype = TORCH_DTYPES[spec.cache_dtype]
        k_cache, v_cache = self.caches(held)
        return {
            "k": self.rows(self.normal(len(slots), spec.kv_heads, spec.head_dim), dtype),
            "v": self.rows(self.normal(len(slots), spec.kv_heads, spec.dim_v), dtype, heads_outside=True),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": torch.tensor(slots, dtype=torch.int64)[order],
        }

    def copy_blocks(self) -> Tensors:
        pairs = [(source, self.free.pop()) for table in self.tables for source in table]
        if len(pairs) > 2:  # a fork in three: one source, several destinations
            pairs[1] = (pairs[0][0], pairs[1][1])
        k_cache, v_cache = self.caches([*self.case.context_lens])
        return {"k_cache": k_cache, "v_cache": v_cache, "pairs": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def rows(self, values: torch.Tensor, dtype: torch.dtype, heads_outside: bool = False) -> torch.Tensor:
        """`[tokens, heads, dim]` as asked: dense, or with gaps of NaN, heads outermost if `heads_outside`."""
        values = values.to(dtype)
        if not self.case.strided:
            return values.contiguous()
        if heads_outside:
            return _spread(values.transpose(0, 1), math.nan).transpose(0, 1)
        return _spread(values, math.nan)

    def caches(self, held: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in their layouts; everything but the first held[s] tokens of sequence s is poison."""
        spec, layout = self.spec, self.spec.kv_layout
        written = torch.zeros(self.num_blocks, spec.block_size, dtype=torch.bool)
        for table, count in zip(self.tables, held, strict=True):
            position = torch.arange(count)
            written[torch.tensor(table, dtype=torch.int64)[position // spec.block_size], position % spec.block_size] = True
        k = self.cache(written, spec.head_dim, layout.k_order, layout.x)
        return k, self.cache(written, spec.dim_v, layout.v_order, None)

    def cache(self, written: torch.Tensor, dim: int, order: Order, x: int | None) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.spec.cache_dtype]
        tokens = self.normal(*written.shape, self.spec.kv_heads, dim).to(dtype)
        poison = self.case.poison.value_for(dtype)
        tokens[~written] = poison
        match order:
            case Order.NHD:
                cache = tokens
            case Order.HND:
                cache = tokens.transpose(1, 2)
            case Order.HDN:
                cache = tokens.permute(0, 2, 3, 1)
                if x is not None:
                    cache = cache.reshape(*cache.shape[:2], dim // x, x, -1).transpose(3, 4)
        return _spread(cache, poison, packed=x is not None and order is Order.HDN) if self.case.strided else cache.contiguous()

    def block_table(self) -> torch.Tensor:
        """Rows of block ids, each followed by ids of no block."""
        bad = [-1, self.num_blocks, 2**31 - 1, -(2**31), self.num_blocks + 70]
        width = max(self.counts, default=0) + 2
        rows = [[*table, *(bad[i % len(bad)] for i in range(width - len(table)))] for table in self.tables]
        table = torch.tensor(rows, dtype=torch.int32).reshape(-1, width)
        return _spread(table, -1) if self.case.strided else table


def _spread(tensor: torch.Tensor, filler: float, packed: bool = False) -> torch.Tensor:
    """The same values with gaps of `filler` between all dimensions; a packed last dimension keeps its neighbour."""
    last = tensor.dim() - packed
    shape = [n + 3 if 0 < i < last else n for i, n in enumerate(tensor.shape)]
    room = torch.full(shape, filler, dtype=tensor.dtype)
    view = room[tuple(slice(n) for n in tensor.shape)]
    return view.copy_(tensor)


def _spoil(fault: Fault, tensors: Tensors, spec: KernelSpec) -> None:
    """Writes the wrong value; ARGS_SIZE and WORKSPACE are no tensor's and left to the driver."""
    num_blocks = tensors["k_cache"].shape[0]
    match fault:
        case Fault.CU_SEQLENS_START:
            tensors["cu_seqlens_q"][0] = 1
        case Fault.CU_SEQLENS_DECREASES:
            tensors["cu_seqlens_q"][1] = tensors["cu_seqlens_q"][-1] + 1
        case Fault.CU_SEQLENS_END:
            tensors["cu_seqlens_q"][-1] += 1
        case Fault.CONTEXT_NEGATIVE:
            tensors["context_lens"][-1] = -1
        case Fault.CONTEXT_PAST_TABLE:
            tensors["context_lens"][-1] = tensors["block_table"].shape[1] * spec.block_size + 1
        case Fault.BLOCK_NEGATIVE:
            tensors["block_table"][-1, 1] = -1
        case Fault.BLOCK_PAST_END:
            tensors["block_table"][0, 0] = num_blocks
        case Fault.SLOT_BELOW:
            tensors["slot_mapping"][-1] = -2
        case Fault.SLOT_PAST_END:
            tensors["slot_mapping"][0] = num_blocks * spec.block_size
        case Fault.PAIR_NEGATIVE:
            tensors["pairs"][-1, 0] = -1
        case Fault.PAIR_PAST_END:
            tensors["pairs"][0, 1] = num_blocks
        case Fault.ARGS_SIZE | Fault.WORKSPACE:
            pass
