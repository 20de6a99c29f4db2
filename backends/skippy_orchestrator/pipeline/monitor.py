"""Readiness: a heartbeat to every stage, and whether all of them make one model.

Each stage has a thread that asks for its status. The call may hang for ever when the stage's process was
killed, so what counts is the time of the last answer; a thread that is stuck is replaced by a fresh one,
which is refused at once by a dead stage and gets through to one that is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippy_stage.protocol import StageStatus

from skippy_orchestrator.pipeline.link import Transport

_STUCK_THREADS = 8
"""Probes of one stage that may hang at the same time; then the next waits for one of them."""


@dataclass(frozen=True, slots=True)
class StageHealth:
    """What is known of a stage: the last status it gave, and why it counts as not ready (or "")."""

    name: str
    status: StageStatus | None
    reason: str
    asked_at: float = 0.0
    """When it was asked for that status."""


class StageProbe:
    """The heartbeat of one stage."""

    def __init__(
        self, transport: Transport, interval_s: float, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._status: StageStatus | None = None
        self._status_asked_at = 0.0
        self._error = "has not answered yet"
        self._asked_at: float | None = None
        self._generation = 0
        self._stuck = 0
        self._start_thread()

    def _start_thread(self) -> None:
        self._generation += 1
        threading.Thread(
            target=self._beat, args=(self._generation,), name=f"{self.name}-heartbeat", daemon=True
        ).start()

    def _beat(self, generation: int) -> None:
        while not self._stop.is_set():
            status, error = None, ""
            asked_at = self._clock()
            try:
                # A stage that is gone isn't asked: the call might never return.
                if self._transport.is_gone():
                    with self._lock:
                        self._error = "its process has ended, it is being loaded again"
                    self._transport.revive()
                with self._lock:
                    self._asked_at = asked_at = self._clock()
                status = self._transport.status(check_integrity=True)
            except Exception as problem:
                error = str(problem).removeprefix(f"{self.name}: ") or type(problem).__name__
            with self._lock:
                if generation != self._generation:
                    self._stuck -= 1
                    return
                self._asked_at = None
                self._error = error
                if status is not None:
                    self._status, self._status_asked_at = status, asked_at
            self._stop.wait(self._interval_s)

    def health(self) -> StageHealth:
        """What is known now; replaces a heartbeat that hangs."""
        with self._lock:
            if self._asked_at is not None and self._clock() - self._asked_at > self._timeout_s:
                self._error = f"has not answered for {self._timeout_s:g} s"
                if self._stuck < _STUCK_THREADS:
                    self._stuck += 1
                    self._asked_at = None
                    self._start_thread()
            return StageHealth(self.name, self._status, self._error, self._status_asked_at)

    def stop(self) -> None:
        """Ask no more; does not wait for a call that hangs."""
        self._stop.set()


class Monitor:
    """The heartbeats of all stages, and the agreement between them."""

    def __init__(
        self,
        transports: Sequence[Transport],
        interval_s: float,
        timeout_s: float,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probes = [StageProbe(transport, interval_s, timeout_s, clock) for transport in transports]
        self._vocab_size = vocab_size

    def health(self) -> list[StageHealth]:
        """Every stage's health, in pipeline order."""
        return [probe.health() for probe in self._probes]

    def problem(self, health: Sequence[StageHealth]) -> str:
        """Why the pipeline as a whole cannot serve, naming the stage; "" when it can."""
        for stage in health:
            if stage.reason or stage.status is None:
                return f"{stage.name}: {stage.reason or 'has not answered yet'}"
        return disagreement([stage.status for stage in health if stage.status], self._vocab_size)

    def stop(self) -> None:
        """Stop all heartbeats."""
        for probe in self._probes:
            probe.stop()


def disagreement(stages: Sequence[StageStatus], vocab_size: int) -> str:
    """Why these stages do not make one model for a tokenizer of ``vocab_size``; "" when they do."""
    first = stages[0]
    expected = 0
    for index, stage in enumerate(stages):
        if stage.index != index:
            return f"{stage.name}: is stage {stage.index}, expected {index}"
        if stage.first_layer != expected:
            return f"{stage.name}: starts at layer {stage.first_layer}, expected {expected}"
        expected = stage.last_layer
        for what in ("architecture", "n_layers", "hidden_size", "vocab_size", "link_dtype"):
            mine, other = getattr(stage, what), getattr(first, what)
            if mine != other:
                return f"{stage.name}: has {what} {mine}, {first.name} has {other}"
    if expected != first.n_layers:
        return f"{stages[-1].name}: ends at layer {expected} of {first.n_layers}"
    if vocab_size > first.vocab_size:
        return f"{first.name}: has a vocabulary of {first.vocab_size}, the tokenizer {vocab_size}"
    return ""
