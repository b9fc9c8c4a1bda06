"""write_kv and copy_blocks on this machine's CPU beside torch copying as many bytes, interleaved in one run.

    python benchmarks/cache_ops.py [--tokens 4096] [--seconds 1]

A call goes to the next of the places in 512 MiB of cache, so what it writes lies in memory and in no processor's cache;
blocks are in random order. The copy moves as many bytes as the kernel writes, in one piece, to the next place of as much
memory. A ratio is the kernel's time over the copy's. With rope, q is rotated on the way, too, and its bytes count.
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
PLAIN = ("bf16-d128-h32x8-b16-NHD", "bf16-d128-h32x8-b16-HND", "bf16-d128-h32x8-b16-HDN8_HDN", "bf16-d64-h9x3-b32-NHD")
CACHES = ("float", "int8", "fp8_e4m3")


def specs() -> list[KernelSpec]:
    """Layouts, then what is fused on the way."""
    plain = [parse_slug(slug)[0] for slug in PLAIN]
    fused = [plain[0].replace(kv_dtype=None if cache == "float" else cache, rope=rope) for rope in (None, "neox") for cache in CACHES]
    return [*plain, *fused[1:]]


def write_call(spec: KernelSpec, tokens: int) -> tuple[Call, int]:
    """write_kv of `tokens` tokens to the next blocks, and the bytes that it writes."""
    kernel: WriteKV = build(render(variant(Op.WRITE_KV, spec, best_cpu())))  # type: ignore[assignment]  # what WRITE_KV builds
    blocks = CACHE_BYTES // block_bytes(spec)
    k_cache, v_cache = allocate_cache(spec, blocks)
    dtype = TORCH_DTYPES[spec.dtype]
    k, v = (torch.randn(tokens, spec.kv_heads, dim).to(dtype) for dim in (spec.head_dim, spec.dim_v))
    order = torch.randperm(blocks)[: blocks - blocks % max(1, tokens // spec.block_size)]
    slots = (order[:, None] * spec.block_size + torch.arange(spec.block_size)).flatten()
    places = itertools.cycle(slots[: len(slots) // tokens * tokens].split(tokens))
    num_bytes = tokens * block_bytes(spec) // spec.block_size
    extras = WriteExtras(scales=allocate_scales(spec, blocks))
    if spec.rope:
        q = torch.randn(tokens, spec.q_heads, spec.head_dim).to(dtype)
        num_bytes += q.nbytes
        extras = WriteExtras(
            extras.scales, q, torch.empty_like(q), torch.arange(tokens), torch.randn(tokens, spec.rotary_dim)
        )
    return lambda: kernel(k, v, k_cache, v_cache, next(places), extras=extras), num_bytes


def copy_call(spec: KernelSpec, tokens: int) -> tuple[Call, int]:
    """copy_blocks of as many blocks as `tokens` tokens fill, and the bytes that it writes."""
    kernel: CopyBlocks = build(render(variant(Op.COPY_BLOCKS, spec, best_cpu())))  # type: ignore[assignment]  # what COPY_BLOCKS builds
    blocks, count = CACHE_BYTES // block_bytes(spec), max(1, tokens // spec.block_size)
    k_cache, v_cache = allocate_cache(spec, blocks)
    scales = allocate_scales(spec, blocks)
    pairs = torch.randperm(blocks)[: blocks // (2 * count) * 2 * count].view(-1, count, 2)
    places = itertools.cycle(list(pairs))
    return lambda: kernel(k_cache, v_cache, next(places), scales=scales), count * block_bytes(spec)


def plain_copy(num_bytes: int, fresh: bool) -> Call:
    """A copy to the next place, from the same (as a kernel's inputs are) or from the next one."""
    count = CACHE_BYTES // num_bytes
    memory, source = torch.ones(count, num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    order = itertools.cycle(torch.randperm(count - count % 2).view(-1, 2).tolist())

    def call() -> None:
        to, origin = next(order)
        memory[to].copy_(memory[origin] if fresh else source)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32, 4096], help="of a call")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    options = parser.parse_args()
    torch.set_num_threads(detect().threads)
    print(f"{best_cpu().name}, {torch.get_num_threads()} threads")
    print(f"{'':44} {'tokens':>6} {'us':>9} {'GB/s':>6}  over a plain copy")
    for tokens, (op, make), spec in itertools.product(
        options.tokens, (("write_kv", write_call), ("copy_blocks", copy_call)), specs()
    ):
        if op == "copy_blocks" and spec.rope:
            continue
        call, num_bytes = make(spec, tokens)
        taken = measure({op: call, "copy": plain_copy(num_bytes, op == "copy_blocks")}, "copy", seconds=options.seconds)
        found, ratio = taken.timing(op).median, taken.ratio(op)
        print(
            f"{op:11} {spec.slug:32} {tokens:6} {found * 1e6:9.1f} {num_bytes / found / 1e9:6.1f}  "
            f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
