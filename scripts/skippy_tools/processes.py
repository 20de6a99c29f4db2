"""Looking at a running server from outside."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from skippy_tools.triton import STUB, check_version

_ERROR_LINE: Final = re.compile(r"\S+Z E \d+ |error: ")
_ERROR_LINES: Final = 12


def stubs_of(pids: Iterable[int], models: Iterable[str]) -> dict[str, int]:
    """Triton model name -> process id, for those of the processes that are Python stubs."""
    wanted = set(models)
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it may end while we look
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[0].endswith(STUB):
                # Among its arguments is the name of its instance: <model>_<group>_<number>.
                names = {word.rsplit("_", 2)[0] for word in words}
                found.update(dict.fromkeys(names & wanted, pid))
    return found


def log_excerpt(path: Path, last: int = 20) -> str:
    """What a person wants to see of a failed server's log: the first error, and the last lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    tail = max(0, len(lines) - last)
    first = next((number for number, line in enumerate(lines) if _ERROR_LINE.match(line)), tail)
    # A Python traceback goes on for some lines.
    end = min(first + _ERROR_LINES, tail)
    head = [*lines[first:end], "..."] if first < end else []
    return "\n".join(head + lines[tail:])


def server_ready(http: str) -> bool:
    """The server's own ready flag, at the base URL of its HTTP endpoint.

    Raises TritonError for a server that is too old: where it brings no version file, this is where its
    version becomes known.
    """
    try:
        with urllib.request.urlopen(f"{http}/v2/health/ready", timeout=2):
            pass
        with urllib.request.urlopen(f"{http}/v2", timeout=2) as answer:
            version = str(json.load(answer)["version"])
    except (OSError, ValueError, KeyError):
        return False
    check_version(version, "the server that answers")
    return True
