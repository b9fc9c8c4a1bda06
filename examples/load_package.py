"""Calls the kernels of a package directly: one decode step of two sequences over a paged cache.

python examples/load_package.py PACKAGE
"""

import sys

import torch

from pagegen import load_package
from pagegen.kernel import TORCH_DTYPES, allocate_cache


def main(path: str) -> None:
    kernels = load_package(path)
    spec = kernels.spec
    dtype = TORCH_DTYPES[spec.dtype]
    context = 2 * spec.block_size  # tokens of each sequence, its newest included
    k_cache, v_cache = allocate_cache(spec, num_blocks=4)
    block_table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)

    positions = torch.arange(context)
    blocks = block_table[:, positions // spec.block_size].long()
    slot_mapping = (blocks * spec.block_size + positions % spec.block_size).flatten()
    k = torch.randn(2 * context, spec.kv_heads, spec.head_dim).to(dtype)
    v = torch.randn(2 * context, spec.kv_heads, spec.dim_v).to(dtype)
    kernels.write_kv(k, v, k_cache, v_cache, slot_mapping)

    q = torch.randn(2, spec.q_heads, spec.head_dim).to(dtype)
    out = torch.empty(2, spec.q_heads, spec.dim_v, dtype=dtype)
    context_lens = torch.full((2,), context, dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 1, 2], dtype=torch.int32)
    kernels.attend(out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)
    print(f"{kernels.name}: attention over {context} tokens a sequence, norm of the output {out.float().norm():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
