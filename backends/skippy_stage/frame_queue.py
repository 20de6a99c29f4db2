"""Frames between the thread that receives them and the worker: order, incarnations, and what must not wait.

Invariants:

* Frames of an incarnation are taken in the order 1, 2, 3, ...; a gap is refused, never waited for.
* A frame's ended sessions and live epochs count from the moment it comes in, for older queued frames too.
* Once a new incarnation has begun, nothing of an old one is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from skippy_stage.engines.base import Hidden
from skippy_stage.errors import ProtocolError
from skippy_stage.protocol import FrameHeader

R = TypeVar("R", bound=Hashable)
Tokens = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class QueuedFrame(Generic[R]):
    """A frame that was accepted, with where its result goes."""

    header: FrameHeader
    tokens: Tokens
    hidden: Hidden | None
    reply: R
    accepted_at: float


@dataclass(frozen=True, slots=True)
class Urgent:
    """What applies before any queued work."""

    incarnation: int
    """The one that counts; frames of another are skipped as a whole."""
    reset: bool
    """A new incarnation has begun: all sessions are to be freed."""
    closing: frozenset[int]
    """Sessions to be freed."""
    ended: frozenset[int]
    """Sessions whose queued steps are skipped."""
    live_epochs: dict[int, int]
    """Session -> lowest epoch whose steps still count."""


class FrameQueue(Generic[R]):
    """The frames of one stage; safe to use from both threads."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._queue: deque[QueuedFrame[R]] = deque()
        self._incarnation = 0
        self._next_frame = 1
        self._retired: set[int] = set()
        self._reset = False
        self._closing: set[int] = set()
        self._ended: set[int] = set()
        self._live_epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def incarnation(self) -> int:
        """That of the last frame that came in."""
        return self._incarnation

    @property
    def last_frame(self) -> int:
        """Number of the last frame that came in."""
        return self._next_frame - 1

    def put(self, frame: QueuedFrame[R]) -> list[R]:
        """Queue a frame, and apply at once what it says about sessions.

        Returns the reply handles of an older incarnation's frames that will never run. Raises ProtocolError
        for a late incarnation or a gap in numbers; the frame then has no effect.
        """
        header = frame.header
        dropped: list[R] = []
        with self._arrived:
            if header.incarnation != self._incarnation:
                if header.incarnation in self._retired:
                    raise ProtocolError(f"late frame {header.frame} of incarnation {header.incarnation}")
                if header.frame != 1:
                    raise ProtocolError(f"frame {header.frame} of a new incarnation, expected 1")
                dropped = self._begin_incarnation(header.incarnation)
            if header.frame != self._next_frame:
                raise ProtocolError(f"gap in frames: got {header.frame}, expected {self._next_frame}")
            self._next_frame += 1
            self._ended.update(header.ended)
            self._closing.update(header.ended)
            self._live_epochs.update(header.live_epochs)
            self._queue.append(frame)
            self._arrived.notify()
        return dropped

    def _begin_incarnation(self, incarnation: int) -> list[R]:
        if self._incarnation:
            self._retired.add(self._incarnation)
        self._incarnation = incarnation
        self._next_frame = 1
        self._reset = True
        self._ended.clear()
        self._closing.clear()
        self._live_epochs.clear()
        dropped = [frame.reply for frame in self._queue]
        self._queue.clear()
        return dropped

    def take(self, timeout: float | None = None) -> QueuedFrame[R] | None:
        """The next frame, or None after ``timeout`` seconds without one."""
        with self._arrived:
            if not self._queue and not self._arrived.wait(timeout):
                return None
            return self._queue.popleft() if self._queue else None

    def wake(self) -> None:
        """Let a waiting ``take`` return early."""
        with self._arrived:
            self._arrived.notify_all()

    def take_urgent(self) -> Urgent:
        """What has to be applied now; what is to be freed is told once."""
        with self._arrived:
            urgent = Urgent(
                self._incarnation,
                self._reset,
                frozenset(self._closing),
                frozenset(self._ended),
                dict(self._live_epochs),
            )
            self._reset = False
            self._closing.clear()
        return urgent

    def done(self, header: FrameHeader) -> None:
        """A frame was executed: nothing older can name the sessions that it ended."""
        with self._arrived:
            self._ended.difference_update(header.ended)
            for session in header.ended:
                self._live_epochs.pop(session, None)
