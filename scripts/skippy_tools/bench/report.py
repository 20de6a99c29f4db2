"""What all benchmarks report with: medians, ratios as sentences, the JSON file."""

from __future__ import annotations

import math
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


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the true median lies with 95 % confidence, whatever the distribution; the whole range below 6 values.

    Between the k-th least and the k-th largest value, by the sign test.
    """
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    least = 1
    while 2 * sum(math.comb(count, i) for i in range(least + 1)) / 2**count <= 0.05:
        least += 1
    return round(ordered[least - 1], 2), round(ordered[-least], 2)


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
