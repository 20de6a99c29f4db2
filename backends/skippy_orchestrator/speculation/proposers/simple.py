"""What followed the last earlier occurrence of the text's end."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.speculation.proposers.history import IndexedHistory


class SimpleProposer(IndexedHistory):
    """Looks for the longest n-gram first; one look per length."""

    name = "simple"

    def __init__(self, min_ngram: int, max_ngram: int, max_proposal: int) -> None:
        super().__init__()
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._max_proposal = max_proposal
        self._ends: dict[tuple[int, ...], int] = {}

    def _index(self, end: int) -> None:
        # The n-grams before the new token: so every end in the index has a token that follows it.
        for length in self._lengths:
            if length <= end:
                self._ends[tuple(self._tokens[end - length : end])] = end

    def _forget(self) -> None:
        self._ends.clear()

    def _propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        query = self._last(continuation, self._lengths.start)
        for length in self._lengths:
            if length > len(query):
                continue
            self.stats.candidates_examined += 1
            follower = self._ends.get(tuple(query[-length:]))
            if follower is not None:
                draft = self._tokens[follower : follower + min(limit, self._max_proposal)]
                self.stats.hit(len(draft), length)
                return draft
        return []
