"""When calls to stages may start: never while the error of a dead stage may still be on its way.

A call that a stub had not answered when it died gets an error from Triton, one second later, with the id of
an arbitrary earlier call, whose memory may belong to a call of now. That one then ends in its place, and the
server crashes at its next response (release 24.10). So once a stage is gone nothing is started until the
calls to it have returned; those that run on other stages are long done when the error comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from skippy_stage.errors import StageFault

_SETTLING_S: Final = 0.25
"""After a failed call has returned: until the stub's service thread and the server are done with its id."""
_POLL_S: Final = 0.02


class Callee(Protocol):
    """A stage that can be called."""

    @property
    def name(self) -> str:
        """The stage's name."""
        ...

    def is_gone(self) -> bool:
        """Whether its process has ended."""
        ...


class CallGate:
    """Shared by all that call stages from one process; safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[Callee, int] = {}
        self._quiet_until = 0.0

    @contextmanager
    def call(self, stage: Callee) -> Iterator[None]:
        """Around a call until its first response; waits at the gate. Raises StageFault when the stage is gone."""
        with self._changed:
            while self._must_wait():
                self._changed.wait(_POLL_S)
            if stage.is_gone():
                raise StageFault(stage.name, "its process has ended")
            self._running[stage] = self._running.get(stage, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[stage] -= 1
                if stage.is_gone():
                    self._quiet_until = self._clock() + _SETTLING_S
                self._changed.notify_all()

    def wait_settled(self, stage: Callee, timeout: float) -> bool:
        """Wait until no call to a stage that is gone is under way; False when one is after ``timeout`` s."""
        deadline = self._clock() + timeout
        with self._changed:
            while self._running.get(stage) or self._clock() < self._quiet_until:
                if self._clock() > deadline:
                    return False
                self._changed.wait(_POLL_S)
        return True

    def _must_wait(self) -> bool:
        return self._clock() < self._quiet_until or any(
            calls and stage.is_gone() for stage, calls in self._running.items()
        )
