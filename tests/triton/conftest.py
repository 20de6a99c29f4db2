from __future__ import annotations

from collections.abc import Iterator

import pytest
from skippy_client import SkippyClient
from skippy_tools.server import ServerProcess

from tests.triton.support import client_of


@pytest.fixture
def client(two_stage_server: ServerProcess) -> Iterator[SkippyClient]:
    """A client of the shared server, which must be idle again at the end."""
    with client_of(two_stage_server) as client:
        yield client
