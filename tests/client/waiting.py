"""Waiting for what another process does; the limit only ends a test that would hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LIMIT_S: Final = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "didn't come true"
        time.sleep(0.02)
