"""Offline generation: a list of prompts in, a list of outputs in the same order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagegen.errors import ConfigError, RequestError
from pagegen.kernel import PagedKernels
from pagegen.runtime.engine import EngineConfig, RequestOutput
from pagegen.runtime.engine_config import KV_DTYPES
from pagegen.runtime.quantised import WEIGHT_DTYPES
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.scheduler import DEFAULT_MAX_NUM_SEQS, Preemption
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.tokenizer import Message
from pagegen.spec import FLOATS, DType


class LLM:
    """A model with an engine of its own.

    `model` is a MODEL word: a Hugging Face folder, a .gguf file, a short name or `dummy:NAME`. `kernels` is a kernel
    package's folder, or any PagedKernels; None takes the user's cached package (of `block_size`, if one is given) or builds
    the default config. The limits are those of EngineConfig. Raises ModelError, PackageError, BuildError or ConfigError for what cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        kernels: PagedKernels | str | Path | None = None,
        dtype: str | DType = DType.BF16,
        kv_dtype: str | DType | None = None,
        weight_dtype: str | DType | None = None,
        block_size: int | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        policy: str = "default",
        memory_policy: str = "paged",
        preemption: str | Preemption = Preemption.RECOMPUTE,
        swap_bytes: int | None = None,
        prefix_cache: bool = True,
        deterministic: bool = False,
    ) -> None:
        if dtype not in FLOATS:
            raise ConfigError(f"dtype={dtype!r} is not known; allowed: {', '.join(FLOATS)}; change dtype")
        if kv_dtype is not None and kv_dtype not in tuple(DType):
            raise ConfigError(f"kv_dtype={kv_dtype!r} is not known; allowed: {', '.join((*FLOATS, *KV_DTYPES))}")
        if weight_dtype is not None and weight_dtype not in WEIGHT_DTYPES:
            raise ConfigError(f"weight_dtype={weight_dtype!r} is not known; allowed: {', '.join(WEIGHT_DTYPES)}")
        if preemption not in tuple(Preemption):
            raise ConfigError(f"preemption={preemption!r} is not known; allowed: {', '.join(Preemption)}")
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            dtype=DType(dtype),
            kv_dtype=DType(kv_dtype) if kv_dtype else None,
            weight_dtype=DType(weight_dtype) if weight_dtype else None,
            policy=policy,
            memory_policy=memory_policy,
            preemption=Preemption(preemption),
            swap_bytes=swap_bytes,
            prefix_cache=prefix_cache,
            deterministic=deterministic,
        )
        from pagegen.runtime.launcher import launch  # brings the compiler along

        package = Path(kernels) if isinstance(kernels, str) else kernels
        launched = launch(model, package, config, block_size)
        self.tokenizer, self.engine = launched.tokenizer, launched.engine
        self._request_ids = map(str, itertools.count())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts (texts or lists of token ids) as one continuous batch; their outputs in order.

        That is one for each prompt, or `n` where its params ask for more. A prompt that cannot be served has its error in its place, and the others are done. `params` is one for all or
        one each. Raises RequestError if their number differs.
        """
        each = [prompts] if isinstance(prompts, str) else prompts
        return self._run([partial(self._encode, prompt) for prompt in each], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template; otherwise as `generate`."""
        each: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run([partial(self.tokenizer.encode_chat, conversation) for conversation in each], params)

    def pin_prefix(self, prefix: str | Sequence[int]) -> None:
        """Computes a text or token ids now, and keeps the KV of its full blocks for all prompts that begin so, until
        `unpin_prefix`. Raises RequestError or ConfigError for one that cannot be kept.
        """
        self.engine.pin_prefix(self._encode(prefix))
        while self.engine.has_work:
            self.engine.step()

    def unpin_prefix(self, prefix: str | Sequence[int]) -> None:
        """Takes one `pin_prefix` of the same prefix back. Raises ConfigError if there is none."""
        self.engine.unpin_prefix(self._encode(prefix))

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"prompt {prompt!r} is neither a text nor a list of token ids", "prompt")
        return list(prompt)

    def _run(
        self, prompts: Sequence[Callable[[], list[int]]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        params = params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(each)} params; give one SamplingParams for all, or one each", "params"
            )
        request_ids = [next(self._request_ids) for _ in prompts]
        outputs: dict[tuple[str, int], RequestOutput] = {}
        try:
            for request_id, prompt, options in zip(request_ids, prompts, each, strict=True):
                token_ids: list[int] = []
                try:
                    token_ids = prompt()
                    self.engine.add_request(request_id, token_ids, options)
                except RequestError as error:
                    failed = RequestOutput(
                        request_id, tuple(token_ids), finish_reason=FinishReason.ERROR, error=str(error)
                    )
                    outputs |= {(request_id, i): dataclasses.replace(failed, index=i) for i in range(options.n)}
            while self.engine.has_work:
                ended = [output for output in self.engine.step() if output.finish_reason]
                outputs |= {(output.request_id, output.index): output for output in ended}
        finally:
            for request_id in request_ids:  # an interrupt leaves nothing running
                self.engine.abort(request_id)
        return [
            outputs[request_id, index]
            for request_id, options in zip(request_ids, each, strict=True)
            for index in range(options.n)
        ]
