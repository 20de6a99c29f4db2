"""Streams of the server with the times of their tokens, as a client sees them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence

from skippy_client import GenerateOptions, GenerationCancelled, GenerationStream, SkippyClient
from skippy_stage.errors import SkippyError


class TimedStream:
    """One generation and when its tokens came; times in seconds of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.started = 0.0
        self.arrivals: list[tuple[float, int]] = []
        """Time and number of tokens of every response with tokens."""
        self.token_ids: list[int] = []
        self.text = ""
        self.cached_tokens = 0
        """Prompt tokens that the server had in its prefix cache; known at the end."""
        self.ended = False
        self.error: BaseException | None = None
        self._generation: GenerationStream | None = None
        self._thread: threading.Thread | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first response with a token."""
        if not self.arrivals:
            raise SkippyError("a stream ended without a token")
        return self.arrivals[0][0] - self.started

    def read(self, client: SkippyClient, options: GenerateOptions) -> None:
        """Generate, to the end."""
        self.started = time.perf_counter()
        self._generation = client.stream(**options)
        for chunk in self._generation:
            if chunk.token_ids:
                self.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
                self.token_ids.extend(chunk.token_ids)
            self.text += chunk.text
            self.cached_tokens = chunk.cached_tokens or self.cached_tokens
        self.ended = True

    def start(self, client: SkippyClient, options: GenerateOptions) -> None:
        """Generate in a thread of the stream's own; ``join`` raises what went wrong there."""
        self._thread = threading.Thread(target=self._read, args=(client, options), daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Have the server stop; ``join`` then returns soon."""
        if self._generation is not None:
            self._generation.cancel()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None and not isinstance(self.error, GenerationCancelled):
            raise self.error

    def _read(self, client: SkippyClient, options: GenerateOptions) -> None:
        try:
            self.read(client, options)
        except BaseException as error:
            self.error = error


def new_key() -> str:
    """A ``prompt_cache_key`` that was never used: nothing is cached under it, so a known prompt is cold again."""
    return f"bench-{uuid.uuid4().hex}"


def start_together(client: SkippyClient, prompts: Sequence[Sequence[int]], count: int) -> list[TimedStream]:
    """Start to stream ``count`` tokens for each of the prompts, all of them cold."""
    streams = [TimedStream() for _ in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        options: GenerateOptions = {"input_ids": prompt, "max_tokens": count, "ignore_eos": True}
        stream.start(client, {**options, "prompt_cache_key": new_key()})
    return streams


def read_together(client: SkippyClient, prompts: Sequence[Sequence[int]], count: int) -> list[TimedStream]:
    """Stream ``count`` tokens for each of the prompts at the same time, all of them cold."""
    streams = start_together(client, prompts, count)
    for stream in streams:
        stream.join()
    return streams
