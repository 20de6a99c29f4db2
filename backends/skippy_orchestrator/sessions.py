"""A session: one generation, from prompt to last token, as a pure state machine.

Events in (steps dispatched, stage 0 left, results), steps out. No clock, no thread, no tensor.

Invariants:

* ``context`` is the prompt plus the committed tokens; ``commit`` alone extends it.
* Steps of a session complete in the order they were dispatched; results of a dead epoch are ignored.
* Once ``finish_reason`` is set or the session was ended nothing more is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from skippy_stage.protocol import DecodeStep, OpenStep, PrefillStep, RowStep

from skippy_orchestrator.prefill import Chunk, ChunkPolicy, PrefillMachine
from skippy_orchestrator.requests import GenerationRequest


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


class Phase(Enum):
    """Where a session is."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Session:
    """One generation on the stages."""

    def __init__(
        self,
        session: int,
        request: GenerationRequest,
        text: Text,
        end_tokens: frozenset[int],
        policy: ChunkPolicy,
        credits: int,
    ) -> None:
        self.id = session
        self.request = request
        self.phase = Phase.PREFILL
        self.finish_reason = ""
        self.epoch = 0
        self._text = text
        self._end_tokens = frozenset() if request.ignore_eos else end_tokens
        self._context = list(request.prompt)
        self._prefill = PrefillMachine(len(request.prompt), policy, credits)
        self._in_flight: deque[RowStep] = deque()
        self._opened = False

    @property
    def n_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt)

    @property
    def n_output(self) -> int:
        """Committed tokens so far."""
        return len(self._context) - self.n_prompt

    @property
    def max_positions(self) -> int:
        """Positions the session can come to hold on a stage, uncommitted ones included."""
        return self.n_prompt + self.request.max_tokens

    @property
    def steps_in_flight(self) -> int:
        """Row steps dispatched and not completed."""
        return len(self._in_flight)

    @property
    def on_stages(self) -> bool:
        """Whether any stage was told of the session."""
        return self._opened

    def next_step(self, room: int) -> RowStep | None:
        """The next step that could run now with at most ``room`` rows; changes nothing."""
        if self.phase is Phase.DECODE and room >= 1 and not self._in_flight:
            return DecodeStep(session=self.id, epoch=self.epoch, pos_start=len(self._context) - 1)
        if self.phase is Phase.PREFILL:
            chunk = self._prefill.next_chunk(room)
            if chunk is not None:
                return PrefillStep(
                    session=self.id,
                    epoch=self.epoch,
                    pos_start=chunk.start,
                    rows=chunk.rows,
                    sample=chunk.sample,
                )
        return None

    def dispatch(self, step: RowStep) -> tuple[OpenStep | None, Sequence[int]]:
        """A step that ``next_step`` gave goes into a frame: its token ids, and what must come before it."""
        opening = None
        if not self._opened:
            opening = OpenStep(session=self.id, max_tokens=self.max_positions, sampling=self.request.sampling)
            self._opened = True
        if isinstance(step, PrefillStep):
            self._prefill.dispatched(Chunk(step.pos_start, step.pos_start + step.rows, step.sample))
            if self._prefill.planned:
                self.phase = Phase.DECODE
        self._in_flight.append(step)
        start = step.pos_start
        rows = 1 if isinstance(step, DecodeStep) else step.rows
        return opening, self._context[start : start + rows]

    def left_first_stage(self, step: RowStep) -> None:
        """A step of this session has left stage 0."""
        if isinstance(step, PrefillStep):
            self._prefill.left_first_stage()

    def complete(self, step: RowStep, tokens: Sequence[int]) -> Commit | None:
        """A step has come back with the last stage's predictions; commits what counts of them."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError(f"session {self.id}: result out of order")
        self._in_flight.popleft()
        if isinstance(step, PrefillStep):
            self._prefill.completed()
        if self.phase is Phase.ENDED or step.epoch < self.epoch or not tokens:
            return None
        return self.commit(tokens)

    def commit(self, tokens: Sequence[int]) -> Commit:
        """Commit tokens: the one place where they enter the context and an end is decided (spec 8.7).

        An end token is neither in the output nor in its count; the tokens of a stop string are in both.
        """
        committed: list[int] = []
        text: list[str] = []
        for token in tokens:
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
        if self.finish_reason:
            text.append(self._text.flush())
            self.phase = Phase.ENDED
        return Commit(self.id, tuple(committed), "".join(text), self.finish_reason)

    def end(self) -> None:
        """End the session from outside (cancel, failure): what is in flight no longer counts."""
        self.phase = Phase.ENDED

    def check_integrity(self) -> None:
        """Raise AssertionError when the machine's parts disagree."""
        self._prefill.check_integrity()
        assert self.n_output <= self.request.max_tokens, (
            f"{self.n_output} tokens of {self.request.max_tokens}"
        )
        assert (self.phase is Phase.PREFILL) == (not self._prefill.planned) or self.phase is Phase.ENDED
