"""An engine on a scripted model, for the tests of engine and server that say exactly what is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pagegen.kernel import PagedKernels
from pagegen.reference import ReferenceKernels
from pagegen.runtime.batch import Batch
from pagegen.runtime.engine import Engine, EngineConfig, RequestOutput
from pagegen.runtime.kv_cache import KVCache
from pagegen.runtime.models import CausalLM
from pagegen.runtime.models.config import ModelConfig
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import Preemption
from pagegen.runtime.scheduling.events import SchedulerEvent
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import DType

TINY = resolve_model("dummy:tiny")
EOS = TINY.config.eos_token_ids[0]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class ScriptedModel:
    """Its next token is `script(position, token)`; the cache is not touched."""

    def __init__(self, script: Callable[[int, int], int | float]) -> None:
        self.config: ModelConfig = dataclasses.replace(TINY.config, max_position_embeddings=64)
        self.dtype = DType.FP32
        self.deterministic = False
        self.script = script

    def forward(self, batch: Batch, kv_cache: KVCache, kernels: PagedKernels) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_rows), self.config.vocab_size)
        for row, token in enumerate(batch.logits_rows.tolist()):
            chosen = self.script(int(batch.positions[token]), int(batch.input_ids[token]))
            if isinstance(chosen, float):
                logits[row] = chosen
            else:
                logits[row, chosen] = 9.0
        return logits


def counting(position: int, token: int) -> int:
    """a -> b -> c: the next byte."""
    return (token + 1) % 256


def make_engine(
    model: CausalLM | None = None,
    *,
    block_size: int = 4,
    num_blocks: int = 32,
    max_num_seqs: int = 8,
    budget: int | None = 32,
    max_model_len: int | None = None,
    tokenizer: Tokenizer | None = None,
    policy: str = "default",
    memory_policy: str = "paged",
    preemption: str = "recompute",
    prefix_cache: bool = True,
    recorder: Callable[[SchedulerEvent], None] | None = None,
) -> Engine:
    model = model or ScriptedModel(counting)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        dtype=DType.FP32,
        policy=policy,
        memory_policy=memory_policy,
        preemption=Preemption(preemption),
        prefix_cache=prefix_cache,
    )
    kernels = ReferenceKernels(model.config.kernel_spec(DType.FP32, block_size))
    return Engine(model, kernels, tokenizer or TINY.tokenizer(), config, recorder)


def finish(engine: Engine, max_steps: int = 500) -> dict[str, RequestOutput]:
    """Runs to the end, and gives the outputs of index 0; `finish_all` gives all."""
    return {request_id: output for (request_id, index), output in finish_all(engine, max_steps).items() if not index}


def finish_all(engine: Engine, max_steps: int = 500) -> dict[tuple[str, int], RequestOutput]:
    """Runs to the end; checks each output's stream against its last one, that each request has exactly one usage, and
    that the pool is whole again.
    """
    done: dict[tuple[str, int], RequestOutput] = {}
    streamed: dict[tuple[str, int], tuple[list[int], str]] = {}
    ended: set[str] = set()
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            key = output.request_id, output.index
            tokens, text = streamed.get(key, ([], ""))
            streamed[key] = (tokens + list(output.new_token_ids), text + output.text_delta)
            assert key not in done and output.request_id not in ended
            if output.finish_reason:
                done[key] = output
            if output.usage:
                ended.add(output.request_id)
        engine.memory.audit(full=True)
    stats = engine.stats()
    assert (
        not engine.has_work
        and stats.num_running == stats.num_waiting == stats.num_used_blocks == stats.kv_bytes_in_use == 0
        and stats.num_swapped == 0
        and not stats.wait_reasons
    )
    assert ended == {request_id for request_id, _ in done}
    for key, output in done.items():
        tokens, text = streamed[key]
        if tokens == list(output.token_ids):  # outputs before this call are not seen here
            assert text == output.text
    return done


def run_one(engine: Engine, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
    token_ids = prompt if isinstance(prompt, list) else TINY.tokenizer().encode(prompt)
    engine.add_request("one", token_ids, params)
    return finish(engine)["one"]
