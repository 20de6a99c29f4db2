"""What an answer to a window is worth: predictions judge drafts, and everything is counted (spec 7.3 to 7.6)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skippy_orchestrator.speculation.classify import (
    classify_serial,
    classify_window,
    threshold_met,
    under_threshold,
)
from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.epoch import Epoch, commit_of
from skippy_orchestrator.speculation.options import SpeculationOptions
from skippy_orchestrator.speculation.sources import NATIVE_MTP, DraftSources
from skippy_orchestrator.speculation.widths import SerialWidth
from skippy_orchestrator.speculation.work import Answer, Work


class Judge:
    """Judges the windows of one request; ``generated`` is what is committed before the answer.

    All methods raise ValueError for an answer that does not fit its window.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        counters: SpeculationCounters,
        sources: DraftSources,
        max_tokens: int,
        end_tokens: Collection[int],
    ) -> None:
        self.serial_width = SerialWidth(
            options.plan.speculative_window, adaptive=options.plan.adaptive_speculative_window
        )
        self._threshold = options.plan.draft_acceptance_threshold
        self._counters = counters
        self._native = sources.native
        self._max_tokens = max_tokens
        self._end_tokens = end_tokens

    def serial_window(self, work: Work, predicted: Sequence[int], generated: int) -> Answer:
        """As many inputs as drafts: no free token (7.3)."""
        decision = classify_serial(
            work.drafts, predicted, generated, self._max_tokens, self._threshold, self._end_tokens
        )
        self._count_drafts(work, decision.accepted)
        self._counters.count_serial_window(decision)
        self.serial_width.update(decision)
        valid = min(1 + decision.accepted, len(work.inputs))
        return Answer(work, tuple(predicted[: decision.commit]), valid, accepted=decision.accepted)

    def verify_window(
        self, work: Work, predicted: Sequence[int], draft: Sequence[int] | None, generated: int
    ) -> Answer:
        """One window at a time, with a free token (7.4)."""
        count = len(work.drafts)
        decision = classify_window(work.drafts, predicted, generated, self._max_tokens, self._end_tokens)
        self._counters.verify_windows += 1
        self._count_drafts(work, decision.accepted)
        self._check_native(work, predicted)
        return Answer(
            work,
            tuple(predicted[: decision.commit]),
            1 + decision.accepted,
            full=not decision.rejected and decision.accepted == count and decision.commit == count + 1,
            accepted=decision.accepted,
            rejected=decision.rejected,
            free=predicted[count] if len(predicted) > count else None,
            draft=draft,
        )

    def pipelined(
        self,
        work: Work,
        epoch: Epoch,
        predicted: Sequence[int],
        draft: Sequence[int] | None,
        generated: int,
        *,
        dependent: bool,
    ) -> Answer:
        """The oldest window of an epoch; ``dependent``: more of the epoch builds on its free token (7.6)."""
        count = len(work.drafts)
        target = epoch.target_of(work, predicted)
        judged = classify_window(work.drafts, target, generated, self._max_tokens, self._end_tokens)
        decision = under_threshold(judged, count, self._threshold)
        met = threshold_met(judged.accepted, count, self._threshold)
        full = met and not judged.rejected and judged.accepted == count
        self._count_drafts(work, decision.accepted)
        self._counters.count_pipelined_window(count, decision, full=full)
        self._check_native(work, target)
        epoch.accepted += decision.accepted
        return Answer(
            work,
            target[: commit_of(count, decision.commit, full=full, dependent=dependent)],
            # The current token is an input of the epoch's first window alone.
            int(work.starts_epoch) + decision.accepted,
            full=full,
            accepted=decision.accepted,
            rejected=judged.rejected,
            free=target[count] if len(target) > count else None,
            draft=draft,
        )

    def _check_native(self, work: Work, target: Sequence[int]) -> None:
        self._native.window_answer()
        self._native.check(work.drafts[: work.native], target)

    def _count_drafts(self, work: Work, accepted: int) -> None:
        native, tail = work.native, len(work.drafts) - work.native
        if native:
            self._counters.count_drafts(NATIVE_MTP, native, min(accepted, native))
        if tail and accepted >= native:
            self._counters.count_drafts(work.source, tail, accepted - native)
