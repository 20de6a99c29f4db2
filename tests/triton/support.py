"""What the tests of the whole server share: raw streams, waiting, and the state that every test must leave."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as triton
from skippy_client import Generation, ServerStatus, SkippyClient, SkippyError
from skippy_tools.server import ServerProcess

DTYPES = {
    "INT32": np.int32,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll until it holds; fails with ``what`` after the time given."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def check_integrity(status: ServerStatus) -> None:
    """The orchestrator and every stage check themselves; this is what they say."""
    assert status.raw["integrity"] == ""
    for stage in status.stages:
        assert stage.raw["integrity"] == "", stage.name


def is_idle(status: ServerStatus) -> bool:
    """No session anywhere, and no KV block in use."""
    return (
        status.active == 0
        and status.waiting == 0
        and all(s.sessions == 0 and s.kv_blocks_used == 0 for s in status.stages)
    )


def assert_idle(client: SkippyClient, within_s: float = 10.0) -> ServerStatus:
    """Wait until nothing is left of any generation, and check integrity; every test ends with it."""
    last: list[ServerStatus] = []

    def idle() -> bool:
        last[:] = [client.status()]
        return is_idle(last[0])

    wait_until(idle, within_s, "all sessions freed on the orchestrator and every stage")
    check_integrity(last[0])
    return last[0]


@contextmanager
def client_of(server: ServerProcess, model: str | None = None) -> Iterator[SkippyClient]:
    """A client that leaves the server idle."""
    with SkippyClient(server.endpoints.grpc, model=model or server.model_name, timeout=120) as client:
        yield client
        assert_idle(client)


def generate_all(client: SkippyClient, requests: Sequence[dict[str, Any]]) -> list[Generation | SkippyError]:
    """Run generations at the same time, each in a thread of its own; errors are returned in their place."""
    results: list[Any] = [None] * len(requests)

    def one(index: int) -> None:
        try:
            results[index] = client.generate(**requests[index])
        except SkippyError as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass
class RawStream:
    """What tritonclient's own stream client was called back with."""

    responses: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finals: dict[str, int] = field(default_factory=dict)

    def text(self, request_id: str) -> str:
        """All text of a request."""
        return "".join(
            r.as_numpy("text_output").item().decode()
            for r in self.responses
            if r.get_response().id == request_id and r.as_numpy("text_output") is not None
        )


def tensor(name: str, dtype: str, values: Any) -> triton.InferInput:
    """An input of shape [1, n]."""
    array = np.array(values, DTYPES[dtype]).reshape(1, -1)
    result = triton.InferInput(name, list(array.shape), dtype)
    result.set_data_from_numpy(array)
    return result


def raw_stream(
    server: ServerProcess,
    requests: dict[str, list[triton.InferInput]],
    *,
    model: str | None = None,
    empty_final: bool = False,
    parameters: dict[str, Any] | None = None,
    within_s: float = 60.0,
) -> RawStream:
    """Send requests by id on one stream of tritonclient; returns when each has had its final response or error."""
    seen = RawStream()
    done = threading.Event()

    def callback(result: Any, error: Exception | None) -> None:
        if error is not None:
            seen.errors.append(str(error))
        else:
            seen.responses.append(result)
            message = result.get_response()
            if message.parameters["triton_final_response"].bool_param:
                seen.finals[message.id] = seen.finals.get(message.id, 0) + 1
        if len(seen.errors) + len(seen.finals) >= len(requests):
            done.set()

    client = triton.InferenceServerClient(server.endpoints.grpc)
    client.start_stream(callback)
    try:
        for request_id, inputs in requests.items():
            client.async_stream_infer(
                model or server.model_name,
                inputs,
                request_id=request_id,
                enable_empty_final_response=empty_final,
                parameters=parameters,
            )
        assert done.wait(within_s), f"{seen.finals} and {seen.errors} after {within_s:g} s"
    finally:
        client.stop_stream()
        client.close()
    return seen


def http_generate(
    server: ServerProcess, body: dict[str, Any], *, stream: bool = False, model: str | None = None
) -> tuple[int, Any]:
    """POST to the generate endpoint: status and JSON, or the list of events when streaming."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoints.http).netloc, timeout=60)
    try:
        path = f"/v2/models/{model or server.model_name}/generate{'_stream' if stream else ''}"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if not stream or answer.status != 200:
        return answer.status, json.loads(text)
    return answer.status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
