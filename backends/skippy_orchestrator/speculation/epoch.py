"""One epoch of pipelined windows: an optimistic continuation, cut into windows that tile the positions (spec 7.6).

Between windows stands the *boundary prediction*: the token that the target predicts behind one window judges
the first token of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.speculation.compose import Proposal
from skippy_orchestrator.speculation.work import Work


class Epoch:
    """What was proposed since the epoch began, and how far it was sent and accepted."""

    def __init__(self, number: int, proposal: Proposal) -> None:
        self.number = number
        self.native = proposal.native
        self.boundary: int | None = None
        self.accepted = 0
        self._proposal = list(proposal.tokens)
        self._dispatched = 0

    @property
    def started(self) -> bool:
        """Whether any window was sent."""
        return self._dispatched > 0

    @property
    def length(self) -> int:
        """Tokens proposed so far."""
        return len(self._proposal)

    @property
    def candidates(self) -> int:
        """Tokens that were not sent yet."""
        return len(self._proposal) - self._dispatched

    @property
    def optimistic_suffix(self) -> Sequence[int]:
        """What would follow the committed text if everything is right."""
        return self._proposal[self.accepted :]

    @property
    def tail_rejected(self) -> bool:
        """An n-gram part was there, the head's part was right, and not everything was accepted."""
        accepted = min(self.accepted, self.length)
        return self.length > self.native and self.native <= accepted < self.length

    def refill(self, tokens: Sequence[int]) -> None:
        """More tokens behind the suffix."""
        self._proposal += tokens

    def next_chunk(self, width: int) -> tuple[tuple[int, ...], int]:
        """Take the next tokens, and say how many of them are the head's."""
        start = self._dispatched
        chunk = tuple(self._proposal[start : start + width])
        self._dispatched += len(chunk)
        return chunk, max(0, min(self.native - start, len(chunk)))

    def target_of(self, work: Work, predicted: Sequence[int]) -> tuple[int, ...]:
        """The predictions that judge a window's tokens, and the one behind them; fewer when verification ended early.

        Raises ValueError for an answer without predictions, or a continuation without a boundary prediction.
        """
        count = len(work.drafts)
        if not predicted:
            raise ValueError("a verify window without predictions")
        if work.starts_epoch:
            return tuple(predicted[: count + 1])
        if self.boundary is None:
            raise ValueError("a continuation without a boundary prediction")
        return (self.boundary, *predicted[:count])


def commit_of(drafts: int, commit: int, *, full: bool, dependent: bool) -> int:
    """Tokens to commit of a window: the free token stays uncommitted while other windows build on it."""
    return drafts if full and dependent else commit
