"""How the command line writes: answers to standard output, everything about them to standard error."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final

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
    """One line about an answer: tokens, times, rate, how it ended, what the prefix cache did for it."""
    timings = generation.timings
    rate = generation.tokens_per_s
    cache = generation.cache_stats
    counted = cache is not None or generation.cached_tokens
    cached = f" ({generation.cached_tokens} cached)" if counted else ""
    parts = [
        f"{generation.num_input_tokens} tokens in{cached}",
        f"{generation.num_output_tokens} out",
        f"first after {timings.ttft_s:.3f} s",
        f"all after {timings.total_s:.3f} s",
        *([] if rate is None else [f"{rate:.1f} tok/s"]),
        f"finish_reason {generation.finish_reason}",
        *([] if generation.seed is None else [f"seed {generation.seed}"]),
        *([] if cache is None else [describe_cache(cache)]),
        *describe_drafts(generation),
    ]
    return ", ".join(parts)


def describe_drafts(generation: Generation) -> list[str]:
    """How many of the tokens that were guessed ahead were right; nothing where there were none."""
    rate = generation.acceptance_rate
    if rate is None:
        return []
    return [
        f"{generation.total_accepted_draft_tokens} of {generation.total_draft_tokens} drafts right ({rate:.0%})"
    ]


def describe_cache(stats: Mapping[str, Any]) -> str:
    """What the prefix cache did for one request, and in which way it hit."""
    kind = stats.get("hit_kind")
    return f"cache {stats.get('status') or '?'}{f' {kind}' if kind else ''}"


def number(value: float | None) -> str:
    """A count for a person; - for one that isn't known."""
    return "-" if value is None else f"{value:,}"


def part_of(part: float | None, whole: float | None) -> str:
    """A count, the count that it is a part of, and its share; - when neither is known."""
    if part is None and whole is None:
        return "-"
    share = f" ({part / whole:.0%})" if part is not None and whole else ""
    return f"{number(part)}/{number(whole)}{share}"


def note(text: str) -> None:
    """A quiet line on standard error."""
    _stderr().print(Text(text, style="dim"))


def print_error(text: str) -> None:
    """An error on standard error."""
    _stderr().print(Text.assemble(("error: ", "bold red"), text))


def _stderr() -> Console:
    # Made when needed: standard error may have been redirected since the import. Long lines aren't broken.
    return Console(stderr=True, soft_wrap=True, highlight=False)
