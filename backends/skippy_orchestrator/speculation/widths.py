"""How wide the next window is: widths that follow acceptance (spec 7.3, 7.4)."""

from __future__ import annotations

from skippy_orchestrator.speculation.classify import Outcome, SerialDecision

_SERIAL_START = 4
_VERIFY_START = 2


class SerialWidth:
    """Tokens that a draft model or n-grams may propose at depth 1: grows with acceptance, shrinks with rejection."""

    def __init__(self, speculative_window: int, *, adaptive: bool) -> None:
        self._max = max(speculative_window, 1)
        self._adaptive = adaptive
        self.current = min(self._max, _SERIAL_START) if adaptive else self._max
        self.total = 0
        self.least = 0
        self.most = 0
        self.grown = 0
        self.shrunk = 0

    def update(self, decision: SerialDecision) -> None:
        """A window of the current width was decided."""
        self.total += self.current
        self.least = self.current if self.least == 0 else min(self.least, self.current)
        self.most = max(self.most, self.current)
        if not self._adaptive:
            return
        match decision.outcome:
            case Outcome.FULL_ACCEPT | Outcome.TAIL_REJECT:
                if self.current < self._max:
                    self.current += 1
                    self.grown += 1
            case Outcome.EARLY_REJECT:
                smaller = max(self.current - 1, decision.commit, 1)
                if smaller < self.current:
                    self.current = smaller
                    self.shrunk += 1
            case _:
                pass


class VerifyWidth:
    """Tokens of a window with a free token at depth 1."""

    def __init__(self, least: int, most: int) -> None:
        self._min = max(least, 1)
        self._max = max(most, self._min)
        self.current = max(min(self._max, _VERIFY_START), self._min)

    def update(self, *, full: bool) -> None:
        """A window was accepted whole with its free token, or not."""
        if full:
            self.current = min(self.current + 1, self._max)
        else:
            self.current = max(self.current - 1, self._min)
