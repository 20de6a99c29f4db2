"""What the MTP head of the last stage sees of a frame, and the drafts that follow the frame's result.

Invariants:

* The head sees rows that are right alone: a window's up to its first wrong draft. What it has seen of a session is
  contiguous; behind a gap it neither sees nor drafts, and owes an empty draft.
* Every step that predicts, of a session that wants drafts, is answered by one draft, however the head fares.
* A fault of the head costs drafts and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from skippy_stage.engines.base import DraftRows, StageEngine
from skippy_stage.frame_queue import Tokens
from skippy_stage.protocol import Draft, HeadStatus, PrefillStep, ProposeStep, RowStep
from skippy_stage.sessions import SessionTable

log = logging.getLogger(__name__)


class HeadDrafts:
    """The head's share of one frame after the other. Not thread-safe: the stage's worker owns it."""

    def __init__(self, engine: StageEngine, sessions: SessionTable) -> None:
        self._engine = engine
        self._sessions = sessions
        self._layers = engine.info.mtp_layers
        self._rows: list[DraftRows] = []
        self._owed: dict[int, Draft] = {}
        self._drafts = self._failures = self._busy_us = 0

    @property
    def follow(self) -> bool:
        """Whether drafts follow the frame's result."""
        return bool(self._owed)

    def begin_frame(self) -> None:
        """A frame begins: what the last one left is of no use."""
        self._owed.clear()
        self._rows.clear()

    def begin_batch(self) -> None:
        """The engine runs a batch: the rows of an earlier one can no longer be seen."""
        for item in self._rows:
            self._forget(item)
        self._rows.clear()

    def saw(
        self, step: RowStep, start: int, inputs: Tokens, lookahead: Tokens, predicted: Sequence[int]
    ) -> None:
        """A step of the batch is ok: its rows begin at ``start`` in the batch, and predict what they predict."""
        session = self._sessions.get(step.session)
        if session is None or not session.drafts or isinstance(step, ProposeStep):
            return
        following = _following(step, inputs.tolist(), lookahead.tolist(), predicted)
        if predicted:
            self._owed[step.session] = Draft(
                session=step.session,
                epoch=step.epoch,
                pos_start=step.pos_start,
                position=step.pos_start + len(following) + 1,
            )
        # A window may go on from drafts that the one before it has shown to be wrong.
        goes_on = step.pos_start == session.head and session.follows in (None, int(inputs[0]))
        if following and goes_on:
            wanted = session.drafts if predicted else 0
            self._rows.append(DraftRows(step.session, step.pos_start, start, following, wanted))
            session.head = step.pos_start + len(following)
            session.follows = following[-1]

    def draft(self, threads: int) -> tuple[Draft, ...]:
        """Let the head see the frame's rows, and draft; never raises for a fault of the head."""
        rows = [item for item in self._rows if self._sessions.get(item.sequence) is not None]
        self._rows.clear()
        if rows:
            started = time.monotonic()
            try:
                drafted = self._engine.draft(rows, threads=threads)
            except Exception:
                log.exception("the MTP head failed; its sessions go on without these drafts")
                self._failures += 1
                for item in rows:
                    self._forget(item)
            else:
                self._note(rows, drafted)
            self._busy_us += round((time.monotonic() - started) * 1e6)
        drafts = tuple(self._owed.values())
        self._owed.clear()
        return drafts

    def status(self) -> HeadStatus:
        """Totals since the stage started."""
        return HeadStatus(
            layers=self._layers, drafts=self._drafts, failures=self._failures, busy_us=self._busy_us
        )

    def _note(self, rows: Sequence[DraftRows], drafted: Sequence[tuple[int, ...]]) -> None:
        for item, tokens in zip(rows, drafted, strict=True):
            owed = self._owed.get(item.sequence)
            if tokens and owed is not None:
                self._drafts += len(tokens)
                self._owed[item.sequence] = Draft(
                    session=owed.session,
                    epoch=owed.epoch,
                    pos_start=owed.pos_start,
                    position=owed.position,
                    tokens=tokens,
                )

    def _forget(self, item: DraftRows) -> None:
        session = self._sessions.get(item.sequence)
        if session is not None:
            session.head, session.follows = min(session.head, item.past), None


def _following(
    step: RowStep, inputs: list[int], lookahead: list[int], predicted: Sequence[int]
) -> Sequence[int]:
    """For each row that is right, from the first on, the token that follows it."""
    if isinstance(step, PrefillStep):
        return [*inputs[1:], *(predicted[:1] if predicted else lookahead[:1])]
    right = 1
    while right < len(inputs) and predicted[right - 1] == inputs[right]:
        right += 1
    return predicted[:right]
