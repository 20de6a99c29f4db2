"""The scheduler: which steps of which sessions make the next frame. Pure policy.

* Decode rows come first, so running streams never wait for a prompt. While any session decodes, no frame
  carries more than ``prefill_rows_while_decoding`` prefill rows, and none without decode rows queues at stage 0:
  a token waits for one such frame at most, and the time between two tokens stays bounded by what its rows take.
* Prompts take turns chunk by chunk: a short one is not stuck behind a long one.
* Probes have no rows and go with the next frame.
* Decoding sessions are spread over as many groups as there are stages, each in a frame of its own, so all
  stages work at the same time. Groups smaller than ``min_group_rows`` are not worth it: a batch costs
  little more than one row, so few sessions travel together. A group that comes back while all groups'
  frames are out waits for the others and joins them, which keeps groups even.
* A session with several verify windows in flight has one in each frame: they go with the next frame that is
  built, and stages work on the windows at the same time.
* A frame is built only when stage 0 has a place for it: sessions that become ready meanwhile travel
  together, as a batch.
"""

from __future__ import annotations

from skippy_stage.protocol import rows_of

from skippy_orchestrator.deployment import SchedulerSection
from skippy_orchestrator.sessions import Phase, Session, SessionStep


class Scheduler:
    """Running sessions by what they wait for."""

    def __init__(self, settings: SchedulerSection, stages: int) -> None:
        self._settings = settings
        self._stages = stages
        self._prefilling: dict[int, Session] = {}
        self._ready: dict[int, Session] = {}
        self._decoding: set[int] = set()

    def add(self, session: Session) -> None:
        """A session was admitted."""
        self._prefilling[session.id] = session

    def remove(self, session: Session) -> None:
        """A session has ended."""
        self._prefilling.pop(session.id, None)
        self._ready.pop(session.id, None)
        self._decoding.discard(session.id)

    def update(self, session: Session) -> None:
        """A step of a running session has completed: it may be ready for the next."""
        self._move(session)
        self._note_ready(session)

    @property
    def groups(self) -> int:
        """Frames over which decoding sessions are spread."""
        return max(1, min(self._stages, len(self._decoding) // self._settings.min_group_rows))

    def pick(
        self, decode_frames: int, now: float, *, queues: bool = False
    ) -> list[tuple[Session, SessionStep]]:
        """Choose the steps of the next frame, ``decode_frames`` with decode rows being in flight.

        ``queues``: the frame would queue behind another one at stage 0.
        The caller dispatches every step it is given; sessions are taken off the ready list here.
        """
        room = self._settings.max_frame_rows
        picks = self._pick_decode(room, now, starts=decode_frames < self.groups)
        room -= sum(rows_of(step) for _, step in picks)
        bound = self._settings.prefill_rows_while_decoding
        if bound and self._decoding:
            room = 0 if queues and not picks else min(room, bound)
        for session in list(self._prefilling.values()):
            step = session.next_step(room, now)
            if step is None:
                continue
            picks.append((session, step))
            room -= rows_of(step)
            del self._prefilling[session.id]
            self._prefilling[session.id] = session
        return picks

    def _pick_decode(self, room: int, now: float, *, starts: bool) -> list[tuple[Session, SessionStep]]:
        """Steps of decoding sessions; without ``starts`` only of those that have windows in flight."""
        share = -(-len(self._decoding) // self.groups) if self._decoding and starts else 0
        picks: list[tuple[Session, SessionStep]] = []
        for session in list(self._ready.values()):
            alone = not session.steps_in_flight
            if room < 1:
                break
            if alone and not share:
                continue
            step = session.next_step(room, now)
            if step is None:
                # It has nothing to send until something comes back; or just no room here, and goes on waiting.
                if not session.wants_step:
                    del self._ready[session.id]
                continue
            share -= alone
            room -= rows_of(step)
            del self._ready[session.id]
            picks.append((session, step))
        return picks

    def dispatched(self, session: Session) -> None:
        """A picked step of the session is in a frame now; its prompt may be all on its way."""
        self._move(session)
        self._note_ready(session)

    def _note_ready(self, session: Session) -> None:
        if session.wants_step:
            self._ready[session.id] = session

    def _move(self, session: Session) -> None:
        if session.phase is Phase.DECODE and self._prefilling.pop(session.id, None) is not None:
            self._decoding.add(session.id)

    def check_integrity(self, running: dict[int, Session]) -> None:
        """Raise AssertionError when a running session is on no list, or on a wrong one."""
        known = self._prefilling.keys() | self._decoding
        assert known == running.keys(), f"scheduler knows {known ^ running.keys()} by mistake"
        assert self._ready.keys() <= self._decoding, "a session is ready to decode before its prompt is done"
        for name, session in self._prefilling.items():
            assert session.phase in (Phase.PROBE, Phase.PREFILL), (
                f"session {name} is in {session.phase} on the prefill list"
            )
        for name in self._decoding:
            waits = running[name].wants_step
            assert waits <= (name in self._ready), f"session {name} could go on and is not ready"
