"""Source to a loaded kernel, through a table of builders; and the default kernels of a spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..catalog import variant
from ..errors import SpecError
from ..kernel import Attend, CopyBlocks, WriteKV
from ..render import Source, render
from ..space import Config
from ..spec import PAGED_OPS, KernelSpec, Op
from ..target import Target
from ..transfer import AnyKernel


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltKernels:
    """`PagedKernels` made of one built kernel an op."""

    spec: KernelSpec
    attend: Attend
    write_kv: WriteKV
    copy_blocks: CopyBlocks


def build(source: Source) -> AnyKernel:
    """Builds (or finds in the cache) and loads a kernel for a target that is present.

    Raises BuildError with the compiler's log; ConfigError if the cache cannot be written.
    """
    made_of = source.variant
    match made_of.template.language:
        case "cpp":
            from . import cpp

            return cpp.load(cpp.compile_library(source.text, made_of.target), made_of.spec, made_of.template.op)
        case "triton":
            from . import triton

            return triton.load(source.text, source.key, made_of.spec, made_of.template.op, made_of.config.to_dict())
        case language:
            raise SpecError(f"no builder for language {language!r}; allowed: cpp, triton")


def build_kernels(spec: KernelSpec, target: Target, configs: Mapping[Op, Config] | None = None) -> BuiltKernels:
    """The three ops of `spec`, each with its config of `configs` or its template's default."""
    made = {op: build(render(variant(op, spec, target, (configs or {}).get(op)))) for op in PAGED_OPS}
    return BuiltKernels(spec, made[Op.ATTEND], made[Op.WRITE_KV], made[Op.COPY_BLOCKS])  # type: ignore[arg-type]
