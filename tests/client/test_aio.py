"""The asyncio client against a real tritonserver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from skippy_client import (
    AsyncSkippyClient,
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    ServerFault,
    ServerStatus,
    ServerUnavailable,
    SkippyError,
)

from tests.client.waiting import LIMIT_S

pytestmark = pytest.mark.triton


def script(**plan: Any) -> str:
    return json.dumps(plan)


def run(url: str, body: Callable[[AsyncSkippyClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncSkippyClient(url, timeout=60) as client:
            await body(client)

    asyncio.run(main())


async def wait_for(condition: Callable[[ServerStatus], bool], client: AsyncSkippyClient) -> None:
    """Wait for something in the server's status; the limit only ends a test that would hang."""
    async with asyncio.timeout(LIMIT_S):
        while not condition(await client.status()):
            await asyncio.sleep(0.02)


async def model_saw_cancel(client: AsyncSkippyClient, request_id: str) -> None:
    await wait_for(lambda status: request_id in status.raw["cancelled"], client)


def test_generate_and_status(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        assert (await client.wait_ready()).ready
        result = await client.generate(script(tokens=3))
        assert (result.text, result.token_ids, result.finish_reason) == ("t0 t1 t2 ", (0, 1, 2), "length")
        assert 0 < result.timings.ttft_s <= result.timings.total_s

    run(url, body)


def test_stream_comes_in_pieces(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        stream = client.stream(script(tokens=3, gate="aio-pieces"))
        assert (await anext(stream)).text == "t0 "
        await client.generate(script(opens="aio-pieces"))
        assert [chunk.finish_reason async for chunk in stream] == ["", "length"]
        assert (await stream.result()).text == "t0 t1 t2 "

    run(url, body)


def test_cache_key_and_record(url: str) -> None:
    stats = {"status": "hit", "hit_kind": "chain_exact_replay", "cached_prompt_tokens": 6}

    async def body(client: AsyncSkippyClient) -> None:
        stream = client.stream(script(tokens=2, echo=True, cache=stats), prompt_cache_key="mine")
        assert [(chunk.cached_tokens, chunk.cache_stats) async for chunk in stream] == [(0, None), (6, stats)]
        result = await stream.result()
        assert (result.cached_tokens, result.cache_stats) == (6, stats)
        assert json.loads(result.text)["prompt_cache_key"] == ["object", [1, 1], ["mine"]]
        older = await client.generate(script(tokens=2))
        assert (older.cached_tokens, older.cache_stats) == (0, None)

    run(url, body)


def test_64_at_once_on_one_connection(url: str) -> None:
    async def body(client: AsyncSkippyClient) -> None:
        results = await asyncio.gather(
            *(
                client.generate(script(together=["tasks", 64]), max_tokens=10 + index % 5)
                for index in range(64)
            )
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
            await client.generate(script(hang=True), timeout=0.4)
        assert (await client.generate("x")).text

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
        await anext(stream)
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
        await wait_for(lambda status: status.active == 1, client)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model_saw_cancel(client, "aio-task")

    run(url, body)


def test_timeout_scope_cancels_the_generation(url: str) -> None:
    async def expire(client: AsyncSkippyClient) -> None:
        async with asyncio.timeout(None) as scope:
            async for _ in client.stream(script(hang=True), request_id="aio-scope"):
                scope.reschedule(asyncio.get_running_loop().time())

    async def body(client: AsyncSkippyClient) -> None:
        with pytest.raises(TimeoutError):
            await expire(client)
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
