"""What a stage's runtime asks of its prefix store (spec 4).

Recorded prefixes are keyed by a namespace and tokens; who recorded them does not matter. A session uses one
in two steps, since all stages have to agree on a length: ``probe`` finds what could be restored and leases
it to the session, ``restore`` lets the session's empty sequence start with it.

Invariants:

* What is leased is not evicted. A lease ends with ``release``; after ``restore`` it covers no more than what
  the session still shares with the store.
* Recording never fails for lack of room: it records less, or nothing, and counts what it dropped.
* A store takes no room that a live session needs: with shared blocks, all that is not leased can be had back.

Not thread-safe: the stage's worker owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skippy_stage.errors import SkippyError
from skippy_stage.protocol import PrefixStatus, Restorable


class PrefixStore(Protocol):
    """Prefixes of one stage. Sessions go by the ids of their sequences in the engine."""

    def probe(self, session: int, namespace: str, tokens: Sequence[int]) -> Restorable:
        """Find what of ``tokens`` could be restored and lease it to the session, in place of an earlier lease.

        The session need not be open in the engine.
        """
        ...

    def leased(self, session: int) -> tuple[int, ...]:
        """The tokens that the session's lease covers, empty without one."""
        ...

    def restore(self, session: int, length: int) -> tuple[int, ...]:
        """Let the session's open, empty sequence start with ``length`` leased positions; returns their tokens.

        The lease is then cut to what is shared. A length of 0 only gives the lease back. Raises SkippyError
        when the lease does not cover the length or the engine cannot take it; the sequence then stays empty.
        """
        ...

    def record(self, session: int, namespace: str, tokens: Sequence[int]) -> int:
        """Record the session's first ``len(tokens)`` positions, which hold ``tokens``.

        Returns how many tokens can be restored now that could not be before. Raises SkippyError for no tokens
        or more than the session has cached.
        """
        ...

    def release(self, session: int) -> None:
        """End the session's lease; a session without one is ignored."""
        ...

    def release_all(self) -> None:
        """End all leases; records stay."""
        ...

    def status(self) -> PrefixStatus:
        """What is held, and totals; the fields of the activation cache are left at 0."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if records, leases and the engine's accounting disagree."""
        ...


class NoPrefixes:
    """The PrefixStore of a stage that keeps none."""

    def probe(self, session: int, namespace: str, tokens: Sequence[int]) -> Restorable:
        """See PrefixStore; finds nothing."""
        return Restorable()

    def leased(self, session: int) -> tuple[int, ...]:
        """See PrefixStore; nothing is ever leased."""
        return ()

    def restore(self, session: int, length: int) -> tuple[int, ...]:
        """See PrefixStore; only a length of 0 is possible."""
        check_lease(session, length, 0)
        return ()

    def record(self, session: int, namespace: str, tokens: Sequence[int]) -> int:
        """See PrefixStore; records nothing."""
        return 0

    def release(self, session: int) -> None:
        """See PrefixStore."""

    def release_all(self) -> None:
        """See PrefixStore."""

    def status(self) -> PrefixStatus:
        """See PrefixStore."""
        return PrefixStatus()

    def check_integrity(self) -> None:
        """See PrefixStore."""


def check_lease(session: int, length: int, leased: int) -> None:
    """Raise SkippyError unless a lease of ``leased`` tokens covers ``length`` of them."""
    if not 0 <= length <= leased:
        raise SkippyError(f"session {session}: restore of {length} positions, {leased} are leased")


def check_record(session: int, tokens: int, cached: int) -> None:
    """Raise SkippyError unless the first ``tokens`` of a session's ``cached`` positions can be recorded."""
    if not 1 <= tokens <= cached:
        raise SkippyError(f"session {session}: record of {tokens} positions, {cached} are cached")
