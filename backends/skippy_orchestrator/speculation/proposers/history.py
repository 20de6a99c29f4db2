"""The committed tokens that a proposer has indexed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from skippy_orchestrator.speculation.proposers.statistics import ProposerStats

_COMPARED: Final = 8
"""Tokens before the new ones that must be what they were for a history to count as an extension."""


class IndexedHistory(ABC):
    """Base of proposers: follows a growing history, token by token, and never sees an uncommitted one."""

    name: str

    def __init__(self) -> None:
        self.stats = ProposerStats()
        self._tokens: list[int] = []

    def follow(self, history: Sequence[int]) -> None:
        """Index what is new in the committed tokens; O(1) per new token.

        A history that is no extension of the last one is indexed anew. That is recognised by its length and
        the tokens just before the new ones: comparing everything would make a step's cost grow with the text.
        """
        known = len(self._tokens)
        start = max(known - _COMPARED, 0)
        if len(history) < known or list(history[start:known]) != self._tokens[start:]:
            self._tokens.clear()
            self._forget()
            self.stats.rebuilds += 1
            known = 0
        for index in range(known, len(history)):
            self._tokens.append(history[index])
            self._index(index)
        self.stats.appended_tokens += len(history) - known

    def propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        """What may follow the history and ``continuation``, at most ``limit`` tokens; changes no index."""
        self.stats.attempts += 1
        return self._propose(continuation, limit) if limit > 0 else []

    def _last(self, continuation: Sequence[int], count: int) -> list[int]:
        """The last ``count`` tokens of history and continuation, or all of them."""
        missing = count - len(continuation)
        if missing <= 0:
            return list(continuation[-count:])
        return [*self._tokens[-missing:], *continuation]

    @abstractmethod
    def _index(self, end: int) -> None:
        """The token at position ``end`` is new, and the last."""

    @abstractmethod
    def _forget(self) -> None:
        """Begin with an empty index."""

    @abstractmethod
    def _propose(self, continuation: Sequence[int], limit: int) -> list[int]: ...
