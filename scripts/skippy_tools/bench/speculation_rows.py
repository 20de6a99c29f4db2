"""What ``bench speculation`` says: rows for machines, a table and ratios for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from skippy_tools.bench.report import Ratios, median, median_interval

_SURE_ROUNDS: Final = 6
"""Rounds from which the interval of a median is one of 95 %."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """One measurement: medians over the rounds of the run."""

    subject: str
    """``server``, ``server_modelled`` (stages that only wait), ``transformers`` or ``llama_cpp_f16``, with
    ``_lookup`` or ``_assisted`` behind it."""
    prompt_kind: str
    proposer: str
    depth: int
    window: int
    stages: int
    concurrency: int
    link_delay_ms: float
    decode_tokens_per_s: float
    """Tokens of all sequences together per second behind their first one."""
    acceptance: float | None
    """Share of the drafts that was right; None where there were none, or where the subject doesn't say."""
    times_serial: float | None = None
    """Median over the rounds of the rate as against serial decoding in the same round."""
    times_serial_interval: tuple[float, float] | None = None
    """Where the true median lies with 95 % confidence; with fewer than six rounds least and most of them."""
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One round."""

    decode_tokens_per_s: float
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row is about."""

    subject: str
    prompt_kind: str
    proposer: str
    depth: int = 1
    window: int = 0
    stages: int = 1
    concurrency: int = 1
    link_delay_ms: float = 0.0


def row_of(setting: Setting, samples: Sequence[Sample], serial: Sequence[Sample] | None) -> SpeculationRow:
    """The median of rounds; ``serial`` are the rounds of serial decoding that took turns with them."""
    drafts, accepted = sum(s.drafts for s in samples), sum(s.accepted for s in samples)
    times = [
        own.decode_tokens_per_s / base.decode_tokens_per_s
        for own, base in zip(samples, serial or (), strict=False)
    ]
    return SpeculationRow(
        **{name: getattr(setting, name) for name in Setting.__slots__},
        decode_tokens_per_s=round(statistics.median(s.decode_tokens_per_s for s in samples), 2),
        acceptance=round(accepted / drafts, 3) if drafts else None,
        times_serial=median(times),
        times_serial_interval=median_interval(times),
        rounds=len(samples),
    )


def print_speculation_rows(console: Console, rows: Sequence[SpeculationRow]) -> None:
    """A table, and what a reader compares."""
    table = Table(title="decode, tokens per second", box=None, pad_edge=False)
    for name in ("subject", "prompts", "proposer"):
        table.add_column(name, no_wrap=True)
    # Window width and depth, stages, streams at a time, and the delay of a link: short, so that 80 columns hold all.
    for name in ("w x d", "st", "at", "ms", "tok/s", "right", "x off"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.subject, row.prompt_kind, row.proposer),
            f"{row.window}x{row.depth}" if row.window else "-",
            *(
                str(row.stages),
                str(row.concurrency),
                f"{row.link_delay_ms:g}",
                f"{row.decode_tokens_per_s:.1f}",
            ),
            "-" if row.acceptance is None else f"{row.acceptance:.0%}",
            "-" if row.times_serial is None else f"{row.times_serial:.2f}",
        )
    console.print(table)
    for line in ratios(rows):
        console.print(line, markup=False)


def ratios(rows: Sequence[SpeculationRow]) -> list[str]:
    """What the rows say about each other, as sentences; left out where a side was not measured."""
    said = Ratios()
    for stages in sorted({row.stages for row in rows if row.subject == "server"}):
        here = [r for r in rows if r.subject == "server" and r.stages == stages and r.concurrency == 1]
        here = [row for row in here if not row.link_delay_ms]
        for kind in dict.fromkeys(row.prompt_kind for row in here):
            of_kind = [row for row in here if row.prompt_kind == kind]
            serial = _rate(row for row in of_kind if row.proposer == "off")
            for proposer in dict.fromkeys(row.proposer for row in of_kind if row.proposer != "off"):
                best = _rate(row for row in of_kind if row.proposer == proposer)
                said.add(f"{kind}, {stages} stages: {proposer} at its best depth / serial", best, serial)
            own = _rate(row for row in of_kind if row.proposer == "ngram")
            for peer in dict.fromkeys(row.subject for row in rows if not row.subject.startswith("server")):
                theirs = _rate(row for row in rows if row.subject == peer and row.prompt_kind == kind)
                said.add(f"{kind}, {stages} stages: ngram / {peer}", own, theirs)
    _add_delays(said, rows)
    return [*said.lines, *_intervals(rows)]


def _intervals(rows: Sequence[SpeculationRow]) -> Iterator[str]:
    """Text in which there is nothing to guess: what guessing costs, and how sure that is."""
    for row in rows:
        if row.prompt_kind == "random" and row.times_serial_interval and row.rounds >= _SURE_ROUNDS:
            least, most = row.times_serial_interval
            yield (
                f"random, {row.stages} stages, {row.concurrency} at a time: {row.proposer} {row.window}x{row.depth} "
                f"/ serial in {row.rounds} pairs: {row.times_serial}x (95 %: {least} to {most})"
            )


def _add_delays(said: Ratios, rows: Sequence[SpeculationRow]) -> None:
    slow = [row for row in rows if row.link_delay_ms]
    for subject, delay in dict.fromkeys((row.subject, row.link_delay_ms) for row in slow):
        here = [row for row in slow if (row.subject, row.link_delay_ms) == (subject, delay)]
        serial = _rate(row for row in here if row.proposer == "off")
        by_depth = {
            depth: _rate(row for row in here if row.depth == depth and row.proposer != "off")
            for depth in sorted({row.depth for row in here})
        }
        deepest = max(by_depth)
        name = f"{subject}, {delay:g} ms per link, best widths: depth {deepest}"
        said.add(f"{name} / depth 1", by_depth[deepest], by_depth.get(1))
        said.add(f"{name} / serial", by_depth[deepest], serial)


def _rate(rows: Iterable[SpeculationRow]) -> float | None:
    return max((row.decode_tokens_per_s for row in rows), default=None)
