"""What of a window's predictions is committed (spec 7.3, 7.4): the rules that make greedy text the target's own.

The target decides: whatever was drafted, a committed token is always a prediction of the target.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Outcome(Enum):
    """How a window without a free token ended."""

    FULL_ACCEPT = "full_accept"
    ACCEPTED_STOP = "accepted_stop"
    TAIL_REJECT = "tail_reject"
    EARLY_REJECT = "early_reject"
    EARLY_REJECT_STOP = "early_reject_stop"

    @property
    def rejected(self) -> bool:
        """Whether a draft was wrong."""
        return self not in (Outcome.FULL_ACCEPT, Outcome.ACCEPTED_STOP)


@dataclass(frozen=True, slots=True)
class SerialDecision:
    """Of K drafts ``accepted`` were right; the first ``commit`` predictions are committed."""

    outcome: Outcome
    accepted: int
    commit: int


@dataclass(frozen=True, slots=True)
class WindowDecision:
    """The same of a window that predicts a free token behind its drafts."""

    accepted: int
    commit: int
    rejected: bool


def threshold_met(accepted: int, drafts: int, threshold: float) -> bool:
    """Whether enough of a window was accepted for the rest of it to count."""
    return drafts == 0 or threshold <= 0 or accepted == drafts or accepted / drafts >= threshold


def classify_serial(
    drafts: Sequence[int],
    predicted: Sequence[int],
    generated: int,
    max_tokens: int,
    threshold: float,
    end_tokens: Collection[int],
) -> SerialDecision:
    """Decide about drafts that were verified with as many inputs, ``generated`` tokens being committed.

    Raises ValueError when there are fewer predictions than drafts.
    """
    decision = _classify(drafts, predicted, generated, max_tokens, end_tokens)
    stops = decision.outcome in (Outcome.ACCEPTED_STOP, Outcome.EARLY_REJECT_STOP)
    if stops or threshold_met(decision.accepted, len(drafts), threshold):
        return decision
    return SerialDecision(Outcome.EARLY_REJECT, 0, 1)


def _classify(
    drafts: Sequence[int],
    predicted: Sequence[int],
    generated: int,
    max_tokens: int,
    end_tokens: Collection[int],
) -> SerialDecision:
    count = len(drafts)
    if len(predicted) < count:
        raise ValueError(f"{len(predicted)} predictions for {count} drafts")
    for i, (draft, token) in enumerate(zip(drafts, predicted, strict=False), 1):
        ends = token in end_tokens or generated + i >= max_tokens
        if draft != token:
            if i == count:
                return SerialDecision(Outcome.TAIL_REJECT, i - 1, i)
            return SerialDecision(Outcome.EARLY_REJECT_STOP if ends else Outcome.EARLY_REJECT, i - 1, i)
        if ends and i < count:
            return SerialDecision(Outcome.ACCEPTED_STOP, i, i)
    return SerialDecision(Outcome.FULL_ACCEPT, count, count)


def classify_window(
    tokens: Sequence[int],
    predicted: Sequence[int],
    generated: int,
    max_tokens: int,
    end_tokens: Collection[int],
) -> WindowDecision:
    """Decide about drafts that were verified with one input more, so a free token follows them.

    Raises ValueError when predictions end before that is decided.
    """
    for i, token in enumerate(tokens, 1):
        if i > len(predicted):
            raise ValueError("predictions ended before a decision")
        if predicted[i - 1] != token:
            return WindowDecision(i - 1, i, True)
        if token in end_tokens or generated + i >= max_tokens:
            return WindowDecision(i, i, False)
    count = len(tokens)
    if len(predicted) <= count:
        raise ValueError("predictions omitted the token behind the window")
    return WindowDecision(count, min(count + 1, max_tokens - generated), False)


def under_threshold(decision: WindowDecision, drafts: int, threshold: float) -> WindowDecision:
    """The decision when too little of a window was accepted: only the target's first token counts."""
    if threshold_met(decision.accepted, drafts, threshold):
        return decision
    return replace(decision, accepted=0, commit=1)


def split_len(tokens: int, probability: float, seed: int) -> int:
    """Where to cut a window of so many tokens: the same for the same seed, ``tokens`` for no cut (spec 7.3)."""
    if tokens <= 1 or probability <= 0:
        return tokens
    if probability >= 1:
        return 1
    for i in range(1, tokens):
        mixed = (((seed + i) & _MASK) * _GOLDEN) & _MASK
        if (mixed >> 11) / float(1 << 53) < probability:
            return i
    return tokens
