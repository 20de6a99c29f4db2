"""What all benchmarks report with: medians, ratios as sentences, the JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec


def median(values: Sequence[float | None]) -> float | None:
    """The median of what was measured, to two decimals; None where nothing was."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


class Ratios:
    """Sentences that compare two figures; one that lacks a side is left out."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str, top: float | None, bottom: float | None) -> None:
        """How many times ``bottom`` is ``top``."""
        if top and bottom:
            self.lines.append(f"{text}: {top / bottom:.2f}x")

    def add_share(self, text: str, part: float, whole: float, name: str) -> None:
        """How many hundredths of ``whole``, called ``name``, are ``part``."""
        if whole:
            self.lines.append(f"{text}: {100 * part / whole:.1f} % of {name}")


def write_json(path: Path, rows: Sequence[Any]) -> None:
    """Write the rows as a JSON list."""
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode([asdict(row) for row in rows]), indent=1) + b"\n"
    )
