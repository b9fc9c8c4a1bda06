"""Claims about SmolLM2-135M in fp32: transformers' tokens under every way to schedule, reserve and preempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagegen.kernel import PagedKernels
from pagegen.runtime.engine import Engine, EngineConfig
from pagegen.runtime.launcher import default_kernels
from pagegen.runtime.models import CausalLM, build_model
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Preemption
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType

pytestmark = [pytest.mark.model, pytest.mark.compiler]

NUM_TOKENS = 14
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_reference.json").read_text())[
    "cases"
]


@pytest.fixture(scope="module")
def loaded() -> tuple[CausalLM, PagedKernels]:
    source = resolve_model("smollm2-135m")
    kernels = default_kernels(source.config.kernel_spec(DType.FP32))
    return build_model(source.config, source.weights(), DType.FP32), kernels


@pytest.mark.parametrize(
    ("policy", "memory_policy", "preemption", "num_blocks"),
    [
        ("default", "paged", "recompute", 4),
        pytest.param("vllm-paper", "paged", "swap", 5, marks=pytest.mark.long),
        pytest.param("vllm-paper", "paged", "auto", 5, marks=pytest.mark.long),
        pytest.param("orca", "orca-max", "recompute", 24, marks=pytest.mark.long),
        pytest.param("request", "contiguous-first-fit", "recompute", 12, marks=pytest.mark.long),
    ],
)
def test_every_policy_gives_the_references_tokens(
    loaded: tuple[CausalLM, PagedKernels], policy: str, memory_policy: str, preemption: str, num_blocks: int
) -> None:
    """Three of the cases twice, in a pool that holds half of them; the prompts that come again are cached or not."""
    model, kernels = loaded
    config = EngineConfig(
        max_model_len=96,
        num_blocks=num_blocks,
        dtype=DType.FP32,
        policy=policy,
        memory_policy=memory_policy,
        preemption=Preemption(preemption),
        max_num_batched_tokens=24 if policy == "default" else None,
    )
    engine, cases = Engine(model, kernels, None, config), [CASES[i] for i in (2, 3, 4)] * 2
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for i, case in enumerate(cases):
        engine.add_request(str(i), case["prompt_ids"], params)
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        found |= {output.request_id: output.token_ids for output in engine.step() if output.finish_reason}
    for i, case in enumerate(cases):
        assert list(found[str(i)]) == case["greedy_ids"][:NUM_TOKENS], case["name"]
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (memory_policy == "paged")
    assert (stats.num_swaps > 0) == (preemption in ("swap", "auto")), "computing anew costs a model of this size more"
