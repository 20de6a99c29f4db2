"""When n-grams rest: a proposer whose drafts are wrong costs rows and brings nothing (design.md, back-off).

Not in the spec. The output does not depend on it; only which windows are tried.
"""

from __future__ import annotations

from typing import Final

_ALPHA: Final = 0.25
_PAYS: Final = 0.35
"""Accepted tokens per window from which windows pay: what their extra rows cost, in decode steps."""
_START: Final = 1.0
"""As if earlier windows had each brought a token: a few misses in a row are needed to rest."""
_FIRST_REST: Final = 8
_LONGEST_REST: Final = 128


class BackOff:
    """Rests a proposer by tokens: longer each time that a trial after a rest does not pay either."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._gain = _START
        self._next_rest = _FIRST_REST
        self._resting_until = 0
        self.rests = 0

    def rests_at(self, generated: int) -> bool:
        """Whether the proposer is not to be asked with so many tokens generated."""
        return generated < self._resting_until

    def update(self, accepted: int, generated: int) -> None:
        """A window with drafts of the proposer had so many right, ``generated`` tokens being there after it."""
        if not self._enabled:
            return
        self._gain += _ALPHA * (accepted - self._gain)
        if self._gain >= _PAYS:
            if accepted:
                self._next_rest = _FIRST_REST
            return
        self.rests += 1
        self._resting_until = generated + self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        # One window after the rest decides: a single miss is below what pays, a hit is above.
        self._gain = _PAYS
