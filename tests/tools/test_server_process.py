"""ServerProcess and serve against a real tritonserver with a trivial model."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from skippy_orchestrator.deployment import LimitsSection
from skippy_stage.errors import SkippyError
from skippy_tools.endpoints import Endpoints
from skippy_tools.server import ServerError, ServerProcess, StoppedError

from tests.tools.launcher import NAME, Serve, trivial_deployment, trivial_repository
from tests.triton_server import assert_no_traces, running, traces

pytestmark = pytest.mark.triton


def wait_until_ended(server: ServerProcess, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while server.running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ready_means_that_the_orchestrator_has_its_stages(tmp_path: Path) -> None:
    server = ServerProcess(
        trivial_deployment(), model_repository=trivial_repository(tmp_path, ready_after_s=1.5)
    )
    seen: list[str] = []
    server.start()
    try:
        server.wait_ready(progress=seen.append)
        assert "trivial: waiting for trivial_stage_0 (loading)" in seen
        assert server.status().ready
        assert set(server.stub_pids) == {NAME}
        assert {server.pid, *server.stub_pids.values()} <= set(server.pids)
        with urllib.request.urlopen(server.endpoints.metrics) as answer:
            assert b"nv_inference" in answer.read()
        run_dir = server.run_dir
    finally:
        server.stop()
    assert server.returncode == 0
    assert not run_dir.exists()
    assert_no_traces(server.shm_prefix)


def test_readiness_has_a_limit_that_names_the_missing_stage(tmp_path: Path) -> None:
    server = ServerProcess(
        trivial_deployment(),
        model_repository=trivial_repository(tmp_path, ready_after_s=1000),
        ready_timeout_s=3,
    )
    with pytest.raises(ServerError, match=r"not ready after 3 s.*trivial_stage_0"), server:
        pass
    assert_no_traces(server.shm_prefix)


def test_waiting_can_be_stopped(tmp_path: Path) -> None:
    server = ServerProcess(
        trivial_deployment(), model_repository=trivial_repository(tmp_path, ready_after_s=1000)
    )
    server.start()
    with pytest.raises(StoppedError):
        server.wait_ready(interrupted=lambda: True)
    server.stop()
    assert_no_traces(server.shm_prefix)


def test_a_model_that_does_not_load_is_shown(tmp_path: Path) -> None:
    server = ServerProcess(
        trivial_deployment(), model_repository=trivial_repository(tmp_path, fail_to_load=1)
    )
    with pytest.raises(ServerError) as caught, server:
        pass
    assert "told not to load" in caught.value.log
    assert_no_traces(server.shm_prefix)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    repository = trivial_repository(tmp_path)
    with running(trivial_deployment(), model_repository=repository) as first:
        taken = msgspec.structs.replace(trivial_deployment().server, grpc_port=first.endpoints.grpc_port)
        second = ServerProcess(
            msgspec.structs.replace(trivial_deployment(), server=taken), model_repository=repository
        )
        with pytest.raises(SkippyError, match=f"grpc port {first.endpoints.grpc_port}"):
            second.start()
        second.stop()


def test_stop_waits_for_running_requests(tmp_path: Path) -> None:
    with running(trivial_deployment(), model_repository=trivial_repository(tmp_path, busy_s=3)) as server:
        assert server.drain()
        assert not server.status().ready, "the drain file makes the model refuse"
        assert server.status().idle


def test_a_drain_has_a_limit(tmp_path: Path) -> None:
    limits = LimitsSection(drain_timeout_s=0.5)
    deployment = msgspec.structs.replace(trivial_deployment(), limits=limits)
    with running(deployment, model_repository=trivial_repository(tmp_path, busy_s=1000)) as server:
        assert not server.drain()


def test_two_servers_at_once(tmp_path: Path) -> None:
    repository = trivial_repository(tmp_path)
    with running(trivial_deployment(), model_repository=repository) as first:
        with running(trivial_deployment(), model_repository=repository) as second:
            assert not set(first.pids) & set(second.pids)
        assert first.status().ready


@pytest.mark.parametrize("victim", ["server", "guard"])
def test_nothing_outlives_a_crash(tmp_path: Path, victim: str) -> None:
    with running(trivial_deployment(), model_repository=trivial_repository(tmp_path)) as server:
        assert server._guard is not None
        os.kill(server.pid if victim == "server" else server._guard.pid, signal.SIGKILL)
        wait_until_ended(server)
        if victim == "server":
            assert server.returncode == 128 + signal.SIGKILL
            assert not traces(server.shm_prefix), "the guard has cleaned up by itself"


@pytest.mark.slow
def test_a_model_that_hangs_at_exit_is_killed(tmp_path: Path) -> None:
    with running(
        trivial_deployment(), model_repository=trivial_repository(tmp_path, hang_at_exit=1)
    ) as server:
        pass
    assert server.returncode is not None


def test_kill_is_quick(tmp_path: Path) -> None:
    with running(
        trivial_deployment(), model_repository=trivial_repository(tmp_path, hang_at_exit=1)
    ) as server:
        started = time.monotonic()
        server.kill()
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_ends_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    serve = Serve(tmp_path, ready_after_s=1)
    try:
        serve.wait_until_ready()
        endpoints = msgspec.json.decode(serve.endpoints.read_bytes(), type=Endpoints)
        serve.process.send_signal(number)
        assert serve.process.wait(20) == 0
    finally:
        serve.process.kill()
    output = serve.output.read_text()
    assert "waiting for trivial_stage_0" in output
    assert endpoints.grpc in output
    assert "stopped" in output
    assert_no_traces(serve.prefix)
    assert not list(serve.tmp.iterdir())


def test_serve_stops_while_it_starts(tmp_path: Path) -> None:
    serve = Serve(tmp_path, ready_after_s=1000)
    try:
        deadline = time.monotonic() + 30
        while "trivial_stage_0" not in serve.output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(20) == 0
    finally:
        serve.process.kill()
    assert_no_traces(serve.prefix)


def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    serve = Serve(tmp_path, busy_s=1000)
    try:
        serve.wait_until_ready()
        started = time.monotonic()
        serve.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert serve.process.poll() is None, "a request is running"
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(20) == 0
        assert time.monotonic() - started < 8, "less than the drain limit of 10 s"
    finally:
        serve.process.kill()
    assert_no_traces(serve.prefix)


def test_a_killed_serve_leaves_nothing(tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serve.wait_until_ready()
    assert len(traces(serve.prefix)) >= 4, "guard, server, stub, lock and region"
    serve.process.kill()
    serve.process.wait()
    assert_no_traces(serve.prefix, within_s=15)
    assert not list(serve.tmp.iterdir())


def test_serve_reports_a_crash(tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serve.wait_until_ready()
    [server] = [text for text in traces(serve.prefix) if "bin/tritonserver" in text]
    os.kill(int(server.split()[1].rstrip(":")), signal.SIGKILL)
    assert serve.process.wait(20) == 1
    assert "tritonserver ended with status 137" in serve.output.read_text()
    assert_no_traces(serve.prefix)


def test_serve_ends_when_the_orchestrator_s_process_has(tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    try:
        serve.wait_until_ready()
        (stub,) = [line for line in traces(serve.prefix) if "triton_python_backend_stub" in line]
        os.kill(int(stub.split()[1].rstrip(":")), signal.SIGKILL)
        assert serve.process.wait(60) == 1
    finally:
        serve.process.kill()
    assert f"{NAME}: the process has ended" in serve.output.read_text()
    assert_no_traces(serve.prefix)
    assert not list(serve.tmp.iterdir())


def test_what_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    repository = trivial_repository(tmp_path / "repository")
    missing = tmp_path / "missing" / "server.log"
    server = ServerProcess(trivial_deployment(), model_repository=repository, log=missing)
    with pytest.raises(SkippyError, match=r"missing.*No such file"):
        server.start()
    assert not list(tmp_path.glob("skippy-*"))
