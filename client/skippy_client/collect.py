"""Watches one generation's chunks: their order, their times, their sum. No network, no clock."""

from __future__ import annotations

from skippy_client.errors import ServerFault
from skippy_client.types import Chunk, Generation, Timings


class Collector:
    """Checks that exactly one chunk is the last, and puts the answer together.

    Times are seconds on any clock that only goes forward.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._first: float | None = None
        self._ended: float | None = None
        self._last: Chunk | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._output_tokens = 0

    @property
    def finished(self) -> bool:
        """Whether the last chunk has come."""
        return self._ended is not None

    def add(self, chunk: Chunk, now: float) -> None:
        """Take the next chunk; raises ServerFault for one after the last."""
        if self._ended is not None:
            raise ServerFault("the server sent a response after the last one")
        if self._first is None and chunk.num_output_tokens:
            self._first = now
        if chunk.finish_reason:
            self._ended = now
        self._last = chunk
        self._texts.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        self._output_tokens += chunk.num_output_tokens

    def end(self) -> None:
        """Take the end of the stream; raises ServerFault when it came before the last chunk."""
        if self._ended is None:
            raise ServerFault("the stream ended before the answer did: no response had a finish_reason")

    def result(self) -> Generation:
        """The whole answer, once finished."""
        self.end()
        assert self._last is not None
        assert self._ended is not None
        # An answer without tokens has no first one: its end is the first that was heard.
        first = self._ended if self._first is None else self._first
        return Generation(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._last.finish_reason,
            num_input_tokens=self._last.num_input_tokens,
            num_output_tokens=self._output_tokens,
            seed=self._last.seed,
            timings=Timings(first - self._started, self._ended - self._started),
            cached_tokens=self._last.cached_tokens,
            cache_stats=self._last.cache_stats,
            total_draft_tokens=self._last.total_draft_tokens,
            total_accepted_draft_tokens=self._last.total_accepted_draft_tokens,
        )
