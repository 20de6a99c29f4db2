"""How the command line writes: answers to standard output, everything about them to standard error."""

from __future__ import annotations

import re
import sys
from typing import Final

from rich.console import Console
from rich.text import Text

from skippy_client.types import Generation

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalWriter:
    """Writes an answer piece by piece; on a terminal, without the control characters a model may invent."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open_line = False

    def write(self, text: str) -> None:
        """Write and show at once."""
        if not text:
            return
        sys.stdout.write(_CONTROLS.sub("\ufffd", text) if self._terminal else text)
        sys.stdout.flush()
        self._open_line = not text.endswith("\n")

    def end(self) -> None:
        """End the line, if one is open."""
        if self._open_line:
            self.write("\n")


def describe_stats(generation: Generation) -> str:
    """One line about an answer: tokens, times, rate, how it ended."""
    timings = generation.timings
    rate = generation.tokens_per_s
    parts = [
        f"{generation.num_input_tokens} tokens in",
        f"{generation.num_output_tokens} out",
        f"first after {timings.ttft_s:.3f} s",
        f"all after {timings.total_s:.3f} s",
        *([] if rate is None else [f"{rate:.1f} tok/s"]),
        f"finish_reason {generation.finish_reason}",
        *([] if generation.seed is None else [f"seed {generation.seed}"]),
    ]
    return ", ".join(parts)


def note(text: str) -> None:
    """A quiet line on standard error."""
    _stderr().print(Text(text, style="dim"))


def print_error(text: str) -> None:
    """An error on standard error."""
    _stderr().print(Text.assemble(("error: ", "bold red"), text))


def _stderr() -> Console:
    # Made when needed: standard error may have been redirected since the import. Long lines aren't broken.
    return Console(stderr=True, soft_wrap=True, highlight=False)
