"""Sections about speculative decoding: the plan of spec 7.2 with its limits, and plans by name."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from skippy_orchestrator.deployment.section import Section

NgramKind = Literal["suffix", "cache", "simple"]

_MOST_NGRAM: dict[NgramKind, int] = {"cache": 4, "suffix": 64, "simple": 64}
_LEAST_NGRAM: dict[NgramKind, int] = {"cache": 1, "suffix": 3, "simple": 1}

PLAN_NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"


class NativeMtpSection(Section, frozen=True):
    """Drafts of the model's own multi-token prediction head."""

    enabled: Annotated[bool, Meta(description="Whether requests use the head, where the model has one.")] = (
        False
    )
    max_draft_tokens: Annotated[
        int, Meta(ge=1, le=64, description="Tokens that the head drafts at once.")
    ] = 1
    min_draft_tokens: Annotated[
        int, Meta(ge=0, description="Shorter drafts are not used; at most max_draft_tokens.")
    ] = 0
    reject_cooldown_tokens: Annotated[
        int, Meta(ge=0, description="Tokens that are decoded one by one after a rejected draft.")
    ] = 0
    draft_after_reject: Annotated[
        bool,
        Meta(
            description="Whether the head's draft behind a rejected one is used; else a token is decoded first, "
            "as in spec 7.4."
        ),
    ] = True
    suppress_cooldown_drafts: Annotated[
        bool, Meta(description="Whether drafts that come during such a cooldown are dropped.")
    ] = False
    suppress_cooldown_draft_limit: Annotated[
        int, Meta(ge=0, description="Drafts dropped at the start of every cooldown, even so.")
    ] = 0

    def __post_init__(self) -> None:
        if self.min_draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"native_mtp.min_draft_tokens: got {self.min_draft_tokens}, expected at most "
                f"max_draft_tokens, {self.max_draft_tokens}"
            )


class NgramSection(Section, frozen=True, kw_only=True):
    """Drafts copied from what the text already holds."""

    kind: Annotated[
        NgramKind,
        Meta(
            description="`suffix`: what followed the longest earlier match; `cache`: the most frequent follower, token "
            "by token; `simple`: what followed the last match."
        ),
    ] = "cache"
    min_ngram: Annotated[
        int, Meta(ge=1, description="Tokens that must match at least; 3 and more with `suffix`.")
    ]
    max_ngram: Annotated[
        int, Meta(ge=1, description="Tokens of a match that are looked at; at most 4 with `cache`, else 64.")
    ]
    max_proposal_tokens: Annotated[int, Meta(ge=1, le=512, description="Tokens of a proposal at most.")]
    resume: Annotated[
        bool,
        Meta(
            description="With `suffix`: whether a copy is followed past a token that differs from its source, as in an "
            "edit; spec 7.8 waits for min_ngram tokens that match again."
        ),
    ] = True

    def __post_init__(self) -> None:
        least, most = _LEAST_NGRAM[self.kind], _MOST_NGRAM[self.kind]
        if self.min_ngram < least:
            raise ValueError(
                f"ngram.min_ngram: got {self.min_ngram}, expected at least {least} with {self.kind!r}"
            )
        if self.max_ngram > most:
            raise ValueError(
                f"ngram.max_ngram: got {self.max_ngram}, expected at most {most} with {self.kind!r}"
            )
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"ngram.min_ngram: got {self.min_ngram}, expected at most max_ngram, {self.max_ngram}"
            )


class ExtensionSection(Section, frozen=True, kw_only=True):
    """Drafts of the MTP head that are continued by n-grams."""

    max_tokens: Annotated[int, Meta(ge=1, le=512, description="Tokens that n-grams add at most.")]


class VerifyWindowSection(Section, frozen=True):
    """How drafts are verified."""

    min_tokens: Annotated[int, Meta(ge=1, description="Least tokens of an adaptive window.")] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=512, description="Most tokens of a window.")] = 4
    pipeline_depth: Annotated[
        int,
        Meta(ge=1, le=64, description="Windows of one request in flight over the stages; 1 is one by one."),
    ] = 1

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"verify_window.min_tokens: got {self.min_tokens}, expected at most max_tokens, {self.max_tokens}"
            )


class SpeculationPlan(Section, frozen=True):
    """One way to speculate. Without a proposer a request decodes token by token."""

    native_mtp: Annotated[
        NativeMtpSection, Meta(description="Drafts of the model's own multi-token prediction head; a table.")
    ] = NativeMtpSection()
    draft_model: Annotated[
        bool,
        Meta(
            description="Drafts of the draft model of [draft]; n-grams, where the plan has them, are asked when it has "
            "none. Windows go one by one."
        ),
    ] = False
    ngram: Annotated[NgramSection | None, Meta(description="Drafts of n-grams; a table, absent is none.")] = (
        None
    )
    extension: Annotated[
        ExtensionSection | None,
        Meta(description="N-grams behind the head's drafts; a table, absent is without. Needs both."),
    ] = None
    verify_window: Annotated[VerifyWindowSection, Meta(description="How drafts are verified; a table.")] = (
        VerifyWindowSection()
    )
    speculative_window: Annotated[
        int,
        Meta(
            ge=0, le=64, description="Most tokens of a window that a draft model or n-grams fill at depth 1."
        ),
    ] = 4
    adaptive_speculative_window: Annotated[
        bool,
        Meta(description="Whether that window grows with accepted drafts and shrinks with rejected ones."),
    ] = False
    draft_acceptance_threshold: Annotated[
        float,
        Meta(ge=0, le=1, description="Windows of which a smaller share is accepted count as rejected whole."),
    ] = 0.0
    draft_split_probability: Annotated[
        float,
        Meta(ge=0, le=1, description="Chance at each token that a window is cut there, for experiments."),
    ] = 0.0
    back_off: Annotated[
        bool, Meta(description="Whether n-grams rest for a while when what they propose does not pay.")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extension is not None and not (self.native_mtp.enabled and self.ngram is not None):
            raise ValueError("extension: needs native_mtp.enabled and ngram")
        if self.draft_model and not self.speculative_window:
            raise ValueError("speculative_window: got 0, expected at least 1 with draft_model")

    def lacks(self, *, head: bool, draft_model: bool) -> str:
        """What the plan needs and is not there, or ""; n-grams are always there."""
        if self.native_mtp.enabled and not head:
            return "a model with an MTP head (model.mtp_head in the deployment file)"
        if self.draft_model and not draft_model:
            return "a draft model ([draft] in the deployment file)"
        return ""

    @property
    def most_tokens(self) -> int:
        """Most drafts of one window; 0 without proposers."""
        if self.ngram is None and not self.native_mtp.enabled and not self.draft_model:
            return 0
        return max(self.verify_window.max_tokens, self.speculative_window)


OFF = "off"
"""The plan without a proposer; always there."""

_NGRAM = NgramSection(kind="suffix", min_ngram=3, max_ngram=32, max_proposal_tokens=32)
_MTP = NativeMtpSection(enabled=True, max_draft_tokens=2)
_BUILT_IN = {
    "ngram": SpeculationPlan(ngram=_NGRAM, verify_window=VerifyWindowSection(max_tokens=8, pipeline_depth=2)),
    "mtp": SpeculationPlan(native_mtp=_MTP),
    "composite": SpeculationPlan(
        native_mtp=_MTP,
        ngram=_NGRAM,
        extension=ExtensionSection(max_tokens=16),
        verify_window=VerifyWindowSection(max_tokens=8),
    ),
    "draft": SpeculationPlan(draft_model=True),
}
"""Plans that need no description in the deployment file; one there with the same name stands for it."""


class SpeculationSection(Section, frozen=True):
    """Speculative decoding: plans by name, and which one requests have that ask for none.

    Output does not depend on it. A plan is a table `[speculation.plans.NAME]` with tables of its own.
    """

    default: Annotated[str, Meta(description="Plan of requests that name none; `off` is token by token.")] = (
        OFF
    )
    plans: Annotated[
        dict[Annotated[str, Meta(pattern=PLAN_NAME)], SpeculationPlan],
        Meta(
            description="Plans that requests may name; a table of tables. `ngram`, `mtp`, `composite` and `draft` are "
            "there anyway, where the model has a head and the deployment a draft model."
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        if OFF in self.plans:
            raise ValueError(f"plans.{OFF}: that name is for no speculation")
        if self.default not in self.names:
            raise ValueError(f"default: got {self.default!r}, expected one of {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return (OFF, *sorted({*_BUILT_IN, *self.plans}))

    def available(self, *, head: bool, draft_model: bool) -> tuple[str, ...]:
        """Those that a deployment with an MTP head, or with a draft model, can carry out."""
        return tuple(n for n in self.names if not self.plan(n).lacks(head=head, draft_model=draft_model))

    def check(self, *, head: bool, draft_model: bool) -> None:
        """Raise ValueError naming a plan of the deployment that lacks what it drafts with."""
        for name in (self.default, *self.plans):
            lacks = self.plan(name).lacks(head=head, draft_model=draft_model)
            if lacks:
                raise ValueError(f"speculation.plans.{name}: needs {lacks}")

    def plan(self, name: str) -> SpeculationPlan:
        """The plan of that name; ``off`` proposes nothing."""
        if name == OFF:
            return SpeculationPlan()
        return self.plans[name] if name in self.plans else _BUILT_IN[name]
