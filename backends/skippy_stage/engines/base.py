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
* A sequence that starts with a restored prefix goes on as one that computed it.
* A failed ``forward`` leaves every sequence's cached length at its ``past`` or unchanged.
* ``draft`` changes no sequence's cached length, and nothing that ``forward`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError
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
    mtp_layers: int = 0
    """Layers of the multi-token prediction head that the engine drafts with; 0 without one."""

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
class DraftRows:
    """Rows of the last ``forward`` that the head is to see, and what it is to draft behind the last of them.

    The head's row at position i joins the model's hidden row there with token i + 1. Rows of a sequence are seen
    in order from position 0, or from where a restored prefix ends, and again from where it was cut back to.
    """

    sequence: int
    past: int
    """Position of the first of the rows."""
    start: int
    """Where the rows begin in the last batch."""
    next_tokens: Sequence[int]
    """For each row the token that follows it."""
    drafts: int = 0
    """Tokens to draft, as far as the sequence has room; 0: the rows are only to be seen."""


@dataclass(frozen=True, slots=True)
class KvUsage:
    """A snapshot of the cache for status and integrity checks."""

    blocks_total: int
    blocks_used: int
    """Blocks that open sequences hold; a shared one counts once."""
    cached: dict[int, int] = field(default_factory=dict)
    """Cached positions by open sequence."""
    blocks_prefix: int = 0
    """Blocks that the prefix store alone holds, beside ``blocks_used``."""


class StateMismatch(SkippyError):
    """A state that is not what it is said to be: loading it again would fail again."""


class PrefixBlocks(Protocol):
    """KV blocks that sequences and a prefix store share without copying.

    A block of ``block_tokens`` positions may be held by any number of sequences, and once by the prefix
    store. As long as the store holds it the positions in it do not change: a sequence that writes into it
    gets a copy first. When a sequence needs blocks and too few are free, the engine asks the store to give
    some up (``set_reclaim``).
    """

    @property
    def block_tokens(self) -> int:
        """Positions per block."""
        ...

    @property
    def blocks_free(self) -> int:
        """Blocks that nobody holds."""
        ...

    @property
    def blocks_held(self) -> int:
        """Blocks that the prefix store holds."""
        ...

    @property
    def blocks_exclusive(self) -> int:
        """Blocks that only the prefix store holds."""
        ...

    def cached(self, sequence: int) -> int:
        """Positions cached for an open sequence; raises SkippyError for another."""
        ...

    def blocks(self, sequence: int) -> Sequence[int]:
        """The blocks of an open sequence, in order of its positions; raises SkippyError for another."""
        ...

    def hold(self, sequence: int, first: int, count: int) -> list[int]:
        """Make the prefix store a holder of ``count`` blocks of a sequence, in order of its positions.

        ``first`` is the index of the first one in the sequence. Raises SkippyError, with nothing changed,
        for a sequence that is not open or has no such blocks, and for a block that the store holds already.
        """
        ...

    def adopt(self, sequence: int, blocks: Sequence[int], length: int) -> None:
        """Let an open sequence without positions start with ``length`` of them, which lie in ``blocks``.

        The store holds these blocks and goes on holding them; they are as many as ``length`` positions take.
        Raises SkippyError, with nothing changed, when the sequence is not open, not empty or too small.
        """
        ...

    def drop(self, block: int) -> bool:
        """End the store's hold on a block; True when the block is free now."""
        ...

    def holds(self, block: int) -> bool:
        """The prefix store holds the block."""
        ...

    def exclusive(self, block: int) -> bool:
        """The prefix store holds the block, and no sequence does."""
        ...

    def set_reclaim(self, reclaim: Callable[[int], None]) -> None:
        """Name what is called when blocks run short, with the number wanted.

        It drops blocks, or none when it can drop nothing more. As long as it drops some it is called again
        with what is then missing.
        """
        ...


class ExactState(Protocol):
    """All that a sequence holds as bytes, for engines whose state cannot be cut or shared."""

    def cached(self, sequence: int) -> int:
        """Positions cached for an open sequence; raises SkippyError for another."""
        ...

    def export(self, sequence: int) -> bytes:
        """The state after all cached positions of an open sequence; raises SkippyError if there are none."""
        ...

    def load(self, sequence: int, state: bytes, length: int) -> None:
        """Let an open sequence without positions go on after the ``length`` positions of a state.

        Raises StateMismatch for a state of another length or engine, and SkippyError when the sequence is not
        open, not empty or too small, or there is no room; the sequence then stays empty.
        """
        ...


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

    def draft(self, rows: Sequence[DraftRows], *, threads: int | None = None) -> list[tuple[int, ...]]:
        """Let the head see rows of the last ``forward`` and draft, for each sequence at most once.

        Only where ``info.mtp_layers`` is not 0. Drafts are greedy. Gives for each item the tokens that continue
        its text behind the last of ``next_tokens``.
        """
        ...

    @property
    def prefix_blocks(self) -> PrefixBlocks | None:
        """Its blocks, if a prefix store may share them; None where the state cannot be cut."""
        ...

    @property
    def exact_state(self) -> ExactState | None:
        """Its sequences' state as bytes; None where that is not offered."""
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
