"""Configs that do the same on the batches at hand are told before anything is compiled, and do the same."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import cast

import pytest
import torch

from pagegen.build import build
from pagegen.build import triton as build_triton
from pagegen.catalog import template_for, variant
from pagegen.kernel import Attend
from pagegen.render import render
from pagegen.space import Config
from pagegen.spec import Op, Phase, parse_slug
from pagegen.target import best_cpu, parse_target
from pagegen.tuning import static_compile
from pagegen.tuning.static import _drawn
from pagegen.tuning.static_same import signature_of
from pagegen.tuning.workload import Inputs, Point, Pool, Workload

DECODE = Workload(Phase.DECODE, (Point.parse("8x1@700"), Point.parse("1x1@100")))


def test_a_cpu_s_configs_that_differ_in_what_no_batch_reaches_do_the_same() -> None:
    spec, target = parse_slug("fp32-d64-h9x3-b16-NHD")[0], parse_target("cpu:avx2")
    space = template_for(Op.ATTEND, spec, target).space(spec, target)
    signature = signature_of(spec, target, DECODE, 1)
    default = signature(space.default)
    assert signature(space.config({"row_block_packed": 12})) == signature(space.config({"split_kv": 8192})) == default
    assert signature(space.config({"split_kv": 256})) != default != signature(space.config({"prefetch": 0}))
    again = signature_of(spec, target, DECODE, 1)  # as another process has it
    assert all(again(config) == signature(config) for config in _drawn(space, 50, 0))


@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_a_gpu_s_configs_that_launch_the_same_do_the_same_and_nothing_is_compiled(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (static_compile, build_triton):
        monkeypatch.setattr(module, "compile_call", None)
    spec, where = parse_slug("bf16-d64-h4x2-b16-NHD")[0], parse_target(target)
    space = template_for(Op.ATTEND, spec, where).space(spec, where)
    signature = signature_of(spec, where, DECODE, 1)
    never = space.config({"split_below": 0})
    below = sorted(int(value) for knob in space.knobs if knob.name == "split_below" for value in knob.values)
    first = space.config({"split_below": below[-1]})
    assert signature(never) != signature(first)  # cut into parts or not
    assert len({signature(space.config({"num_warps": warps})) for warps in (2, 4, 8)}) == 3
    assert signature(space.default) == signature_of(spec, where, DECODE, 1)(space.default)
    whole = Workload(Phase.PREFILL, (Point.parse("64x64@64"),))  # programs enough not to cut contexts, either way
    prefill = signature_of(spec, where, whole, 1)
    assert prefill(never) == prefill(space.config({"split_below": below[1]}))


def by_signature(slug: str, workload: Workload, count: int) -> list[list[Config]]:
    """Drawn configs for the CPU at hand that do the same, two or more each."""
    spec, target = parse_slug(slug)[0], best_cpu()
    signature, found = signature_of(spec, target, workload, 1), defaultdict[object, list[Config]](list)
    for config in _drawn(template_for(Op.ATTEND, spec, target).space(spec, target), count, 0):
        found[signature(config)].append(config)
    groups = [random.Random(0).sample(each, 2) for each in found.values() if len(each) > 1]
    return random.Random(0).sample(groups, min(3, len(groups)))


@pytest.mark.long
@pytest.mark.parametrize("slug", ["fp32-d64-h4x2-b16-NHD", "fp32-d64-h4x4-b16-HDN8", "fp32-d64-h4x2-b16-NHD-det", "fp32-d64-h4x2-b16-NHD-w100"])
def test_the_kernels_of_one_signature_add_in_one_order(slug: str) -> None:
    """Tiles, parts and packing change the last bits of a result: those of one signature agree in them, others need not."""
    spec = parse_slug(slug)[0]
    workload = Workload(Phase.MIXED, (Point.parse("3x1@300+1x40@90"),))
    pool = Pool.for_points(spec, workload.points, 1 << 20)
    inputs = Inputs(pool, workload.points[0], warm=True)
    results = []
    for group in by_signature(slug, workload, 1500):
        found = []
        for config in group:
            inputs.bind(cast(Attend, build(render(variant(Op.ATTEND, spec, best_cpu(), config)))))()
            found.append(inputs.out.clone())
        assert all(torch.equal(found[0], other) for other in found), [config.slug for config in group]
        results.append(found[0])
    assert len(results) > 1 and not all(torch.equal(results[0], other) for other in results)
