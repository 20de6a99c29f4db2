"""What most often followed the text's last few tokens, token by token (spec 7.8, *cache*)."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.speculation.proposers.history import IndexedHistory

MAX_NGRAM = 4


class _Followers:
    """Counts of the tokens that followed one n-gram, and the most frequent of them."""

    __slots__ = ("best", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.best = -1

    def add(self, token: int) -> None:
        """One more; of equally frequent ones the most recent is the best."""
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if count >= self.counts.get(self.best, 0):
            self.best = token


class CacheProposer(IndexedHistory):
    """Drafts by the longest n-gram that was ever followed by anything, then goes on behind the draft."""

    name = "cache"

    def __init__(self, min_ngram: int, max_ngram: int, max_proposal: int) -> None:
        super().__init__()
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._max_proposal = max_proposal
        self._followers: dict[tuple[int, ...], _Followers] = {}

    def _index(self, end: int) -> None:
        token = self._tokens[end]
        for length in self._lengths:
            if length <= end:
                ngram = tuple(self._tokens[end - length : end])
                self._followers.setdefault(ngram, _Followers()).add(token)

    def _forget(self) -> None:
        self._followers.clear()

    def _propose(self, continuation: Sequence[int], limit: int) -> list[int]:
        query = self._last(continuation, self._lengths.start)
        draft: list[int] = []
        longest = 0
        while len(draft) < min(limit, self._max_proposal):
            found = self._follower(query)
            if found is None:
                break
            token, length = found
            longest = max(longest, length)
            draft.append(token)
            query = [*query[1 - self._lengths.start :], token] if self._lengths.start > 1 else [token]
        if draft:
            self.stats.hit(len(draft), longest)
        return draft

    def _follower(self, query: Sequence[int]) -> tuple[int, int] | None:
        for length in self._lengths:
            if length <= len(query):
                self.stats.candidates_examined += 1
                followers = self._followers.get(tuple(query[-length:]))
                if followers is not None:
                    return followers.best, length
        return None
