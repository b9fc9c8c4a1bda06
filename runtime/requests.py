"""What the engine keeps of a request beside its sequences: randomness, texts, log-probabilities."""

from __future__ import annotations

import dataclasses

from pagegen.runtime.beam_search import BeamSearch, Hypothesis
from pagegen.runtime.detokenizer import Detokenizer
from pagegen.runtime.outputs import RequestOutput, RequestUsage
from pagegen.runtime.sampler import SampledToken, TokenLogprobs, request_seed
from pagegen.runtime.sampling_params import SamplingParams
from pagegen.runtime.sequence import FinishReason, Sequence, SequenceGroup
from pagegen.runtime.tokenizer import Tokenizer


class Choice:
    """One sequence's side: its seed, its text, what its tokens were worth."""

    def __init__(self, seed: int, detokenizer: Detokenizer | None) -> None:
        self.seed = seed
        self.detokenizer = detokenizer
        self.logprobs: list[TokenLogprobs] = []

    @property
    def mean_logprob(self) -> float:
        """By which `best_of` chooses: of all tokens, so that short and long ones compare."""
        return sum(token.logprob for token in self.logprobs) / max(len(self.logprobs), 1)


class EngineRequest:
    """A request at work. Its `n` outputs are told as they come; those of a beam search, or of `best_of` above n, only
    at the end.
    """

    def __init__(
        self, group: SequenceGroup, params: SamplingParams, tokenizer: Tokenizer | None, search: BeamSearch | None
    ) -> None:
        self.group = group
        self.params = params
        self.search = search
        self.ranks = search is not None or params.num_sequences > params.n
        # What is sampled is scored where the best are chosen by that, wanted or not.
        self.sampling = dataclasses.replace(params, logprobs=params.logprobs or 0) if self.ranks else params
        self.silent = False  # where nobody waits for the outputs
        self._tokenizer = tokenizer
        prompt = group.request.prompt_token_ids
        base = request_seed(params)
        seeded = dataclasses.replace(params, seed=base)
        self.choices = [
            Choice(request_seed(seeded, child), Detokenizer(tokenizer, prompt, params.stop) if tokenizer else None)
            for child in range(params.num_sequences)
        ]
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position; a preempted prompt is scored again
        self._left: list[Sequence] = []

    @property
    def found(self) -> bool:
        """Whether this is a beam search that is over."""
        return self.search is not None and self.search.done

    def push(self, sequence: Sequence, sampled: SampledToken) -> str:
        """Takes a sampled token in; returns the text that it makes final."""
        choice = self.choices[sequence.index]
        if sampled.logprobs:
            choice.logprobs.append(sampled.logprobs)
        if choice.detokenizer is None or sampled.token_id is None:
            return ""
        ended_by_token = sequence.finish_reason is FinishReason.STOP
        delta = "" if ended_by_token else choice.detokenizer.push(sampled.token_id)
        return delta + choice.detokenizer.flush() if sequence.finished else delta

    def stopped(self, sequence: Sequence) -> bool:
        """Whether the sequence's text has come to a stop string."""
        detokenizer = self.choices[sequence.index].detokenizer
        return detokenizer is not None and detokenizer.stopped is not None

    def update(self, sequence: Sequence, new_token_ids: tuple[int, ...], text_delta: str) -> list[RequestOutput]:
        """The output of a sequence that got a token and goes on."""
        return [] if self.ranks else [self._output(sequence, sequence.index, new_token_ids, text_delta)]

    def leave(self, sequence: Sequence, new_token_ids: tuple[int, ...], text_delta: str) -> list[RequestOutput]:
        """The outputs that are due when a sequence has left the scheduler: its own, or the best at the very end."""
        self._left.append(sequence)
        last = not self.group.live and len(self._left) == len(self.group.sequences)
        if not self.ranks:
            output = self._output(sequence, sequence.index, new_token_ids, text_delta, final=True)
            outputs = [output, *(self._missing() if last else [])]
        elif last:
            outputs = self._best()
        else:
            outputs = []
        if last:
            outputs[-1] = dataclasses.replace(outputs[-1], usage=self._usage(outputs))
        return outputs

    def _best(self) -> list[RequestOutput]:
        failed = [sequence for sequence in self._left if sequence.error is not None]
        if failed:
            return [self._output(failed[0], index, final=True) for index in range(self.params.n)]
        if self.search:
            return [
                self._found(hypothesis, index)
                for index, hypothesis in enumerate(self.search.hypotheses[: self.params.n])
            ]
        best = sorted(self._left, key=lambda s: (-self.choices[s.index].mean_logprob, s.index))[: self.params.n]
        return [
            self._output(sequence, index, tuple(sequence.output_token_ids), self._text(sequence), final=True)
            for index, sequence in enumerate(best)
        ]

    def _found(self, hypothesis: Hypothesis, index: int) -> RequestOutput:
        tokens = hypothesis.beam.tokens()
        token_ids = tuple(token.token_id for token in tokens)
        text = ""
        if self._tokenizer:
            detokenizer = Detokenizer(self._tokenizer, self.group.request.prompt_token_ids)
            for token_id in token_ids[: -1 if hypothesis.stopped else None]:
                detokenizer.push(token_id)
            detokenizer.flush()
            text = detokenizer.text
        return dataclasses.replace(
            self._output(self.group.sequences[0], index),
            token_ids=token_ids,
            new_token_ids=token_ids,
            text=text,
            text_delta=text,
            finish_reason=FinishReason.STOP if hypothesis.stopped else FinishReason.LENGTH,
            logprobs=None if self.params.logprobs is None else tokens,
            score=hypothesis.score,
        )

    def _missing(self) -> list[RequestOutput]:
        """Outputs of the sequences that there never were, as the request failed before it was forked."""
        (first, *_), count = self.group.sequences, len(self.group.sequences)
        return [self._output(first, index, final=True) for index in range(count, self.params.n)]

    def _text(self, sequence: Sequence) -> str:
        detokenizer = self.choices[sequence.index].detokenizer
        return detokenizer.text if detokenizer else ""

    def _usage(self, outputs: list[RequestOutput]) -> RequestUsage:
        group = self.group
        sampled = sum(sequence.num_tokens - group.prompt_len for sequence in group.sequences)
        found = sum(len(output.token_ids) for output in outputs)
        return RequestUsage(
            prompt_tokens=group.prompt_len,
            cached_tokens=group.num_cached_tokens,
            completion_tokens=found if self.search else sampled,
            saved_blocks=group.num_saved_blocks,
            num_preemptions=group.num_preemptions,
        )

    def _output(
        self,
        sequence: Sequence,
        index: int,
        new_token_ids: tuple[int, ...] = (),
        text_delta: str = "",
        *,
        final: bool = False,
    ) -> RequestOutput:
        logprobs = self.choices[sequence.index].logprobs
        return RequestOutput(
            request_id=self.group.request_id,
            prompt_token_ids=self.group.request.prompt_token_ids,
            index=index,
            token_ids=tuple(sequence.output_token_ids),
            new_token_ids=new_token_ids,
            text=self._text(sequence),
            text_delta=text_delta,
            finish_reason=sequence.finish_reason if final else None,
            error=sequence.error if final else None,
            logprobs=None if self.params.logprobs is None else list(logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs.values()),
            num_preemptions=self.group.num_preemptions,
        )
