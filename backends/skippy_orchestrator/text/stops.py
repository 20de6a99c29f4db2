"""Stop strings: found in decoded text wherever token boundaries fall, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string that is completed, and holds back text that could become one.

    The text ends where that stop string begins. When several are completed by the same character the one
    that begins first counts. The result doesn't depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was found; after that there is no more text."""
        if self._stopped:
            return "", True
        if not self._stops or not piece:
            return piece, False
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        shown = len(text) - self._could_begin(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What was held back; the generation has ended."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
