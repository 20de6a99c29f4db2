"""Sending: spans on their way to clients, by threads of their own.

A send blocks for a fraction of a millisecond, so neither the core nor a reader ever sends. What is
committed while a stream's last span is being sent is merged into its next one: a slow client costs no
memory beyond its own text and delays nobody.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from dataclasses import dataclass, replace
from typing import Protocol

from skippy_stage.errors import SkippyError

from skippy_orchestrator.prefix.outcome import CacheStats
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sessions import Commit
from skippy_orchestrator.speculation.counters import SpeculationCounters

log = logging.getLogger(__name__)

_UNSENT = SkippyError("orchestrator: a response could not be sent")


@dataclass(frozen=True, slots=True)
class Span:
    """What one response says. ``error`` or a ``finish_reason`` makes it the last one."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    error: SkippyError | None = None
    cache: CacheStats | None = None
    """With the last span of a generation that finished."""
    speculation: SpeculationCounters | None = None
    """With the last span of a generation that finished."""

    @property
    def final(self) -> bool:
        """Nothing follows."""
        return bool(self.finish_reason) or self.error is not None


class Sink(Protocol):
    """Where a request's responses go."""

    def send(self, request: GenerationRequest, span: Span) -> None:
        """Send one response; may block. Called by one thread at a time, never after a final span."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or is gone."""
        ...


class OutputStream:
    """One request's responses: what waits to be sent, and whether somebody is at it."""

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self._lock = threading.Lock()
        self._pending: list[Span] = []
        self._scheduled = False
        self._held: list[Span] = []
        self.broken = False
        """A response could not be sent; the session is to be ended."""

    def add(self, span: Span) -> bool:
        """Add a span; True when a sender must be told."""
        with self._lock:
            if self.broken:
                return False
            if not self.request.stream and not span.final:
                self._held.append(span)
                return False
            self._pending.append(span)
            scheduled, self._scheduled = self._scheduled, True
            return not scheduled

    def break_off(self) -> None:
        """A response was lost: nothing may follow it as if all were well, and the session is of no use."""
        with self._lock:
            self.broken = True
            self._pending.clear()

    def take(self) -> Span | None:
        """All that waits as one span; None when nothing does, and the stream is then unscheduled."""
        with self._lock:
            if not self._pending:
                self._scheduled = False
                return None
            spans = self._held + self._pending
            self._held, self._pending = [], []
        return merge(spans)


def merge(spans: list[Span]) -> Span:
    """Consecutive spans as one; linear in their size."""
    if len(spans) == 1:
        return spans[0]
    tokens = tuple(token for span in spans for token in span.tokens)
    return replace(spans[-1], tokens=tokens, text="".join(span.text for span in spans))


def span_of(commit: Commit) -> Span:
    """The span that says what was committed."""
    return Span(
        commit.tokens,
        commit.text,
        commit.finish_reason,
        cache=commit.cache,
        speculation=commit.speculation,
    )


class Senders:
    """A few threads that send what streams have waiting; each stream's spans stay in order."""

    def __init__(self, threads: int = 4) -> None:
        self._waiting: queue.SimpleQueue[OutputStream | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, stream: OutputStream, span: Span) -> None:
        """Hand over a span; never blocks."""
        if stream.add(span):
            self._waiting.put(stream)

    def stop(self, timeout: float) -> None:
        """Send what waits, then end the threads; gives up on a blocked send after ``timeout`` s each."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (stream := self._waiting.get()) is not None:
            self._send_next(stream)
        # A send that was under way when the end came has put its stream behind the marks of the end.
        marks = 0
        while not self._waiting.empty():
            try:
                left = self._waiting.get_nowait()
            except queue.Empty:
                break
            if left is None:
                marks += 1
            else:
                self._send_next(left)
        for _ in range(marks):
            self._waiting.put(None)

    def _send_next(self, stream: OutputStream) -> None:
        span = stream.take()
        if span is None:
            return
        try:
            stream.sink.send(stream.request, span)
        except Exception:
            log.exception("a response could not be sent")
            stream.break_off()
            with contextlib.suppress(Exception):
                stream.sink.send(stream.request, Span(error=_UNSENT))
        self._waiting.put(stream)
