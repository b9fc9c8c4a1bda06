"""What an engine gives: outputs of requests, and numbers about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pagegen.runtime.policies import MemorySplit
from pagegen.runtime.sampler import TokenLogprobs
from pagegen.runtime.scheduling.pool import WaitReason
from pagegen.runtime.scheduling.preemption import PreemptionCosts
from pagegen.runtime.sequence import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUsage:
    """What a whole request took. `cached_tokens` of the prompt were found in the prefix cache when it was admitted;
    `completion_tokens` are those of all its sequences, with the ones that `best_of` dropped, but of a beam search only
    those of its outputs; `saved_blocks` KV blocks would have been needed more, had its sequences shared nothing with
    each other nor with the cache: of beams, when they shared the most.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    saved_blocks: int = 0
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """One of a request's `n` outputs, as it stands after a step that gave it a token or ended it.

    `index` tells the n apart. `token_ids`, `text` and `logprobs` hold everything so far, `new_token_ids` and
    `text_delta` what this step added. A stop token is in `token_ids`, not in `text`. `prompt_logprobs[i]` scores prompt
    token i + 1. Each index has exactly one output with a `finish_reason`; the request's very last output has `usage`. The
    outputs of a beam search come at its end, the best first by `score`: the sum of log-probabilities over a power of their
    length.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    index: int = 0
    token_ids: tuple[int, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    text: str = ""
    text_delta: str = ""
    score: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    usage: RequestUsage | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the present. `num_computed_tokens` counts recomputed ones again.

    `num_pinned_blocks` are kept for pinned prefixes, in use or not. `num_swaps` of the preemptions went to the host.
    `wait_reasons` says for what how many requests wait.
    `num_idle_slot_iterations` are slots that policy `request` kept for sequences that had ended. `preemption_costs` are
    what this machine was measured to do, once that was asked for.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    kv_bytes_in_use: int
    kv_bytes_peak: int
    num_swapped: int = 0
    num_swaps: int = 0
    num_deadlocks: int = 0
    num_idle_slot_iterations: int = 0
    num_cached_tokens: int = 0
    num_saved_blocks: int = 0
    num_pinned_blocks: int = 0
    wait_reasons: Mapping[WaitReason, int] = dataclasses.field(default_factory=dict)
    preemption_costs: PreemptionCosts | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Where the pool's slots were when the most blocks were in use."""

    num_used_blocks: int = 0
    split: MemorySplit = dataclasses.field(default_factory=lambda: MemorySplit(0, 0, 0, 0, 0))
