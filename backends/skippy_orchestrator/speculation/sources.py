"""Where a request's drafts come from: its head, n-grams over its own text, a draft model (spec 7.3, 7.8)."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_orchestrator.speculation.back_off import BackOff
from skippy_orchestrator.speculation.classify import split_len
from skippy_orchestrator.speculation.compose import Proposal, compose, ngram_limit
from skippy_orchestrator.speculation.native_mtp import NativeDraft, NativeMtp
from skippy_orchestrator.speculation.options import SpeculationOptions
from skippy_orchestrator.speculation.proposers import Proposer

DRAFT_MODEL = "draft-model"
NATIVE_MTP = "native-mtp"


class DraftSources:
    """The proposers of one request, asked by the decode machine."""

    def __init__(
        self,
        options: SpeculationOptions,
        context: Sequence[int],
        prompt_tokens: int,
        proposer: Proposer | None,
    ) -> None:
        self.native = NativeMtp(options)
        self.back_off = BackOff(enabled=options.plan.back_off)
        self._options = options
        self._context = context
        self._start = prompt_tokens
        self._proposer = proposer
        self._drafts: tuple[int, ...] | None = None
        self._draft_model_lost = False

    @property
    def ngram_name(self) -> str:
        """What made the n-gram part of a proposal."""
        return self._proposer.name if self._proposer is not None else ""

    def take_native(self, remaining: int) -> NativeDraft | None:
        """The pending draft of the head, unless it rests."""
        return self.native.take(remaining) if not self.native.cooldown else None

    def proposal(self, taken: NativeDraft | None, total: int, available: int) -> Proposal:
        """The head's draft where it is long enough, continued by n-grams: at most ``total`` tokens.

        ``available`` is how many positions are left, of which n-grams may fill those behind the head's.
        """
        head = self.native.usable(taken)
        horizon = self._options.horizon if self._options.ngram_proposals else 0
        limit = ngram_limit(horizon, available - len(head))
        return compose(head, total, limit, horizon, self._ngrams() if limit else None)

    def continuation(self, suffix: Sequence[int], remaining: int) -> list[int] | None:
        """What n-grams say follows text and ``suffix``; None when they are not asked."""
        budget = ngram_limit(self._options.horizon, max(remaining - len(suffix), 0))
        proposer = self._ngrams() if budget and self._options.ngram_proposals else None
        return proposer.propose(suffix, budget) if proposer is not None else None

    def needs_draft_model(self) -> bool:
        """Whether the draft model must be asked before the next window."""
        return self._options.draft_model and not self._draft_model_lost and self._drafts is None

    def draft_model_lost(self) -> None:
        """There is no draft model to ask any more."""
        self._draft_model_lost = True

    def drafted(self, tokens: Sequence[int]) -> None:
        """The draft model expects these tokens behind the text, or nothing."""
        self._drafts = tuple(tokens)

    def serial_drafts(self, limit: int) -> tuple[tuple[int, ...], str]:
        """Drafts of a window without a free token, and their source: the draft model's, else n-grams'."""
        drafts, source = (self._drafts or ())[:limit], DRAFT_MODEL
        self._drafts = None
        proposer = None if drafts else self._ngrams()
        if proposer is not None:
            drafts, source = tuple(proposer.propose((), limit)), proposer.name
        seed = len(self._context) - self._start
        return drafts[: split_len(len(drafts), self._options.plan.draft_split_probability, seed)], source

    def _ngrams(self) -> Proposer | None:
        """The n-gram proposer, up to date, unless it rests."""
        if self._proposer is None or self.back_off.rests_at(len(self._context) - self._start):
            return None
        self._proposer.follow(self._context)
        return self._proposer
