from __future__ import annotations

from collections.abc import Iterator

import pytest
from skippy_client import SkippyClient
from skippy_tools.server import ServerProcess

from tests.client.triton_server import run_scripted_server
from tests.client.waiting import wait_for


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with run_scripted_server(tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture
def url(scripted_server: ServerProcess) -> Iterator[str]:
    """Address of the server; after the test no generation may be left running on it."""
    address = scripted_server.endpoints.grpc
    yield address
    with SkippyClient(address) as client:
        wait_for(lambda: client.status().active == 0)


@pytest.fixture
def client(url: str) -> Iterator[SkippyClient]:
    with SkippyClient(url, timeout=60) as client:
        yield client
