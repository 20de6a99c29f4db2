"""A deterministic engine for tests: every row depends on every row before it, on every stage.

A row's value at a layer is a hash of the value below it and of the same layer's value one position
earlier, kept in the sequence's "KV". A lost, doubled or misplaced row anywhere changes all that follows.
Values are integers below 2**16, exact in float32, and do not depend on where the layers are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from skippy_stage.engines.base import Batch, BatchOutput, EngineInfo, KvUsage
from skippy_stage.errors import SkippyError
from skippy_stage.protocol import SamplingParams
from skippy_stage.sampling import sample
from skippy_stage.settings import StageSettings

PRIME = 65521
HIDDEN = 4
VOCAB = 251
LAYERS = 6


def _next(layer: int, before: int, below: int) -> int:
    return (before * 31 + below * 17 + layer * 101 + 7) % PRIME


def _logits(state: int) -> np.ndarray:
    ids = np.arange(VOCAB, dtype=np.int64)
    return ((state * 7919 + ids * ids * 104729 + ids * 31) % 10007 / 1000).astype(np.float32)


class ScriptedEngine:
    """Layers [first, last) of the scripted model. ``fault`` may raise before a batch runs."""

    def __init__(
        self,
        first: int = 0,
        last: int = LAYERS,
        blocks: int = 4096,
        block_tokens: int = 4,
        fault: Callable[[Batch], None] | None = None,
    ) -> None:
        self._info = EngineInfo(
            engine="scripted",
            architecture="scripted",
            first_layer=first,
            last_layer=last,
            n_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            context_length=4096,
            link_dtype="f32",
            kv_block_tokens=block_tokens,
            kv_blocks=blocks,
            weight_bytes=0,
        )
        self.fault = fault
        self.batches: list[Batch] = []
        self._rooms: dict[int, int] = {}
        self._states: dict[int, list[list[int]]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    def open(self, sequence: int, max_tokens: int) -> None:
        if sequence in self._states:
            raise SkippyError(f"sequence {sequence} is open")
        self._states[sequence] = []
        self._rooms[sequence] = -(-max_tokens // self._info.kv_block_tokens)
        if sum(self._rooms.values()) > self._info.kv_blocks:
            raise AssertionError("the orchestrator let a stage run out of KV")

    def close(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        self._rooms.pop(sequence, None)

    def cached(self, sequence: int) -> int:
        return len(self._states[sequence])

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        if self.fault is not None:
            self.fault(batch)
        self.batches.append(batch)
        info = self._info
        layers = range(info.first_layer, info.last_layer)
        outs: list[int] = []
        logits: list[np.ndarray] = []
        row = 0
        for rows in batch.sequences:
            states = self._states[rows.sequence]
            assert rows.past <= len(states), "past beyond the cache"
            del states[rows.past :]
            for i in range(rows.rows):
                below = int(batch.token_ids[row]) if info.is_first else int(batch.hidden[row, 0])  # type: ignore[index]
                row += 1
                column: list[int] = []
                for place, layer in enumerate(layers):
                    before = states[-1][place] if states else layer
                    below = _next(layer, before, below)
                    column.append(below)
                states.append(column)
                outs.append(below)
                if rows.rows - i <= rows.logits:
                    logits.append(_logits(below))
        if info.is_last:
            return BatchOutput(logits=np.stack(logits) if logits else None)
        hidden = np.repeat(np.array(outs, dtype=np.float32)[:, None], HIDDEN, axis=1)
        return BatchOutput(hidden=hidden)

    def usage(self) -> KvUsage:
        cached = {name: len(states) for name, states in self._states.items()}
        return KvUsage(self._info.kv_blocks, sum(self._rooms.values()), cached)

    def check_integrity(self) -> None:
        assert self._rooms.keys() == self._states.keys()

    def shutdown(self) -> None:
        self._states.clear()


def create(settings: StageSettings) -> ScriptedEngine:
    """The engine factory: ``engine = "scripted:create"`` in a deployment."""
    return ScriptedEngine(settings.first_layer, settings.last_layer)


def reference(prompt: Sequence[int], count: int, sampling: SamplingParams | None = None) -> list[int]:
    """The next ``count`` tokens after a prompt, computed without any of the product's machinery."""
    params = sampling or SamplingParams()
    states = list(range(LAYERS))
    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        below = tokens[position]
        for layer in range(LAYERS):
            below = states[layer] = _next(layer, states[layer], below)
        if position >= len(prompt) - 1:
            tokens.append(sample(_logits(below), params, position + 1))
    return tokens[len(prompt) :]


def cut(stages: int, **options: object) -> list[ScriptedEngine]:
    """The scripted model in so many stages."""
    ends = [LAYERS * i // stages for i in range(stages + 1)]
    return [ScriptedEngine(a, b, **options) for a, b in itertools.pairwise(ends)]  # type: ignore[arg-type]
