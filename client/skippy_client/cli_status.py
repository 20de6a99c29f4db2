"""The tables of ``skippy status``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from skippy_client.cli_output import number, part_of
from skippy_client.cli_prefix import prefix_line, prefix_table
from skippy_client.cli_speculation import head_line, speculation_line
from skippy_client.errors import ServerUnavailable
from skippy_client.sync import SkippyClient
from skippy_client.types import ServerStatus, StageStatus

PLAIN_WIDTH: Final = 140
"""Columns for output that isn't a terminal, where nobody told us a width."""


def show_status(status: ServerStatus) -> None:
    """Print the server's state once."""
    _console().print(render_status(status))


def watch_status(client: SkippyClient, interval_s: float) -> None:
    """Show the server's state again and again, until Ctrl-C; a server that goes away is waited for.

    A terminal shows the newest in place; anything else gets them one after the other.
    """
    console = _console()
    if not console.is_terminal:
        for shown in _looks(client):
            console.print(shown)
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False) as live:
        for shown in _looks(client):
            live.update(shown, refresh=True)
            time.sleep(interval_s)


def _looks(client: SkippyClient) -> Iterator[RenderableType]:
    before: tuple[float, ServerStatus] | None = None
    while True:
        now = time.monotonic()
        try:
            status = client.status()
        except ServerUnavailable as error:
            before = None
            yield Text.assemble(("unavailable ", "bold red"), str(error))
        else:
            busy = {} if before is None else busy_shares(before[1], status, now - before[0])
            before = (now, status)
            yield render_status(status, busy)


def busy_shares(before: ServerStatus, after: ServerStatus, elapsed_s: float) -> dict[str, float]:
    """The share of the time between two looks that each stage computed, by its name."""
    earlier = {stage.name: stage.busy_us for stage in _all_stages(before)}
    shares = {}
    for stage in _all_stages(after):
        start = earlier.get(stage.name)
        # A counter that went back belongs to a stage that started anew.
        if start is not None and stage.busy_us is not None and stage.busy_us >= start:
            shares[stage.name] = min(1.0, (stage.busy_us - start) / 1e6 / elapsed_s)
    return shares


def render_status(status: ServerStatus, busy: dict[str, float] | None = None) -> RenderableType:
    """The server's lines and the tables of its stages; ``busy`` replaces the busy seconds by shares.

    What is about prefix cache, speculation and MTP head is left out for a server that says nothing of one. The stage
    of a draft model is the last row.
    """
    line = Text.assemble(
        ("ready", "bold green") if status.ready else ("not ready", "bold red"),
        f"  {status.model}" if status.model else "",
        f"  active {number(status.active)}  waiting {number(status.waiting)}",
    )
    if status.reason:
        line.append(f"\n{status.reason}", style="yellow")
    for more in (prefix_line(status), speculation_line(status), head_line(status)):
        if more is not None:
            line.append("\n").append_text(more)
    return Group(line, *_tables(status, busy or {}))


def _tables(status: ServerStatus, busy: dict[str, float]) -> Iterator[RenderableType]:
    """The tables, each after an empty line."""
    if _all_stages(status):
        yield Text()
        yield _stage_table(status, busy)
    if (prefixes := prefix_table(status)) is not None:
        yield Text()
        yield prefixes


def _all_stages(status: ServerStatus) -> tuple[StageStatus, ...]:
    return status.stages if status.draft is None else (*status.stages, status.draft)


def _stage_table(status: ServerStatus, busy: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "state", "layers", "engine"):
        table.add_column(name)
    for name in ("sessions", "KV blocks", "frames", "rows", "busy", "memory"):
        table.add_column(name, justify="right")
    table.add_column("last error")
    for stage in _all_stages(status):
        table.add_row(*map(Text, _cells(stage, busy.get(stage.name))))
    return table


def _cells(stage: StageStatus, busy: float | None) -> tuple[str, ...]:
    state = "ready" if stage.ready else f"not ready: {stage.reason}" if stage.reason else "not ready"
    layers = "-" if stage.first_layer is None else f"[{stage.first_layer}, {number(stage.last_layer)})"
    seconds = "-" if stage.busy_us is None else f"{stage.busy_us / 1e6:.1f} s"
    return (
        stage.name,
        state,
        layers,
        stage.engine or "-",
        number(stage.sessions),
        _kv(stage),
        number(stage.frames),
        number(stage.rows),
        seconds if busy is None else f"{busy:.0%}",
        "-" if stage.rss_bytes is None else f"{stage.rss_bytes / 2**20:,.0f} MiB",
        stage.last_error or "",
    )


def _kv(stage: StageStatus) -> str:
    if stage.kv_blocks is None:
        return "-"
    return part_of(stage.kv_blocks_used or 0, stage.kv_blocks)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
