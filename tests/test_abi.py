"""Claims about calls of attend and write_kv: what was checked once is not checked again, and whatever has changed is."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagegen import abi
from pagegen.abi import CppAttend
from pagegen.build import build_kernels
from pagegen.build.cpp import run_compiler
from pagegen.errors import KernelError
from pagegen.kernel import AttendExtras, KVScales, WriteExtras, WriteKV, allocate_cache, check_attend
from pagegen.paths import TEMPLATES
from pagegen.spec import DType, KernelSpec
from pagegen.target import best_cpu
from tests.test_kernel_args import SPEC, Tensors, attend_args

pytestmark = pytest.mark.compiler
PLAIN = SPEC.replace(block_size=16, dtype=DType.FP32, kv_dtype=DType.FP32)
ROTATED = PLAIN.replace(rope="neox")
LATENT = KernelSpec(5, 1, 24, DType.FP32, head_dim_v=16, block_size=16, v_in_k=True, lse=True)
QUANTISED = KernelSpec(6, 2, 16, DType.FP32, DType.INT8, block_size=16, kv_scale="token_head", sinks=True, mask=True, lse=True)  # type: ignore[arg-type]


def kernel(spec: KernelSpec) -> CppAttend:
    """One that has never been called."""
    attend = build_kernels(spec, best_cpu()).attend
    assert isinstance(attend, CppAttend)
    return attend


def writer(spec: KernelSpec) -> WriteKV:
    """The same of write_kv."""
    return build_kernels(spec, best_cpu()).write_kv


def arguments(spec: KernelSpec) -> Tensors:
    """Three sequences, of 3, 1 and 3 rows, in 5 blocks of random numbers."""
    k_cache, v_cache = allocate_cache(spec, 5)
    for cache in (k_cache,) if spec.v_in_k else (k_cache, v_cache):
        cache.copy_(torch.randint(-9, 9, cache.shape)) if spec.kv_scale else cache.normal_()
    args: Tensors = {
        "out": torch.zeros(7, spec.q_heads, spec.dim_v),
        "q": torch.randn(7, spec.q_heads, spec.head_dim),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": torch.tensor([[0, 1], [1, 2], [2, 4]], dtype=torch.int32),
        "context_lens": torch.tensor([5, 1, 30], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 4, 7], dtype=torch.int32),
        "lse": torch.zeros(7, spec.q_heads),
    }
    if spec.kv_scale:
        scales = KVScales(*(torch.rand(5, 16, spec.kv_heads) for _ in "kv"))
        args["extras"] = AttendExtras(scales, sinks=torch.randn(spec.q_heads), mask=torch.ones(7, 40, dtype=torch.bool))
    return args


def answer(call: Callable[..., None], args: Tensors) -> tuple[torch.Tensor, ...] | str:
    """What was written, or what the call was refused with."""
    written = (args["out"], args["lse"]) if "out" in args else (args["k_cache"], args["v_cache"], args["extras"].q_out)
    for tensor in written:
        tensor.zero_()
    try:
        call(**args)
    except KernelError as error:
        return str(error)
    return tuple(tensor.clone() for tensor in written)


def same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
    return isinstance(one, str) and one == other


def retyped(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.view(dtype)


def moved(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.set_(values)  # type: ignore[call-overload]


def on_meta(args: Tensors, *names: str) -> None:
    args.update({name: args[name].to("meta") for name in names})


CHANGES: dict[str, tuple[KernelSpec, Callable[[Tensors], object], str | None]] = {
    "q, a row less": (PLAIN, lambda a: a["q"].resize_(6, 6, 16), "out shape"),
    "q, another type": (PLAIN, lambda a: retyped(a["q"], torch.int32), "q dtype"),
    "q, another type in the same place": (PLAIN, lambda a: a.update(q=a["q"].view(torch.int32)), "q dtype"),
    "q, another device": (PLAIN, lambda a: on_meta(a, "q"), "q device"),
    "q, heads before tokens": (PLAIN, lambda a: a["q"].as_strided_((7, 6, 16), (16, 7 * 16, 1)), None),
    "q, dims apart": (PLAIN, lambda a: a["q"].as_strided_((7, 6, 16), (96, 1, 6)), "q last stride"),
    "out, elsewhere": (PLAIN, lambda a: moved(a["out"], torch.ones(7, 6, 8)), None),
    "k_cache, fewer blocks": (PLAIN, lambda a: a["k_cache"].resize_(2, *a["k_cache"].shape[1:]), "v_cache shape"),
    "both caches, fewer blocks": (PLAIN, lambda a: [a[k].resize_(2, *a[k].shape[1:]) for k in ("k_cache", "v_cache")], "outside the cache"),
    "k_cache, another type": (PLAIN, lambda a: retyped(a["k_cache"], torch.int32), "k_cache dtype"),
    "k_cache, one block for all": (PLAIN, lambda a: a["k_cache"].as_strided_(a["k_cache"].shape, (0, *a["k_cache"].stride()[1:])), None),
    "v_cache, elsewhere": (PLAIN, lambda a: moved(a["v_cache"], torch.randn(a["v_cache"].shape)), None),
    "caches of another layer": (PLAIN, lambda a: a.update(k_cache=a["k_cache"] + 1, v_cache=a["v_cache"] + 1), None),
    "block_table, narrower": (PLAIN, lambda a: a["block_table"].as_strided_((3, 1), (2, 1)), "block_table width"),
    "block_table, rows apart": (PLAIN, lambda a: moved(a["block_table"], torch.tensor([[4, 3, 0]] * 3).int()[:, :2]), None),
    "block_table, another block": (PLAIN, lambda a: a["block_table"].fill_(3), None),
    "block_table, no block": (PLAIN, lambda a: a["block_table"].fill_(5), "outside the cache"),
    "context_lens, a sequence less": (PLAIN, lambda a: a["context_lens"].resize_(2), "block_table shape"),
    "context_lens, another type": (PLAIN, lambda a: retyped(a["context_lens"], torch.float32), "context_lens dtype"),
    "context_lens, longer": (PLAIN, lambda a: a["context_lens"].fill_(32), None),
    "context_lens, too long": (PLAIN, lambda a: a["context_lens"].fill_(33), "context_lens must be"),
    "cu_seqlens_q, decreasing": (PLAIN, lambda a: a["cu_seqlens_q"].copy_(torch.tensor([0, 4, 3, 7])), "never decrease"),
    "lse, none": (PLAIN, lambda a: moved(a["lse"], torch.zeros(0)), "lse shape"),
    "scale": (PLAIN, lambda a: a.update(scale=0.5), None),
    "everything, another device": (PLAIN, lambda a: on_meta(a, *a), "k_cache memory"),
    "V in K, another layer": (LATENT, lambda a: a.update(k_cache=(k := a["k_cache"] + 1), v_cache=k[..., :16]), None),
    "V in K, in another K": (LATENT, lambda a: a.update(v_cache=a["k_cache"].clone()[..., :16]), "memory of its own"),
    "scales, elsewhere": (QUANTISED, lambda a: moved(a["extras"].scales.k_scale, torch.rand(5, 16, 2)), None),
    "scales, fewer": (QUANTISED, lambda a: a["extras"].scales.v_scale.resize_(4, 16, 2), "v_scale shape"),
    "mask, narrower": (QUANTISED, lambda a: a["extras"].mask.resize_(7, 4).fill_(False), None),
    "mask, another": (QUANTISED, lambda a: a.update(extras=dataclasses.replace(a["extras"], mask=torch.zeros(7, 40, dtype=torch.bool))), None),
    "mask, none": (QUANTISED, lambda a: a.update(extras=dataclasses.replace(a["extras"], mask=None)), "mask: got none"),
    "extras, none": (QUANTISED, lambda a: a.pop("extras"), "scales: got none"),
    "a prefix": (QUANTISED, lambda a: a.update(extras=dataclasses.replace(a["extras"], shared_prefix_len=16)), "shared_prefix_len"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_has_been_called_answers_as_one_that_has_not(change: str) -> None:
    """Whatever happens to the tensors between two calls, in place or not; and as often as it is asked."""
    spec, apply, refusal = CHANGES[change]
    attend, args = kernel(spec), arguments(spec)
    first = answer(attend, args)
    assert isinstance(first, tuple) and same(answer(attend, args), first)
    apply(args)
    expected = answer(kernel(spec), args)
    assert refusal in expected if refusal else isinstance(expected, tuple)
    assert all(same(answer(attend, args), expected) for _ in range(3))
    args = arguments(spec)
    assert same(answer(attend, args), answer(kernel(spec), args))


def to_write() -> Tensors:
    """Three tokens, the middle one in no slot, whose q and k are rotated."""
    k_cache, v_cache = allocate_cache(ROTATED, 5)
    heads, ends = (3, ROTATED.q_heads, 16), torch.tensor([7, 0, 39])
    extras = WriteExtras(q=torch.randn(heads), q_out=torch.zeros(heads), positions=ends, cos_sin=torch.randn(40, 16))
    return {
        "k": torch.randn(3, 2, 16),
        "v": torch.randn(3, 2, 8),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.tensor([3, -1, 79]),
        "extras": extras,
    }


WRITES: dict[str, tuple[Callable[[Tensors], object], str | None]] = {
    "k, another type": (lambda a: retyped(a["k"], torch.int32), "k dtype"),
    "v, a row less": (lambda a: a["v"].resize_(2, 2, 8), "v shape"),
    "v, heads before tokens": (lambda a: a["v"].as_strided_((3, 2, 8), (8, 24, 1)), None),
    "caches, fewer blocks": (lambda a: [a[k].resize_(4, *a[k].shape[1:]) for k in ("k_cache", "v_cache")], "outside the cache"),
    "caches of another layer": (lambda a: a.update(k_cache=a["k_cache"].clone(), v_cache=a["v_cache"].clone()), None),
    "slot_mapping, another slot": (lambda a: a["slot_mapping"].fill_(-1), None),
    "slot_mapping, no slot": (lambda a: a["slot_mapping"].fill_(80), "outside the cache"),
    "slot_mapping, another type": (lambda a: retyped(a["slot_mapping"], torch.float64), "slot_mapping dtype"),
    "q, rotated in place": (lambda a: a.update(extras=dataclasses.replace(a["extras"], q=a["extras"].q_out)), None),
    "q_out, a row less": (lambda a: a["extras"].q_out.resize_(2, 6, 16), "q_out shape"),
    "positions, another": (lambda a: a["extras"].positions.fill_(1), None),
    "cos_sin, shorter": (lambda a: a["extras"].cos_sin.resize_(39, 16), "outside cos_sin"),
    "extras, none": (lambda a: a.update(extras=dataclasses.replace(a["extras"], q=None)), "q: got none"),
    "everything, another device": (lambda a: on_meta(a, *(name for name in a if name != "extras")), "k_cache memory"),
}


@pytest.mark.parametrize("change", WRITES)
def test_write_kv_that_has_been_called_answers_as_one_that_has_not(change: str) -> None:
    (apply, refusal), write, args = WRITES[change], writer(ROTATED), to_write()
    assert isinstance(answer(write, args), tuple)
    apply(args)
    expected = answer(writer(ROTATED), args)
    assert refusal in expected if refusal else isinstance(expected, tuple)
    assert all(same(answer(write, args), expected) for _ in range(3))


def test_layers_of_a_step_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, checks = kernel(QUANTISED), list[KernelSpec]()

    def counted(spec: KernelSpec, *tensors: Any) -> int:
        checks.append(spec)
        return check_attend(spec, *tensors)

    monkeypatch.setattr(abi, "check_attend", counted)
    layers = [arguments(QUANTISED) for _ in range(3)]
    answers = [answer(attend, args) for args in layers]
    assert len(checks) == 1 and not same(answers[0], answers[1])
    assert all(same(found, answer(kernel(QUANTISED), args)) for found, args in zip(answers, layers, strict=True))


def test_a_torch_that_does_not_say_what_its_tensors_are_has_every_call_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "_dl_tensor", lambda: None)
    attend, layers = kernel(PLAIN), [arguments(PLAIN) for _ in range(3)]
    for args in (*layers, *layers):
        found = answer(attend, args)
        monkeypatch.undo()
        assert isinstance(found, tuple) and same(found, answer(kernel(PLAIN), args))
        monkeypatch.setattr(abi, "_dl_tensor", lambda: None)
        args["q"].resize_(7, 6, 16)
    layers[0]["q"].resize_(6, 6, 16)
    assert "out shape" in str(answer(attend, layers[0]))


def test_threads_call_one_kernel_at_once_with_different_batches() -> None:
    attend, wrong = kernel(PLAIN), list[int]()

    def call_often(rows: int) -> None:
        args = arguments(PLAIN)
        args["cu_seqlens_q"].copy_(torch.tensor([0, 1, 2, rows])), args["context_lens"].fill_(rows)
        args.update({name: args[name][:rows].clone() for name in ("out", "q", "lse")})
        expected = answer(kernel(PLAIN), args)
        wrong.append(sum(not same(answer(attend, args), expected) for _ in range(300)))

    threads = [threading.Thread(target=call_often, args=(rows,)) for rows in (3, 4, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]


def test_the_structs_of_a_call_are_those_of_the_header(tmp_path: Path) -> None:
    call = abi._Call
    lines = ["#include <cstddef>", "#include <cstdint>", (TEMPLATES / "cpp/python_call.h").read_text()]
    lines += [f"static_assert(offsetof(python::Call, {name}) == {getattr(call, name).offset});" for name, *_ in call._fields_]
    lines += [f"static_assert(sizeof(python::Call) == {ctypes.sizeof(call)});", "int main() {}"]
    (tmp_path / "a.cpp").write_text("\n".join(lines))
    run_compiler(["-std=c++17", "-Wall", "-Wextra", "-Werror", "a.cpp", "-o", "a"], tmp_path)


def test_a_prepared_call_takes_what_its_tensors_hold_and_checks_it_each_time() -> None:
    spec, target = SPEC.replace(block_size=16, dtype=DType.FP32), best_cpu()
    attend = build_kernels(spec, target).attend
    assert isinstance(attend, CppAttend)
    args = attend_args(spec)
    for name in ("out", "q"):
        args[name] = torch.randn(args[name].shape)
    args["k_cache"].normal_(), args["v_cache"].normal_()
    call = attend.prepared(**args)
    for contexts, table in (([5, 1, 9], [[0, 1], [1, 2], [2, 4]]), ([30, 0, 32], [[4, 3], [1, 0], [2, 0]])):  # then it needs more room
        args["context_lens"].copy_(torch.tensor(contexts)), args["block_table"].copy_(torch.tensor(table))
        args["cu_seqlens_q"].copy_(torch.tensor([0, 3, 4, 7]) if contexts[1] else torch.tensor([0, 3, 3, 7]))
        call()
        found = args["out"].clone(), args["lse"].clone()
        attend(**args)
        assert torch.equal(found[0][:7], args["out"][:7]) and torch.equal(found[1][:3], args["lse"][:3])
    args["block_table"][0, 0] = 5
    with pytest.raises(KernelError, match="outside the cache"):
        call()
    with pytest.raises(KernelError, match="lse"):
        attend.prepared(**{**args, "lse": None})


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Like a tensor that was freed."""
    emptied = tensor.clone()
    emptied.untyped_storage().resize_(0)
    return emptied


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """What torch.compile traces with."""
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", ["q", "k_cache", "block_table", "context_lens"])
@pytest.mark.parametrize("made", [without_memory, fake])
@pytest.mark.parametrize("called", [False, True])
def test_a_tensor_without_memory_is_refused_and_not_read(name: str, made: Callable[[torch.Tensor], torch.Tensor], called: bool) -> None:
    attend, args = kernel(PLAIN), arguments(PLAIN)
    if called:
        attend(**args)
    with pytest.raises(KernelError, match=f"{name} memory: got none"):
        attend(**{**args, name: made(args[name])})


@pytest.mark.parametrize("name", ["out", "q", "k_cache", "cu_seqlens_q"])
@pytest.mark.parametrize("other", ["x", None, [1.0]])
def test_what_is_no_tensor_is_refused_by_its_name(name: str, other: object) -> None:
    args = arguments(PLAIN)
    with pytest.raises(KernelError, match=f"{name}: got a {type(other).__name__}, expected a tensor"):
        kernel(PLAIN)(**{**args, name: other})


def test_rows_of_out_may_not_lie_on_one_another_nor_numbers_be_negated_on_reading() -> None:
    attend, args = kernel(PLAIN), arguments(PLAIN)
    with pytest.raises(KernelError, match="out strides"):
        attend(**{**args, "out": torch.zeros(1, PLAIN.q_heads, PLAIN.dim_v).expand(7, -1, -1)})
    with pytest.raises(KernelError, match="q view: got one whose numbers are negated"):
        attend(**{**args, "q": torch._neg_view(args["q"])})


def test_a_scale_is_the_number_that_it_is_at_the_call() -> None:
    attend, args, scale = kernel(PLAIN), arguments(PLAIN), torch.tensor(0.5)
    attend(**args, scale=scale)  # type: ignore[arg-type]  # any number will do
    scale.fill_(2.0)
    attend(**args, scale=scale)  # type: ignore[arg-type]
    expected = torch.zeros_like(args["out"])
    kernel(PLAIN)(**{**args, "out": expected}, scale=2.0)
    assert torch.equal(args["out"], expected)
    with pytest.raises(KernelError, match="scale: got a list, expected a number"):
        attend(**args, scale=[1.0, 2.0])  # type: ignore[arg-type]
