"""A decode machine against the reference's target, in virtual time: answers come when nothing more can be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from skippy_orchestrator.deployment.speculation import (
    ExtensionSection,
    NativeMtpSection,
    NgramSection,
    SpeculationPlan,
    VerifyWindowSection,
)
from skippy_orchestrator.speculation.machine import DecodeMachine
from skippy_orchestrator.speculation.options import SpeculationOptions
from skippy_orchestrator.speculation.proposers import make_proposer
from skippy_orchestrator.speculation.work import Answer, Path, Work

from tests.orchestrator.speculation.reference import Draft, ReferencePlan, Target


def plan_of(reference: ReferencePlan, *, redraft: bool = False, **changes: Any) -> SpeculationPlan:
    """The same plan in the product's words; back-off, ``redraft`` and resumed copies, which the spec lacks, are off."""
    ngram = reference.ngram
    sections: dict[str, Any] = {
        "native_mtp": NativeMtpSection(
            enabled=bool(reference.mtp),
            max_draft_tokens=reference.max_draft,
            min_draft_tokens=min(reference.min_draft, reference.max_draft),
            reject_cooldown_tokens=reference.cooldown,
            draft_after_reject=redraft,
            suppress_cooldown_drafts=reference.suppress,
            suppress_cooldown_draft_limit=reference.suppress_limit,
        ),
        "ngram": NgramSection(
            kind="suffix",
            min_ngram=ngram[0],
            max_ngram=ngram[1],
            max_proposal_tokens=ngram[2],
            resume=False,
        )
        if ngram
        else None,
        "extension": ExtensionSection(max_tokens=reference.extension)
        if reference.extension and ngram
        else None,
        "verify_window": VerifyWindowSection(
            min_tokens=reference.verify_min, max_tokens=reference.verify_max, pipeline_depth=reference.depth
        ),
        "draft_model": reference.draft is not None,
        "speculative_window": reference.window,
        "adaptive_speculative_window": reference.adaptive,
        "draft_acceptance_threshold": reference.threshold,
        "draft_split_probability": reference.split,
        "back_off": False,
    }
    return SpeculationPlan(**{**sections, **changes})


@dataclass
class Driver:
    """One request: its text, its machine, and what is on its way."""

    plan: SpeculationPlan
    prompt: Sequence[int]
    max_tokens: int
    target: Target
    ends: Collection[int] = ()
    draft: Draft | None = None
    stops_at: int | None = None
    """Tokens after which a stop string ends the text."""
    late: bool = False
    """Whether the head's drafts come behind the answers, as a second response."""
    now: float = 0.0
    works: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = list(self.prompt)
        if len(self.prompt) > 1:
            self.target.run(0, self.prompt[:-1])
        options = SpeculationOptions(self.plan, native_mtp=True, draft_model=self.draft is not None)
        ngram = self.plan.ngram
        proposer = None if ngram is None else make_proposer(ngram)
        self.machine = DecodeMachine(
            options, self.context, len(self.prompt), self.max_tokens, self.ends, proposer, self.now
        )
        self.flight: deque[tuple[Work, list[int], list[int]]] = deque()
        self.stopped = False

    @property
    def output(self) -> list[int]:
        return self.context[len(self.prompt) :]

    def send(self) -> bool:
        """Send one piece of work, if there is one."""
        if self.draft is not None:
            wanted = self.machine.wanted_drafts()
            if wanted:
                self.machine.proposed(self.draft(self.context, wanted), self.now)
        work = self.machine.next(self.now)
        if work is None:
            return False
        verify = work.path in (Path.VERIFY_WINDOW, Path.PIPELINED)
        predicted, draft = self.target.run(work.pos_start, work.inputs, verify=verify)
        self.flight.append((work, predicted, draft))
        self.works.append(work)
        return True

    def receive(self, check: Callable[[Answer], None] | None = None) -> None:
        """The oldest answer comes back and is committed."""
        _, predicted, draft = self.flight.popleft()
        answer = self.machine.answered(predicted, None if self.late else draft, self.now)
        if check is not None:
            check(answer)
        committed = 0
        for token in answer.commit:
            self.context.append(token)
            committed += 1
            ends = token in self.ends or len(self.output) >= self.max_tokens
            if ends or len(self.output) == self.stops_at:
                self.stopped = True
                break
        self.machine.settle(answer, committed, stopped=self.stopped)
        if self.late:
            waits = self.machine.awaits_drafts
            assert not waits or self.machine.next(self.now) is None, "the draft was not waited for"
            self.machine.drafted(draft, self.now)
            assert not self.machine.awaits_drafts
        self.now += 1.0

    def run(self) -> list[int]:
        """Decode to the end."""
        while not self.stopped:
            while self.send():
                pass
            assert self.flight, "nothing to send and nothing on its way"
            self.receive()
        return self.output
