"""Claims about the Triton backend without a GPU: the numbers (interpreted), the texts, and the binaries (cross-compiled)."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagegen.build import triton as backend
from pagegen.build.triton import Interpreter, compile_for
from pagegen.catalog import template_for, variant
from pagegen.check.case import Case, Poison
from pagegen.check.compare import check_calls
from pagegen.check.suite import quick_suite
from pagegen.errors import BuildError, CheckError, KernelError
from pagegen.kernel import allocate_cache
from pagegen.render import Source, render
from pagegen.resources import Resources, gpu_resources
from pagegen.space import Value
from pagegen.spec import PAGED_OPS, KernelSpec, Op, parse_slug
from pagegen.target import TARGETS, parse_target

from ..conftest import Golden

pytestmark = pytest.mark.triton

GPUS = [target.name for target in TARGETS if target.kind != "cpu"]
PROMISED = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942")

# Groups 1, 3, 5, 8; block sizes 1, 3, 16, 24; head dims 8, 40, 64, 80, 128; every order of K and V, packed and not.
COVERING = (
    "fp32-d8-h3x1-b1-NHD-lse",
    "bf16-d40-h5x1-b3-HND",
    "fp16-d64v24-h2x2-b16-HDN-lse",
    "fp32-d80-h8x1-b24-HDN8_HDN",
    "bf16-d128-h6x2-b16-HDN2_NHD",
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own: a kernel of an earlier run proves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def interpreter(cache: None) -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def source(
    spec: KernelSpec, op: Op = Op.ATTEND, target: str = "cuda:sm_90", knobs: dict[str, Value] | None = None
) -> Source:
    where = parse_target(target)
    return render(variant(op, spec, where, template_for(op, spec, where).space(spec, where).config(knobs or {})))


def failures(interpreter: Interpreter, made: Source, cases: list[Case]) -> list[str]:
    op, spec = made.variant.template.op, made.variant.spec
    kernel = interpreter.load(made.text, made.key, spec, op, made.variant.config.to_dict())
    return [f"{failure.case.name}: {failure.message}" for failure in check_calls({op: kernel}, cases)]


def of_op(spec: KernelSpec, op: Op) -> list[Case]:
    return [case for case in quick_suite(spec) if case.op is op and case.fault is None]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", [pytest.param(slug, marks=pytest.mark.long if place in (1, 2) else []) for place, slug in enumerate(COVERING)])
def test_attend_gives_the_references_numbers(interpreter: Interpreter, slug: str) -> None:
    spec = parse_slug(slug)[0]
    b = spec.block_size
    cases = [
        Case("decode", Op.ATTEND, spec, (1,) * 6, (0, 1, max(b - 1, 2), b, b + 1, 67), poison=Poison.INF),
        Case("mixed", Op.ATTEND, spec, (0, 1, 4, b + 1, 19, 3), (7, b + 1, 2, b + 1, 40, 0), padding=2, strided=True),
        Case("split context", Op.ATTEND, spec, (1, 2), (515, 3), scale=0.4),
    ]
    assert failures(interpreter, source(spec), cases) == []


def test_attend_without_a_causal_mask_sees_every_key(interpreter: Interpreter) -> None:
    spec = KernelSpec(4, 2, 16, "fp32", block_size=5, causal=False, scale=0.3, lse=True)  # type: ignore[arg-type]
    cases = [Case("not causal", Op.ATTEND, spec, (3, 1, 17, 2), (3, 70, 21, 0))]
    assert failures(interpreter, source(spec), cases) == []


@pytest.mark.parametrize("slug", COVERING[-3:])
@pytest.mark.parametrize("op", [Op.WRITE_KV, Op.COPY_BLOCKS])
def test_the_other_ops_move_the_references_bits(interpreter: Interpreter, op: Op, slug: str) -> None:
    spec = parse_slug(slug)[0]
    assert failures(interpreter, source(spec, op), of_op(spec, op)) == []


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"tile_q": 16, "tile_kv": 128}, marks=pytest.mark.long),
        {"tile_q": 128, "tile_kv": 16, "split_below": 512},
        {"split_below": 0},
    ],
    ids=str,
)
def test_no_knob_changes_what_is_computed(interpreter: Interpreter, knobs: dict[str, Value]) -> None:
    spec = parse_slug("fp32-d24-h9x3-b6-NHD-lse")[0]
    cases = [Case("mixed", Op.ATTEND, spec, (1, 45, 2, 1), (520, 60, 2, 7))]
    assert failures(interpreter, source(spec, knobs=knobs), cases) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDN", "HDN8", "HDN8_HDN", "NHD_HDN", "HND_NHD"])
@pytest.mark.parametrize(("group", "block_size", "head_dim"), [(1, 1, 8), (3, 3, 40), (5, 16, 64), (8, 24, 80), (3, 16, 128)])
def test_the_whole_gate_passes_interpreted(
    interpreter: Interpreter, group: int, block_size: int, head_dim: int, layout: str
) -> None:
    dtype = ("fp32", "bf16", "fp16")[(group + block_size) % 3]
    spec = parse_slug(f"{dtype}-d{head_dim}-h{group}x1-b{block_size}-{layout}-lse")[0]
    for op in PAGED_OPS:
        assert failures(interpreter, source(spec, op), of_op(spec, op)) == []


def test_arguments_are_checked_before_a_kernel_sees_them(interpreter: Interpreter) -> None:
    spec = parse_slug("fp32-d8-h3x1-b3-NHD")[0]
    made = source(spec, Op.WRITE_KV)
    write = interpreter.load(made.text, made.key, spec, Op.WRITE_KV, {})
    k_cache, v_cache = allocate_cache(spec, 2)
    with pytest.raises(KernelError, match="k shape"):
        write(torch.zeros(2, 1, 16), torch.zeros(2, 1, 8), k_cache, v_cache, torch.tensor([0, 1]))  # type: ignore[call-arg, arg-type]


def test_what_fails_in_the_worker_is_told_here(cache: None) -> None:
    spec = parse_slug("fp32-d8-h3x1-b3-NHD")[0]
    k_cache, v_cache = allocate_cache(spec, 2)
    arguments = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), k_cache, v_cache, torch.tensor([0]))
    with Interpreter() as worker:
        broken = worker.load("def launch(*arguments):\n    raise ValueError('no')\n", "broken", spec, Op.WRITE_KV, {})
        with pytest.raises(CheckError, match="ValueError: no"):
            broken(*arguments)  # type: ignore[call-arg, arg-type]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(CheckError, match="died"):
            broken(*arguments)  # type: ignore[call-arg, arg-type]


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "slug", "target"),
    [
        (Op.ATTEND, "bf16-d64-h9x3-b16-NHD", "cuda:sm_90"),
        (Op.ATTEND, "fp16-d80v40-h10x2-b24-HDN8_HDN-lse", "hip:gfx942"),
        (Op.WRITE_KV, "bf16-d128-h32x8-b16-HDN8", "cuda:sm_80"),
        (Op.COPY_BLOCKS, "fp16-d96-h8x8-b16-HDN8_HDN", "cuda:sm_100"),
    ],
)
def test_golden_text(golden: Golden, op: Op, slug: str, target: str) -> None:
    golden(f"triton/{op.value}-{slug}.py", source(parse_slug(slug)[0], op, target).text)


@pytest.mark.parametrize("target", PROMISED)
@pytest.mark.parametrize("op", PAGED_OPS)
def test_a_generated_module_stands_alone(op: Op, target: str) -> None:
    tree = ast.parse(source(parse_slug("bf16-d72-h6x2-b3-HDN4-lse")[0], op, target).text)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module))


def test_every_spec_of_the_family_has_a_default_config() -> None:
    for name in GPUS:
        target = parse_target(name)
        for dtype in ("fp32", "bf16", "fp16"):
            for head_dim in range(8, 257, 8):
                for group in (1, 3, 17, 32):
                    spec = KernelSpec(group, 1, head_dim, dtype)  # type: ignore[arg-type]
                    assert template_for(Op.ATTEND, spec, target).space(spec, target).default


# --- binaries --------------------------------------------------------------------------------------------------------

MATRIX_UNITS = {"cuda:sm_90": "HGMMA", "cuda:sm_100": "UTCMMA", "hip:gfx1100": "WMMA"}


def resources(made: Source) -> dict[str, Resources]:
    return {
        kernel.name: gpu_resources(kernel.target, kernel.binary, kernel.assembly, kernel.num_warps, kernel.shared_memory)
        for kernel in compile_for(made)
    }


def check_binaries(slug: str, target: str) -> dict[str, Resources]:
    """Nothing spills, everything can be launched, and the matrix products run on the target's own units."""
    found = resources(source(parse_slug(slug)[0], target=target))
    for name, kernel in found.items():
        assert kernel.spills == 0, f"{slug} {target} {name}: {kernel}"
        assert kernel.occupancy, f"{slug} {target} {name} cannot be launched"
    prefill = found.get("prefill", found["decode"])  # one binary where both have as many rows
    unit = MATRIX_UNITS.get(target, "MFMA" if target.startswith("hip") else "HMMA")
    assert prefill.instructions[unit], f"{slug} {target}: {prefill}"
    return found


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[] if name in ("cuda:sm_90", "hip:gfx942") else pytest.mark.long) for name in PROMISED]
)
def test_default_configs_spill_nothing_and_use_the_matrix_units(target: str) -> None:
    found = check_binaries("bf16-d128-h32x8-b16-NHD", target)
    assert set(found) == {"decode", "split", "merge", "prefill"}
    assert all(found[name].instructions["load 16 B"] >= 12 for name in ("decode", "split", "prefill"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", GPUS)
def test_so_do_those_of_every_target_layout_and_width(target: str) -> None:
    for slug in (
        "bf16-d64-h14x2-b16-NHD",
        "fp16-d80-h32x32-b16-HND-lse",
        "fp16-d128-h32x8-b16-HDN8_HDN",
        "bf16-d128-h64x2-b32-HDN",
        "bf16-d96v128-h24x8-b1-HND-lse",
        "fp16-d40-h5x5-b3-HDN2_NHD",
        "fp16-d72-h8x1-b3-HDN",
    ):
        check_binaries(slug, target)


def test_packed_keys_are_loaded_a_pack_at_a_time() -> None:
    found = resources(source(parse_slug("fp16-d64-h8x2-b16-HDN8_HDN")[0], target="cuda:sm_80"))
    assert found["decode"].instructions["LDGSTS"] == found["decode"].instructions["load 16 B"] - 1  # all but q's


def test_a_text_that_triton_refuses_is_a_build_error(tmp_path: Path) -> None:
    made = source(parse_slug("bf16-d64-h8x2-b16-NHD")[0])
    broken = Source(made.variant, made.text.replace("tl.program_id(2)", "tl.no_such_thing(2)"))
    with pytest.raises(BuildError, match="triton cannot compile decode for cuda:sm_90"):
        compile_for(broken)


def test_what_triton_prints_of_an_assembler_goes_into_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / 'a "quoted" folder'))  # a name that ptxas cannot read
    with pytest.raises(BuildError, match="triton cannot compile") as caught:
        compile_for(source(parse_slug("bf16-d64-h8x2-b16-NHD")[0], Op.WRITE_KV))
    assert "ptxas" in caught.value.log and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", [b"", b"launch = 5", b"\xff\xfe"])
def test_a_damaged_module_is_written_again(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path))
    for _ in range(2):
        assert backend._module("launch = 7", "key").launch == 7
        (tmp_path / "kernels" / "key" / "kernel.py").write_bytes(damage)
        os.utime(tmp_path / "kernels" / "key" / "kernel.py", (0, 0))  # not the moment that Python's bytecode knows


def test_tritons_cache_lies_in_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path))
    before = os.environ.get("TRITON_CACHE_DIR")
    compile_for(source(parse_slug("bf16-d64-h8x2-b16-NHD")[0], Op.WRITE_KV))
    assert list((tmp_path / "kernels/triton").rglob("write_kv.cubin"))
    assert os.environ.get("TRITON_CACHE_DIR") == before and backend.toolchain()["triton"]


@pytest.mark.parametrize("op", PAGED_OPS)
def test_what_is_compiled_is_what_triton_would_compile_on_the_device(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launcher, under a driver that only names a GPU, comes to the same binaries."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    spec = parse_slug("fp16-d16-h4x2-b3-HDN2_HDN")[0]
    made = source(spec, op)
    ours = {kernel.binary for kernel in compile_for(made)}
    launched: list[bytes] = []

    def warm_up(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **keywords: Any) -> None:
            launched.append(kernel.warmup(*arguments, grid=grid, **keywords).asm["cubin"])

        return run

    monkeypatch.setattr(JITFunction, "__getitem__", warm_up)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    module = backend._module(made.text, made.key)
    with triton.knobs.cache.scope():
        backend._keep_cache()
        for _, arguments in backend._typical_calls(spec, op):
            module.launch(*map(_on_host, arguments))
    assert set(launched) == ours


def _on_host(argument: Any) -> Any:
    """A meta tensor with memory: Triton looks at its address."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
