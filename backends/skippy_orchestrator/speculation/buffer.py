"""A proposal that is verified window by window, one at a time (spec 7.4)."""

from __future__ import annotations

from dataclasses import dataclass

from skippy_orchestrator.speculation.compose import Proposal


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """What a verified window did to the buffer."""

    dependent_rejected: bool
    """The free token was another one than the proposal went on with."""
    native_rejected: bool
    """A token of the head's was wrong."""
    ended: bool
    """Nothing is left of the proposal."""


class ProposalBuffer:
    """What is left of a proposal; its windows' accepted tokens add up."""

    def __init__(self) -> None:
        self._left: tuple[int, ...] = ()
        self._native_left = 0
        self._length = 0
        self._native = 0
        self.accepted = 0

    def __len__(self) -> int:
        return len(self._left)

    @property
    def tail_rejected(self) -> bool:
        """An n-gram part was there, the head's part was right, and not everything was accepted."""
        return self._length > self._native and self._native <= self.accepted < self._length

    def fill(self, proposal: Proposal) -> None:
        """Begin with a new proposal."""
        self._left = proposal.tokens
        self._length = len(proposal.tokens)
        self._native = self._native_left = proposal.native
        self.accepted = 0

    def window(self, width: int) -> tuple[tuple[int, ...], int]:
        """The next tokens to verify, and how many of them are the head's."""
        tokens = self._left[:width]
        return tokens, min(self._native_left, len(tokens))

    def verified(self, drafts: int, accepted: int, free: int | None, *, full: bool) -> BufferUpdate:
        """A window of so many tokens came back; ``full`` when all were right and the free token is committed."""
        native_before = self._native_left
        self.accepted += accepted
        if not full:
            self._clear()
            return BufferUpdate(False, accepted < native_before, True)
        rest = self._left[drafts:]
        if rest and rest[0] == free:
            self.accepted += 1
            self._native_left = max(native_before - drafts - 1, 0)
            self._left = rest[1:]
            return BufferUpdate(False, False, not self._left)
        if rest:
            self._clear()
            return BufferUpdate(True, native_before > drafts, True)
        self._clear()
        return BufferUpdate(False, False, True)

    def _clear(self) -> None:
        self._left = ()
        self._native_left = 0
