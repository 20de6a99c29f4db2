"""What a decoding session has computed, and what comes of an answer: the words that machine and session share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Path(Enum):
    """Which of the spec's decode paths a piece of work belongs to."""

    SERIAL = "serial"
    """One token (6.3)."""
    SERIAL_WINDOW = "serial_window"
    """As many inputs as drafts (7.3)."""
    VERIFY_WINDOW = "verify_window"
    """One input more than drafts, so a free token follows; one window at a time (7.4)."""
    PIPELINED = "pipelined"
    """One of several windows in flight (7.6)."""


@dataclass(slots=True)
class Work:
    """One step on its way through the stages."""

    path: Path
    pos_start: int
    """Position of the first input."""
    inputs: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    native: int = 0
    """Drafts at the front that are the model's own head's."""
    source: str = ""
    """What made the other drafts."""
    window: int = 0
    epoch: int = 0
    starts_epoch: bool = False
    sent_at: float = 0.0
    """Seconds, on the caller's clock."""
    stale: bool = False
    """Its assumptions turned out wrong: its answer will not count."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be committed of an answer, and how many of its work's inputs stand in the text with it."""

    work: Work
    commit: tuple[int, ...]
    valid_inputs: int
    full: bool = False
    """Everything was accepted, the free token (or boundary prediction) included."""
    accepted: int = 0
    rejected: bool = False
    free: int | None = None
    """The prediction behind the last draft, where there is one."""
    draft: Sequence[int] | None = ()
    """What the head drafted behind what is committed; None while that is on its way."""
