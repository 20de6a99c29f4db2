"""The asyncio client: the same as the blocking one, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
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
from skippy_client.sync import POLL_S, STATUS_TIMEOUT_S
from skippy_client.types import Chunk, GenerateOptions, Generation, ServerStatus


async def _next_response(call: Any, url: str, timeout: float | None) -> Any:
    """The next response of a call, None at its end; gRPC's errors become ours."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise error_mapping.error_of_status(
            error.code(), error.details(), url=url, timeout=timeout
        ) from error
    except grpc.aio.UsageError as error:
        # What gRPC raises once its channel is closed.
        raise GenerationCancelled("the client is closed") from error
    except asyncio.CancelledError as error:
        # gRPC tells of a cancelled call as if the task were cancelled. Only a task that is may see that.
        task = asyncio.current_task()
        if call.cancelled() and not (task and task.cancelling()):
            raise GenerationCancelled("cancelled by this client") from error
        call.cancel()
        raise
    return None if response is grpc.aio.EOF else response


class AsyncGenerationStream:
    """The chunks of one running generation, as they come.

    Leaving an ``async with`` block, cancelling the task that reads, or dropping the stream cancels the
    generation on the server. So does leaving an ``async for`` loop early, as soon as Python has collected
    the loop's iterator: at once in CPython. ``await anext(stream)`` takes one chunk and leaves the rest
    running.
    """

    def __init__(self, call: Any, url: str, timeout: float | None) -> None:
        self._call = call
        self._url = url
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._collector = Collector(time.monotonic())
        self._failure: SkippyError | None = None

    async def __anext__(self) -> Chunk:
        if self._failure is not None:
            raise self._failure
        try:
            response = await _next_response(self._call, self._url, self._timeout)
            if response is None:
                self._collector.end()
                raise StopAsyncIteration
            return await self._take(response)
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self.cancel()
            if isinstance(error, SkippyError):
                self._failure = error
            raise

    async def _take(self, response: Any) -> Chunk:
        # Reads to the end of the stream after the answer's, as the blocking client does, and why it does.
        if response.error_message:
            with contextlib.suppress(SkippyError):
                while await _next_response(self._call, self._url, self._timeout) is not None:
                    pass
        chunk = wire.parse_chunk(response)
        self._collector.add(chunk, time.monotonic())
        while self._collector.finished:
            extra = await _next_response(self._call, self._url, self._timeout)
            if extra is None:
                break
            self._collector.add(wire.parse_chunk(extra), time.monotonic())
        return chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        # A generator, so that Python tells when the loop is left.
        try:
            while True:
                try:
                    chunk = await anext(self)
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            self.cancel()

    async def result(self) -> Generation:
        """Take what is left of the stream, and return the whole answer."""
        async for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """Stop the generation on the server; a waiting reader gets GenerationCancelled."""
        self._call.cancel()

    async def close(self) -> None:
        """The same as ``cancel``; does nothing to a generation that has ended."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        # gRPC's own tasks keep a call alive that nobody holds. Python may collect in any thread, and late.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call.cancel)


class AsyncSkippyClient:
    """Talks to a Skippy server from one event loop; see SkippyClient for the arguments.

    Create it inside the loop that uses it.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", *, model: str = "skippy", timeout: float | None = None
    ) -> None:
        self.url = checks.check_url(url)
        self.model = checks.text_of("model", model)
        self.timeout = checks.check_timeout(timeout)
        self._channel = grpc.aio.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Start a generation and return its chunks as they come; see GenerateOptions."""
        request = wire.build_request(self.model, prompt, **options)
        timeout = options.get("timeout")
        timeout = self.timeout if timeout is None else checks.check_timeout(timeout)
        return AsyncGenerationStream(self._start(request, timeout), self.url, timeout)

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate, and return the whole answer; see GenerateOptions."""
        return await self.stream(prompt, **options).result()

    async def status(self, timeout: float = STATUS_TIMEOUT_S) -> ServerStatus:
        """What the server says of itself and its stages; ServerUnavailable when it doesn't answer in time."""
        call = self._start(wire.build_status_request(self.model), timeout)
        try:
            response = await _next_response(call, self.url, timeout)
            while await _next_response(call, self.url, timeout) is not None:
                pass
        except GenerationTimeout as error:
            raise ServerUnavailable(f"{self.url}: no status within {timeout:g} s") from error
        finally:
            call.cancel()
        if response is None:
            raise ServerFault("the server ended the status request without an answer")
        return wire.parse_status_response(response)

    async def wait_ready(self, timeout: float = 60.0) -> ServerStatus:
        """Wait until the server and all its stages are ready; ServerUnavailable says what was missing."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                status = await self.status(max(POLL_S, min(left, STATUS_TIMEOUT_S)))
                if status.ready:
                    return status
                reason = status.reason or "no reason given"
            except ServerUnavailable as error:
                reason = str(error)
            if time.monotonic() + POLL_S > deadline:
                raise ServerUnavailable(f"not ready after {timeout:g} s: {reason}")
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Cancel what still runs and give up the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, request: Any, timeout: float | None) -> Any:
        try:
            return self._stub.ModelStreamInfer(iter((request,)), timeout=timeout)
        except grpc.aio.UsageError as error:
            raise GenerationCancelled("the client is closed") from error
