"""The conversation of ``skippy chat``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Final

from skippy_client.cli_output import TerminalWriter, describe_stats, note, print_error
from skippy_client.errors import SkippyError
from skippy_client.sync import SkippyClient
from skippy_client.types import GenerateOptions, Message

COMMANDS: Final = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def run_chat(
    client: SkippyClient, opening: Sequence[Message], options: GenerateOptions, *, stats: bool
) -> None:
    """Read messages and answer them until /quit or the end of input.

    An answer stopped by Ctrl-C stays in the conversation as far as it came; a message whose answer
    failed doesn't. Where nobody sits at the keyboard, an error or Ctrl-C ends it all.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            # Importing it is what gives input() line editing and a history.
            import readline  # noqa: F401
        note(COMMANDS)
    messages = list(opening)
    while (line := read_line("> " if interactive else "")) is not None:
        text = line.strip()
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                messages = list(opening)
                note("forgotten")
            case _ if text.startswith("/"):
                note(f"{text.split()[0]}: no such command; {COMMANDS}")
            case _:
                messages.append({"role": "user", "content": text})
                reply = answer(client, messages, options, stats=stats, goes_on=interactive)
                if reply:
                    messages.append({"role": "assistant", "content": reply})
                else:
                    messages.pop()


def read_line(prompt: str) -> str | None:
    """The next line, None at the end of input; Ctrl-C drops what was typed."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                note("")
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            note("")


def answer(
    client: SkippyClient,
    messages: Sequence[Message],
    options: GenerateOptions,
    *,
    stats: bool,
    goes_on: bool,
) -> str:
    """Stream one answer and return its text: what came before Ctrl-C, or nothing after an error.

    Unless ``goes_on``, both are raised.
    """
    writer = TerminalWriter()
    turn: GenerateOptions = {**options, "messages": messages}
    said = []
    try:
        with client.stream(**turn) as stream:
            for chunk in stream:
                said.append(chunk.text)
                writer.write(chunk.text)
            writer.end()
            if stats:
                note(describe_stats(stream.result()))
    except KeyboardInterrupt:
        writer.end()
        if not goes_on:
            raise
        note("stopped")
    except SkippyError as error:
        writer.end()
        if not goes_on:
            raise
        print_error(str(error))
        return ""
    return "".join(said)
