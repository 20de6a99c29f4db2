"""The text of one generation: tokens in, text that is safe to show out."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.text.detokenizer import Detokenizer
from skippy_orchestrator.text.stops import StopMatcher
from skippy_orchestrator.text.tokenizer import TextModel


class TextStream:
    """Detokenizer and stop strings in a row."""

    def __init__(self, model: TextModel, stop_words: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(model.token_bytes)
        self._stops = StopMatcher(stop_words)

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is safe to show after this token, and whether a stop string ended it."""
        return self._stops.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """What is left when the generation ends without a stop string."""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text if stopped else text + self._stops.flush()
