"""The service: the core driven by one thread, the pipeline by others; no Triton here.

Requests come in by ``submit`` from any thread and are answered through their sink, always: by spans and a
last one, or by an error. The core thread is the only one that touches the core. It starts a pipeline when
all stages agree, ends it when a stage is lost, and then waits until they agree again.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from skippy_stage.errors import SkippyError, StageFault, Unavailable
from skippy_stage.protocol import Message, StageStatus

from skippy_orchestrator.core import Core
from skippy_orchestrator.deployment import OrchestratorSettings
from skippy_orchestrator.draft_stage import DraftStage
from skippy_orchestrator.history import CoreCounters, History
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.pipeline.link import Transport
from skippy_orchestrator.pipeline.monitor import Monitor, StageHealth
from skippy_orchestrator.pipeline.pipeline import (
    FrameDone,
    FrameDrafted,
    FrameLeftStage,
    Pipeline,
    PipelineEvent,
    PipelineFailed,
)
from skippy_orchestrator.prefix.cache import PrefixCache, StageFacts
from skippy_orchestrator.requests import GenerationRequest, parse_request
from skippy_orchestrator.sending import OutputStream, Senders, Sink, Span, span_of
from skippy_orchestrator.sessions import Commit
from skippy_orchestrator.speculation.request import Drafters
from skippy_orchestrator.text.stream import TextStream
from skippy_orchestrator.text.tokenizer import TextModel

log = logging.getLogger(__name__)

_TICK_S = 0.05
_STOP_LIMIT_S = 2.0
_FREE_LIMIT_S = 1.0
"""Seconds that stages have to hear of the last ends before the links stop."""
_DRAINING = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class _Submit:
    session: int
    request: GenerationRequest
    stream: OutputStream


@dataclass(frozen=True, slots=True)
class _Cancel:
    session: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


Event: TypeAlias = PipelineEvent | _Submit | _Cancel | _Stop


class Service:
    """A deployment that serves."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        text: TextModel,
        context_tokens: int,
        transports: Sequence[Transport],
        draft: Transport | None = None,
        head: bool = False,
        drain_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``head``: the model has an MTP head, of its own or beside it; ``draft``: the draft model's stage."""
        self._settings = settings
        self._text = text
        self._context_tokens = context_tokens
        self._transports = list(transports)
        self._finds_chat_prefix = False
        self._drafters = Drafters(head=head, model=draft is not None)
        self._drain_file = drain_file
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._streams: dict[int, OutputStream] = {}
        self._history = History.of(settings.prefix_cache)
        self._core: Core | None = None
        self._pipeline: Pipeline | None = None
        self._pids: list[int] = []
        self._lost_at = float("-inf")
        self._stop_by: float | None = None
        self._draining = False
        self._closed = False
        self._submitting = threading.Lock()
        self._reason = "starting"
        self._integrity = ""
        self._stopped = threading.Event()
        self._senders = Senders()
        limits = settings.limits
        self._monitor = Monitor(
            transports, limits.heartbeat_interval_s, limits.heartbeat_timeout_s, text.vocab_size, clock
        )
        self._draft: DraftStage | None = None
        if draft is not None:
            self._draft = DraftStage(draft, settings, text.vocab_size, self._events.put, clock)
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)
        self._poller = threading.Thread(target=self._poll_cancels, name="cancel-poller", daemon=True)

    def start(self) -> None:
        """Start serving; requests get UNAVAILABLE until all stages agree."""
        self._thread.start()
        self._poller.start()

    # Any thread.

    def check_ready(self) -> None:
        """Raise Unavailable, saying why, unless requests are served now."""
        reason = self._reason
        if reason:
            raise Unavailable(reason)

    def parse(
        self, inputs: Mapping[str, npt.NDArray[np.generic]], parameters: Mapping[str, object]
    ) -> GenerationRequest:
        """Check a request's tensors and parameters; raises InvalidArgument naming the field."""
        return parse_request(
            inputs,
            parameters,
            self._text,
            self._settings.limits,
            self._settings.sampling,
            self._context_tokens,
            lambda: secrets.randbits(64),
            self._settings.speculation,
            self._drafters,
            finds_chat_prefix=self._finds_chat_prefix,
        )

    def new_session(self) -> int:
        """A name for a session."""
        return secrets.randbits(63)

    def submit(self, session: int, request: GenerationRequest, sink: Sink) -> None:
        """Take a request; all that follows, refusals included, comes through the sink."""
        with self._submitting:
            if not self._closed:
                self._events.put(_Submit(session, request, OutputStream(request, sink)))
                return
        sink.send(request, Span(error=Unavailable(_DRAINING)))

    def cancel(self, session: int) -> None:
        """End a session because its client wants no more; unknown ones are ignored."""
        self._events.put(_Cancel(session))

    def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain data."""
        health = self._monitor.health()
        core, pipeline = self._core, self._pipeline
        return {
            "ready": not self._reason,
            "reason": self._reason,
            "draining": self._draining,
            "model": self._settings.model,
            "context_tokens": self._context_tokens,
            "active": core.active if core else 0,
            "waiting": core.waiting if core else 0,
            "incarnation": pipeline.incarnation if pipeline else 0,
            "integrity": self._integrity,
            "counters": {name: getattr(self._history.counters, name) for name in CoreCounters.__slots__},
            "speculation": self._history.speculation.to_plain(),
            "stages": [_stage_status(stage) for stage in health],
            **({} if self._draft is None else {"draft": _draft_status(self._draft)}),
        }

    def stop(self) -> None:
        """Refuse new requests, let running ones finish within the drain limit, end the rest, free all."""
        self._draining = True
        deadline = self._clock() + self._settings.limits.drain_timeout_s
        while self._streams and self._clock() < deadline and not self._reason.startswith("lost"):
            time.sleep(_TICK_S)
        self._events.put(_Stop())
        self._thread.join(_STOP_LIMIT_S * 2)
        self._stopped.set()
        self._monitor.stop()
        if self._draft is not None:
            self._draft.stop()
        self._senders.stop(_STOP_LIMIT_S)
        self._poller.join(_STOP_LIMIT_S)

    # The core thread.

    def _run(self) -> None:
        next_tick = 0.0
        while self._goes_on():
            try:
                event: Event | None = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                event = None
            while event is not None:
                self._safely(self._handle, event)
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    event = None
            self._safely(self._pump)
            now = self._clock()
            if now >= next_tick:
                next_tick = now + _TICK_S
                self._safely(self._tick, now)
        self._end_pipeline(Unavailable(_DRAINING))
        self._refuse_the_rest()

    def _goes_on(self) -> bool:
        """True until it was stopped and the stages have heard of all ends, for which there is a limit."""
        if self._stop_by is None:
            return True
        return self._core is not None and not self._core.idle and self._clock() < self._stop_by

    def _refuse_the_rest(self) -> None:
        self._reason = _DRAINING
        with self._submitting:
            self._closed = True
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Submit):
                self._senders.post(event.stream, Span(error=Unavailable(_DRAINING)))

    def _safely(self, call: Callable[..., None], *args: object) -> None:
        """A bug in the core must not silence it: it ends the pipeline's sessions, and serving goes on."""
        try:
            call(*args)
        except Exception as error:
            log.exception("the core failed")
            self._lose_pipeline(StageFault("orchestrator", str(error)))

    def _handle(self, event: Event) -> None:
        core, pipeline = self._core, self._pipeline
        if isinstance(event, _Submit):
            self._submit(event)
        elif isinstance(event, _Stop):
            self._stop_by = self._clock() + _FREE_LIMIT_S
            if core is not None:
                core.fail_all(Unavailable(_DRAINING), self._clock())
        elif isinstance(event, _Cancel):
            if core is not None:
                core.cancel(event.session, self._clock())
        elif (
            core is None
            or pipeline is None
            or self._is_of_draft(event, core)
            or event.incarnation != pipeline.incarnation
        ):
            return
        elif isinstance(event, FrameLeftStage):
            core.frame_left_stage(event.number, event.stage, event.report, self._clock())
        elif isinstance(event, FrameDone):
            core.frame_done(
                *(event.number, event.statuses, event.report, self._clock()),
                drafts_follow=event.drafts_follow,
            )
        elif isinstance(event, FrameDrafted):
            core.frame_drafted(event.drafts, self._clock())
        elif isinstance(event, PipelineFailed):
            self._lose_pipeline(StageFault(event.stage, event.message))

    def _is_of_draft(self, event: PipelineEvent, core: Core) -> bool:
        """Whether an event is the draft stage's; then it is taken."""
        return self._draft is not None and self._draft.handle(event, core)

    def _submit(self, event: _Submit) -> None:
        core = self._core
        try:
            if core is None or self._draining:
                raise Unavailable(_DRAINING if self._draining else self._reason)
            text = TextStream(self._text, event.request.stop_words)
            core.submit(event.session, event.request, text, self._clock())
        except SkippyError as error:
            self._senders.post(event.stream, Span(error=error))
        except Exception as error:
            log.exception("a request could not be taken")
            self._senders.post(event.stream, Span(error=SkippyError(f"orchestrator: {error}")))
        else:
            self._streams[event.session] = event.stream

    def _pump(self) -> None:
        core, pipeline = self._core, self._pipeline
        if core is None or pipeline is None:
            return
        while (frame := core.next_frame(self._clock())) is not None:
            pipeline.submit(frame)
        if self._draft is not None:
            self._draft.pump(core)
        self._publish(core)

    def _publish(self, core: Core) -> None:
        for output in core.take_outputs():
            span = span_of(output) if isinstance(output, Commit) else Span(error=output.error)
            stream = self._streams.get(output.session)
            if stream is None:
                continue
            if span.final:
                del self._streams[output.session]
            self._senders.post(stream, span)

    def _tick(self, now: float) -> None:
        if self._drain_file is not None and not self._draining and self._drain_file.exists():
            self._draining = True
        health = self._monitor.health()
        problem = self._monitor.problem(health)
        if self._pipeline is None:
            if problem:
                self._reason = problem
            elif not self._draining and all(stage.asked_at > self._lost_at for stage in health):
                self._begin_pipeline([stage.status for stage in health if stage.status])
        else:
            pids = [stage.status.pid if stage.status else 0 for stage in health]
            lost = next((s for s in health if s.reason), None)
            restarted = next(
                (s for s, old, new in zip(health, self._pids, pids, strict=True) if old != new), None
            )
            if lost is not None:
                self._pipeline.fail(lost.name, lost.reason)
            elif restarted is not None:
                self._pipeline.fail(restarted.name, "has restarted")
            self._pipeline.check_deadlines(now, self._settings.limits.frame_deadline_s)
        if self._core is not None:
            self._core.tick(now)
            if self._draft is not None:
                self._draft.tick(self._core, now)
            self._publish(self._core)
            if self._core.idle:
                self._check_integrity(self._core)
        if self._draining:
            self._reason = _DRAINING

    def _check_integrity(self, core: Core) -> None:
        try:
            core.check_integrity()
            self._integrity = ""
        except AssertionError as error:
            self._integrity = str(error) or "integrity check failed"

    def _begin_pipeline(self, stages: Sequence[StageStatus]) -> None:
        stuck = next((stage for stage in stages if stage.pending), None)
        if stuck is not None and self._pids:
            self._reason = f"{stuck.name}: is still busy with a frame of the last pipeline"
            return
        settings = self._settings
        budget = KvBudget.of_tightest([(stage.kv_blocks, stage.kv_block_tokens) for stage in stages])
        self._pids = [stage.pid for stage in stages]
        facts = StageFacts.of(stages)
        self._core = Core(
            len(stages),
            budget,
            self._text.end_tokens,
            settings.scheduler,
            settings.prefill,
            settings.limits,
            PrefixCache(settings.prefix_cache, self._text.identity, facts, self._history.prefixes),
            self._history,
        )
        self._finds_chat_prefix = facts.exact
        incarnation = secrets.randbits(63)
        self._pipeline = Pipeline(
            *(
                self._transports,
                incarnation,
                settings.scheduler.frames_per_link,
                self._events.put,
                self._clock,
            ),
            link_delay_s=settings.link_delay_ms / 1000,
        )
        self._reason = ""

    def _lose_pipeline(self, error: StageFault) -> None:
        self._reason = f"lost {error.message}"
        self._lost_at = self._clock()
        self._end_pipeline(error, Unavailable(self._reason))

    def _end_pipeline(self, error: SkippyError, waiting_error: SkippyError | None = None) -> None:
        core, pipeline = self._core, self._pipeline
        self._core = self._pipeline = None
        if self._draft is not None:
            self._draft.end("there is no pipeline to draft for")
        try:
            if core is not None:
                core.fail_all(error, self._clock(), waiting_error)
                self._publish(core)
        except Exception:
            log.exception("the core failed at its end")
        for stream in self._streams.values():  # of sessions that a broken core has forgotten
            self._senders.post(stream, Span(error=error))
        self._streams.clear()
        if pipeline is not None:
            pipeline.stop(0.0)

    # The thread that watches clients.

    def _poll_cancels(self) -> None:
        while not self._stopped.wait(_TICK_S):
            for session, stream in self._streams.copy().items():
                try:
                    cancelled = stream.broken or stream.sink.is_cancelled()
                except Exception:
                    log.exception("a client's state could not be read")
                    cancelled = True
                if cancelled:
                    self.cancel(session)


def _draft_status(draft: DraftStage) -> dict[str, Any]:
    return {**_stage_status(draft.health()), "counters": draft.to_plain()}


def _stage_status(stage: StageHealth) -> dict[str, Any]:
    plain = {} if stage.status is None else _fields(stage.status)
    return {**plain, "name": stage.name, "ready": not stage.reason, "reason": stage.reason}


def _fields(message: Message) -> dict[str, Any]:
    """A message and those in it by field names; on the wire they are arrays."""
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return {name: _fields(value) if isinstance(value, Message) else value for name, value in values.items()}
