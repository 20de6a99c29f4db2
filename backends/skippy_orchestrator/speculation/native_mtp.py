"""Drafts of the model's own head: the pending one, where it came from, and cooldown (spec 7.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from skippy_orchestrator.speculation.options import SpeculationOptions


class Origin(Enum):
    """Which answer a draft came with."""

    INITIAL_SERIAL = "initial_serial"
    SERIAL_AFTER_GAP = "serial_after_gap"
    VERIFY_NEXT = "verify_next"


@dataclass(frozen=True, slots=True)
class NativeDraft:
    """Tokens that the head expects behind the last prediction of an answer."""

    tokens: tuple[int, ...]
    origin: Origin


@dataclass(slots=True)
class NativeMtpCounters:
    """What the head's drafts came to."""

    drafted_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    checks: int = 0
    suppressed: int = 0
    adopted: int = 0
    """Drafts that became pending behind a window."""

    @property
    def accept_rate(self) -> float:
        """Share of checked tokens that was right; 0 without any."""
        checked = self.accepted + self.rejected
        return self.accepted / checked if checked else 0.0


class NativeMtp:
    """The pending draft of one request; at most one."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._options = options
        self._pending: NativeDraft | None = None
        self._windows_seen = False
        self._suppress_left = 0
        self.cooldown = 0
        self.counters = NativeMtpCounters()

    @property
    def pending(self) -> NativeDraft | None:
        """The draft that waits to be used."""
        return self._pending

    def take(self, remaining: int) -> NativeDraft | None:
        """Take the pending draft, cut to what one request uses and to one token less than ``remaining``."""
        pending, self._pending = self._pending, None
        if pending is None or not self._options.native_mtp:
            return None
        tokens = pending.tokens[: self._options.max_draft][: max(remaining - 1, 0)]
        return NativeDraft(tokens, pending.origin)

    def usable(self, draft: NativeDraft | None) -> tuple[int, ...]:
        """The tokens of a taken draft that is long enough to be used."""
        if draft is None or len(draft.tokens) < self._options.min_draft:
            return ()
        return draft.tokens

    def put_back(self, draft: NativeDraft | None) -> None:
        """Nothing came of a draft that was taken: it is pending again, unchanged."""
        self._pending = draft

    def check(self, drafted: Sequence[int], predicted: Sequence[int]) -> str:
        """``accepted``, ``rejected`` or ``none``: a draft against the target, up to the first difference."""
        if not drafted or not predicted:
            return "none"
        self.counters.checks += 1
        for draft, token in zip(drafted, predicted, strict=False):
            if draft != token:
                self.counters.rejected += 1
                return "rejected"
            self.counters.accepted += 1
        return "accepted"

    def serial_answer(self, token: int, draft: Sequence[int]) -> None:
        """A serial step came back with a token and a draft: the old one is checked, the new one is pending."""
        if self._pending is not None:
            self.check(self._pending.tokens[:1], [token])
            self._pending = None
        if (
            draft
            and self.cooldown > 0
            and (self._options.plan.native_mtp.suppress_cooldown_drafts or self._suppress_left)
        ):
            self.counters.suppressed += 1
            self._suppress_left = max(self._suppress_left - 1, 0)
        elif draft and self._options.native_mtp:
            origin = Origin.SERIAL_AFTER_GAP if self._windows_seen else Origin.INITIAL_SERIAL
            self._adopt(draft, origin)
        self.cooldown = max(self.cooldown - 1, 0)

    def window_answer(self) -> None:
        """A window was verified."""
        self._windows_seen = True

    def adopt(self, draft: Sequence[int]) -> None:
        """A window accepted whole came with a draft for what follows."""
        if draft and self._options.native_mtp:
            self.counters.adopted += 1
            self._adopt(draft, Origin.VERIFY_NEXT)

    def _adopt(self, draft: Sequence[int], origin: Origin) -> None:
        self.counters.drafted_tokens += len(draft)
        self._pending = NativeDraft(tuple(draft), origin)

    def drop(self) -> None:
        """What is pending no longer continues the text."""
        self._pending = None

    def rejected(self) -> None:
        """A native prefix was rejected: the head rests for a while, if the plan says so."""
        settings = self._options.plan.native_mtp
        if settings.reject_cooldown_tokens:
            self.cooldown = settings.reject_cooldown_tokens
            self._suppress_left = settings.suppress_cooldown_draft_limit
            self._pending = None
