"""The torch engine with faults on order: a file per stage in $SKIPPY_TEST_FAULTS says what goes wrong.

``raise at N`` fails a batch in which a sequence comes to exactly N positions; ``only M`` after it spares
sequences whose first batch did not end at M. ``hang`` blocks until the file is gone. Steps that share a batch
with a faulty one are tried again alone, so the others survive.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from skippy_stage.engines.base import Batch, BatchOutput, EngineInfo, ExactState, KvUsage, PrefixBlocks
from skippy_stage.engines.torch_engine import TorchEngine
from skippy_stage.settings import StageSettings


class FaultyEngine:
    """Delegates to the torch engine."""

    def __init__(self, settings: StageSettings) -> None:
        self._engine = TorchEngine(settings)
        self._orders = Path(os.environ["SKIPPY_TEST_FAULTS"]) / settings.name
        self._first_end: dict[int, int] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def prefix_blocks(self) -> PrefixBlocks | None:
        return self._engine.prefix_blocks

    @property
    def exact_state(self) -> ExactState | None:
        return self._engine.exact_state

    def open(self, sequence: int, max_tokens: int) -> None:
        self._engine.open(sequence, max_tokens)

    def close(self, sequence: int) -> None:
        self._first_end.pop(sequence, None)
        self._engine.close(sequence)

    def cached(self, sequence: int) -> int:
        return self._engine.cached(sequence)

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        ends = {rows.sequence: rows.past + rows.rows for rows in batch.sequences}
        for sequence, end in ends.items():
            self._first_end.setdefault(sequence, end)
        match self._order():
            case ["hang"]:
                while self._order():
                    time.sleep(0.02)
            case ["raise", "at", at] if int(at) in ends.values():
                raise RuntimeError("injected")
            case ["raise", "at", at, "only", first]:
                if any(end == int(at) and self._first_end[s] == int(first) for s, end in ends.items()):
                    raise RuntimeError("injected")
        return self._engine.forward(batch, threads=threads)

    def _order(self) -> list[str]:
        try:
            return self._orders.read_text().split()
        except FileNotFoundError:
            return []

    def usage(self) -> KvUsage:
        return self._engine.usage()

    def check_integrity(self) -> None:
        self._engine.check_integrity()

    def shutdown(self) -> None:
        self._engine.shutdown()


def create(settings: StageSettings) -> FaultyEngine:
    """The engine factory."""
    return FaultyEngine(settings)
