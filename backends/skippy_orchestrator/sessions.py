"""A session: one generation, from prompt to last token, as a pure state machine.

Events in (steps dispatched, stages left, results), steps out. No clock, no thread, no tensor.

Invariants:

* ``context`` is the prompt plus the committed tokens; ``commit`` alone extends it.
* Steps of a session complete in the order they were dispatched; results of a dead epoch commit nothing.
* Once ``finish_reason`` is set or the session was ended nothing more is committed.
* What is recorded on the stages is never longer than what is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from skippy_stage.protocol import (
    Control,
    DecodeStep,
    Draft,
    OpenStep,
    PrefillStep,
    ProbeStep,
    RecordStep,
    RestoreStep,
    RowStep,
    Step,
    StepOk,
    StopStep,
    VerifyStep,
    rows_of,
)

from skippy_orchestrator.decoding import SessionDecoding
from skippy_orchestrator.frames import StageReport
from skippy_orchestrator.prefill import Chunk, PrefillMachine, PrefillTerms
from skippy_orchestrator.prefix.outcome import CacheStats
from skippy_orchestrator.prefix.output_tokens import MAX_EXACT_REPLAY_TOKENS
from skippy_orchestrator.prefix.session import OFF, PrefixTerms, SessionPrefix
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.machine import DecodeMachine
from skippy_orchestrator.speculation.options import NO_SPECULATION, SpeculationOptions, after_restore
from skippy_orchestrator.speculation.proposers import make_proposer

SessionStep: TypeAlias = ProbeStep | RowStep
"""What a session sends on its way; controls ride along."""


class Text(Protocol):
    """What turns committed tokens into text and decides about stop strings (text.stream.TextStream)."""

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is safe to show after this token, and whether a stop string ended it."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Commit:
    """A span of tokens that was committed, with the text that became safe to show."""

    session: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str = ""
    """Empty until the last span; then ``stop`` or ``length``."""
    cache: CacheStats | None = None
    """With the last span: what the prefix cache did for the request."""
    speculation: SpeculationCounters | None = None
    """With the last span: what came of guessing ahead."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What goes into a frame with a step: controls around it, and its token ids."""

    before: tuple[Control, ...]
    tokens: Sequence[int]
    after: tuple[Control, ...]


class Phase(Enum):
    """Where a session is."""

    WAITING = "waiting"
    PROBE = "probe"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Session:
    """One generation on the stages. ``begin`` starts it; before that it only waits."""

    def __init__(
        self,
        session: int,
        request: GenerationRequest,
        text: Text,
        end_tokens: frozenset[int],
        prefill: PrefillTerms,
    ) -> None:
        self.id = session
        self.request = request
        self.phase = Phase.WAITING
        self.finish_reason = ""
        self.epoch = 0
        self.draft_model = False
        """Whether a draft model drafts for it."""
        self.native_mtp = False
        """Whether the last stage's MTP head drafts for it."""
        self.predicted: list[int] = []
        """The first predictions, an end token included: what may be replayed (spec 4.7)."""
        self._text = text
        self._end_tokens = frozenset() if request.ignore_eos else end_tokens
        self._context = list(request.prompt)
        self._prefill_terms = prefill
        self._prefix = SessionPrefix(request.prompt, request.max_tokens, OFF, 0.0)
        self._prefill: PrefillMachine | None = None
        self._in_flight: deque[SessionStep] = deque()
        self._decoding: SessionDecoding | None = None
        self._opened = False
        self._computed = 0

    @property
    def n_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt)

    @property
    def n_output(self) -> int:
        """Committed tokens so far."""
        return len(self._context) - self.n_prompt

    @property
    def context(self) -> Sequence[int]:
        """Prompt and committed tokens."""
        return self._context

    @property
    def max_positions(self) -> int:
        """Positions the session can come to hold on a stage, uncommitted ones included."""
        return self.n_prompt + self.request.max_tokens

    @property
    def steps_in_flight(self) -> int:
        """Steps with an answer to come: probes and row steps."""
        return len(self._in_flight)

    @property
    def on_stages(self) -> bool:
        """Whether any stage was told of the session."""
        return self._opened

    @property
    def wants_step(self) -> bool:
        """Whether a decode step could be sent now, as far as is known without asking."""
        if self.phase is not Phase.DECODE or self._decoding is None:
            return False
        return self._decoding.wants_step(in_flight=bool(self._in_flight))

    def is_stale(self, step: Step) -> bool:
        """Whether a step is a window whose answer no longer counts."""
        return isinstance(step, VerifyStep) and step.epoch < self.epoch

    @property
    def prefix(self) -> SessionPrefix:
        """The session's dealings with the prefix caches."""
        return self._prefix

    @property
    def prefill(self) -> PrefillMachine | None:
        """The prompt on its way; None before it is known what is restored, and where nothing is left to compute."""
        return self._prefill

    def begin(self, terms: PrefixTerms, now: float) -> None:
        """The session has its place: it may use the stages from now on."""
        self._prefix = SessionPrefix(self.request.prompt, self.request.max_tokens, terms, now)
        if self._prefix.probes:
            self.phase = Phase.PROBE
        else:
            self._begin_prefill(0)

    def next_step(self, room: int, now: float) -> SessionStep | None:
        """The next step, of at most ``room`` rows, or None. A decode step counts as sent: dispatch it."""
        if self.phase is Phase.PROBE and not self._in_flight:
            length = len(self._prefix.probe_tokens)
            return ProbeStep(session=self.id, epoch=self.epoch, length=length)
        if self.phase is Phase.DECODE and self._decoding is not None:
            return self._decoding.next_step(self.epoch, room, now)
        if self.phase is Phase.PREFILL and self._prefill is not None:
            chunk = self._prefill.next_chunk(room, now)
            if chunk is not None:
                return PrefillStep(
                    session=self.id,
                    epoch=self.epoch,
                    pos_start=chunk.start,
                    rows=chunk.rows,
                    sample=chunk.sample,
                    lookahead=int(self.native_mtp and not chunk.sample and chunk.end < len(self._context)),
                )
        return None

    def dispatch(self, step: SessionStep, now: float) -> Dispatched:
        """A step that ``next_step`` gave goes into a frame."""
        before: list[Control] = []
        if not self._opened:
            before.append(
                OpenStep(
                    session=self.id,
                    max_tokens=self.max_positions,
                    sampling=self.request.sampling,
                    namespace=self._prefix.namespace,
                    drafts=self.request.speculation.native_mtp.max_draft_tokens if self.native_mtp else 0,
                )
            )
            self._opened = True
        self._in_flight.append(step)
        if isinstance(step, ProbeStep):
            self._prefix.probed(now)
            return Dispatched(tuple(before), self._prefix.probe_tokens, ())
        length = self._prefix.take_restore()
        if length:
            before.append(RestoreStep(session=self.id, epoch=self.epoch, length=length))
        if not isinstance(step, PrefillStep) or self._prefill is None:
            inputs = self._decoding.inputs if self._decoding is not None else ()
            return Dispatched(tuple(before), inputs, ())
        end = step.pos_start + step.rows
        self._prefill.dispatched(Chunk(step.pos_start, end, step.sample), now)
        if self._prefill.planned:
            self.phase = Phase.DECODE
        after = self._record(self._prefix.record_after(step.pos_start, end))
        return Dispatched(tuple(before), self._context[step.pos_start : end + step.lookahead], after)

    def credit_returned(self, now: float) -> None:
        """The second stage has started on the oldest chunk that holds a credit."""
        if self._prefill is not None:
            self._prefill.credit_returned(now)

    def left_stage(self, step: PrefillStep, stage: int, report: StageReport) -> None:
        """A stage has answered the frame with this chunk; its time is shared by rows."""
        if self._prefill is None:
            return
        share = step.rows / max(report.rows, step.rows)
        if stage == 0:
            self._prefill.left_first_stage(
                step.rows, report.compute_us * share / 1000, report.write_us / 1000
            )
        else:
            self._prefill.observed_at_stage(
                stage,
                step.rows,
                round(report.compute_us * share),
                report.write_us,
                report.queue_us,
                round(report.sent_bytes * share),
            )

    def complete(
        self, step: SessionStep, status: StepOk | None, now: float, *, drafts_follow: bool = False
    ) -> Commit | None:
        """A step has come back from the last stage, None for one that was not executed; commits what counts.

        ``drafts_follow``: what the MTP head drafts behind it comes later, for ``drafted``.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError(f"session {self.id}: result out of order")
        self._in_flight.popleft()
        if isinstance(step, PrefillStep) and self._prefill is not None:
            self._prefill.completed()
        if self.phase is Phase.ENDED:
            return None
        if isinstance(step, DecodeStep | VerifyStep):
            return self._decoded(step, status, now, drafts_follow=drafts_follow and self.native_mtp)
        if step.epoch < self.epoch:
            return None
        if status is None:
            raise ValueError(f"session {self.id}: a live step was skipped")
        if isinstance(step, ProbeStep):
            return self._probed(status, now)
        self._computed = step.pos_start + rows_of(step)
        return self._begin_decode(status.tokens, now) if status.tokens else None

    def _begin_decode(self, tokens: Sequence[int], now: float) -> Commit:
        """The first tokens are known."""
        commit = self.commit(tokens, now)
        wish = self.request.speculation if self._prefix.cuts else NO_SPECULATION
        plan = after_restore(wish, keep_ngrams=self._prefix.keeps_ngrams)
        machine = DecodeMachine(
            SpeculationOptions(plan, native_mtp=self.native_mtp, draft_model=self.draft_model),
            self._context,
            self.n_prompt,
            self.request.max_tokens,
            self._end_tokens,
            make_proposer(plan.ngram) if plan.ngram is not None else None,
            now,
        )
        self._decoding = SessionDecoding(self.id, machine)
        return commit

    def _decoded(
        self, step: RowStep, status: StepOk | None, now: float, *, drafts_follow: bool
    ) -> Commit | None:
        if self._decoding is None:
            raise ValueError(f"session {self.id}: a decode step before the first token")
        answer = self._decoding.answered(status, now, drafts_follow=drafts_follow)
        if not answer.commit:
            return None
        self._computed = max(self._computed, step.pos_start + answer.valid_inputs)
        commit = self.commit(answer.commit, now)
        ended = self.phase is Phase.ENDED
        stale = self._decoding.settle(step, answer, len(commit.tokens), stopped=ended)
        if stale or (ended and self._in_flight):
            self.epoch += 1
        return commit

    def drafted(self, draft: Draft, now: float) -> None:
        """The draft of the MTP head behind one of the session's steps."""
        if self._decoding is not None:
            self._decoding.drafted(draft, len(self._context), now)

    @property
    def wanted_drafts(self) -> int:
        """Tokens that the draft model is to draft behind the text before there is a next step; 0 for none."""
        if self.phase is not Phase.DECODE or self._decoding is None:
            return 0
        return self._decoding.wanted_drafts

    def proposed(self, drafts: Sequence[int], now: float) -> None:
        """What the draft model expects behind the text; nothing when it has failed."""
        if self.phase is Phase.DECODE and self._decoding is not None:
            self._decoding.proposed(drafts, now)

    def lose_draft_model(self) -> None:
        """There is no draft model any more: the session goes on without."""
        self.draft_model = False
        if self._decoding is not None:
            self._decoding.lose_draft_model()

    def commit(self, tokens: Sequence[int], now: float) -> Commit:
        """Commit tokens: the one place where they enter the context and an end is decided (spec 8.7).

        An end token is neither in the output nor in its count; the tokens of a stop string are in both.
        """
        self._prefix.first_token(now)
        committed: list[int] = []
        text: list[str] = []
        for token in tokens:
            if len(self.predicted) < MAX_EXACT_REPLAY_TOKENS:
                self.predicted.append(token)
            if token in self._end_tokens:
                self.finish_reason = "stop"
                break
            self._context.append(token)
            committed.append(token)
            piece, stopped = self._text.push(token)
            text.append(piece)
            if stopped:
                self.finish_reason = "stop"
            elif self.n_output >= self.request.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        cache = speculation = None
        if self.finish_reason:
            text.append(self._text.flush())
            self.phase = Phase.ENDED
            cache = self._prefix.stats(now)
            speculation = self._decoding.counters if self._decoding is not None else SpeculationCounters()
        span = "".join(text)
        return Commit(self.id, tuple(committed), span, self.finish_reason, cache, speculation)

    def end(self) -> None:
        """End the session from outside (cancel, failure): what is in flight no longer counts."""
        self.phase = Phase.ENDED

    def closing(self) -> tuple[Control, ...]:
        """The last steps of a session that has finished: record what it computed, and stop."""
        length = self._prefix.record_at_end(min(self._computed, len(self._context)))
        return (*self._record(length), StopStep(session=self.id))

    def _record(self, length: int) -> tuple[Control, ...]:
        return (RecordStep(session=self.id, epoch=self.epoch, length=length),) if length else ()

    def _begin_prefill(self, start: int) -> None:
        self.phase = Phase.PREFILL
        self._prefill = self._prefill_terms.machine(self.n_prompt, start, self._prefix.boundaries())

    def _probed(self, status: StepOk, now: float) -> Commit | None:
        if status.restorable is None:
            raise ValueError(f"session {self.id}: a probe without an answer")
        plan = self._prefix.answered(status.restorable, now)
        if not plan.tokens:
            self._begin_prefill(plan.length)
            return None
        self.phase = Phase.DECODE
        return self._begin_decode(plan.tokens, now)

    def check_integrity(self) -> None:
        """Raise AssertionError when the machine's parts disagree."""
        if self._prefill is not None:
            self._prefill.check_integrity()
        assert self.n_output <= self.request.max_tokens, (
            f"{self.n_output} tokens of {self.request.max_tokens}"
        )
        if self.phase is Phase.PREFILL:
            assert self._prefill is not None
            assert not self._prefill.planned, "a prompt that is all on its way still counts as prefill"
        assert self._prefix.recorded <= len(self._context), "a record is longer than what is committed"
