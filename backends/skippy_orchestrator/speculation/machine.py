"""The decode machine: what a session computes next, and what of the answers is committed (spec 6.2, 7).

Pure. The session owns the text: it calls ``next`` for work, ``answered`` with the predictions of work that came
back, commits what the answer says, and calls ``settle`` with what became of that.

Invariants:

* Work comes back in the order it was given. Either one piece of work is out that everything waits for, or windows
  of one epoch and stale ones of earlier epochs.
* Windows of an epoch tile the positions: the first covers the current token and its drafts, each further one its
  own drafts alone.
* Only ``answered`` decides; whatever proposers say, it commits predictions of the target.
* A draft of the head that comes behind its answer is waited for where the next work depends on it, and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from skippy_orchestrator.speculation.buffer import ProposalBuffer
from skippy_orchestrator.speculation.classify import split_len
from skippy_orchestrator.speculation.counters import SpeculationCounters
from skippy_orchestrator.speculation.epoch import Epoch
from skippy_orchestrator.speculation.judge import Judge
from skippy_orchestrator.speculation.options import SpeculationOptions
from skippy_orchestrator.speculation.proposers import Proposer
from skippy_orchestrator.speculation.sources import DraftSources
from skippy_orchestrator.speculation.widths import VerifyWidth
from skippy_orchestrator.speculation.windows import VerifyWindows
from skippy_orchestrator.speculation.work import Answer, Path, Work


class DecodeMachine:
    """Decoding of one request, over a text that its session extends."""

    def __init__(
        self,
        options: SpeculationOptions,
        context: Sequence[int],
        prompt_tokens: int,
        max_tokens: int,
        end_tokens: Collection[int],
        proposer: Proposer | None,
        now: float,
    ) -> None:
        """``context`` is the session's own list: ``prompt_tokens`` of the prompt, then committed tokens."""
        self.options = options
        self.sources = DraftSources(options, context, prompt_tokens, proposer)
        self.windows = VerifyWindows(options.depth, now)
        self.counters = SpeculationCounters(
            native_mtp=self.sources.native.counters, in_flight=self.windows.stats
        )
        self._judge = Judge(options, self.counters, self.sources, max_tokens, end_tokens)
        self.verify_width = VerifyWidth(options.verify_min, options.verify_max)
        self._context = context
        self._start = prompt_tokens
        self._max_tokens = max_tokens
        self._buffer = ProposalBuffer()
        self._single: Work | None = None
        self._queue: deque[Work] = deque()
        self._epoch: Epoch | None = None
        self._epochs = 0
        self._answered_at = now
        self._late: Callable[[Sequence[int]], None] | None = None
        """What to do with the head's draft of the last answer, which is on its way."""
        self._seedless_at = -1
        """Tokens generated when nothing was worth an epoch: asking again would give the same answer."""
        self._dry_at: tuple[int, ...] = ()
        """The state of an epoch in which it had nothing more to send."""

    @property
    def generated(self) -> int:
        """Tokens that were committed."""
        return len(self._context) - self._start

    @property
    def in_flight(self) -> int:
        """Pieces of work that are out."""
        return len(self._queue) + (self._single is not None)

    @property
    def awaits_drafts(self) -> bool:
        """Whether the next work depends on drafts that are on their way, of the head or of the draft model."""
        return self._late is not None or self.wanted_drafts() > 0

    @property
    def awaits_head(self) -> bool:
        """Whether a draft of the head behind the last answer is waited for."""
        return self._late is not None

    @property
    def may_send(self) -> bool:
        """Whether ``next`` may have work beside what is in flight: windows of an epoch that goes on."""
        return (
            self._epoch is not None
            and not self.windows.full
            and self._dry_at != self._fill_state(self._epoch)
        )

    @property
    def most_rows(self) -> int:
        """Rows that the next piece of work can have at most."""
        if not self.options.speculates:
            return 1
        return 1 + max(self.options.verify_max, self.options.plan.speculative_window)

    # What comes next.

    def next(self, now: float) -> Work | None:
        """The next work, or None while something must come back first. What is given counts as sent."""
        work = self._next(now)
        if work is not None:
            work.sent_at = now
        return work

    def _next(self, now: float) -> Work | None:
        remaining = self._max_tokens - self.generated
        if self._single is not None or self._late is not None or remaining <= 0:
            return None
        options = self.options
        if options.pipelined and self._epoch is None and not self._advance:
            self._seed(remaining)
        pipelining = self._epoch is not None or bool(self._queue)
        if options.verify_windows and not self.sources.native.cooldown and remaining >= 2 and not pipelining:
            work = self._verify_window(remaining, now)
            if work is not None:
                return self._only(work)
        if self._epoch is not None:
            work = self._fill(self._epoch, remaining, now)
            if work is not None:
                return work
        if self._queue:
            return None
        if options.serial_windows:
            if self.sources.needs_draft_model():
                return None
            work = self._serial_window(remaining)
            if work is not None:
                return self._only(work)
        return self._only(Work(Path.SERIAL, self._position, (self._context[-1],)))

    def wanted_drafts(self) -> int:
        """Tokens that the draft model is to draft behind the text before there is a next work; 0 for none."""
        if self.in_flight or self._late is not None or not self.sources.needs_draft_model():
            return 0
        return min(self._max_tokens - self.generated, self._judge.serial_width.current)

    @property
    def _position(self) -> int:
        """The position of the current token."""
        return len(self._context) - 1

    @property
    def _advance(self) -> int:
        """Tokens that live windows in flight would bring."""
        return sum(len(work.drafts) for work in self._queue if not work.stale)

    def _only(self, work: Work) -> Work:
        self._single = work
        return work

    def _seed(self, remaining: int) -> None:
        """Begin an epoch, if there is something worth pipelining."""
        pending = self.sources.native.pending
        if self._seedless_at == self.generated and pending is None:
            return
        taken = self.sources.take_native(remaining)
        proposal = self.sources.proposal(taken, remaining, remaining)
        if len(proposal.tokens) >= 2 and self.options.horizon >= 2:
            self._epochs += 1
            self._epoch = Epoch(self._epochs, proposal)
            return
        self._seedless_at = self.generated
        self.sources.native.put_back(pending)

    def _fill(self, epoch: Epoch, remaining: int, now: float) -> Work | None:
        """One more window of the epoch."""
        advance, state = self._advance, self._fill_state(epoch)
        if self.windows.full or self.generated + advance >= self._max_tokens or self._dry_at == state:
            self._dry_at = state
            return None
        width = split_len(
            *(self.options.verify_max, self.options.plan.draft_split_probability),
            self.generated + epoch.number,
        )
        if epoch.candidates < width:
            more = self.sources.continuation(epoch.optimistic_suffix, remaining)
            if more is not None:
                self.windows.stats.count_refill(len(more))
                epoch.refill(more)
        if not epoch.candidates:
            self._dry_at = state
            return None
        starts = not epoch.started
        chunk, native = epoch.next_chunk(width)
        work = Work(
            path=Path.PIPELINED,
            pos_start=self._position + advance + (not starts),
            inputs=(self._context[-1], *chunk) if starts else chunk,
            drafts=chunk,
            native=native,
            source=self.sources.ngram_name,
            window=self.windows.open(now),
            epoch=epoch.number,
            starts_epoch=starts,
        )
        self._queue.append(work)
        return work

    def _fill_state(self, epoch: Epoch) -> tuple[int, ...]:
        """What another window of the epoch depends on."""
        return self.generated, epoch.number, epoch.length, self.windows.in_flight

    def _verify_window(self, remaining: int, now: float) -> Work | None:
        if not self._buffer:
            taken = self.sources.take_native(remaining)
            proposal = self.sources.proposal(taken, remaining - 1, remaining - 1)
            if not proposal.tokens:
                return None
            self._buffer.fill(proposal)
        drafts, native = self._buffer.window(self.verify_width.current)
        return Work(
            path=Path.VERIFY_WINDOW,
            pos_start=self._position,
            inputs=(self._context[-1], *drafts),
            drafts=drafts,
            native=native,
            source=self.sources.ngram_name,
            window=self.windows.open(now),
        )

    def _serial_window(self, remaining: int) -> Work | None:
        drafts, source = self.sources.serial_drafts(min(remaining, self._judge.serial_width.current))
        if not drafts:
            return None
        inputs = (self._context[-1], *drafts[:-1])
        return Work(Path.SERIAL_WINDOW, self._position, inputs, drafts, source=source)

    # What came of it.

    def answered(self, predicted: Sequence[int], draft: Sequence[int] | None, now: float) -> Answer:
        """The oldest work came back with predictions for its inputs, and perhaps with a draft of the head.

        ``draft`` None: it follows, for ``drafted``. A draft continues the text as it is once the answer is settled.
        Raises ValueError when the answer does not fit the work. A stale window's answer commits nothing.
        """
        work = self._take(now)
        if work.stale:
            self.counters.stale_windows += 1
            return Answer(work, (), 0)
        match work.path:
            case Path.SERIAL:
                if len(predicted) != 1:
                    raise ValueError(f"{len(predicted)} predictions for one input")
                self.counters.serial_steps += 1
                self._take_draft(partial(self.sources.native.serial_answer, predicted[0]), draft)
                return Answer(work, (predicted[0],), 1)
            case Path.SERIAL_WINDOW:
                return self._judge.serial_window(work, predicted, self.generated)
            case Path.VERIFY_WINDOW:
                return self._judge.verify_window(work, predicted, draft, self.generated)
            case Path.PIPELINED:
                epoch = self._epoch
                if epoch is None or work.epoch != epoch.number:
                    raise ValueError(f"window {work.window} of epoch {work.epoch}, which is over")
                dependent = self._advance > 0 or epoch.candidates > 0
                return self._judge.pipelined(
                    work, epoch, predicted, draft, self.generated, dependent=dependent
                )

    def drafted(self, draft: Sequence[int], now: float) -> None:
        """The draft that followed the last answer, empty for none; dropped when nothing waits for it any more."""
        late, self._late = self._late, None
        if late is not None:
            self.counters.draft_s += now - self._answered_at
            late(draft)

    def proposed(self, drafts: Sequence[int], now: float) -> None:
        """The draft model has answered: it expects these tokens behind the text, or nothing."""
        self.counters.draft_s += now - self._answered_at
        self.sources.drafted(drafts)

    def _take_draft(self, use: Callable[[Sequence[int]], None], draft: Sequence[int] | None) -> None:
        if draft is None:
            self._late = use
        else:
            use(draft)

    def _take(self, now: float) -> Work:
        if self._single is not None:
            work, self._single = self._single, None
        elif self._queue:
            work = self._queue.popleft()
        else:
            raise ValueError("an answer that nobody waits for")
        if work.window:
            self.windows.complete_next(work.window, now)
        if work.drafts:
            self.counters.verify_s += now - work.sent_at
        self._answered_at = now
        return work

    def settle(self, answer: Answer, committed: int, *, stopped: bool) -> bool:
        """So many tokens of the answer are committed now; ``stopped`` when the text has ended with them.

        Returns whether windows that are in flight have become stale.
        """
        work = answer.work
        if work.stale or work.path is Path.SERIAL:
            return False
        self.counters.window_tokens += committed
        if len(work.drafts) > work.native and work.source == self.sources.ngram_name:
            back_off = self.sources.back_off
            back_off.update(max(answer.accepted - work.native, 0), self.generated)
            self.counters.rests = back_off.rests
        if work.path is Path.VERIFY_WINDOW:
            self._settle_window(answer, full=answer.full and not stopped)
        elif work.path is Path.PIPELINED and self._epoch is not None:
            return self._settle_pipelined(self._epoch, answer, full=answer.full and not stopped)
        return False

    def _settle_window(self, answer: Answer, *, full: bool) -> None:
        update = self._buffer.verified(len(answer.work.drafts), answer.accepted, answer.free, full=full)
        self.counters.dependent_rejects += update.dependent_rejected
        self.verify_width.update(full=full)
        if update.native_rejected:
            self.sources.native.rejected()
        if update.ended:
            self.counters.tail_rejects += self._buffer.tail_rejected
            if self.generated < self._max_tokens and (
                (full and not update.native_rejected) or self._redrafts(answer)
            ):
                self._take_draft(self.sources.native.adopt, answer.draft)

    def _settle_pipelined(self, epoch: Epoch, answer: Answer, *, full: bool) -> bool:
        if full:
            epoch.boundary = answer.free
            if not self._advance and not epoch.candidates:
                self._close(epoch)
                self._take_draft(self.sources.native.adopt, answer.draft)
            return False
        stale = [work for work in self._queue if not work.stale]
        for work in stale:
            work.stale = True
        self.windows.stats.recovery_epochs += 1
        self.windows.stats.stale_marked += len(stale)
        self._close(epoch)
        self.sources.native.drop()
        if answer.rejected and epoch.accepted < epoch.native:
            self.sources.native.rejected()
        if self._redrafts(answer):
            self._take_draft(self.sources.native.adopt, answer.draft)
        return bool(stale)

    def _redrafts(self, answer: Answer) -> bool:
        """Whether a draft behind a window that was not accepted whole is used."""
        settings = self.options.plan.native_mtp
        return settings.draft_after_reject and answer.rejected and not self.sources.native.cooldown

    def _close(self, epoch: Epoch) -> None:
        self.counters.tail_rejects += epoch.tail_rejected
        self._epoch = None
