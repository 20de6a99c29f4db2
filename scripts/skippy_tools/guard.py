"""Keeps one server and leaves nothing behind, whoever dies first.

``serve`` starts this guard, and the guard starts tritonserver in a session of its own. The guard's
standard input is a pipe from its starter: its end tells that the starter is gone, kill -9 included, and
the server is stopped. When the server is gone, however it went, the guard ends what is left of its
session (Python stubs outlive a killed server) and removes its shared-memory regions.

Signals to the guard: SIGTERM stops the server gently, SIGQUIT kills it.

Run as a file with ``python -I``, so this module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SHM: Final = Path("/dev/shm")
PREFIX: Final = "skippy_"
LOCK_SUFFIX: Final = "lock"
PID_FILE: Final = "server.pid"

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


@contextlib.contextmanager
def region_lock(prefix: str, shm: Path = SHM) -> Iterator[None]:
    """Own the regions of a prefix; removes them at the end.

    The lock tells a living owner from a dead one also across containers that share /dev/shm, where a
    process id would not.
    """
    path = shm / f"{prefix}{LOCK_SUFFIX}"
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        remove_regions(prefix, shm)
        os.close(handle)


def remove_regions(prefix: str, shm: Path = SHM) -> None:
    """Remove the regions of a prefix; its lock goes last."""
    lock = shm / f"{prefix}{LOCK_SUFFIX}"
    for region in sorted(shm.glob(f"{prefix}*"), key=lambda path: path == lock):
        region.unlink(missing_ok=True)


def sweep_dead(shm: Path = SHM) -> list[str]:
    """Remove the regions of servers whose guard is gone; returns their prefixes."""
    swept = []
    for lock in shm.glob(f"{PREFIX}*_{LOCK_SUFFIX}"):
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            prefix = lock.name.removesuffix(LOCK_SUFFIX)
            remove_regions(prefix, shm)
            swept.append(prefix)
        except OSError:
            continue
        finally:
            os.close(handle)
    return swept


def session_pids(session: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command, in parentheses, may hold anything; the fields after it are plain.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in ("Z", "X"):
            found.append(int(entry.name))
    return found


def end_session(session: int, limit_s: float = 5.0) -> list[int]:
    """Kill every process of a session; returns those that were still there after the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        left = session_pids(session)
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _reap_orphans() -> None:
    """Stubs of a dead server are the guard's children then (it is their subreaper)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    """A killed guard takes the server with it; the guard has one thread, so its death is the thread's."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Watch:
    """Waits for the first of: the server's end, a signal, the end of the starter.

    Made before the server is started: a signal that comes early is kept.
    """

    def __init__(self, grace_s: float) -> None:
        self.orphaned = False
        self._grace_s = grace_s
        self._stop = self._kill = False
        self._deadline: float | None = None
        self._wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        self._stop = True
        self._kill |= number == signal.SIGQUIT

    def _act(self, server: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if self._kill or (self._deadline is not None and now >= self._deadline):
            server.kill()
            self._deadline = now + self._grace_s
        elif self._stop and self._deadline is None:
            server.terminate()
            self._deadline = now + self._grace_s

    def run(self, server: subprocess.Popen[bytes]) -> int:
        """Returns the server's exit status, as a shell would show it."""
        ended = os.pidfd_open(server.pid)
        starter = sys.stdin.fileno()
        watched = [ended, self._wake, starter]
        while True:
            self._act(server)
            timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select(watched, [], [], timeout)
            if ended in ready:
                code = server.wait()
                return code if code >= 0 else 128 - code
            if self._wake in ready:
                os.read(self._wake, 4096)
            if starter in ready and not os.read(starter, 4096):
                watched.remove(starter)
                self.orphaned = self._stop = True


def main(plan_text: str) -> int:
    """Run the plan that ``ServerProcess`` wrote: command, run_dir, prefix, grace_s, remove_run_dir."""
    plan = json.loads(plan_text)
    run_dir = Path(plan["run_dir"])
    watch = _Watch(float(plan["grace_s"]))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with region_lock(plan["prefix"]):
        server = subprocess.Popen(
            plan["command"], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
        )
        (run_dir / PID_FILE).write_text(str(server.pid))
        code = watch.run(server)
        end_session(server.pid)
        _reap_orphans()
    if watch.orphaned and plan["remove_run_dir"]:
        shutil.rmtree(run_dir, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
