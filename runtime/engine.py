"""Requests in, tokens out: one `step` is one iteration of the model over whatever the scheduler put together."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from pagegen.errors import ConfigError, KernelError, PagegenError, RequestError
from pagegen.kernel import PagedKernels
from pagegen.runtime.batch import Batch, prompt_logprob_positions
from pagegen.runtime.beam_search import BeamSearch
from pagegen.runtime.calibrate import measure_costs
from pagegen.runtime.engine_config import EngineConfig
from pagegen.runtime.kv_cache import KVCache, block_bytes
from pagegen.runtime.models import CausalLM
from pagegen.runtime.outputs import EngineStats, MemoryPeak, RequestOutput
from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.requests import EngineRequest
from pagegen.runtime.sampler import SampledToken, sample, token_logprobs, top_logprobs, unusable
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import (
    PreemptionCosts,
    ScheduledBatch,
    ScheduledSequence,
    Scheduler,
    Transfer,
    TransferKind,
)
from pagegen.runtime.scheduling import find_policy
from pagegen.runtime.scheduling.events import Branch, Sampled, SchedulerEvent
from pagegen.runtime.sequence import FinishReason, GroupStatus, Request
from pagegen.runtime.sequence import Sequence as RunningSequence
from pagegen.runtime.tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig", "EngineStats", "RequestOutput"]

logger = logging.getLogger(__name__)


class Engine:
    """Serves one model. Not thread-safe: one thread owns it, as the server's worker does.

    `recorder` is told all that the scheduler is told. `seconds` adds up where the time of steps went: schedule, move,
    batch, model, sample, record. Raises KernelError if the kernels are not for this model,
    ConfigError if the limits do not fit it.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: PagedKernels,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        recorder: Callable[[SchedulerEvent], None] | None = None,
    ) -> None:
        _check_fit(model, kernels, config)
        model_limit = model.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > model_limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the model's {model_limit} positions; lower max_model_len"
            )
        self.config = config
        self.model = model
        self.kernels = kernels
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len or model_limit
        num_layers, spec = model.config.num_layers, kernels.spec
        num_blocks = config.pool_blocks(spec, num_layers, self.max_model_len)
        num_host_blocks = config.num_host_blocks(num_blocks, block_bytes(spec, num_layers))
        self.kv_cache = KVCache(spec, num_layers, num_blocks)
        self.memory = make_memory_policy(
            config.memory_policy,
            num_blocks,
            spec.block_size,
            max_model_len=self.max_model_len,
            prefix_cache=config.prefix_cache and find_policy(config.policy).prefix_cache,
            num_host_blocks=num_host_blocks,
        )
        self.swap_space = KVCache(spec, num_layers, num_host_blocks) if num_host_blocks else None
        self.scheduler = Scheduler(
            config.scheduler(self.max_model_len),
            self.memory,
            costs=self._measure_costs if self.swap_space else None,
            recorder=recorder,
        )
        self.peak = MemoryPeak()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lapped = 0.0
        self._eos_token_ids = frozenset(model.config.eos_token_ids) | frozenset(
            tokenizer.eos_token_ids if tokenizer else ()
        )
        self._requests: dict[str, EngineRequest] = {}
        self._num_steps = self._num_computed_tokens = self._num_generated_tokens = 0
        self._num_cached_tokens = self._num_saved_blocks = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queues a request. Raises RequestError for one that is malformed or could never finish in this engine.

        A lower `priority` number goes first under policy `default`. Requests with different salts share no cached KV.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another", "request_id")
        self._check_prompt(prompt_token_ids)
        params.validate_for(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this engine has none; use stop_token_ids", "stop")
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        room = min(params.max_tokens, self.max_model_len + 1 - len(prompt_token_ids))
        search = BeamSearch(params, stops, room, self.model.config.vocab_size) if params.beam_search else None
        group = self.scheduler.add(
            Request(
                request_id,
                tuple(prompt_token_ids),
                len(prompt_token_ids) + room,
                num_sequences=search.num_beams if search else params.num_sequences,
                beams=search is not None,
                stop_token_ids=stops,
                priority=priority,
                salt=cache_salt,
                score_prompt=params.prompt_logprobs is not None,
            )
        )
        self._requests[request_id] = EngineRequest(group, params, self.tokenizer, search)

    def pin_prefix(self, token_ids: list[int], *, cache_salt: str = "") -> None:
        """Keeps the KV of a prefix's full blocks until `unpin_prefix`, for every request of that salt which begins so.

        A request of its own, which has no output, computes them in the next iterations. Requests that wait and will
        never fit beside them end with that reason. Raises RequestError for a prefix that could not be computed, and
        ConfigError where nothing is cached or what is left of the pool would be too little for a request at work.
        """
        request_id = f"pin-{uuid.uuid4().hex}"
        self.add_request(request_id, token_ids, SamplingParams(max_tokens=1, temperature=0), cache_salt=cache_salt)
        try:
            self.scheduler.pin(token_ids, cache_salt)
        except ConfigError:
            self.abort(request_id)
            raise
        self._requests[request_id].silent = True

    def unpin_prefix(self, token_ids: list[int], *, cache_salt: str = "") -> None:
        """Takes one `pin_prefix` of the same tokens back. Raises ConfigError if there is none."""
        self.scheduler.unpin(token_ids, cache_salt)

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, without an output, and frees what it holds; False for an id that is not at work."""
        if self._requests.pop(request_id, None) is None:
            return False
        return self.scheduler.end(request_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Runs one iteration; returns the outputs that got a token or ended.

        A request whose own logits are unusable ends with `error`. If the whole iteration fails, every request in it
        does: it cannot be told whose fault it is, and the others go on.
        """
        self._lapped = time.perf_counter()
        scheduled = self.scheduler.schedule()
        self._lap("schedule")
        if not scheduled.rows:
            return self._outputs({})
        self._num_steps += 1
        self._num_computed_tokens += scheduled.num_tokens
        if self.memory.num_used_blocks > self.peak.num_used_blocks:
            self.peak = MemoryPeak(self.memory.num_used_blocks, self.memory.split())
        try:
            outcomes = self._execute(scheduled)
        except (PagegenError, RuntimeError) as error:  # RuntimeError is what torch raises, out of memory included
            logger.exception("an iteration over %d sequences failed", len(scheduled.rows))
            self._fail(scheduled, f"the iteration failed: {error}")
            outcomes = [()] * len(scheduled.rows)
        outputs = self._record(scheduled, outcomes)
        self._lap("record")
        return outputs

    def stats(self) -> EngineStats:
        scheduler, used, size = self.scheduler, self.memory.num_used_blocks, self.kv_cache.block_bytes
        pool = scheduler.pool
        return EngineStats(
            num_running=len(pool.running),
            num_waiting=len(pool.waiting),
            num_blocks=self.memory.num_blocks,
            num_used_blocks=used,
            num_preemptions=pool.num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_generated_tokens=self._num_generated_tokens,
            kv_bytes_in_use=used * size,
            kv_bytes_peak=self.peak.num_used_blocks * size,
            num_swapped=sum(group.status is GroupStatus.SWAPPED for group in pool.preempted),
            num_swaps=pool.num_swaps,
            num_deadlocks=scheduler.num_deadlocks,
            num_idle_slot_iterations=scheduler.policy.num_idle_slot_iterations,
            num_cached_tokens=self._num_cached_tokens,
            num_saved_blocks=self._num_saved_blocks,
            num_pinned_blocks=self.memory.num_pinned_blocks,
            wait_reasons=scheduler.wait_reasons(),
            preemption_costs=scheduler.preemption_costs,
        )

    def _measure_costs(self) -> PreemptionCosts:
        if self.swap_space is None:
            raise RuntimeError("there is no swap space to measure")
        return measure_costs(self.model, self.kernels, self.kv_cache, self.swap_space)

    # --- inside a step -----------------------------------------------------------------------------------------------

    def _execute(self, scheduled: ScheduledBatch) -> list[tuple[SampledToken, ...]]:
        """Runs the model; what each row sampled, in order."""
        with torch.inference_mode():
            for transfer in scheduled.transfers:
                self._move(transfer)
            self._lap("move")
            batch = Batch.from_scheduled(scheduled, self.memory)
            self._lap("batch")
            logits = self.model.forward(batch, self.kv_cache, self.kernels)
            self._lap("model")
            completed = [row for row in scheduled.rows if row.completes]
            self._score_prompts(scheduled, logits[len(completed) :])
            chosen = iter(self._choose(completed, logits[: len(completed)]))
            self._lap("sample")
            return [next(chosen) if row.completes else () for row in scheduled.rows]

    def _lap(self, phase: str) -> None:
        """What has passed since the last lap was this phase of a step."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._lapped
        self._lapped = now

    def _move(self, transfer: Transfer) -> None:
        match transfer.kind:
            case TransferKind.COPY:
                self.kv_cache.copy_blocks(self.kernels, transfer.pairs)
            case TransferKind.SWAP_OUT if self.swap_space:
                self.swap_space.copy_from(self.kv_cache, transfer.pairs)
            case TransferKind.SWAP_IN if self.swap_space:
                self.kv_cache.copy_from(self.swap_space, transfer.pairs)

    def _choose(self, completed: Sequence[ScheduledSequence], logits: torch.Tensor) -> list[tuple[SampledToken, ...]]:
        """What each completed row gives, from its logits [R, V]: a sample or several, or what a beam search makes of it."""
        beams = [i for i, row in enumerate(completed) if row.sequence.group.request.beams]
        if not beams:
            return self._sample(completed, logits)
        others = [i for i, row in enumerate(completed) if not row.sequence.group.request.beams]
        found = dict(zip(beams, self._search([completed[i] for i in beams], logits[beams]), strict=True))
        found |= zip(others, self._sample([completed[i] for i in others], logits[others]), strict=True)
        return [found[i] for i in range(len(completed))]

    def _search(self, completed: Sequence[ScheduledSequence], logits: torch.Tensor) -> list[tuple[SampledToken, ...]]:
        """A step of every beam search: the beams of a group are all there, in order of their index."""
        errors = unusable(logits)
        searches = [search for row in completed if (search := self._requests[row.sequence.group.request_id].search)]
        outcomes = list[tuple[SampledToken, ...]]()
        for search, rows in itertools.groupby(range(len(completed)), key=searches.__getitem__):
            beams = list(rows)
            if errors.keys().isdisjoint(beams):
                outcomes += search.advance(top_logprobs(logits[beams], search.num_candidates))
            else:
                outcomes += [(SampledToken(None, error=errors[i]),) if i in errors else () for i in beams]
        return outcomes

    def _sample(self, completed: Sequence[ScheduledSequence], logits: torch.Tensor) -> list[tuple[SampledToken, ...]]:
        """One token for each completed row, or several where the group is forked: from the same logits."""
        if any(row.num_samples > 1 for row in completed):
            counts = torch.tensor([row.num_samples for row in completed], device=logits.device)
            logits = logits.repeat_interleave(counts, 0)
        params, positions, seeds = list[SamplingParams](), list[int](), list[int]()
        for row in completed:
            request, first = self._requests[row.sequence.group.request_id], row.sequence.index
            for choice in request.choices[first : first + row.num_samples]:
                params.append(request.sampling)
                positions.append(row.sequence.num_tokens)
                seeds.append(choice.seed)
        samples = iter(sample(logits, params, positions, seeds))
        return [tuple(islice(samples, row.num_samples)) for row in completed]

    def _score_prompts(self, scheduled: ScheduledBatch, logits: torch.Tensor) -> None:
        scored = [(row.sequence, position) for row in scheduled.rows for position in prompt_logprob_positions(row)]
        if not scored:
            return
        targets = torch.tensor(
            [sequence.token_ids[position + 1] for sequence, position in scored], device=logits.device
        )
        requests = [self._requests[sequence.group.request_id] for sequence, _ in scored]
        counts = [request.params.prompt_logprobs or 0 for request in requests]
        found = token_logprobs(logits, targets, counts)
        for request, (_, position), logprobs in zip(requests, scored, found, strict=True):
            request.prompt_logprobs[position] = logprobs

    def _fail(self, scheduled: ScheduledBatch, error: str) -> None:
        """Ends what an iteration that failed may have spoilt: its rows, and if blocks were on the move all that has any."""
        groups = {row.sequence.group: None for row in scheduled.rows}
        if scheduled.transfers:
            groups |= dict.fromkeys([*self.scheduler.running, *self.scheduler.pool.preempted])
        for group in groups:
            self.scheduler.end(group.request_id, FinishReason.ERROR, error)

    def _record(self, scheduled: ScheduledBatch, outcomes: Sequence[tuple[SampledToken, ...]]) -> list[RequestOutput]:
        """Brings what each row sampled into scheduler, texts and outputs."""
        for row, samples in zip(scheduled.rows, outcomes, strict=True):
            if error := next((token.error for token in samples if token.error), None):
                self.scheduler.end(row.sequence.group.request_id, FinishReason.ERROR, error)
        self.scheduler.update(scheduled, list(map(_sampled, scheduled.rows, outcomes)))
        news: dict[RunningSequence, tuple[tuple[int, ...], str]] = {}
        for row, samples in zip(scheduled.rows, outcomes, strict=True):
            group = row.sequence.group
            if group.request.beams:
                if self._requests[group.request_id].found:
                    self.scheduler.end(group.request_id, FinishReason.STOP)
                continue
            sequences = group.sequences if len(samples) > 1 else (row.sequence,)
            for sequence, sampled in zip(sequences, samples, strict=False):
                if sequence.error is None and sampled.token_id is not None:
                    news[sequence] = self._take_in(sequence, sampled)
        return self._outputs(news)

    def _take_in(self, sequence: RunningSequence, sampled: SampledToken) -> tuple[tuple[int, ...], str]:
        """A sampled token becomes text, and perhaps the end."""
        request = self._requests[sequence.group.request_id]
        self._num_generated_tokens += 1
        delta = request.push(sequence, sampled)
        if request.stopped(sequence):
            self.scheduler.finish_sequence(sequence, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP  # also where this token was the last one allowed
        return ((sampled.token_id,) if sampled.token_id is not None else ()), delta

    def _outputs(self, news: dict[RunningSequence, tuple[tuple[int, ...], str]]) -> list[RequestOutput]:
        """Outputs of the sequences that got a token, then of others that ended or were let go."""
        left = dict.fromkeys(self.scheduler.take_released())
        outputs: list[RequestOutput] = []
        for sequence in (*news, *(gone for gone in left if gone not in news)):
            request = self._requests.get(sequence.group.request_id)
            if request is None or request.group is not sequence.group:  # aborted
                continue
            new_token_ids, delta = news.get(sequence, ((), ""))
            tell = request.leave if sequence in left else request.update
            told = tell(sequence, new_token_ids, delta)
            outputs += [] if request.silent else told
            if told and (usage := told[-1].usage):
                self._num_cached_tokens += request.group.num_cached_tokens
                self._num_saved_blocks += request.group.num_saved_blocks
                self._num_generated_tokens += usage.completion_tokens if request.search else 0
                del self._requests[sequence.group.request_id]
        return outputs

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError for a prompt that is empty, too long, or not made of this model's tokens."""
        vocab_size, length = self.model.config.vocab_size, len(token_ids)
        if not length:
            raise RequestError("the prompt has no tokens; send at least one", "prompt")
        if length > self.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens, max_model_len is {self.max_model_len}; shorten the prompt", "prompt"
            )
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"token id {token!r} is not in the vocabulary; allowed: 0 to {vocab_size - 1}", "prompt"
                )


def _check_fit(model: CausalLM, kernels: PagedKernels, config: EngineConfig) -> None:
    if not model.dtype is kernels.spec.dtype is config.dtype:
        raise ConfigError(
            f"model {model.dtype}, kernels {kernels.spec.dtype} and config {config.dtype} differ; give all one dtype"
        )
    if config.deterministic and not model.deterministic:
        raise ConfigError("the config is deterministic, the model is not; build it with deterministic=True")
    found = kernels.spec
    needed = config.kernel_spec(model.config, found.block_size)
    needed = needed.replace(layout=found.kv_layout, deterministic=config.deterministic or found.deterministic)
    if kernels.spec != needed:
        raise KernelError(
            f"the kernels compute {kernels.spec.slug}, the model needs {needed.slug}; run `pagegen tune {needed.slug}`"
        )


def _sampled(row: ScheduledSequence, samples: tuple[SampledToken, ...]) -> Sampled:
    """What a row sampled, as the scheduler takes it; a row with an error has ended."""
    ids = tuple(token.token_id for token in samples if token.token_id is not None)
    if len(ids) != 1:
        return ids or None
    parent = samples[0].parent
    return ids[0] if parent is None or parent == row.sequence.index else Branch(parent, ids[0])
