"""What ``bench prefill`` shows people: tables, then ratios."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from skippy_tools.bench.prefill_ratios import Own, prefill_ratios
from skippy_tools.bench.prefill_rows import Gaps, PrefillRow


def print_prefill_rows(console: Console, rows: Sequence[PrefillRow], own: Own) -> None:
    """Tables of cold prompts, of cached ones and of running streams, then the ratios that matter."""
    cold = [row for row in rows if row.scenario == "cold"]
    beside = [row for row in rows if row.scenario == "interference"]
    cached = [row for row in rows if row.scenario not in ("cold", "interference")]
    for table in (_cold(cold), _cached(cached), _beside(beside)):
        if table.row_count:
            console.print(table)
    for line in prefill_ratios(rows, own):
        console.print(line)


def _cold(rows: Sequence[PrefillRow]) -> Table:
    table = _table("cold prompts", rows, ("subject", "chunks"))
    _figures(table, "stages", "threads", "prompt\ntokens", "TTFT\nms", "prompt\ntok/s")
    for row in rows:
        table.add_row(
            *(row.subject, row.policy.removeprefix("schedule:"), str(row.stages), str(row.threads)),
            *(str(row.prompt_tokens), f"{row.ttft_ms:.0f}", f"{row.prompt_tokens_per_s:.0f}"),
        )
    return table


def _cached(rows: Sequence[PrefillRow]) -> Table:
    table = _table("cached prompts on the server", rows, ("scenario", "cache"))
    _figures(table, "stages", "prompt\ntokens", "shared", "cached", "TTFT\nms")
    for row in rows:
        table.add_row(
            *(row.scenario, row.cache, str(row.stages), str(row.prompt_tokens), str(row.shared_tokens)),
            *(str(row.cached_tokens), f"{row.ttft_ms:.1f}"),
        )
    return table


def _beside(rows: Sequence[PrefillRow]) -> Table:
    streams = max((row.streams for row in rows), default=0)
    table = _table(f"ms between tokens of {streams} streams, quiet and beside a prompt", rows, ())
    _figures(table, "bound\nrows", "prompt\ntokens", "TTFT\nms")
    _figures(
        table, *(f"{when}\n{figure}" for when in ("quiet", "beside") for figure in ("p50", "p95", "max"))
    )
    for row in rows:
        table.add_row(
            *(str(row.prefill_rows_while_decoding), str(row.prompt_tokens), f"{row.ttft_ms:.0f}"),
            *(*_three(row.quiet_gaps), *_three(row.gaps)),
        )
    return table


def _three(gaps: Gaps | None) -> tuple[str, ...]:
    if gaps is None:
        return ("-",) * 3
    return tuple(f"{value:.0f}" for value in (gaps.median_ms, gaps.p95_ms, gaps.max_ms))


def _table(title: str, rows: Sequence[PrefillRow], names: Sequence[str]) -> Table:
    counts = sorted({row.rounds for row in rows})
    rounds = " or ".join(str(count) for count in counts)
    table = Table(title=f"{title}; rounds: {rounds}", title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _figures(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
