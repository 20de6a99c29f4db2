"""The sessions of a stage: what each holds beside its KV, and the controls that act on them.

Invariants:

* ``tokens`` of a session are the tokens of its cached positions; ``pos_start`` cuts what is beyond.
* A session starts at position 0, with what was restored, or with nothing.
* Only positions that a record step names enter the prefix store, and those are committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from skippy_stage.engines.base import StageEngine
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.store import PrefixStore
from skippy_stage.protocol import (
    OpenStep,
    ProbeStep,
    ProposeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    RowStep,
    SamplingParams,
    Step,
    StepOk,
    StopStep,
    TrimStep,
    positions_of,
    rows_of,
)

Located: TypeAlias = ProbeStep | RestoreStep | RecordStep | TrimStep | RowStep
"""Steps of a session that has to be open."""

_OK = StepOk()


@dataclass(slots=True)
class StageSession:
    """What a stage keeps of a session beside its KV."""

    max_tokens: int
    sampling: SamplingParams
    namespace: str
    tokens: list[int] = field(default_factory=list)
    failed_epoch: int = -1
    """Highest epoch that had a failure: its later steps are skipped."""
    drafts: int = 0
    """Tokens that the MTP head drafts behind each prediction."""
    head: int = 0
    """Positions that the head has seen, all from 0 on."""
    follows: int | None = None
    """The token that follows what the head has seen; None where that isn't known."""
    probed: Sequence[int] = ()
    """Tokens of a probe whose lease is neither used nor given up yet."""


class SessionTable:
    """Open sessions by id. Not thread-safe: the stage's worker owns it."""

    def __init__(self, engine: StageEngine, prefixes: PrefixStore) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._sessions: dict[int, StageSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: int) -> StageSession | None:
        """The session, or None when it is not open."""
        return self._sessions.get(session)

    def close(self, sessions: Iterable[int]) -> None:
        """Free sessions and their leases; unknown ones are ignored."""
        for session in sessions:
            if self._sessions.pop(session, None) is not None:
                self._engine.close(session)
                self._prefixes.release(session)

    def close_all(self) -> None:
        """Free everything that sessions hold; records stay."""
        self.close(list(self._sessions))

    def control(self, step: Step, tokens: Sequence[int]) -> StepOk:
        """Carry out a control; ``tokens`` are those of a probe. Raises SkippyError when it cannot be done."""
        match step:
            case OpenStep():
                self._open(step)
            case StopStep():
                self.close([step.session])
            case ProbeStep():
                return StepOk(restorable=self._probe(step, tokens))
            case RestoreStep():
                self._restore(step)
            case RecordStep():
                self._record(step)
            case TrimStep():
                self.align(step)
        return _OK

    def align(self, step: RowStep | TrimStep) -> StageSession:
        """Cut the session to the authoritative position; raises SkippyError when it is behind that."""
        session = self._sessions[step.session]
        position = step.length if isinstance(step, TrimStep) else step.pos_start
        have, end = len(session.tokens), position + rows_of(step)
        if position > have:
            raise SkippyError(f"session is behind: has {have} positions, the step starts at {position}")
        if end > session.max_tokens:
            raise SkippyError(f"step ends at {end}, the session has room for {session.max_tokens}")
        if isinstance(step, ProposeStep) and position + positions_of(step) > session.max_tokens:
            raise SkippyError(
                f"drafts: got {step.drafts}, expected at most {session.max_tokens - end + 1} behind position "
                f"{end - 1}, the session has room for {session.max_tokens}"
            )
        del session.tokens[position:]
        if position < session.head:
            session.head, session.follows = position, None
        if session.probed:  # its rows start without a restore: the lease was a miss
            session.probed = ()
            self._prefixes.release(step.session)
        return session

    def start_from(self, session: int, tokens: Sequence[int]) -> int:
        """Let an empty session start with these tokens if all of them can be restored.

        Returns how many could be; the session is changed only if it is all of them.
        """
        state = self._sessions[session]
        found = self._prefixes.probe(session, state.namespace, tokens).best(len(tokens))
        if found == len(tokens):
            self._prefixes.restore(session, found)
            state.tokens = list(tokens)
            state.head, state.follows = found, None
        else:
            self._prefixes.release(session)
        return found

    def _open(self, step: OpenStep) -> None:
        if step.session in self._sessions:
            raise SkippyError(f"session {step.session} is open already")
        self._engine.open(step.session, step.max_tokens)
        drafts = step.drafts if self._engine.info.mtp_layers else 0
        self._sessions[step.session] = StageSession(
            step.max_tokens, step.sampling, step.namespace, drafts=drafts
        )

    def _probe(self, step: ProbeStep, tokens: Sequence[int]) -> Restorable:
        session = self._sessions[step.session]
        if session.tokens:
            raise SkippyError(f"probe of a session that holds {len(session.tokens)} positions")
        session.probed = tokens
        return self._prefixes.probe(step.session, session.namespace, tokens)

    def _restore(self, step: RestoreStep) -> None:
        session = self._sessions[step.session]
        if session.tokens or step.length > min(len(session.probed), session.max_tokens):
            raise SkippyError(
                f"restore of {step.length} positions: {len(session.probed)} probed, room for "
                f"{session.max_tokens}, {len(session.tokens)} held"
            )
        self._prefixes.restore(step.session, step.length)
        session.tokens = list(session.probed[: step.length])
        session.head, session.follows = step.length, None
        session.probed = ()

    def _record(self, step: RecordStep) -> None:
        session = self._sessions[step.session]
        if step.length > len(session.tokens):
            raise SkippyError(f"record of {step.length} positions, the session has {len(session.tokens)}")
        self._prefixes.record(step.session, session.namespace, session.tokens[: step.length])

    def check_integrity(self) -> None:
        """Raise AssertionError when sessions, engine and prefix store disagree."""
        self._engine.check_integrity()
        self._prefixes.check_integrity()
        cached = self._engine.usage().cached
        assert cached.keys() == self._sessions.keys(), (
            f"engine has {cached.keys()}, runtime {self._sessions.keys()}"
        )
        for name, session in self._sessions.items():
            assert cached[name] >= len(session.tokens), (
                f"session {name}: {cached[name]} cached, {len(session.tokens)} known"
            )
            assert len(session.tokens) <= session.max_tokens, f"session {name} has grown past its room"
