"""What ``skippy status`` shows of the prefix cache: totals in one line, and a row for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.table import Table
from rich.text import Text

from skippy_client.cli_output import number, part_of
from skippy_client.types import PrefixStatus, ServerStatus

_TEXT_COLUMNS: Final = ("stage", "prefix cache")
_NUMBER_COLUMNS: Final = ("entries", "blocks held", "tokens", "memory", "hits", "restored", "evicted")


def prefix_line(status: ServerStatus) -> Text | None:
    """The totals since the server started; None from a server that counts nothing of a prefix cache.

    A hit is a request that something was restored for; the share is that of the requests that asked.
    Cached are the prompt tokens of finished requests that weren't computed again, of all their tokens.
    """
    counters = status.counters
    stages = [stage.prefix for stage in status.stages if stage.prefix is not None]
    if stages and all(stage.payload == "off" for stage in stages):
        return Text("prefix cache off")
    parts = [
        _part(counters, "hits {}", "prefix_hits", "prefix_queries"),
        _part(counters, "cached {} prompt tokens", "cached_tokens", "prompt_tokens"),
    ]
    if replayed := counters.get("replayed_tokens"):
        parts.append(f"replayed {number(replayed)} output tokens")
    shown = [part for part in parts if part]
    return Text("  ".join(["prefix cache", *shown])) if shown else None


def prefix_table(status: ServerStatus) -> Table | None:
    """What each stage holds, and its totals since it started; None when no stage keeps anything."""
    stages = [(stage.name, stage.prefix) for stage in status.stages if stage.prefix is not None]
    if all(prefix.payload == "off" for _, prefix in stages):
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _TEXT_COLUMNS:
        table.add_column(name)
    for name in _NUMBER_COLUMNS:
        table.add_column(name, justify="right")
    for name, prefix in stages:
        table.add_row(*map(Text, (name, *_cells(prefix))))
    return table


def _part(counters: Mapping[str, float], form: str, part: str, whole: str) -> str:
    return form.format(part_of(counters[part], counters.get(whole))) if part in counters else ""


def _cells(prefix: PrefixStatus) -> tuple[str, ...]:
    return (
        prefix.payload or "-",
        number(prefix.entries),
        number(prefix.blocks),
        number(prefix.tokens),
        "-" if prefix.bytes is None else f"{prefix.bytes / 2**20:,.0f} MiB",
        part_of(prefix.hits, prefix.lookups),
        number(prefix.restored_tokens),
        number(prefix.evicted),
    )
