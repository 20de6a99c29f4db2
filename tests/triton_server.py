"""Real servers for tests marked ``triton``.

Tests that can share a server take the fixture ``two_stage_server``; others start their own:

    with running(deployment("[pipeline]\nstages = 3")) as server:
        ...

At the end either asserts that no process and no shared-memory region is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from skippy_orchestrator.deployment import Deployment, parse_deployment
from skippy_tools import guard
from skippy_tools.serve import with_overrides
from skippy_tools.server import ServerProcess


def deployment(toml: str = "") -> Deployment:
    """A deployment on free ports; ``toml`` is what differs from the defaults."""
    return with_overrides(parse_deployment(toml), http_port=0, grpc_port=0, metrics_port=0)


def traces(prefix: str) -> list[str]:
    """Processes and shared-memory regions of the server that has this region prefix.

    The prefix is on the command line of the guard, the server and each of its stubs.
    """
    found = [str(region) for region in guard.SHM.glob(f"{prefix}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if prefix.encode() in command:
                found.append(f"process {entry.name}: {command.decode().split(chr(0))[0]}")
    return found


def assert_no_traces(prefix: str, within_s: float = 5.0) -> None:
    """Fail when something of a server is still there after the time given."""
    deadline = time.monotonic() + within_s
    while (left := traces(prefix)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@contextmanager
def running(what: Deployment, **options: Any) -> Iterator[ServerProcess]:
    """A server that is ready; ``options`` are those of ServerProcess."""
    server = ServerProcess(what, **options)
    try:
        with server:
            yield server
    finally:
        assert_no_traces(server.shm_prefix)


@pytest.fixture(scope="session")
def two_stage_server() -> Iterator[ServerProcess]:
    """The default deployment, shared by all tests of a session: don't break it."""
    with running(deployment()) as server:
        yield server
