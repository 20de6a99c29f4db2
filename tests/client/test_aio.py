"""The asyncio client against a real tritonserver."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from skippy_client import (
    AsyncSkippyClient,
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    ServerFault,
    ServerUnavailable,
    SkippyError,
)

pytestmark = pytest.mark.triton


def script(**plan: Any) -> str:
    return json.dumps(plan)


def run(url: str, body: Callable[[AsyncSkippyClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncSkippyClient(url, timeout=20) as client:
            await body(client)

    asyncio.run(main())


async def model_saw_cancel(client: AsyncSkippyClient, request_id: str, limit_s: float = 2.0) -> None:
    deadline = time.monotonic() + limit_s
    while request_id not in (await client.status()).raw["cancelled"]:
        assert time.monotonic() < deadline, f"the model never saw {request_id} cancelled"
        await asyncio.sleep(0.02)


def test_generate_and_status(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        assert (await client.wait_ready(5)).ready
        result = await client.generate(script(tokens=3, delay_s=0.02))
        assert (result.text, result.token_ids, result.finish_reason) == ("t0 t1 t2 ", (0, 1, 2), "length")
        assert result.timings.total_s >= 0.06
        chunks = [chunk async for chunk in client.stream(script(tokens=3))]
        assert [chunk.finish_reason for chunk in chunks] == ["", "", "length"]

    run(url, body)


def test_64_at_once_on_one_connection(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        results = await asyncio.gather(
            *(client.generate(script(delay_s=0.02), max_tokens=10 + index % 5) for index in range(64))
        )
        assert [result.num_output_tokens for result in results] == [10 + index % 5 for index in range(64)]

    run(url, body)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"error": ["INVALID_ARG", "why"]}, InvalidRequest),
        ({"error": ["UNAVAILABLE", "why"]}, ServerUnavailable),
        ({"error": ["CANCELLED", "why"]}, GenerationCancelled),
        ({"error": ["INTERNAL", "why"], "tokens": 0}, ServerFault),
        ({"finals": 0}, ServerFault),
        ({"finals": 2}, ServerFault),
    ],
)
def test_errors(url: str, plan: dict[str, Any], error: type[SkippyError]) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        with pytest.raises(error) as raised:
            await client.generate(script(**plan))
        assert type(raised.value) is error
        assert (await client.generate("x")).text

    run(url, body)


def test_timeout(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        with pytest.raises(GenerationTimeout):
            await client.generate(script(hang=True), timeout=0.4, request_id="aio-late")
        await model_saw_cancel(client, "aio-late")

    run(url, body)


def test_leaving_the_loop_cancels(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        stream = client.stream(script(hang=True), request_id="aio-left")
        async for _ in stream:
            break
        await model_saw_cancel(client, "aio-left")

    run(url, body)


def test_with_block_cancels(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        async with client.stream(script(hang=True), request_id="aio-block") as stream:
            assert (await anext(stream)).text == "t0 "
        await model_saw_cancel(client, "aio-block")

    run(url, body)


def test_dropped_stream_cancels(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        stream = client.stream(script(hang=True), request_id="aio-dropped")
        await anext(stream)
        del stream
        await model_saw_cancel(client, "aio-dropped")

    run(url, body)


def test_cancel_wakes_the_reader(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        stream = client.stream(script(hang=True), request_id="aio-cancel")
        reader = asyncio.create_task(stream.result())
        await asyncio.sleep(0.2)
        stream.cancel()
        with pytest.raises(GenerationCancelled):
            await reader
        with pytest.raises(GenerationCancelled):
            await anext(stream)
        await model_saw_cancel(client, "aio-cancel")

    run(url, body)


def test_cancelled_task_cancels_the_generation(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        task = asyncio.create_task(client.generate(script(hang=True), request_id="aio-task"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model_saw_cancel(client, "aio-task")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate(script(hang=True), request_id="aio-scope")
        await model_saw_cancel(client, "aio-scope")

    run(url, body)


def test_close_and_no_server(url: str) -> None:
    async def main() -> None:
        client = AsyncSkippyClient(url)
        stream = client.stream(script(hang=True))
        await anext(stream)
        await client.close()
        with pytest.raises(GenerationCancelled):
            await anext(stream)
        with pytest.raises(GenerationCancelled, match="closed"):
            await client.generate("x")
        async with AsyncSkippyClient("127.0.0.1:9") as nobody:
            with pytest.raises(ServerUnavailable, match="no server answers"):
                await nobody.generate("x")
            with pytest.raises(ServerUnavailable, match="not ready after"):
                await nobody.wait_ready(0.5)

    asyncio.run(main())
