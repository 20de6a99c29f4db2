"""Whether a process is still there, with and without pidfds."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
from collections.abc import Iterator

import pytest
from skippy_orchestrator.pipeline.process import StageProcess

from tests.orchestrator.pipeline.manual import wait_until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture(params=["pidfd", "psutil"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "psutil":

        def forbidden(pid: int, flags: int = 0) -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "pidfd_open", forbidden)


@pytest.mark.usefixtures("_way")
def test_a_killed_child_has_ended_before_and_after_it_was_waited_for(child: subprocess.Popen[bytes]) -> None:
    process = StageProcess(child.pid)
    assert process.pid == child.pid
    assert not process.has_ended()
    child.kill()
    wait_until(process.has_ended)
    assert StageProcess(child.pid).has_ended(), "a zombie counts as ended from the start"
    child.wait()
    assert process.has_ended()
    assert StageProcess(child.pid).has_ended(), "so does an id that nobody has"


@pytest.mark.usefixtures("_way")
def test_a_child_that_was_waited_for_at_once_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = StageProcess(child.pid)
    child.kill()
    child.wait()
    assert process.has_ended()


@pytest.mark.usefixtures("_way")
def test_a_process_that_ends_by_itself(child: subprocess.Popen[bytes]) -> None:
    own = StageProcess(os.getpid())
    short = subprocess.Popen(["true"])
    process = StageProcess(short.pid)
    wait_until(process.has_ended)
    short.wait()
    assert not own.has_ended()
    assert not StageProcess(child.pid).has_ended()


def test_many_open_files_do_not_matter(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    open_pidfd = os.pidfd_open

    def high(pid: int, flags: int = 0) -> int:
        low = open_pidfd(pid, flags)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        finally:
            os.close(low)

    monkeypatch.setattr(os, "pidfd_open", high)
    try:
        process = StageProcess(child.pid)
        assert not process.has_ended()
        child.kill()
        wait_until(process.has_ended)
        del process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_file_stays_open(child: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        StageProcess(child.pid).has_ended()
    assert len(os.listdir("/proc/self/fd")) == before
