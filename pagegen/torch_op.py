"""attend as an operator of torch: `torch.ops.pagegen.attend(handle, ...)`, which survives torch.compile(fullgraph=True).

Registered with `torch.library.Library.define` and `impl`: a call costs a few microseconds of dispatch. An operator cannot
take a kernel as an argument, so that it takes a number, which `handle` gives. Extras are the handle's too.
"""

from __future__ import annotations

import inspect

import torch

from pagegen.errors import KernelError
from pagegen.kernel import NO_ATTEND_EXTRAS, Attend, AttendExtras

NAMESPACE = "pagegen"
SCHEMA = (
    "attend(int handle, Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,"
    " Tensor cu_seqlens_q, Tensor(b!)? lse=None, float? scale=None, int? max_query_len=None, int? max_context_len=None) -> ()"
)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_bound: list[tuple[Attend, AttendExtras]] = []  # by handle; kernels live as long as the process, as their libraries do


def handle(attend: Attend, extras: AttendExtras = NO_ATTEND_EXTRAS) -> int:
    """The number by which `torch.ops.pagegen.attend` calls `attend` with these extras."""
    call = attend if inspect.isroutine(attend) else attend.__call__  # an object that is called makes a dict of its arguments
    if (call, extras) not in _bound:  # compared, for a method is another object each time it is asked for
        _bound.append((call, extras))
    return _bound.index((call, extras))


def _attend(
    handle: int,
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lse: torch.Tensor | None = None,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_context_len: int | None = None,
) -> None:
    if not 0 <= handle < len(_bound):
        raise KernelError(f"attend has no handle {handle}; pagegen.torch_op.handle(kernels.attend) gives one")
    attend, extras = _bound[handle]
    attend(
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        cu_seqlens_q,
        scale=scale,
        lse=lse,
        extras=extras,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )


def _nothing(*_: object, **__: object) -> None:
    """What tracing sees: `out` and `lse` are written, which the schema says."""


_library.define(SCHEMA)  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake(f"{NAMESPACE}::attend", _nothing, lib=_library)
