"""write_kv and copy_blocks on this machine's CPU beside torch moving as many bytes, interleaved in one run.

    python benchmarks/cache_ops.py [--tokens 4096] [--seconds 1]

A call goes to the next of the places in 512 MiB of cache, so what it writes lies in memory and in no processor's cache;
blocks are in random order. A ratio is the kernel's time over that of a plain move, in one piece, to the next place of as
much memory, which reads as many bytes and writes as many: a copy, or where the cache has 8 bits an element and the input 16,
the sum of two pieces into one of their size. Scales count as written; with rope, q counts as copied.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from pagegen.build import build
from pagegen.catalog import variant
from pagegen.kernel import TORCH_DTYPES, CopyBlocks, WriteExtras, WriteKV, allocate_cache, allocate_scales
from pagegen.render import render
from pagegen.spec import KernelSpec, Op, parse_slug
from pagegen.target import best_cpu, detect
from pagegen.transfer import block_bytes
from pagegen.tuning.measure import Call, measure

CACHE_BYTES = 512 << 20
PLAIN = ("bf16-d128-h32x8-b16-NHD", "bf16-d128-h32x8-b16-HND", "bf16-d128-h32x8-b16-HDN2", "bf16-d128-h32x8-b16-HDN8_HDN", "bf16-d64-h9x3-b32-NHD")
CACHES = ("float", "int8", "fp8_e4m3")


def specs() -> list[KernelSpec]:
    """Layouts, then what is fused on the way."""
    plain = [parse_slug(slug)[0] for slug in PLAIN]
    fused = [plain[0].replace(kv_dtype=None if cache == "float" else cache, rope=rope) for rope in (None, "neox") for cache in CACHES]
    return [*plain, *fused[1:]]


def touched_cache(spec: KernelSpec, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose pages are there before the first call."""
    k_cache, v_cache = allocate_cache(spec, blocks)
    return k_cache.zero_(), v_cache.zero_()


def write_call(spec: KernelSpec, tokens: int) -> tuple[Call, int, int]:
    """write_kv of `tokens` tokens to the next blocks; the bytes that it copies, and those it writes from twice as many."""
    kernel: WriteKV = build(render(variant(Op.WRITE_KV, spec, best_cpu())))  # type: ignore[assignment]  # what WRITE_KV builds
    blocks = CACHE_BYTES // block_bytes(spec)
    k_cache, v_cache = touched_cache(spec, blocks)
    dtype = TORCH_DTYPES[spec.dtype]
    k, v = (torch.randn(tokens, spec.kv_heads, dim).to(dtype) for dim in (spec.head_dim, spec.dim_v))
    order = torch.randperm(blocks)[: blocks - blocks % max(1, tokens // spec.block_size)]
    slots = (order[:, None] * spec.block_size + torch.arange(spec.block_size)).flatten()
    places = itertools.cycle(slots[: len(slots) // tokens * tokens].split(tokens))
    written, rotated = tokens * block_bytes(spec) // spec.block_size, 0
    extras = WriteExtras(scales=allocate_scales(spec, blocks))
    if spec.rope:
        q = torch.randn(tokens, spec.q_heads, spec.head_dim).to(dtype)
        rotated = q.nbytes
        extras = WriteExtras(
            extras.scales, q, torch.empty_like(q), torch.arange(tokens), torch.randn(tokens, spec.rotary_dim)
        )
    copied, narrowed = (0, written) if spec.cache_dtype.quantised else (written, 0)
    return lambda: kernel(k, v, k_cache, v_cache, next(places), extras=extras), rotated + copied, narrowed


def copy_call(spec: KernelSpec, tokens: int) -> tuple[Call, int, int]:
    """copy_blocks of as many blocks as `tokens` tokens fill; the bytes that it copies, and 0."""
    kernel: CopyBlocks = build(render(variant(Op.COPY_BLOCKS, spec, best_cpu())))  # type: ignore[assignment]  # what COPY_BLOCKS builds
    blocks, count = CACHE_BYTES // block_bytes(spec), max(1, tokens // spec.block_size)
    k_cache, v_cache = touched_cache(spec, blocks)
    scales = allocate_scales(spec, blocks)
    pairs = torch.randperm(blocks)[: blocks // (2 * count) * 2 * count].view(-1, count, 2)
    places = itertools.cycle(list(pairs))
    return lambda: kernel(k_cache, v_cache, next(places), scales=scales), count * block_bytes(spec), 0


def plain_move(copied: int, narrowed: int, fresh: bool) -> Call:
    """To the next place `copied` bytes from as many and `narrowed` from twice as many: the same ones, as a kernel's inputs
    are, or `fresh` ones from the next place."""
    count = CACHE_BYTES // (copied + narrowed)
    memory, source = (torch.ones(n, copied + narrowed, dtype=torch.uint8) for n in (count, 2))
    order = itertools.cycle(torch.randperm(count - count % 2).view(-1, 2).tolist())

    def call() -> None:
        to, origin = next(order)
        if copied:
            memory[to, :copied].copy_(memory[origin] if fresh else source[0, :copied])
        if narrowed:
            torch.add(source[0, copied:], source[1, copied:], out=memory[to, copied:])

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32, 4096], help="of a call")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    options = parser.parse_args()
    torch.set_num_threads(detect().threads)
    print(f"{best_cpu().name}, {torch.get_num_threads()} threads")
    print(f"{'':44} {'tokens':>6} {'us':>9} {'GB/s':>6}  over a plain move")
    for tokens, (op, make), spec in itertools.product(
        options.tokens, (("write_kv", write_call), ("copy_blocks", copy_call)), specs()
    ):
        if op == "copy_blocks" and spec.rope:
            continue
        call, copied, narrowed = make(spec, tokens)
        taken = measure({op: call, "move": plain_move(copied, narrowed, op == "copy_blocks")}, "move", seconds=options.seconds)
        found, ratio = taken.timing(op).median, taken.ratio(op)
        print(
            f"{op:11} {spec.slug:32} {tokens:6} {found * 1e6:9.1f} {(2 * copied + 3 * narrowed) / found / 1e9:6.1f}  "
            f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
