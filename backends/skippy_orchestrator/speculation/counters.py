"""What speculation did for one request, and how requests add up (spec 7.3 to 7.6, 13.3 row 20)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from skippy_orchestrator.speculation.classify import Outcome, SerialDecision, WindowDecision
from skippy_orchestrator.speculation.native_mtp import NativeMtpCounters
from skippy_orchestrator.speculation.windows import WindowStats

POSITIONS = 16
"""Positions of a window that are told apart; later ones count with the last."""


@dataclass(slots=True)
class Proposed:
    """Tokens that were verified, and those of them that were right."""

    tokens: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Share that was right; 0 without any."""
        return self.accepted / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class SpeculationCounters:
    """Counters with the spec's names; stale windows are in none of them but ``stale_windows``."""

    serial_steps: int = 0
    serial_windows: int = 0
    """Windows without a free token (spec 7.3)."""
    verify_windows: int = 0
    """Windows one at a time with a free token (spec 7.4)."""
    pipelined_windows: int = 0
    stale_windows: int = 0
    window_tokens: int = 0
    """Tokens that windows committed, the target's own included."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    """Drafts that were right and are in the text, whatever became of the rest of their window."""
    accepted_tokens: int = 0
    """As the spec counts: those of a pipelined window only when it was accepted whole."""
    rejected_tokens: int = 0
    full_accept_windows: int = 0
    accepted_stop_windows: int = 0
    rejected_windows: int = 0
    early_reject_windows: int = 0
    tail_reject_windows: int = 0
    early_reject_stop_windows: int = 0
    first_reject_position_sum: int = 0
    dependent_rejects: int = 0
    """Free tokens that were not what a buffered proposal continued with (spec 7.4)."""
    tail_rejects: int = 0
    """Proposals whose n-gram part was rejected behind an accepted native part."""
    rests: int = 0
    """How often a proposer was rested because it did not pay."""
    draft_s: float = 0.0
    """Seconds in which nothing was sent because drafts of a head or a draft model were waited for."""
    verify_s: float = 0.0
    """Seconds from sending a window to its answer, of all windows."""
    native_mtp: NativeMtpCounters = field(default_factory=NativeMtpCounters)
    in_flight: WindowStats = field(default_factory=WindowStats)
    by_source: dict[str, Proposed] = field(default_factory=dict)
    by_position: list[Proposed] = field(default_factory=list)

    @property
    def windows(self) -> int:
        """Windows that were verified, of all paths."""
        return self.serial_windows + self.verify_windows + self.pipelined_windows

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per window: its accepted drafts and the target's own token; 0 without any."""
        return self.window_tokens / self.windows if self.windows else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that was right; 0 without any."""
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def stale_share(self) -> float:
        """Share of the windows that came back stale; 0 without any."""
        total = self.windows + self.stale_windows
        return self.stale_windows / total if total else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Everything by name, for an operator."""
        return {
            **asdict(self),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "stale_share": self.stale_share,
        }

    def count_drafts(self, source: str, drafts: int, accepted: int) -> None:
        """A window with drafts of one source was verified: the first ``accepted`` of them were right.

        What lies behind the first wrong one was never judged.
        """
        self.draft_tokens += drafts
        self.accepted_draft_tokens += accepted
        of = self.by_source.setdefault(source, Proposed())
        of.tokens += drafts
        of.accepted += accepted
        for position in range(min(accepted + 1, drafts)):
            index = min(position, POSITIONS - 1)
            while len(self.by_position) <= index:
                self.by_position.append(Proposed())
            self.by_position[index].tokens += 1
            self.by_position[index].accepted += position < accepted

    def count_serial_window(self, decision: SerialDecision) -> None:
        """A window of spec 7.3 was decided."""
        self.serial_windows += 1
        self.accepted_tokens += decision.accepted
        outcome = decision.outcome
        self.full_accept_windows += outcome is Outcome.FULL_ACCEPT
        self.accepted_stop_windows += outcome is Outcome.ACCEPTED_STOP
        if outcome.rejected:
            self.rejected_tokens += 1
            self.rejected_windows += 1
            self.first_reject_position_sum += decision.commit
            self.tail_reject_windows += outcome is Outcome.TAIL_REJECT
            self.early_reject_windows += outcome is not Outcome.TAIL_REJECT
            self.early_reject_stop_windows += outcome is Outcome.EARLY_REJECT_STOP

    def count_pipelined_window(self, drafts: int, decision: WindowDecision, *, full: bool) -> None:
        """A window of spec 7.6 was decided; an accepted end inside it counts as a rejection there."""
        self.pipelined_windows += 1
        accepted = decision.accepted
        if full:
            self.accepted_tokens += accepted
            self.full_accept_windows += 1
        else:
            self.rejected_tokens += max(drafts - accepted, 1)
            self.rejected_windows += 1
            self.early_reject_windows += accepted + 1 < drafts
            self.first_reject_position_sum += accepted + 1

    def add(self, other: SpeculationCounters) -> None:
        """Add what another request did."""
        _add(self, other)


def _add(to: Any, what: Any) -> None:
    """Add field by field: numbers, tables and lists of numbers or of further counters; highest values stay highest."""
    for each in fields(to):
        mine, theirs = getattr(to, each.name), getattr(what, each.name)
        if each.name.startswith("max_"):
            setattr(to, each.name, max(mine, theirs))
        elif isinstance(mine, int | float):
            setattr(to, each.name, mine + theirs)
        elif isinstance(mine, dict):
            for key, value in theirs.items():
                _add(mine.setdefault(key, type(value)()), value)
        elif isinstance(mine, list):
            _add_lists(mine, theirs)
        else:
            _add(mine, theirs)


def _add_lists(mine: list[Any], theirs: list[Any]) -> None:
    for index, value in enumerate(theirs):
        if index == len(mine):
            mine.append(type(value)())
        if is_dataclass(value):
            _add(mine[index], value)
        else:
            mine[index] += value
