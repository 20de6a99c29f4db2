"""D-14: a client that goes away frees its session everywhere, however it goes and by whatever name it came."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
import tritonclient.grpc as triton
from skippy_client import AsyncSkippyClient, GenerationCancelled, SkippyClient, SkippyError
from skippy_tools.server import ServerProcess

from tests.triton.support import assert_idle, is_idle, tensor, wait_until

pytestmark = pytest.mark.triton

NAMES = ["skippy", "ensemble", "tensorrt_llm_bls"]
LONG = {"max_tokens": 4000, "ignore_eos": True}
PROMPT = "Once upon a time"
FREED_WITHIN_S = 1.0
HEARTBEAT_S = 0.25
"""A stage's own view is as old as the last heartbeat."""


def rows(client: SkippyClient) -> int:
    return int(client.status().raw["counters"]["output_tokens"])


def assert_freed(client: SkippyClient) -> None:
    """Every stage is free within the limit, and the generation had far to go."""
    started = time.monotonic()
    wait_until(lambda: is_idle(client.status()), FREED_WITHIN_S + HEARTBEAT_S + 0.5, "freed on every stage")
    assert time.monotonic() - started < 10
    at_end = rows(client)
    time.sleep(0.2)
    assert rows(client) == at_end, "somebody still generates"


@pytest.mark.parametrize("name", NAMES)
def test_cancel_of_a_stream(two_stage_server: ServerProcess, client: SkippyClient, name: str) -> None:
    with SkippyClient(two_stage_server.endpoints.grpc, model=name) as mine:
        stream = mine.stream(PROMPT, **LONG)  # type: ignore[arg-type]
        for _ in range(5):
            next(stream)
        assert client.status().active == 1
        stream.cancel()
        assert_freed(client)


@pytest.mark.parametrize("name", NAMES)
def test_stop_stream_of_tritonclient(
    two_stage_server: ServerProcess, client: SkippyClient, name: str
) -> None:
    seen: list[object] = []
    raw = triton.InferenceServerClient(two_stage_server.endpoints.grpc)
    raw.start_stream(lambda result, error: seen.append(error or result))
    inputs = [
        tensor("text_input", "BYTES", [PROMPT.encode()]),
        tensor("max_tokens", "INT32", [4000]),
        tensor("ignore_eos", "BOOL", [True]),
        tensor("stream", "BOOL", [True]),
    ]
    raw.async_stream_infer(name, inputs)
    wait_until(lambda: len(seen) >= 5, 20, "five responses")
    raw.stop_stream(cancel_requests=True)
    assert_freed(client)
    raw.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_channel(two_stage_server: ServerProcess, client: SkippyClient, name: str) -> None:
    mine = SkippyClient(two_stage_server.endpoints.grpc, model=name)
    stream = mine.stream(PROMPT, **LONG)  # type: ignore[arg-type]
    next(stream)
    mine.close()
    assert_freed(client)
    with pytest.raises(SkippyError):
        stream.result()


def test_cancel_before_the_first_token(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    stream = client.stream(input_ids=[300] * 3000, **LONG)  # type: ignore[arg-type]
    wait_until(lambda: client.status().active == 1, 5, "it runs")
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result()
    assert_freed(client)


@pytest.mark.parametrize("name", NAMES)
def test_aio_cancel(two_stage_server: ServerProcess, client: SkippyClient, name: str) -> None:
    async def scenario() -> None:
        async with AsyncSkippyClient(two_stage_server.endpoints.grpc, model=name) as mine:

            async def consume() -> None:
                async for _ in mine.stream(PROMPT, **LONG):  # type: ignore[arg-type]
                    pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0.5)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(assert_freed, client)

    asyncio.run(scenario())


def test_a_client_that_is_killed(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    code = (
        "from skippy_client import SkippyClient\n"
        f"c = SkippyClient({two_stage_server.endpoints.grpc!r})\n"
        f"for chunk in c.stream({PROMPT!r}, max_tokens=4000, ignore_eos=True): print('.', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert client.status().active == 1
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert_freed(client)


def test_a_disconnected_http_stream(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    connection = http.client.HTTPConnection(urlsplit(two_stage_server.endpoints.http).netloc, timeout=20)
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    connection.request("POST", "/v2/models/skippy/generate_stream", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    assert_freed(client)


@pytest.mark.parametrize("name", NAMES)
def test_cancels_at_any_moment_leave_nothing(
    two_stage_server: ServerProcess, client: SkippyClient, name: str
) -> None:
    with SkippyClient(two_stage_server.endpoints.grpc, model=name) as mine:
        delays: list[Callable[[], object]] = [lambda s=step: time.sleep(s / 200) for step in range(12)]  # type: ignore[misc]
        for delay in delays:
            stream = mine.stream(PROMPT, max_tokens=6, ignore_eos=True)
            delay()
            stream.cancel()
    assert_idle(client)
    assert client.generate(PROMPT, max_tokens=3).num_output_tokens == 3
