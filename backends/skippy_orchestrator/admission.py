"""Admission: who waits, who runs, who is refused (spec 8.9).

First come, first served. A request runs when a session place and its whole KV reservation are free; until
then it waits in a bounded queue, for a bounded time.
"""

from __future__ import annotations

from collections import OrderedDict

from skippy_stage.errors import InvalidArgument, SkippyError, Unavailable

from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.sessions import Session


class Admission:
    """The waiting line in front of the stages."""

    def __init__(self, budget: KvBudget, max_sessions: int, max_queue: int, queue_timeout_s: float) -> None:
        self._budget = budget
        self._max_sessions = max_sessions
        self._max_queue = max_queue
        self._timeout_s = queue_timeout_s
        self._waiting: OrderedDict[int, tuple[Session, float]] = OrderedDict()
        self._running = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, session: Session, now: float) -> list[Session]:
        """Queue a session; returns those that may run now, often just this one.

        Raises InvalidArgument for one that could never run and Unavailable when the queue is full.
        """
        if not self._budget.fits_ever(session.max_positions):
            raise InvalidArgument(
                "max_tokens",
                session.request.max_tokens,
                f"prompt and max_tokens of at most {self._budget.tokens} together, the KV budget of a stage",
            )
        self._waiting[session.id] = (session, now + self._timeout_s)
        admitted = self.admit()
        if session.id in self._waiting and len(self._waiting) > self._max_queue:
            del self._waiting[session.id]
            raise Unavailable(f"generation queue is full ({self._max_queue} waiting), retry later")
        return admitted

    def admit(self) -> list[Session]:
        """Take sessions from the head of the queue while there is room for them."""
        admitted: list[Session] = []
        while self._waiting and self._running < self._max_sessions:
            session, _ = next(iter(self._waiting.values()))
            if not self._budget.reserve(session.id, session.max_positions):
                break
            self._waiting.popitem(last=False)
            self._running += 1
            admitted.append(session)
        return admitted

    def release(self, session: Session) -> None:
        """A session that ran has ended."""
        self._budget.release(session.id)
        self._running -= 1

    def withdraw(self, session: int) -> bool:
        """Take a waiting session out of the queue; False when it does not wait."""
        return self._waiting.pop(session, None) is not None

    def expire(self, now: float) -> list[tuple[int, SkippyError]]:
        """Sessions that have waited too long, with the error for their clients."""
        expired: list[tuple[int, SkippyError]] = []
        while self._waiting:
            session, deadline = next(iter(self._waiting.values()))
            if deadline > now:
                break
            self._waiting.popitem(last=False)
            message = f"waited {self._timeout_s:g} s for a place, retry later"
            expired.append((session.id, Unavailable(message)))
        return expired

    def withdraw_all(self) -> list[int]:
        """Empty the queue; returns who waited."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def check_integrity(self, running: set[int]) -> None:
        """Raise AssertionError unless exactly ``running`` sessions hold places and reservations."""
        self._budget.check_integrity(running)
        assert self._running == len(running), f"{self._running} places held by {len(running)} sessions"
