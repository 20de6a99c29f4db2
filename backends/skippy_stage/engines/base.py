"""The contract of a stage engine.

An engine owns the weights and the KV cache of one layer range [first, last) and runs ragged batches
through it. It does not sample, does not know sessions' text, and keeps no notion of "current position":
every call states how much of each sequence's cache is to be believed (``past``).

Invariants, checked by one conformance suite for all engines:

* ``past`` below what is cached rolls the sequence back; ``past`` above it is an error.
* After ``forward`` a sequence has ``past + rows`` cached positions.
* The rows of a sequence do not depend on which other sequences share the batch, nor on how its
  prompt was cut into chunks, but for rounding of the kernels.
* ``close`` returns everything the sequence held; closing an unknown sequence is a no-op.
* A failed ``forward`` leaves every sequence's cached length at its ``past`` or unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from skippy_stage.settings import StageSettings

Hidden = npt.NDArray[np.generic]
"""Rows of the residual stream, ``[rows, hidden_size]``, in the link dtype: float32, float16, or uint16
holding raw bfloat16 words."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine loaded; part of the readiness handshake."""

    engine: str
    """Name and variant, e.g. ``torch-cpu-f16``."""
    architecture: str
    """``general.architecture`` of a GGUF or ``model_type`` of a config.json, e.g. ``llama``."""
    first_layer: int
    last_layer: int
    """Exclusive."""
    n_layers: int
    """Layers of the whole model."""
    hidden_size: int
    vocab_size: int
    context_length: int
    """Positions the model was made for."""
    link_dtype: str
    """``f32``, ``f16`` or ``bf16``."""
    kv_block_tokens: int
    """Tokens per KV block: reservations round up to it."""
    kv_blocks: int
    """Blocks of the cache, shared by all sequences."""
    weight_bytes: int

    @property
    def is_first(self) -> bool:
        """Embeds token ids instead of taking hidden rows."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Has the output head."""
        return self.last_layer == self.n_layers


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a batch: ``rows`` rows at positions ``past .. past + rows - 1``."""

    sequence: int
    past: int
    rows: int
    logits: int = 0
    """How many of the last rows need logits; 0 on all stages but the last."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch. Rows of the sequences follow each other in order, without padding."""

    sequences: Sequence[SequenceRows]
    """Every sequence at most once."""
    token_ids: npt.NDArray[np.int32]
    """``[rows]``; used by the first stage only."""
    hidden: Hidden | None = None
    """``[rows, hidden_size]`` for every stage but the first."""


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What a batch gave: hidden rows for the next stage, or logits on the last."""

    hidden: Hidden | None = None
    """``[rows, hidden_size]`` in the link dtype; None on the last stage."""
    logits: npt.NDArray[np.float32] | None = None
    """``[sum of logits, vocab_size]`` in batch order; None on all stages but the last."""


@dataclass(frozen=True, slots=True)
class KvUsage:
    """A snapshot of the cache for status and integrity checks."""

    blocks_total: int
    blocks_used: int
    cached: dict[int, int] = field(default_factory=dict)
    """Cached positions by open sequence."""


class StageEngine(Protocol):
    """One layer range, loaded and ready. Not thread-safe: one worker thread calls it."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        ...

    def open(self, sequence: int, max_tokens: int) -> None:
        """Open a sequence that will hold at most ``max_tokens`` positions.

        Raises SkippyError if it is open already or the blocks cannot ever hold it.
        """
        ...

    def close(self, sequence: int) -> None:
        """Free all that the sequence holds; unknown sequences are ignored."""
        ...

    def cached(self, sequence: int) -> int:
        """Positions cached for an open sequence."""
        ...

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        """Run the layer range. ``threads`` bounds CPU threads for this call (None: the setting).

        Raises SkippyError for a past beyond the cache, an unknown sequence, or an overflow on a
        16-bit link; the message names the sequence.
        """
        ...

    def usage(self) -> KvUsage:
        """Blocks used and cached lengths."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if block accounting and sequences disagree."""
        ...

    def shutdown(self) -> None:
        """Release threads and memory."""
        ...


class EngineFactory(Protocol):
    """How an engine is made: ``engine = "package.module:factory"`` in a deployment names one."""

    def __call__(self, settings: StageSettings) -> StageEngine:
        """Load the stage's layer range; raises UnsupportedModel naming what it cannot compute."""
        ...
