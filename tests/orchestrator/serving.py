"""A service over stages in this process, with clients; its time can be made to pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skippy_orchestrator.deployment import (
    LimitsSection,
    OrchestratorSettings,
    PrefillSection,
    PrefixCacheSection,
    SchedulerSection,
    SpeculationPlan,
)
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sending import Span
from skippy_orchestrator.service import Service
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.protocol import SamplingParams
from tokenizers import Tokenizer, models

from tests.orchestrator.faulty_stage import FaultyStage
from tests.scripted import VOCAB, cut

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


class Serving:
    """A service, its stages and its clients."""

    def __init__(
        self,
        stages: int = 2,
        *,
        limits: dict[str, Any] | None = None,
        scheduler: SchedulerSection | None = None,
        prefix: PrefixCacheSection | None = None,
        blocks: int = 4096,
        block_tokens: int = 64,
        end_tokens: frozenset[int] = frozenset(),
        draft: bool = False,
        mtp: bool = False,
        **options: Any,
    ) -> None:
        self._ahead = 0.0
        sizes = {"blocks": blocks, "block_tokens": block_tokens}
        self.stages = [
            FaultyStage(i, lambda i=i: cut(stages, mtp=mtp, **sizes)[i], prefix is not None)  # type: ignore[misc]
            for i in range(stages)
        ]
        self.draft: FaultyStage | None = None
        if draft:
            self.draft = FaultyStage(0, lambda: cut(1, **sizes)[0], name="draft")
        settings = OrchestratorSettings(
            model="scripted",
            stages=tuple(stage.name for stage in self.stages),
            scheduler=scheduler or SchedulerSection(min_group_rows=2),
            prefill=PrefillSection(policy="fixed", chunk_tokens=8),
            prefix_cache=prefix or PrefixCacheSection(),
            limits=LimitsSection(**{**LIMITS, **(limits or {})}),
        )
        self.service = Service(
            settings,
            text_model(end_tokens),
            4096,
            self.stages,
            draft=self.draft,
            head=mtp,
            clock=self.clock,
            **options,
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
        speculation: SpeculationPlan | None = None,
        client: Client | None = None,
    ) -> Client:
        request = GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stream=stream,
            stop_words=stop_words,
            **({} if speculation is None else {"speculation": speculation}),
        )
        client = client or Client()
        client.session = self.service.new_session()
        self.clients.append(client)
        self.service.submit(client.session, request, client)
        return client

    def wait_free(self) -> None:
        """All sessions have ended: wait until no stage and no list holds anything."""
        every = [*self.stages, *([] if self.draft is None else [self.draft])]
        wait_until(lambda: not any(stage.cached() for stage in every), "stages are free")
        wait_until(lambda: all(stage.local.status().pending == 0 for stage in every), "stages are idle")
        for stage in every:
            stage.local.runtime.check_integrity()
            assert stage.engine.usage().blocks_used == 0

    def close(self) -> None:
        self.service.stop()
        for stage in [*self.stages, *([] if self.draft is None else [self.draft])]:
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
