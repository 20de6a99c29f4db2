"""A stage in this process whose faults come on order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from skippy_orchestrator.pipeline.link import Pending
from skippy_orchestrator.pipeline.local import LocalTransport
from skippy_stage.engines.base import Batch
from skippy_stage.errors import StageFault
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.protocol import DraftResult, FrameHeader, FrameResult, StageStatus
from skippy_stage.runtime import StageRuntime

from tests.scripted import ScriptedEngine


class _Answer:
    """A frame with a stage that may die before it answers."""

    def __init__(self, stage: FaultyStage, pending: Pending) -> None:
        self._stage = stage
        self._pending = pending

    def wait(self) -> tuple[FrameResult, Any]:
        result, hidden = self._pending.wait()
        if self._stage.gone:
            self._stage.released.wait()
        if self._stage.garbled:
            result = msgspec.structs.replace(result, statuses=())
        return result, hidden

    def drafts(self) -> DraftResult:
        drafts = self._pending.drafts()
        if self._stage.gone:
            self._stage.released.wait()
        return drafts


class FaultyStage:
    """A transport to a stage in this process that can break in every way a real one can."""

    def __init__(
        self, index: int, build: Callable[[], ScriptedEngine], prefixes: bool = False, name: str = ""
    ) -> None:
        self.name = name or f"stage_{index}"
        self.pid = 100
        self.gone = False
        self.garbled = False
        self.broken = ""
        self.deaf = threading.Event()
        self.is_asked = threading.Event()
        """It was asked for its status while deaf."""
        self.engine_is_stuck = threading.Event()
        self.released = threading.Event()
        """What hangs may return."""
        self.may_revive = threading.Event()
        self.index = index
        self._build = build
        self._prefixes = prefixes
        self._starting = threading.Lock()
        self._sending = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.engine = self._build()
        store = make_prefix_store(self.engine, "auto" if self._prefixes else "off")
        self.local = LocalTransport(
            self.name, StageRuntime(self.engine, self.name, self.index, prefixes=store)
        )

    def hang(self) -> None:
        """The engine stops in its next batch until ``released``."""

        def fault(batch: Batch) -> None:
            self.engine_is_stuck.set()
            self.released.wait()

        self.engine.fault = fault

    def restart(self) -> None:
        """A fresh process in its place; what the old one was sent ends with an error."""
        old = self.local
        with self._sending:  # a frame that is sent to what is closed would never be answered
            self._start()
        old.close()
        self.pid += 1

    def cached(self) -> list[int]:
        """Positions that the stage holds of every session, while it works."""
        while True:
            try:
                return list(self.engine.usage().cached.values())
            except RuntimeError:  # a session came or went meanwhile
                continue

    def heal(self) -> None:
        self.broken, self.garbled, self.engine.fault = "", False, None
        self.deaf.clear()
        self.released.set()
        self.may_revive.set()

    def send(self, header: FrameHeader, tokens: np.ndarray[Any, Any], hidden: Any) -> Pending:
        if self.gone:
            raise StageFault(self.name, "its process has ended")
        if self.broken:
            raise StageFault(self.name, self.broken)
        with self._sending:
            return _Answer(self, self.local.send(header, tokens, hidden))

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        assert not self.gone, "a stage that is gone was asked"
        if self.broken:
            raise StageFault(self.name, self.broken)
        if self.deaf.is_set():
            self.is_asked.set()
            self.released.wait()
        return msgspec.structs.replace(self.local.status(check_integrity=check_integrity), pid=self.pid)

    def is_gone(self) -> bool:
        return self.gone

    def revive(self) -> None:
        self.may_revive.wait()
        with self._starting:
            if self._closed:
                raise StageFault(self.name, "is closed")
            self.restart()
        self.gone = False

    def close(self) -> None:
        with self._starting:
            self._closed = True
        self.heal()
        self.local.close()
