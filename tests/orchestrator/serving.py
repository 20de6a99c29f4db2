"""A service over stages in this process: their faults come on order, its time can be made to pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from skippy_orchestrator.deployment import (
    LimitsSection,
    OrchestratorSettings,
    PrefillSection,
    SchedulerSection,
)
from skippy_orchestrator.pipeline.link import Pending
from skippy_orchestrator.pipeline.local import LocalTransport
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sending import Span
from skippy_orchestrator.service import Service
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.engines.base import Batch
from skippy_stage.errors import StageFault
from skippy_stage.protocol import FrameHeader, FrameResult, SamplingParams, StageStatus
from skippy_stage.runtime import StageRuntime
from tokenizers import Tokenizer, models

from tests.scripted import VOCAB, ScriptedEngine, cut

GENEROUS_S = 30.0
LIMITS = {
    "heartbeat_interval_s": 0.005,
    "heartbeat_timeout_s": 1e5,
    "frame_deadline_s": 1e5,
    "queue_timeout_s": 1e5,
    "drain_timeout_s": 1e5,
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.002)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def text_model(end_tokens: frozenset[int] = frozenset()) -> TextModel:
    return TextModel([text_of([i]).encode() for i in range(VOCAB)], end_tokens, Tokenizer(models.BPE()), None)


class Client:
    """A sink that keeps what it is sent."""

    def __init__(self) -> None:
        self.session = 0
        self.spans: list[Span] = []
        self.gone = False
        self._ended = threading.Event()

    def send(self, request: GenerationRequest, span: Span) -> None:
        self.spans.append(span)
        if span.final:
            self._ended.set()

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    def finish(self) -> str:
        """Wait for the end; the reason, or the error's code and message."""
        assert self._ended.wait(GENEROUS_S), "a client was left without an answer"
        last = self.spans[-1]
        return f"{last.error.code}: {last.error.message}" if last.error else last.finish_reason

    def wait_for_tokens(self, count: int) -> None:
        wait_until(lambda: len(self.tokens) >= count, f"{count} tokens have come")


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


class FaultyStage:
    """A transport to a stage in this process that can break in every way a real one can."""

    def __init__(self, index: int, build: Callable[[], ScriptedEngine]) -> None:
        self.name = f"stage_{index}"
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
        self._starting = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.engine = self._build()
        self.local = LocalTransport(self.name, StageRuntime(self.engine, self.name, self.index))

    def hang(self) -> None:
        """The engine stops in its next batch until ``released``."""

        def fault(batch: Batch) -> None:
            self.engine_is_stuck.set()
            self.released.wait()

        self.engine.fault = fault

    def restart(self) -> None:
        """A fresh process in its place."""
        self.local.close()
        self._start()
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


class Serving:
    """A service, its stages and its clients."""

    def __init__(
        self,
        stages: int = 2,
        *,
        limits: dict[str, Any] | None = None,
        scheduler: SchedulerSection | None = None,
        blocks: int = 65536,
        end_tokens: frozenset[int] = frozenset(),
        **options: Any,
    ) -> None:
        self._ahead = 0.0
        self.stages = [
            FaultyStage(i, lambda i=i: cut(stages, blocks=blocks)[i])  # type: ignore[misc]
            for i in range(stages)
        ]
        settings = OrchestratorSettings(
            model="scripted",
            stages=tuple(stage.name for stage in self.stages),
            scheduler=scheduler or SchedulerSection(min_group_rows=2),
            prefill=PrefillSection(chunk_tokens=8),
            limits=LimitsSection(**{**LIMITS, **(limits or {})}),
        )
        self.service = Service(
            settings, text_model(end_tokens), 4096, self.stages, clock=self.clock, **options
        )
        self.clients: list[Client] = []

    def clock(self) -> float:
        return time.monotonic() + self._ahead

    def let_pass(self, seconds: float) -> None:
        self._ahead += seconds

    def start(self) -> None:
        self.service.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_until(lambda: bool(self.service.status()["ready"]), "the service is ready")

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stream: bool = True,
        sampling: SamplingParams | None = None,
        stop_words: tuple[str, ...] = (),
        client: Client | None = None,
    ) -> Client:
        request = GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stream=stream,
            stop_words=stop_words,
        )
        client = client or Client()
        client.session = self.service.new_session()
        self.clients.append(client)
        self.service.submit(client.session, request, client)
        return client

    def wait_free(self) -> None:
        """All sessions have ended: wait until no stage and no list holds anything."""
        wait_until(lambda: not any(stage.cached() for stage in self.stages), "stages are free")
        wait_until(lambda: all(stage.local.status().pending == 0 for stage in self.stages), "stages are idle")
        for stage in self.stages:
            stage.local.runtime.check_integrity()
            assert stage.engine.usage().blocks_used == 0

    def close(self) -> None:
        self.service.stop()
        for stage in self.stages:
            stage.close()


@contextmanager
def serving(stages: int = 2, *, start: bool = True, **options: Any) -> Iterator[Serving]:
    """A service that serves; whatever happens in it, every client is answered once and no thread stays."""
    before = set(threading.enumerate())
    serving = Serving(stages, **options)
    try:
        if start:
            serving.start()
        yield serving
        assert serving.service.status()["integrity"] == ""
    finally:
        serving.close()
    for client in serving.clients:
        client.finish()
        assert [span.final for span in client.spans] == [False] * (len(client.spans) - 1) + [True]
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads have ended")
