"""Requests in, tokens out: one `step` is one iteration of the model over whatever the scheduler put together."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence

import torch

from pagegen.errors import ConfigError, KernelError, PagegenError, RequestError
from pagegen.kernel import PagedKernels
from pagegen.runtime.batch import Batch, prompt_logprob_positions
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.detokenizer import Detokenizer
from pagegen.runtime.kv_cache import KVCache, block_bytes
from pagegen.runtime.models import CausalLM
from pagegen.runtime.sampler import SampledToken, TokenLogprobs, request_seed, sample, token_logprobs
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
)
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.sequence import Sequence as RunningSequence
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.spec import DType

DEFAULT_KV_CACHE_BYTES = 2**30

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine; raises ConfigError for values that serve nobody.

    `max_model_len` bounds the positions that are computed, None being the model's own limit; the last sampled token is
    not computed, so a prompt of exactly that length gets one token. The KV pool has `num_blocks` blocks, or as many as
    fit into `kv_cache_bytes` (1 GiB if neither is given), but no more than `max_num_seqs` full-length sequences fill.
    `dtype` is that of weights, activations and cache.
    """

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_model_len: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    dtype: DType = DType.BF16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive whole number; change {name}")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_bytes both size the KV pool; give one of them")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as it stands after a step that gave it a token or ended it.

    `token_ids`, `text` and `logprobs` hold everything so far, `new_token_ids` and `text_delta` what this step added.
    A stop token is in `token_ids`, not in `text`. `prompt_logprobs[i]` scores prompt token i + 1.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    text: str = ""
    text_delta: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the present. `num_computed_tokens` counts recomputed ones again."""

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


class _Request:
    """What the engine keeps of a request beside its sequence: randomness, text, log-probabilities."""

    def __init__(self, sequence: RunningSequence, detokenizer: Detokenizer | None) -> None:
        self.sequence = sequence
        self.seed = request_seed(sequence.params)
        self.detokenizer = detokenizer
        self.prompt_token_ids = tuple(sequence.prompt_token_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position; a preempted prompt is scored again

    def push(self, token_id: int) -> str:
        """The text that a sampled token makes final; marks the sequence stopped if it completes a stop string."""
        if self.detokenizer is None:
            return ""
        ended_by_token = self.sequence.finish_reason is FinishReason.STOP
        delta = "" if ended_by_token else self.detokenizer.push(token_id)
        if self.sequence.finished:
            delta += self.detokenizer.flush()
        return delta

    def output(self, new_token_ids: tuple[int, ...] = (), text_delta: str = "") -> RequestOutput:
        sequence, params = self.sequence, self.sequence.params
        return RequestOutput(
            request_id=sequence.request_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(sequence.output_token_ids),
            new_token_ids=new_token_ids,
            text=self.detokenizer.text if self.detokenizer else "",
            text_delta=text_delta,
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            logprobs=None if params.logprobs is None else list(self.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else list(self.prompt_logprobs.values()),
            num_preemptions=sequence.num_preemptions,
        )


class Engine:
    """Serves one model. Not thread-safe: one thread owns it, as the server's worker does.

    Raises KernelError if the kernels are not for this model, ConfigError if the limits do not fit it.
    """

    def __init__(
        self, model: CausalLM, kernels: PagedKernels, tokenizer: Tokenizer | None, config: EngineConfig
    ) -> None:
        _check_fit(model, kernels, config)
        model_limit = model.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > model_limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the model's {model_limit} positions; lower max_model_len"
            )
        self.model = model
        self.kernels = kernels
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len or model_limit
        num_blocks = _num_blocks(config, kernels, model.config.num_layers, self.max_model_len)
        self.kv_cache = KVCache(kernels.spec, model.config.num_layers, num_blocks)
        self.block_manager = BlockManager(num_blocks, kernels.spec.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens), self.block_manager
        )
        self._eos_token_ids = frozenset(model.config.eos_token_ids) | frozenset(
            tokenizer.eos_token_ids if tokenizer else ()
        )
        self._requests: dict[str, _Request] = {}
        self._arrivals = itertools.count()
        self._num_steps = self._num_computed_tokens = self._num_generated_tokens = self._peak_blocks = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.scheduler.has_work

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queues a request. Raises RequestError for one that is malformed or could never finish in this engine."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another", "request_id")
        self._check_prompt(prompt_token_ids)
        params.validate_for(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this engine has none; use stop_token_ids", "stop")
        sequence = RunningSequence(
            next(self._arrivals),
            request_id,
            prompt_token_ids,
            params,
            max_num_tokens=min(len(prompt_token_ids) + params.max_tokens, self.max_model_len + 1),
            stop_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self._eos_token_ids),
        )
        self.scheduler.add(sequence)
        detokenizer = Detokenizer(self.tokenizer, prompt_token_ids, params.stop) if self.tokenizer else None
        self._requests[request_id] = _Request(sequence, detokenizer)

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, without an output, and frees what it holds; False for an id that is not at work."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.finish(request.sequence, FinishReason.ABORT)
        return True

    def step(self) -> list[RequestOutput]:
        """Runs one iteration; returns the requests that got a token or ended.

        A request whose own logits are unusable ends with `error`. If the whole iteration fails, every request in it
        does: it cannot be told whose fault it is, and the others go on.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled.rows:
            return []
        self._num_steps += 1
        self._num_computed_tokens += scheduled.num_tokens
        self._peak_blocks = max(self._peak_blocks, self.block_manager.num_used_blocks)
        try:
            sampled = iter(self._execute(scheduled))
        except (PagegenError, RuntimeError) as error:  # RuntimeError is what torch raises, out of memory included
            logger.exception("an iteration over %d requests failed", len(scheduled.rows))
            outcomes = [SampledToken(None, error=f"the iteration failed: {error}") for _ in scheduled.rows]
            return self._record(scheduled, outcomes)
        return self._record(scheduled, [next(sampled) if row.completes else None for row in scheduled.rows])

    def stats(self) -> EngineStats:
        used, size = self.block_manager.num_used_blocks, self.kv_cache.block_bytes
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=self.block_manager.num_blocks,
            num_used_blocks=used,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_generated_tokens=self._num_generated_tokens,
            kv_bytes_in_use=used * size,
            kv_bytes_peak=self._peak_blocks * size,
        )

    # --- inside a step -----------------------------------------------------------------------------------------------

    def _execute(self, scheduled: ScheduledBatch) -> list[SampledToken]:
        """Runs the model; one outcome for each row that completes, in order."""
        with torch.inference_mode():
            self.kv_cache.copy_blocks(self.kernels, scheduled.copies)
            batch = Batch.from_scheduled(scheduled, self.block_manager)
            logits = self.model.forward(batch, self.kv_cache, self.kernels)
            sampling = [row.sequence for row in scheduled.rows if row.completes]
            self._score_prompts(scheduled, logits[len(sampling) :])
            return sample(
                logits[: len(sampling)],
                [sequence.params for sequence in sampling],
                [sequence.num_tokens for sequence in sampling],
                [self._requests[sequence.request_id].seed for sequence in sampling],
            )

    def _score_prompts(self, scheduled: ScheduledBatch, logits: torch.Tensor) -> None:
        scored = [(row.sequence, position) for row in scheduled.rows for position in prompt_logprob_positions(row)]
        if not scored:
            return
        targets = torch.tensor(
            [sequence.token_ids[position + 1] for sequence, position in scored], device=logits.device
        )
        counts = [sequence.params.prompt_logprobs or 0 for sequence, _ in scored]
        for (sequence, position), found in zip(scored, token_logprobs(logits, targets, counts), strict=True):
            self._requests[sequence.request_id].prompt_logprobs[position] = found

    def _record(self, scheduled: ScheduledBatch, outcomes: Sequence[SampledToken | None]) -> list[RequestOutput]:
        """Brings the outcome of each row (None: a chunk of a prompt) into scheduler, texts and outputs."""
        for row, outcome in zip(scheduled.rows, outcomes, strict=True):
            if outcome and outcome.error:
                self.scheduler.finish(row.sequence, FinishReason.ERROR, outcome.error)
        self.scheduler.update(scheduled, [outcome.token_id if outcome else None for outcome in outcomes])
        pairs = zip(scheduled.rows, outcomes, strict=True)
        return [self._output(row.sequence, outcome) for row, outcome in pairs if outcome]

    def _output(self, sequence: RunningSequence, outcome: SampledToken) -> RequestOutput:
        request = self._requests[sequence.request_id]
        new_token_ids: tuple[int, ...] = ()
        delta = ""
        if outcome.token_id is not None:
            self._num_generated_tokens += 1
            new_token_ids = (outcome.token_id,)
            if outcome.logprobs:
                request.logprobs.append(outcome.logprobs)
            delta = request.push(outcome.token_id)
            if request.detokenizer and request.detokenizer.stopped is not None:
                self.scheduler.finish(sequence, FinishReason.STOP)
                sequence.finish_reason = FinishReason.STOP  # also where this token was the last one allowed
        if sequence.finished:
            del self._requests[sequence.request_id]
        return request.output(new_token_ids, delta)

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
    needed = model.config.kernel_spec(model.dtype, kernels.spec.block_size, kernels.spec.kv_layout)
    if kernels.spec != needed:
        raise KernelError(
            f"the kernels compute {kernels.spec.slug}, the model needs {needed.slug}; run `pagegen tune {needed.slug}`"
        )


def _num_blocks(config: EngineConfig, kernels: PagedKernels, num_layers: int, max_model_len: int) -> int:
    """Raises ConfigError if not a single block fits."""
    if config.num_blocks is not None:
        return config.num_blocks
    size = block_bytes(kernels.spec, num_layers)
    budget = config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
    if budget < size:
        raise ConfigError(
            f"kv_cache_bytes={budget} holds no KV block of {size} bytes; raise kv_cache_bytes or lower the block size"
        )
    useful = config.max_num_seqs * -(-max_model_len // kernels.spec.block_size)
    return min(budget // size, useful)
