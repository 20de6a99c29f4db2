"""One tritonserver process, from start to a clean end: used by serve, demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from skippy_orchestrator.deployment import Deployment
from skippy_orchestrator.pipeline.repository import ADDRESS_VARIABLE, KEY_VARIABLE
from skippy_stage.errors import SkippyError

from skippy_tools import guard
from skippy_tools.endpoints import Endpoints, choose_endpoints
from skippy_tools.processes import log_excerpt, server_ready, stubs_of
from skippy_tools.repository import generate_for, write
from skippy_tools.status import Status, StatusError, query_status
from skippy_tools.triton import (
    Tritonserver,
    assemble_backends,
    command_line,
    find_tritonserver,
    our_backends,
    server_environment,
)

DRAIN_FILE: Final = "drain"
EXIT_TIMEOUT_S: Final = 10
"""What tritonserver gives its models to finish after SIGTERM; the guard kills it a little later."""
GRACE_S: Final = EXIT_TIMEOUT_S + 5.0
POLL_S: Final = 0.2

_numbers = itertools.count(1)

Progress = Callable[[str], None]
Check = Callable[[], bool]


class ServerError(SkippyError):
    """The server ended, or did not become ready in time; ``log`` is what its log says."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class StoppedError(SkippyError):
    """The caller's own wish to stop, seen while waiting."""


class ServerProcess:
    """A server of one deployment, in a private run directory, with a guard that cleans up after it.

    ``model_repository`` is used as it is instead of a generated one. ``run_dir`` and ``log`` are kept when
    given, otherwise they are removed at the end. As a context manager: starts, waits until ready, stops.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        source: str = "deployment",
        model_repository: Path | None = None,
        run_dir: Path | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        tritonserver: Tritonserver | None = None,
        ready_timeout_s: float = 180.0,
    ) -> None:
        self.deployment = deployment
        self.source = source
        self.ready_timeout_s = ready_timeout_s
        self.tritonserver = tritonserver
        self.shm_prefix = f"{guard.PREFIX}{os.getpid()}_{next(_numbers)}_"
        self._model_repository = model_repository
        self._environment = dict(environment or {})
        self._keep_run_dir = run_dir is not None
        self._run_dir = run_dir
        self._log = log
        self._endpoints: Endpoints | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._server_pid = 0

    # What it is

    @property
    def run_dir(self) -> Path:
        """The private directory: model repository, backends, log, and SKIPPY_RUN_DIR of the models."""
        if self._run_dir is None:
            raise SkippyError("the server has not been started")
        return self._run_dir

    @property
    def log_path(self) -> Path:
        """What the server prints."""
        return self._log or self.run_dir / "server.log"

    @property
    def endpoints(self) -> Endpoints:
        """Where it listens."""
        if self._endpoints is None:
            raise SkippyError("the server has not been started")
        return self._endpoints

    @property
    def model_name(self) -> str:
        """Triton model name of the orchestrator."""
        return self.deployment.server.name

    @property
    def pid(self) -> int:
        """The tritonserver's process id; 0 when it isn't running."""
        if not self._server_pid and self._run_dir is not None:
            with contextlib.suppress(OSError, ValueError):
                self._server_pid = int((self._run_dir / guard.PID_FILE).read_text())
        return self._server_pid if self.running else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the server and its Python stubs."""
        return guard.session_pids(self._server_pid) if self.pid else []

    @property
    def stub_pids(self) -> dict[str, int]:
        """Triton model name -> process id of its Python stub."""
        return stubs_of(self.pids, self.models)

    @property
    def lost(self) -> list[str]:
        """Of the orchestrator and its aliases, those whose stub has ended; nobody brings them back.

        Meaningful once the server is ready.
        """
        section, alive = self.deployment.server, self.stub_pids
        return [
            name for name in (section.name, *section.aliases) if name in self.models and name not in alive
        ]

    @property
    def models(self) -> list[str]:
        """Names of the models in its repository."""
        repository = self._model_repository or self.run_dir / "models"
        return sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))

    @property
    def running(self) -> bool:
        """True while the server or its guard is there."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the server, as a shell would show it; None while it runs."""
        return None if self._guard is None else self._guard.poll()

    def log_excerpt(self) -> str:
        """What of the log explains a failure."""
        return "" if self._run_dir is None else log_excerpt(self.log_path)

    # Start

    def start(self) -> None:
        """Start the server; returns before it is ready. Raises SkippyError for what is wrong beforehand."""
        try:
            self._start()
        except OSError as error:
            raise SkippyError(f"{error.filename}: {error.strerror}") from None
        finally:
            if self._guard is None and not self._keep_run_dir and self._run_dir is not None:
                shutil.rmtree(self._run_dir, ignore_errors=True)
                self._run_dir = None

    def _start(self) -> None:
        guard.sweep_dead()
        section = self.deployment.server
        server = self.tritonserver = self.tritonserver or find_tritonserver()
        files = None
        if self._model_repository is None:
            files = generate_for(self.deployment, self.source)
        self._endpoints = choose_endpoints(section)
        if self._run_dir is None:
            self._run_dir = Path(tempfile.mkdtemp(prefix="skippy-"))
        else:
            self._run_dir.mkdir(parents=True, exist_ok=True)
        repository = self._model_repository or self.run_dir / "models"
        if files is not None:
            write(files, repository)
        backend_dir = self.run_dir / "backends"
        shutil.rmtree(backend_dir, ignore_errors=True)
        assemble_backends(server, our_backends(), backend_dir)
        for stale in (DRAIN_FILE, guard.PID_FILE):
            (self.run_dir / stale).unlink(missing_ok=True)
        repository_key = secrets.token_hex(16)
        revival = {ADDRESS_VARIABLE: self._endpoints.http_address, KEY_VARIABLE: repository_key}
        plan = {
            "command": command_line(
                server,
                section,
                self._endpoints,
                repository=repository,
                backends=backend_dir,
                shm_prefix=self.shm_prefix,
                exit_timeout_s=EXIT_TIMEOUT_S,
                repository_key=repository_key,
            ),
            "run_dir": str(self.run_dir),
            "prefix": self.shm_prefix,
            "grace_s": GRACE_S,
            "remove_run_dir": not self._keep_run_dir,
        }
        with self.log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(server, self.run_dir, {**revival, **self._environment}),
                start_new_session=True,
            )

    def wait_ready(
        self,
        timeout_s: float | None = None,
        progress: Progress = lambda text: None,
        interrupted: Check = lambda: False,
    ) -> None:
        """Wait for the server's ready flag, then for the orchestrator to have met all its stages.

        ``progress`` is told what is being waited for. Raises ServerError when the server ends or the
        time is over, StoppedError when ``interrupted`` says so.
        """
        limit = self.ready_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        waiting_for = "tritonserver starts and loads the models"
        met = False
        while True:
            self._check_alive()
            if interrupted():
                raise StoppedError("stopped while starting")
            met = met or server_ready(self.endpoints.http)
            if met:
                try:
                    status = self.status(timeout_s=2.0)
                except StatusError as error:
                    waiting_for = error.message
                else:
                    if status.ready:
                        return
                    waiting_for = f"{self.model_name}: {status.describe()}"
            progress(waiting_for)
            if time.monotonic() > deadline:
                raise ServerError(f"not ready after {limit:g} s: {waiting_for}", self.log_excerpt())
            time.sleep(POLL_S)

    def _check_alive(self) -> None:
        if not self.running:
            raise ServerError(f"tritonserver ended with status {self.returncode}", self.log_excerpt())

    def status(self, timeout_s: float = 5.0) -> Status:
        """What the orchestrator says; raises StatusError when it says nothing."""
        return query_status(self.endpoints.grpc, self.model_name, timeout_s)

    # End

    def drain(self, interrupted: Check = lambda: False) -> bool:
        """Refuse new requests and let running ones finish, within limits.drain_timeout_s; True if all did."""
        (self.run_dir / DRAIN_FILE).touch()
        deadline = time.monotonic() + self.deployment.limits.drain_timeout_s
        while self.running and time.monotonic() < deadline and not interrupted():
            # Busy cores may not answer in time; the limit is that of the drain alone.
            with contextlib.suppress(StatusError):
                status = self.status(timeout_s=2.0)
                if status.draining and status.idle:
                    return True
            time.sleep(POLL_S)
        return False

    def stop(self, *, drain: bool = False, interrupted: Check = lambda: False) -> None:
        """Stop the server and remove what it left; safe to call at any time, and again.

        ``interrupted`` turning true ends the drain early.
        """
        if self._guard is None:
            return
        if self.running and drain:
            self.drain(interrupted)
        if self.running:
            self._guard.terminate()
        self._finish(GRACE_S + 10.0)

    def kill(self) -> None:
        """End the server at once."""
        if self.running and self._guard is not None:
            self._guard.send_signal(signal.SIGQUIT)
        self._finish(10.0)

    def _finish(self, limit_s: float) -> None:
        keeper = self._guard
        if keeper is None:
            return
        session = self.pid or self._server_pid
        try:
            keeper.wait(limit_s)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        if keeper.stdin is not None:
            keeper.stdin.close()
        # The guard has done all this, unless it was killed itself.
        if session:
            guard.end_session(session)
        guard.remove_regions(self.shm_prefix)
        if not self._keep_run_dir and self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
