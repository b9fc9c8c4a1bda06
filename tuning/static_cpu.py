"""How long a C++ attend would take on a CPU, from its config alone: for ranking configs, not a promise.

The work items of a batch are those of templates/cpp/attend.cpp.jinja. An item counts vector operations and loads of its
four steps (packing, scores, softmax, weighted sum), two of each a cycle, and the bytes of its K and V. Assumed: a core of
CLOCK, whose share of the memory's bandwidth is READ bytes a cycle and whose caches are L1 and L2 large; tiles that are
prefetched arrive behind the arithmetic but for a fifth of the shorter, if L2 holds them; others, and the first tiles of an
item, are waited for; items are spread over the
threads as well as can be. Only ratios between configs are meant to be right.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pagegen.catalog import products
from pagegen.space import Config
from pagegen.spec import KernelSpec, Order
from pagegen.target import Target
from pagegen.tuning.workload import Point

CLOCK = 2.5e9  # Hz
READ = 5.0  # bytes a cycle and core from memory
ONE_HEAD = 0.7  # of that where an item reads one KV head of a token, and skips the others
L1, L2 = 32 << 10, 1 << 20  # bytes of a core's caches
MATRIX = 16  # rows of an AMX tile
ITEM, TILE, ROW = 500.0, 150.0, 40.0  # cycles that an item, a tile and a row of a tile cost whatever they hold
OVERLAPPED = 0.8  # of the shorter of arithmetic and reading, where tiles are prefetched
EXP = 18.0  # vector operations of a softmax step


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a work item, and how its tiles are done."""

    count: int
    tile: int  # tokens
    packed: bool
    block: int  # rows that share a loaded vector
    mixed: tuple[int, bool] | None = None  # where K or V alone is packed: the same there; two vectors of it at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What is done with `sequences` alike: their keys cut every `size` tokens, or their queries, the rest being `last`."""

    sequences: int
    queries: int
    context: int
    cuts_keys: bool
    size: int
    rows: Rows
    last: Rows | None
    prefetch: int  # tiles ahead
    again: int  # times that a line of them is prefetched again
    folds: int = 0  # tokens after which a deterministic item that cuts queries merges what it has
    heads: int = 1  # KV heads of one item


Work = tuple[Share, ...]  # of a batch; configs whose works are equal do the same


def work_of(spec: KernelSpec, target: Target, config: Config, point: Point, threads: int) -> Work:
    """What a config does with a batch that shares no prefix."""
    knobs = {name: int(value) for name, value in config.items}
    matrix = products(spec, target) == "matrix"
    alike = Counter(zip(point.query_lens, point.context_lens, strict=True))
    shares = [_share(spec, target, knobs, matrix, count, *lengths) for lengths, count in alike.items()]
    if matrix or not _is_together(spec, shares, threads):
        return tuple(shares)
    return tuple(dataclasses.replace(share, heads=_together(spec, knobs, share)) for share in shares)


def _is_together(spec: KernelSpec, shares: Sequence[Share], threads: int) -> bool:
    """Whether items take several KV heads: the template's own rule."""
    seen = {share: share.context - (_hidden(spec, share) if share.cuts_keys else 0) for share in shares}
    longest = max((min(share.size, tokens) for share, tokens in seen.items() if share.cuts_keys), default=0)
    work, turn = sum(share.sequences * tokens for share, tokens in seen.items()), longest * threads
    return turn > 0 and 2 * math.ceil(work / turn) * turn <= 3 * work


def _together(spec: KernelSpec, knobs: Mapping[str, int], share: Share) -> int:
    """KV heads of one item, where they are taken together."""
    return max(1, min(spec.kv_heads, knobs["tile_q"] // share.queries)) if share.cuts_keys else 1


def _share(
    spec: KernelSpec, target: Target, knobs: Mapping[str, int], matrix: bool, count: int, queries: int, context: int
) -> Share:
    few = knobs["tile_q"] if matrix else max(1, min(knobs["tile_q"], knobs["pack_rows"] // spec.group))
    cuts_keys = queries <= few
    size = min(context, knobs["split_kv"]) if cuts_keys else min(queries, knobs["tile_q"])
    left = 0 if cuts_keys else queries % size
    rows = _rows(spec, target, knobs, matrix, queries if cuts_keys else size, context)
    last = _rows(spec, target, knobs, matrix, left, context) if left else None
    folds = min(context, knobs["split_kv"]) if spec.deterministic and not cuts_keys else 0
    return Share(count, queries, context, cuts_keys, size, rows, last, knobs["prefetch"], knobs["prefetch"] and knobs.get("prefetch_again", 0), folds)


def _rows(
    spec: KernelSpec, target: Target, knobs: Mapping[str, int], matrix: bool, queries: int, context: int
) -> Rows:
    rows = queries * spec.group
    if matrix:
        tile = knobs["tile_few"] if rows <= MATRIX and "tile_few" in knobs else knobs["tile_kv"]
        return Rows(rows, min(tile, context), True, min(rows, 2 * MATRIX))
    packed = (spec.group if spec.deterministic else rows) >= knobs["pack_rows"]
    whole = max(context, 2 * target.lanes)  # a packed tile that may hold two vectors is multiplied two at a time
    if packed:
        return Rows(rows, min(knobs["tile_kv"], whole), True, min(rows, knobs["row_block_packed"]))
    tile = min(knobs["tile_kv"], knobs.get("tile_few", knobs["tile_kv"]))
    layout = spec.kv_layout
    in_place = layout.k_order is not Order.HDN or layout.x == 1 or (layout.x == 2 and spec.cache_dtype.bits == 16)
    if in_place and layout.v_order is not Order.HDN:
        return Rows(rows, min(tile, context), False, min(rows, knobs["row_block"]))
    mixed = (min(rows, knobs["row_block_packed"]), knobs["tile_kv"] >= 2 * target.lanes)
    return Rows(rows, min(tile, context), False, min(rows, knobs["row_block"]), mixed)


def seconds_of(spec: KernelSpec, target: Target, work: Work, threads: int) -> float:
    """Seconds of a batch on `threads` threads."""
    whole = longest = 0.0
    for share in work:
        groups = math.ceil(spec.kv_heads / share.heads)
        for number, rows, keys in _pieces(spec, share):
            head = _cycles(spec, target, share, rows, keys)
            whole += share.sequences * number * (spec.kv_heads * head + groups * ITEM)
            longest = max(longest, share.heads * head + ITEM)
        if share.cuts_keys and share.context > share.size:  # parts are merged
            parts = math.ceil(share.context / share.size) * share.sequences * share.queries * spec.q_heads
            whole += parts * (3 * math.ceil(spec.dim_v / target.lanes) + ROW)
    return max(whole / threads, longest) / CLOCK


def _hidden(spec: KernelSpec, share: Share) -> int:
    """Tokens in front of the window of all queries."""
    return 0 if spec.window is None else max(0, share.context - share.queries + 1 - spec.window)


def _pieces(spec: KernelSpec, share: Share) -> Iterator[tuple[int, Rows, float]]:
    """(number, rows, mean keys) of the pieces into which one sequence is cut."""
    before, hidden = share.context - share.queries, _hidden(spec, share)
    if share.cuts_keys:
        parts = math.ceil(share.context / share.size) - hidden // share.size
        yield parts, share.rows, (share.context - hidden) / parts
        return
    full = share.queries // share.size
    seen = before + (full + 1) * share.size / 2 if spec.causal else share.context
    yield full, share.rows, seen if spec.window is None else min(seen, spec.window + share.size)
    if share.last:
        yield 1, share.last, share.context - (0 if spec.window is None else max(0, share.context - spec.window))


def _cycles(spec: KernelSpec, target: Target, share: Share, rows: Rows, seen: float) -> float:
    """Cycles of one KV head of a piece."""
    lanes = target.lanes
    tiles, blocks = math.ceil(seen / rows.tile), math.ceil(rows.count / rows.block)
    last = seen - (tiles - 1) * rows.tile
    keys = (tiles - 1) * rows.tile + math.ceil(last / lanes) * lanes  # whole vectors
    of_k, of_v = (keys * math.ceil(dim / lanes) for dim in (spec.head_dim, spec.dim_v))  # vectors of the K and V read
    softmax = rows.count * (keys / lanes * EXP + tiles * (ROW + 2 * spec.dim_v / lanes))
    if products(spec, target) == "matrix":
        steps = math.ceil(rows.count / MATRIX) * math.ceil(keys / MATRIX) * math.ceil((spec.head_dim + spec.dim_v) / 32)
        operations, loads = softmax + 6 * (of_k + of_v) + 2 * MATRIX * steps, 0.0
    else:
        operations, loads = _vector_work(spec, target, rows, keys, blocks)
        operations += softmax
    busy = max(operations, loads) / 2 + tiles * TILE
    whole_tokens = share.heads > 1 or spec.kv_heads == 1
    rate = READ if whole_tokens else READ * ONE_HEAD
    token_bytes = (spec.head_dim + spec.dim_v) * spec.cache_dtype.bits / 8
    moved = seen * token_bytes / rate
    ahead = share.prefetch * rows.tile  # tokens; the first so many of an item are waited for
    stays = (ahead + rows.tile) * share.heads * token_bytes <= L2
    hidden = min(busy, moved) * OVERLAPPED * (1 - min(1.0, ahead / seen)) if share.prefetch and stays else 0.0
    return busy + moved - hidden


def _vector_work(
    spec: KernelSpec, target: Target, rows: Rows, keys: float, blocks: int
) -> tuple[float, float]:
    """(operations, loads) of both products and of packing, in vectors."""
    paired = products(spec, target) == "pairs"
    of_k, of_v = (keys * math.ceil(dim / target.lanes / (2 if paired else 1)) for dim in (spec.head_dim, spec.dim_v))
    layout, registers = spec.kv_layout, 32 if target.lanes >= 16 else 16
    bits = spec.cache_dtype.bits
    converted = (0.5 if bits == 16 else 4.0) if paired else 1.0 if bits < 32 else 0.0  # operations a vector that is read
    multiplied = rows.count * (of_k + of_v)
    sums_lanes = not rows.packed and layout.k_order is not Order.HDN
    width = 4 if sums_lanes else 2  # accumulators of a row
    needed = width * rows.block + width + 1
    spilled = max(0, needed - registers) / needed * 2 * rows.count * of_k
    if rows.packed:
        packing = of_k * (2 + converted + 4) + of_v * (1 + converted)  # K is transposed
        tile_bytes = 4 * rows.tile * max(spec.head_dim, spec.dim_v)
        slower = 1.0 if tile_bytes <= L1 else 2.0 if tile_bytes <= L2 else 4.0
        loads = of_k + of_v + slower * blocks * (of_k + of_v) + rows.count * (of_k / 2 + keys)
        return multiplied + packing, loads + spilled
    reading = blocks * (of_k + of_v)
    across = 2.5 * rows.count * keys if sums_lanes else 0.0  # sums across lanes
    return multiplied + converted * reading + across, reading + rows.count * (of_k / 4 + keys) + spilled
