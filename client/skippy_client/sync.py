"""The blocking client: one channel, a stream per generation, any number of threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc

from skippy_client import checks, error_mapping, wire
from skippy_client.collect import Collector
from skippy_client.errors import (
    GenerationCancelled,
    GenerationTimeout,
    ServerFault,
    ServerUnavailable,
    SkippyError,
)
from skippy_client.types import Chunk, GenerateOptions, Generation, ServerStatus

STATUS_TIMEOUT_S = 10.0
POLL_S = 0.2


def _next_response(call: Any, url: str, timeout: float | None) -> Any:
    """The next response of a call, None at its end; gRPC's errors become ours."""
    try:
        return next(call, None)
    except grpc.RpcError as error:
        raise error_mapping.error_of_status(
            error.code(), error.details(), url=url, timeout=timeout
        ) from error


class GenerationStream:
    """The chunks of one running generation, as they come.

    Leaving a ``for`` loop over it early, leaving its ``with`` block or dropping it cancels the
    generation on the server. ``next(stream)`` takes one chunk and leaves the rest running.
    """

    def __init__(self, call: Any, url: str, timeout: float | None) -> None:
        self._call = call
        self._url = url
        self._timeout = timeout
        self._collector = Collector(time.monotonic())
        self._failure: SkippyError | None = None

    def __next__(self) -> Chunk:
        if self._failure is not None:
            raise self._failure
        try:
            response = _next_response(self._call, self._url, self._timeout)
            if response is None:
                self._collector.end()
                raise StopIteration
            return self._take(response)
        except StopIteration:
            raise
        except BaseException as error:
            self.cancel()
            if isinstance(error, SkippyError):
                self._failure = error
            raise

    def _take(self, response: Any) -> Chunk:
        # After an answer's end the stream is read to its own: to cancel one that the server is just ending
        # makes tritonserver 2.51.0 keep the request, and never unload the model.
        if response.error_message:
            with contextlib.suppress(SkippyError):
                while _next_response(self._call, self._url, self._timeout) is not None:
                    pass
        chunk = wire.parse_chunk(response)
        self._collector.add(chunk, time.monotonic())
        while self._collector.finished:
            extra = _next_response(self._call, self._url, self._timeout)
            if extra is None:
                break
            self._collector.add(wire.parse_chunk(extra), time.monotonic())
        return chunk

    def __iter__(self) -> Iterator[Chunk]:
        # A generator, so that Python tells when the loop is left.
        try:
            while True:
                try:
                    chunk = next(self)
                except StopIteration:
                    return
                yield chunk
        finally:
            self.cancel()

    def result(self) -> Generation:
        """Take what is left of the stream, and return the whole answer."""
        for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """Stop the generation on the server, from any thread; a waiting reader gets GenerationCancelled."""
        self._call.cancel()

    def close(self) -> None:
        """The same as ``cancel``; does nothing to a generation that has ended."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # gRPC keeps a call alive that nobody holds: without this the server would generate for nobody.
        self.cancel()


class SkippyClient:
    """Talks to a Skippy server; safe to share between threads.

    Args:
        url: host and gRPC port.
        model: the orchestrator's model name, or an alias of it.
        timeout: seconds for each generation that doesn't say otherwise; None waits for ever.

    Every generation is a gRPC stream of its own on one shared connection.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", *, model: str = "skippy", timeout: float | None = None
    ) -> None:
        self.url = checks.check_url(url)
        self.model = checks.text_of("model", model)
        self.timeout = checks.check_timeout(timeout)
        self._channel = grpc.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Start a generation and return its chunks as they come; see GenerateOptions."""
        request = wire.build_request(self.model, prompt, **options)
        timeout = options.get("timeout")
        timeout = self.timeout if timeout is None else checks.check_timeout(timeout)
        return GenerationStream(self._start(request, timeout), self.url, timeout)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate, and return the whole answer; see GenerateOptions.

        The answer is streamed all the same: that is how the time of its first token is known.
        """
        return self.stream(prompt, **options).result()

    def status(self, timeout: float = STATUS_TIMEOUT_S) -> ServerStatus:
        """What the server says of itself and its stages; ServerUnavailable when it doesn't answer in time."""
        call = self._start(wire.build_status_request(self.model), timeout)
        try:
            response = _next_response(call, self.url, timeout)
            while _next_response(call, self.url, timeout) is not None:
                pass
        except GenerationTimeout as error:
            raise ServerUnavailable(f"{self.url}: no status within {timeout:g} s") from error
        finally:
            call.cancel()
        if response is None:
            raise ServerFault("the server ended the status request without an answer")
        return wire.parse_status_response(response)

    def wait_ready(self, timeout: float = 60.0) -> ServerStatus:
        """Wait until the server and all its stages are ready; ServerUnavailable says what was missing."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                status = self.status(max(POLL_S, min(left, STATUS_TIMEOUT_S)))
                if status.ready:
                    return status
                reason = status.reason or "no reason given"
            except ServerUnavailable as error:
                reason = str(error)
            if time.monotonic() + POLL_S > deadline:
                raise ServerUnavailable(f"not ready after {timeout:g} s: {reason}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Cancel what still runs and give up the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: Any, timeout: float | None) -> Any:
        try:
            return self._stub.ModelStreamInfer(iter((request,)), timeout=timeout)
        except ValueError as error:
            # What gRPC raises once its channel is closed.
            raise GenerationCancelled("the client is closed") from error
