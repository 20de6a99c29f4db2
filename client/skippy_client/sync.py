"""The blocking client: one channel, a stream per generation, any number of threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc

from skippy_client import wire
from skippy_client.collect import Collector
from skippy_client.errors import GenerationCancelled, GenerationTimeout, ServerFault, ServerUnavailable
from skippy_client.types import Chunk, GenerateOptions, Generation, ServerStatus

STATUS_TIMEOUT_S = 10.0
POLL_S = 0.2


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

    def __next__(self) -> Chunk:
        try:
            response = next(self._call)
        except StopIteration:
            self._collector.end()
            raise
        except grpc.RpcError as error:
            raise wire.error_of_status(
                error.code(), error.details(), url=self._url, timeout=self._timeout
            ) from error
        try:
            chunk = wire.parse_chunk(response)
            self._collector.add(chunk, time.monotonic())
        except BaseException:
            self.cancel()
            raise
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
        self.url = url
        self.model = model
        self.timeout = timeout
        self._channel = grpc.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Start a generation and return its chunks as they come; see GenerateOptions."""
        request = wire.build_request(self.model, prompt, **options)
        timeout = options.get("timeout")
        timeout = self.timeout if timeout is None else timeout
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
            for response in call:
                return wire.parse_status_response(response)
        except grpc.RpcError as error:
            raised = wire.error_of_status(error.code(), error.details(), url=self.url, timeout=timeout)
            if isinstance(raised, GenerationTimeout):
                raised = ServerUnavailable(f"{self.url}: no status within {timeout:g} s")
            raise raised from error
        finally:
            call.cancel()
        raise ServerFault("the server ended the status request without an answer")

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
