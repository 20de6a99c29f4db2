"""What ``bench decode`` says: rows for machines, a table and ratios for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from skippy_tools.bench.report import Ratios, median


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One measurement of ``bench decode``: medians over the rounds of the run."""

    subject: str
    """``transformers``, ``llama_cpp_f16``, ``in_process`` or ``server``."""
    stages: int
    concurrency: int
    decode_tokens_per_s: float
    """Tokens of all sequences together per second, while all of them decode."""
    prefill_tokens_per_s: float | None
    """Prompt tokens per second until the first token, for the long prompt; None where not measured."""
    ttft_ms: float | None
    """Time to first token for the short prompt, median over the sequences; None where there is none."""
    ms_per_token: float
    """Milliseconds between two tokens of one sequence."""
    rounds: int
    decode_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One round's figures of one subject."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float | None
    ttft_ms: float | None


def median_row(
    subject: str,
    stages: int,
    concurrency: int,
    samples: Sequence[Sample],
    *,
    decode_tokens: int,
    prompt_tokens: int,
) -> DecodeRow:
    """Medians of all rounds, each figure by itself."""
    decode = statistics.median(sample.decode_tokens_per_s for sample in samples)
    return DecodeRow(
        subject=subject,
        stages=stages,
        concurrency=concurrency,
        decode_tokens_per_s=round(decode, 2),
        prefill_tokens_per_s=median([sample.prefill_tokens_per_s for sample in samples]),
        ttft_ms=median([sample.ttft_ms for sample in samples]),
        ms_per_token=round(1000 * concurrency / decode, 2),
        rounds=len(samples),
        decode_tokens=decode_tokens,
        prompt_tokens=prompt_tokens,
    )


def print_decode_rows(console: Console, rows: Sequence[DecodeRow]) -> None:
    """A table of all rows, then the ratios that matter."""
    table = Table(title=f"medians of {rows[0].rounds} rounds", title_justify="left")
    table.add_column("subject", no_wrap=True)
    for name in ("stages", "concurrent", "decode\ntok/s", "ms per\ntoken", "prefill\ntok/s", "TTFT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.subject,
            str(row.stages),
            str(row.concurrency),
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.ms_per_token:.1f}",
            "-" if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:.0f}",
            "-" if row.ttft_ms is None else f"{row.ttft_ms:.0f}",
        )
    console.print(table)
    for line in decode_ratios(rows):
        console.print(line)


def decode_ratios(rows: Sequence[DecodeRow]) -> list[str]:
    """What a reader compares, as sentences; left out where a side was not measured."""

    def find(subject: str, stages: int, concurrency: int) -> DecodeRow | None:
        key = (subject, stages, concurrency)
        return next((row for row in rows if (row.subject, row.stages, row.concurrency) == key), None)

    said = Ratios()
    serial, batch = find("server", 2, 1), find("server", 2, 16)
    transformers, llama, llama16 = (
        find("transformers", 1, 1),
        find("llama_cpp_f16", 1, 1),
        find("llama_cpp_f16", 1, 16),
    )
    engines = find("in_process", 2, 1)
    if serial and transformers:
        said.add(
            "two-stage server / transformers, serial decode",
            serial.decode_tokens_per_s,
            transformers.decode_tokens_per_s,
        )
        said.add(
            "two-stage server / transformers, prefill",
            serial.prefill_tokens_per_s,
            transformers.prefill_tokens_per_s,
        )
    if serial and llama:
        said.add(
            "two-stage server / llama.cpp F16, serial decode",
            serial.decode_tokens_per_s,
            llama.decode_tokens_per_s,
        )
        said.add(
            "two-stage server / llama.cpp F16, prefill",
            serial.prefill_tokens_per_s,
            llama.prefill_tokens_per_s,
        )
    if serial and batch:
        said.add(
            "two-stage server, concurrency 16 / 1", batch.decode_tokens_per_s, serial.decode_tokens_per_s
        )
    if batch and llama16:
        said.add(
            "two-stage server / llama.cpp F16, 16 sequences",
            batch.decode_tokens_per_s,
            llama16.decode_tokens_per_s,
        )
    if serial and engines:
        added = serial.ms_per_token - engines.ms_per_token
        said.lines.append(
            f"Triton and orchestration add {added:.1f} ms to a token of the same two engines in one process"
        )
    return said.lines
