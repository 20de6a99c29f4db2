from __future__ import annotations

from collections.abc import Iterator

import pytest
from skippy_client import SkippyClient
from skippy_tools.server import ServerProcess

from tests.client.triton_server import run_scripted_server


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with run_scripted_server(tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture
def url(scripted_server: ServerProcess) -> str:
    return scripted_server.endpoints.grpc


@pytest.fixture
def client(url: str) -> Iterator[SkippyClient]:
    with SkippyClient(url, timeout=20) as client:
        yield client
