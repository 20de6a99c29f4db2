"""What followed the longest earlier occurrence of the text's end (spec 7.8, *suffix*)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skippy_orchestrator.speculation.proposers.history import IndexedHistory

_MAX_SEED: Final = 8
_MAX_CANDIDATES: Final = 64
_LEAST_DRAFT: Final = 4
_COPY: Final = 8
"""Tokens in a row that make a copy, which one other token does not end."""


class SuffixProposer(IndexedHistory):
    """Finds candidates by their last few tokens, most recent first, and keeps the longest match.

    With ``resume`` a copy is also followed past a token that differs, as in an edit, or one that was left out:
    where no suffix matches, what followed in its source is proposed. That is not in the spec.
    """

    name = "suffix"

    def __init__(self, min_match: int, window: int, max_proposal: int, *, resume: bool = False) -> None:
        super().__init__()
        self._min_match = min_match
        self._window = window
        self._max_proposal = max_proposal
        self._seed = min(min_match, _MAX_SEED)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._resume = resume
        self._source = 0
        """Where the next token would be copied from; 0 when nothing is being copied."""
        self._copied = 0
        """Tokens in a row that came from before there."""

    def _index(self, end: int) -> None:
        if end + 1 >= self._seed:
            self._ends.setdefault(tuple(self._tokens[end + 1 - self._seed : end + 1]), []).append(end)
        if self._source:
            self._compare(end)

    def _compare(self, end: int) -> None:
        """Whether the new token goes on with the copy."""
        token, source = self._tokens[end], self._source
        if token == self._tokens[source]:
            self._source, self._copied = source + 1, self._copied + 1
        elif self._copied < _COPY:
            self._source = self._copied = 0
        else:
            left_out = source + 1 < end and token == self._tokens[source + 1]
            self._source, self._copied = source + 1 + left_out, 0

    def _forget(self) -> None:
        self._ends.clear()
        self._source = self._copied = 0

    def _propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        query = self._last(continuation, max(self._window, self._min_match))
        if len(query) < self._min_match:
            return []
        best = best_end = examined = 0
        for end in reversed(self._ends.get(tuple(query[-self._seed :]), ())):
            if end + 1 >= len(self._tokens):
                continue
            examined += 1
            match = self._match(query, end)
            if match > best:
                best, best_end = match, end
            if best >= self._window or examined >= _MAX_CANDIDATES:
                break
        self.stats.candidates_examined += examined
        if best < self._min_match:
            return [] if continuation else self._resumed(limit)
        if self._resume and not continuation and self._source != best_end + 1:
            self._source, self._copied = best_end + 1, best
        count = min(limit, self._max_proposal, max(2 * best, _LEAST_DRAFT))
        draft = self._tokens[best_end + 1 : best_end + 1 + count]
        self.stats.hit(len(draft), best)
        return draft

    def _resumed(self, limit: int) -> list[int]:
        """The source of a copy, behind the place where one token differed."""
        if not self._source:
            return []
        draft = self._tokens[self._source : self._source + min(limit, self._max_proposal, _COPY)]
        self.stats.hit(len(draft), self._copied)
        return draft

    def _match(self, query: Sequence[int], end: int) -> int:
        """How many tokens back from ``end`` equal the end of the query, at most the window."""
        most = min(self._window, end + 1, len(query))
        length = 0
        while length < most and self._tokens[end - length] == query[-1 - length]:
            length += 1
        return length
