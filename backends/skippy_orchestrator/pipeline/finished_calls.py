"""Finished BLS calls, kept until Triton's stub has let go of them.

When a call's last response has been taken, the stub's service thread drops its own reference to the call's
responses, some time later and without holding the GIL. If that is the last reference, Python objects are
freed without the GIL, which corrupts the heap and kills the process (python_backend of release 24.10). So
whoever takes a last response hands the call over to FINISHED, and it is dropped after the service thread
has passed that point: it works in order, and ``is_cancelled`` goes through it and waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

_SURELY_PASSED_S: Final = 5.0
"""While nobody asks is_cancelled, nothing much is queued for the service thread either: time is enough."""


class FinishedCalls:
    """Calls that have ended, oldest first; safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, float, Any]] = deque()
        self._number = 0

    def keep(self, call: Any) -> None:
        """Keep a call whose last response has been taken."""
        now = self._clock()
        with self._lock:
            self._number += 1
            self._calls.append((self._number, now, call))
        self._drop(lambda number, since: now - since > _SURELY_PASSED_S)

    def mark(self) -> int:
        """The last call that ended so far."""
        return self._number

    def passed(self, mark: int) -> None:
        """A round trip through the service thread that began at ``mark`` has ended."""
        self._drop(lambda number, since: number <= mark)

    def _drop(self, due: Callable[[int, float], bool]) -> None:
        dropped = []
        with self._lock:
            while self._calls and due(*self._calls[0][:2]):
                dropped.append(self._calls.popleft())

    def __len__(self) -> int:
        return len(self._calls)


FINISHED: Final = FinishedCalls()
"""Those of this process."""
