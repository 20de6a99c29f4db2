"""The repository API, against a small HTTP server on loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from skippy_orchestrator.pipeline.repository import (
    ADDRESS_VARIABLE,
    KEY_HEADER,
    KEY_VARIABLE,
    ModelRepository,
)
from skippy_stage.errors import StageFault


class Server:
    """Answers the repository API with what a test has set for an action."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.bodies: list[bytes] = []
        self.answers: dict[str, tuple[int, str]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.calls.append((self.path, self.headers[KEY_HEADER]))
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                outer.closing = self.headers["Connection"] == "close"
                status, body = outer.answers.get(self.path.rsplit("/", 1)[1], (200, ""))
                if not status:
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.closing = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_a_reload_unloads_and_loads_with_the_key(server: Server, key: str) -> None:
    ModelRepository(server.address, key).reload("stage_1")
    assert server.calls == [
        ("/v2/repository/models/stage_1/unload", key or None),
        ("/v2/repository/models/stage_1/load", key or None),
    ]
    assert server.bodies == [b"{}", b"{}"]
    assert server.closing, "an idle connection would hold up the server's exit"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            json.dumps({"error": "failed to load 'stage_1': no such engine"}),
            "failed to load 'stage_1': no such",
        ),
        ("Bad Request", "Bad Request"),
        ("", "no reason given"),
        ('["error"]', r'\["error"\]'),
        ('{"message": "x"}', '{"message": "x"}'),
    ],
)
@pytest.mark.parametrize("action", ["unload", "load"])
def test_a_refusal_is_passed_on_with_its_reason(server: Server, action: str, body: str, reason: str) -> None:
    server.answers[action] = (400, body)
    with pytest.raises(StageFault, match=rf"^stage_1: {action} was refused: {reason}") as caught:
        ModelRepository(server.address).reload("stage_1")
    assert caught.value.stage == "stage_1"
    assert len(server.calls) == (1 if action == "unload" else 2), "nothing is loaded that was not unloaded"


def test_a_server_that_hangs_up_is_a_failure(server: Server) -> None:
    server.answers["load"] = (0, "")
    with pytest.raises(StageFault, match=r"^stage_1: load failed: "):
        ModelRepository(server.address).reload("stage_1")


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StageFault, match=r"^stage_1: unload failed: .*refused"):
            ModelRepository(address).reload("stage_1")


def test_the_launcher_announces_the_api_in_the_environment(server: Server) -> None:
    assert ModelRepository.of_environment({}) is None
    assert ModelRepository.of_environment({KEY_VARIABLE: "s3cret"}) is None
    repository = ModelRepository.of_environment({ADDRESS_VARIABLE: server.address, KEY_VARIABLE: "s3cret"})
    assert repository is not None
    repository.reload("m")
    assert {key for _, key in server.calls} == {"s3cret"}
