"""Exact prefixes: the whole state after a recorded length, exported as bytes (spec 4.1, 4.8).

For engines whose state cannot be cut. Only recorded lengths can be restored, and only the length that a session
has reached can be recorded.

Invariants:

* A lease covers the states that its probe found, until the restore; nothing is shared after it.
* A state that the engine refuses as none of its own is removed: it would be refused again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from skippy_stage.engines.base import ExactState, StateMismatch
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.states import State, StateShelf
from skippy_stage.prefix.store import check_lease, check_record
from skippy_stage.protocol import PrefixStatus, Restorable

log = logging.getLogger(__name__)


class ExactPrefixes:
    """PrefixStore of exported states; ``payload`` is what its status calls it."""

    def __init__(self, engine: ExactState, shelf: StateShelf, *, payload: str = "full-state") -> None:
        self._engine = engine
        self._shelf = shelf
        self._payload = payload
        self._leases: dict[int, list[State]] = {}
        self._lookups = self._hits = self._restored = self._recorded = self._dropped = 0

    def probe(self, session: int, namespace: str, tokens: Sequence[int]) -> Restorable:
        """See PrefixStore."""
        self.release(session)
        found = self._shelf.find(namespace, tuple(tokens))
        self._lookups += 1
        if not found:
            return Restorable(0, ())
        self._hits += 1
        for state in found:
            state.leases += 1
        self._leases[session] = found
        lengths = tuple(len(state.tokens) for state in found)
        return Restorable(lengths[-1], lengths)

    def leased(self, session: int) -> tuple[int, ...]:
        """See PrefixStore; the tokens of the longest state."""
        return max((state.tokens for state in self._states(session)), key=len, default=())

    def restore(self, session: int, length: int) -> tuple[int, ...]:
        """See PrefixStore; a length between recorded ones cannot be restored."""
        check_lease(session, length, len(self.leased(session)))
        tokens: tuple[int, ...] = ()
        if length:
            state = next((state for state in self._states(session) if len(state.tokens) == length), None)
            if state is None:
                raise SkippyError(f"session {session}: no state of {length} positions is leased")
            self._load(session, state)
            tokens = state.tokens
            self._restored += length
        self.release(session)
        return tokens

    def record(self, session: int, namespace: str, tokens: Sequence[int]) -> int:
        """See PrefixStore; records nothing unless the session has exactly these positions."""
        path = tuple(tokens)
        cached = self._engine.cached(session)
        check_record(session, len(path), cached)
        if self._shelf.has(namespace, path):
            return 0
        if cached != len(path) or not self._shelf.put(namespace, path, self._engine.export(session)):
            self._dropped += 1
            return 0
        self._recorded += len(path)
        return len(path)

    def release(self, session: int) -> None:
        """See PrefixStore."""
        for state in self._leases.pop(session, ()):
            state.leases -= 1

    def release_all(self) -> None:
        """See PrefixStore."""
        for session in list(self._leases):
            self.release(session)

    def status(self) -> PrefixStatus:
        """See PrefixStore."""
        return PrefixStatus(
            payload=self._payload,
            entries=len(self._shelf),
            tokens=self._shelf.tokens,
            bytes=self._shelf.bytes,
            leases=len(self._leases),
            lookups=self._lookups,
            hits=self._hits,
            restored_tokens=self._restored,
            recorded_tokens=self._recorded,
            evicted=self._shelf.evicted,
            dropped=self._dropped,
        )

    def check_integrity(self) -> None:
        """See PrefixStore."""
        self._shelf.check_integrity(chain.from_iterable(self._leases.values()))

    def _states(self, session: int) -> list[State]:
        """What the session has leased, but for what had to be removed since."""
        return [state for state in self._leases.get(session, ()) if self._shelf.holds(state)]

    def _load(self, session: int, state: State) -> None:
        try:
            self._engine.load(session, state.payload, len(state.tokens))
        except StateMismatch as error:
            log.warning("a recorded state of %d tokens is removed: %s", len(state.tokens), error.message)
            self._shelf.remove(state)
            raise
