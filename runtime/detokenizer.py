"""From sampled tokens to text that may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagegen.runtime.tokenizer import Tokenizer


class StopChecker:
    """Cuts a text that comes in pieces at the first stop string, whatever the pieces.

    The match that is complete first wins; of several complete at the same character the longest. Text that may still
    turn out to begin a stop string is held back; text after the match is dropped.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes a piece and returns what is safe to show by now."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(begin + len(stop), begin, stop) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if found:
            _, begin, self.matched = min(found)
            self._held = ""
            return text[:begin]
        held = self._open_suffix(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """The text of one sequence's output: `push` tokens, and `flush` once when it ends for another reason than a stop.

    `text` is everything returned so far, so a streamed answer equals one that is sent at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream(prompt_ids)
        self._checker = StopChecker(stop)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._checker.matched

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str:
        """The text that this token makes final, perhaps none."""
        return self._emit(self._checker.push(self._decoder.push(token_id)))

    def flush(self) -> str:
        """The rest. A half character becomes U+FFFD, which a stop string may still match; a second flush is empty."""
        return self._emit(self._checker.push(self._decoder.flush()) + self._checker.flush())

    def _emit(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
