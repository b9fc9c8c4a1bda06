"""attend is an operator of torch: the same numbers as the call, and whole graphs of torch.compile."""

import pytest
import torch

from pagegen import torch_op
from pagegen.build import build
from pagegen.catalog import variant
from pagegen.errors import KernelError
from pagegen.kernel import AttendExtras
from pagegen.render import render
from pagegen.spec import DType, KernelSpec, Op
from pagegen.target import best_cpu
from pagegen.tuning.workload import Inputs, Point, Pool

pytestmark = pytest.mark.compiler
SPEC = KernelSpec(6, 2, 16, DType.FP32, block_size=4, lse=True)


def batch(spec: KernelSpec = SPEC) -> tuple[int, Inputs, tuple[torch.Tensor, ...]]:
    """A handle, a small ragged batch, and what comes after `out` in a call."""
    point = Point.parse("2x1@9+1x5@13")
    inputs = Inputs(Pool.for_points(spec, (point,), 0), point)
    attend = build(render(variant(Op.ATTEND, spec, best_cpu())))
    number = torch_op.handle(attend, inputs.extras)  # type: ignore[arg-type]
    cache = (inputs.pool.k_cache, inputs.pool.v_cache, inputs.block_tables[0])
    return number, inputs, (inputs.q, *cache, inputs.context_lens, inputs.cu_seqlens_q)


def test_the_operator_gives_the_calls_numbers() -> None:
    number, inputs, rest = batch()
    inputs.run(torch_op._bound[number][0], inputs.block_tables[0])
    assert inputs.lse is not None
    out, lse = torch.full_like(inputs.out, torch.nan), torch.full_like(inputs.lse, torch.nan)
    torch.ops.pagegen.attend(number, out, *rest, lse)
    assert torch.equal(out, inputs.out) and torch.equal(lse, inputs.lse)
    assert torch_op.handle(*torch_op._bound[number]) == number


def test_extras_come_with_the_handle() -> None:
    spec = KernelSpec(4, 2, 16, DType.FP32, DType.INT8, block_size=4, sinks=True)
    number, inputs, rest = batch(spec)
    torch.ops.pagegen.attend(number, out := torch.full_like(inputs.out, torch.nan), *rest)
    inputs.run(torch_op._bound[number][0], inputs.block_tables[0])
    assert torch.equal(out, inputs.out) and isinstance(torch_op._bound[number][1], AttendExtras)


def test_a_kernel_has_one_handle_however_often_it_is_asked_for() -> None:
    """A method is a new object each time."""

    class Kernels:
        def attend(self, *_: object, **__: object) -> None: ...

    one, other = Kernels(), Kernels()
    numbers = [torch_op.handle(kernels.attend) for kernels in (one, one, other, one)]
    assert numbers[0] == numbers[1] == numbers[3] != numbers[2]


def test_a_number_that_is_no_handle_is_one_line() -> None:
    _, inputs, rest = batch()
    with pytest.raises(KernelError, match="no handle 99999"):
        torch.ops.pagegen.attend(99_999, inputs.out, *rest)


def test_a_whole_graph_holds_it_whatever_the_batch() -> None:
    """With a backend that only traces: what it computes is the operator's."""
    number, _, rest = batch()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def layer(q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        torch.ops.pagegen.attend(number, out, 2 * q, *cache, lse)
        return out + lse[..., None]

    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    found, expected = compiled(*rest), layer(*rest)
    assert torch.equal(found, expected) and len(graphs) == 1
    assert any(node.target is torch.ops.pagegen.attend for node in graphs[0].graph.nodes)


def test_a_whole_graph_may_write_into_the_cache_that_it_reads() -> None:
    """K and V share memory: torch takes writes to both only if it knows them as views of one tensor."""
    number, inputs, rest = batch()

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        k[0].copy_(k[1])
        v[0].copy_(v[1])
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        torch.ops.pagegen.attend(number, out, q, k, v, *others, lse)
        return out

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*rest)
    assert torch.equal(inputs.pool.v_cache[0], inputs.pool.v_cache[1])
    assert torch.equal(found, layer(*rest))


@pytest.mark.long
def test_inductor_compiles_it_and_keeps_its_writes() -> None:
    number, _, rest = batch()

    def layer(q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        torch.ops.pagegen.attend(number, out, q + 1, *cache, lse)
        return out * 3

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(*rest), layer(*rest))


def test_the_schema_says_what_is_written() -> None:
    number, inputs, rest = batch()
    assert inputs.lse is not None
    arguments = (number, inputs.out, *rest, inputs.lse)
    torch.library.opcheck(torch.ops.pagegen.attend.default, arguments, test_utils=("test_schema", "test_faketensor"))
