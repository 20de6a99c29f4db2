"""Whether the process of a stage in this server is still there."""

from __future__ import annotations

import os
import select

import psutil


class StageProcess:
    """A process by its id; cheap to ask about (microseconds, where the kernel has pidfds)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False
        self._handle = -1
        self._process: psutil.Process | None = None
        try:
            self._process = psutil.Process(pid)
            self._handle = os.pidfd_open(pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            self._ended = True
        except OSError:  # an old kernel, or a sandbox that forbids it: psutil tells as well
            pass

    def has_ended(self) -> bool:
        """True once the process has exited, waited for or not."""
        if self._ended or self._process is None:
            return self._ended
        if self._handle >= 0:
            poll = select.poll()  # unlike select.select, for any number of open files
            poll.register(self._handle, select.POLLIN)
            self._ended = bool(poll.poll(0))
        else:
            try:
                self._ended = self._process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                self._ended = True
        return self._ended

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
