"""What a plan means for one request (spec 7.2): limits that are derived, and which path decodes."""

from __future__ import annotations

from typing import Final

import msgspec

from skippy_orchestrator.deployment.speculation import SpeculationPlan

NO_SPECULATION: Final = SpeculationPlan()
"""Token by token."""


class SpeculationOptions:
    """A plan together with what the request and the deployment allow."""

    def __init__(self, plan: SpeculationPlan, *, native_mtp: bool = False, draft_model: bool = False) -> None:
        """``native_mtp``: the last stage drafts for this request; ``draft_model``: there is one that drafts for it."""
        window = plan.verify_window
        self.plan = plan
        self.native_mtp = native_mtp and plan.native_mtp.enabled
        self.draft_model = draft_model and plan.draft_model and plan.speculative_window > 0
        self.ngram = plan.ngram
        self.max_draft = max(plan.native_mtp.max_draft_tokens, 1)
        self.min_draft = min(plan.native_mtp.min_draft_tokens, self.max_draft)
        self.hybrid = plan.extension is not None and plan.ngram is not None
        self.ngram_proposals = plan.ngram is not None and (self.hybrid or not self.native_mtp)
        self.verify_min = max(window.min_tokens, 1)
        self.verify_max = max(window.max_tokens, self.verify_min)
        self.depth = window.pipeline_depth

    @property
    def horizon(self) -> int:
        """Most tokens that n-grams add to a proposal."""
        if self.plan.extension is not None:
            return self.plan.extension.max_tokens
        return self.plan.ngram.max_proposal_tokens if self.plan.ngram is not None else 0

    @property
    def composite(self) -> bool:
        """MTP drafts that n-grams continue."""
        return self.hybrid and not self.draft_model

    @property
    def standalone(self) -> bool:
        """N-grams by themselves."""
        return not self.native_mtp and self.ngram is not None and not self.draft_model

    @property
    def verify_windows(self) -> bool:
        """Windows of spec 7.4: one at a time, with a free token."""
        return (self.native_mtp or self.composite) and not self.draft_model

    @property
    def pipelined(self) -> bool:
        """Several windows in flight (spec 7.6)."""
        return (self.composite or self.standalone) and self.depth > 1

    @property
    def serial_windows(self) -> bool:
        """Windows of spec 7.3: those of a draft model, and of n-grams where nothing is pipelined."""
        return self.draft_model or (self.ngram is not None and not self.pipelined)

    @property
    def speculates(self) -> bool:
        """Whether there is any proposer."""
        return self.native_mtp or self.draft_model or self.ngram is not None


def after_restore(plan: SpeculationPlan, *, keep_ngrams: bool) -> SpeculationPlan:
    """The plan once it is known what was restored: spec 4.11 drops n-grams behind a whole restored prompt.

    With positions that are authoritative there is no reason to, so keeping them is the default (spec 13.3).
    """
    return plan if keep_ngrams else msgspec.structs.replace(plan, ngram=None, extension=None)
