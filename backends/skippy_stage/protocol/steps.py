"""Steps: the pieces of work that a frame is made of, and what each has in the frame's tensors.

A control has no rows. It applies at its place among the steps of its session: a restore comes before the
rows that continue from it, a record after the rows that it names, a stop last.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of all messages: immutable, encoded as arrays, unknown content refused."""


class SamplingParams(Message, frozen=True, kw_only=True):
    """How tokens are drawn (spec 5.2; defaults are greedy).

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` is always set:
    the orchestrator draws one when the request has none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0

    @property
    def greedy(self) -> bool:
        """True when the highest logit is the token."""
        return self.temperature == 0.0


class OpenStep(Message, tag="open", frozen=True, kw_only=True):
    """Make a session. Comes before anything else of it on every stage.

    ``max_tokens`` is the most positions the session will ever hold, uncommitted ones included.
    ``namespace`` separates prefixes that must not be shared (spec 4.2). ``drafts`` is how many tokens the last
    stage's MTP head drafts behind each of the session's predictions; 0: none, and the head sees nothing of it.
    """

    session: int
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    namespace: str = ""
    drafts: int = 0


class ProbeStep(Message, tag="probe", frozen=True, kw_only=True):
    """Ask how much of ``length`` tokens (in the token tensor) could be restored, and lease it (spec 4.5).

    The answer is a ``StepOk`` with ``restorable``. The lease lasts until the session ends, starts its
    rows without a restore, or is restored.
    """

    session: int
    epoch: int
    length: int


class RestoreStep(Message, tag="restore", frozen=True, kw_only=True):
    """Start the session with the first ``length`` positions of what its probe leased."""

    session: int
    epoch: int
    length: int


class RecordStep(Message, tag="record", frozen=True, kw_only=True):
    """Keep the session's first ``length`` positions for others; all of them are committed.

    It is a wish: a stage without room records less, counts that, and answers ok.
    """

    session: int
    epoch: int
    length: int


class StopStep(Message, tag="stop", frozen=True, kw_only=True):
    """The session is over and all its steps were executed: free it.

    ``FrameHeader.ended`` is for sessions that end early: it applies before queued work.
    """

    session: int


class PrefillStep(Message, tag="prefill", frozen=True, kw_only=True):
    """``rows`` prompt tokens from position ``pos_start``; with ``sample`` the last row predicts.

    ``lookahead`` further tokens follow in the token tensor without being executed, for a last stage
    that drafts (its head needs token i + 1 at row i).
    """

    session: int
    epoch: int
    pos_start: int
    rows: int
    sample: bool = False
    lookahead: int = 0


class DecodeStep(Message, tag="decode", frozen=True, kw_only=True):
    """One committed token at ``pos_start``; predicts the next."""

    session: int
    epoch: int
    pos_start: int


class VerifyStep(Message, tag="verify", frozen=True, kw_only=True):
    """A verify window: ``rows`` inputs from ``pos_start``, each row predicts (spec 7.5)."""

    session: int
    epoch: int
    pos_start: int
    rows: int
    window: int


class ProposeStep(Message, tag="propose", frozen=True, kw_only=True):
    """Draft ``drafts`` tokens behind ``rows`` committed ones from ``pos_start``, on a stage with the whole model.

    The rows are what the draft model has not seen yet, the session's current token last. The first draft is
    what the last row predicts, every further one comes from a decode of the draft before it. All of them are
    drawn as the session's own tokens at their positions. Afterwards the session holds the rows and all drafts
    but the last; the next step's ``pos_start`` cuts those that the target did not take.
    """

    session: int
    epoch: int
    pos_start: int
    rows: int
    drafts: int


class TrimStep(Message, tag="trim", frozen=True, kw_only=True):
    """Cut the session back to ``length`` positions without running a row."""

    session: int
    epoch: int
    length: int


RowStep: TypeAlias = PrefillStep | DecodeStep | VerifyStep | ProposeStep
Control: TypeAlias = OpenStep | ProbeStep | RestoreStep | RecordStep | TrimStep | StopStep
Step: TypeAlias = OpenStep | ProbeStep | RestoreStep | RecordStep | TrimStep | StopStep | RowStep


def rows_of(step: Step) -> int:
    """Rows that a step has in the frame; 0 for controls."""
    match step:
        case PrefillStep() | VerifyStep() | ProposeStep():
            return step.rows
        case DecodeStep():
            return 1
        case _:
            return 0


def positions_of(step: Step) -> int:
    """Positions that a step fills: its rows, and the drafts that a proposal decodes from; 0 for controls."""
    return rows_of(step) + (step.drafts - 1 if isinstance(step, ProposeStep) else 0)


def predictions_of(step: Step) -> int:
    """How many of the step's last rows predict a token on the last stage."""
    match step:
        case PrefillStep():
            return int(step.sample)
        case DecodeStep() | ProposeStep():
            return 1
        case VerifyStep():
            return step.rows
        case _:
            return 0


def tokens_of(step: Step) -> int:
    """Token ids that a step has in the token tensor."""
    match step:
        case PrefillStep():
            return step.rows + step.lookahead
        case ProbeStep():
            return step.length
        case _:
            return rows_of(step)
