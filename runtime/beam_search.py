"""Beam search: which beams go on, which outputs have ended, and when the search is over.

The rules are those of transformers' `generate(num_beams=k)` (`_beam_search` in its generation/utils.py, version 5.24).
In each step the likeliest tokens of all beams are ranked together by the sum of log-probabilities. Of the first k, those
that end, by a stop token or because no more are allowed, become outputs, of which the k best are kept; the first k that
do not end are the next beams. An output's score is its sum over (its tokens ** length_penalty).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pagegen.runtime.sampler import SampledToken, TokenLogprobs
from pagegen.runtime.sampling_params import SamplingParams

TopLogprobs = Sequence[tuple[int, float]]  # of one row: (token, log-probability), the likeliest first


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Output tokens, told by the last of them and by the beam that it was added to; `score` sums log-probabilities."""

    score: float = 0.0
    length: int = 0
    newest: TokenLogprobs | None = None
    parent: Beam | None = None

    def tokens(self) -> list[TokenLogprobs]:
        """First to last."""
        found, beam = list[TokenLogprobs](), self
        while beam.newest and beam.parent:
            found.append(beam.newest)
            beam = beam.parent
        return found[::-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended; `score` is what outputs are compared by, `stopped` says that a stop token ended it."""

    beam: Beam
    score: float
    stopped: bool


class BeamSearch:
    """One request's search. Its beams are the request's sequences, by index; `hypotheses` are the best outputs so far.

    `num_beams` live together: as many as are wanted, or as the vocabulary has tokens to go on with. Each row needs its
    `num_candidates` likeliest tokens in `advance`: then those of the k best that do not end are among them.
    """

    def __init__(
        self, params: SamplingParams, stop_token_ids: frozenset[int], max_output_tokens: int, vocab_size: int
    ) -> None:
        self.params = params
        self.width = params.beam_width or 1
        num_stops = sum(token < vocab_size for token in stop_token_ids)
        self.num_beams = min(self.width, max(vocab_size - num_stops, 1))
        self.num_candidates = min(max(self.width + num_stops, params.logprobs or 0), vocab_size)
        self.hypotheses: list[Hypothesis] = []
        self.done = False
        self._stop_token_ids = stop_token_ids
        self._max_output_tokens = max_output_tokens
        self._beams = [Beam()]

    def advance(self, rows: Sequence[TopLogprobs]) -> list[tuple[SampledToken, ...]]:
        """One step: `rows[i]` are the candidates of beam i. What each row gives, as the scheduler takes it.

        At first there is one row, which gives a token for each beam. Later the best child of a beam takes its place;
        beams without a child are replaced by what is left, whose `parent` says where they come from. Nothing at all
        when the search is `done`.
        """
        ranked = sorted(
            ((beam.score + row[place][1], i, place) for i, (beam, row) in enumerate(zip(self._beams, rows, strict=True))
             for place in range(self.num_candidates)),
            key=lambda candidate: -candidate[0],
        )  # fmt: skip
        length = self._beams[0].length + 1
        children = list[tuple[int, Beam]]()
        for rank, (score, parent, place) in enumerate(ranked):
            token_id = rows[parent][place][0]
            stopped = token_id in self._stop_token_ids
            if stopped or length == self._max_output_tokens:
                if rank < self.width:
                    beam = self._child(score, parent, rows[parent], place)
                    self.hypotheses.append(Hypothesis(beam, self._normalized(score, length), stopped))
            elif len(children) < self.num_beams:
                children.append((parent, self._child(score, parent, rows[parent], place)))
            elif rank >= self.width:
                break
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]
        self.done = not children or (len(self.hypotheses) == self.width and not self._improves(children[0][1]))
        return [()] * len(rows) if self.done else self._settle(children, len(rows))

    def _child(self, score: float, parent: int, row: TopLogprobs, place: int) -> Beam:
        token_id, logprob = row[place]
        rank = 1 + sum(other > logprob for _, other in row[:place])
        entry = TokenLogprobs(token_id, logprob, rank, tuple(row[: self.params.logprobs or 0]))
        return Beam(score, self._beams[parent].length + 1, entry, self._beams[parent])

    def _normalized(self, score: float, length: int) -> float:
        return float(score / length**self.params.length_penalty)

    def _improves(self, best: Beam) -> bool:
        """Whether an output of the best beam may yet be among those that are kept, as far as early_stopping asks."""
        if self.params.early_stopping is True:
            return False
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self._max_output_tokens if longest else best.length
        return self._normalized(best.score, length) > self.hypotheses[-1].score

    def _settle(self, children: Sequence[tuple[int, Beam]], num_rows: int) -> list[tuple[SampledToken, ...]]:
        """Gives every child a place among the beams."""
        if num_rows == 1:
            self._beams = [beam for _, beam in children]
            return [tuple(_sampled(beam, 0) for beam in self._beams)]
        first = dict(reversed(children))  # of each parent its best child
        spare = iter([i for i in range(num_rows) if i not in first])
        places = {parent if first[parent] is beam else next(spare): (parent, beam) for parent, beam in children}
        self._beams = [places[i][1] for i in range(num_rows)]
        return [(_sampled(places[i][1], places[i][0]),) for i in range(num_rows)]


def _sampled(beam: Beam, parent: int) -> SampledToken:
    return SampledToken(beam.newest.token_id if beam.newest else None, parent=parent)
