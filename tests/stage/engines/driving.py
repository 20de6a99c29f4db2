"""Calling stage engines: one sequence, ragged batches, chains of stages, and comparing what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from skippy_stage.engines.base import Batch, BatchOutput, ExactState, PrefixBlocks, SequenceRows, StageEngine

Tokens = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence; ``logits`` None asks for all of them."""

    sequence: int
    past: int
    tokens: Tokens
    logits: int | None = None

    @property
    def rows(self) -> SequenceRows:
        count = len(self.tokens)
        return SequenceRows(self.sequence, self.past, count, count if self.logits is None else self.logits)


class Chain:
    """Stages that hold all layers of a model between them, called one after the other."""

    def __init__(self, stages: Sequence[StageEngine]) -> None:
        self.stages = stages

    def open(self, sequence: int, max_tokens: int) -> None:
        for stage in self.stages:
            stage.open(sequence, max_tokens)

    def close(self, *sequences: int) -> None:
        for stage in self.stages:
            for sequence in sequences:
                stage.close(sequence)

    def run(self, *pieces: Piece) -> F32:
        """Logits ``[rows asked for, vocab]`` of one ragged batch."""
        output = self.outputs(*pieces)[-1]
        assert output.logits is not None
        return output.logits

    def outputs(self, *pieces: Piece) -> list[BatchOutput]:
        """What each stage gives for one ragged batch."""
        tokens = np.concatenate([piece.tokens for piece in pieces]).astype(np.int32)
        outputs: list[BatchOutput] = []
        hidden = None
        for stage in self.stages:
            rows = [piece.rows for piece in pieces]
            if not stage.info.is_last:
                rows = [SequenceRows(item.sequence, item.past, item.rows) for item in rows]
            outputs.append(stage.forward(Batch(rows, tokens, hidden)))
            hidden = outputs[-1].hidden
            stage.check_integrity()
        return outputs

    @contextmanager
    def opened(self, *sequences: int, room: int = 64) -> Iterator[None]:
        """Sequences that are open inside, and whose KV is all given back after."""
        for sequence in sequences:
            self.open(sequence, room)
        try:
            yield
        finally:
            self.close(*sequences)
            self.check_empty()

    def blocks(self) -> list[PrefixBlocks]:
        """Every stage's blocks, to be shared; skips the test for an engine that shares none."""
        blocks = [stage.prefix_blocks for stage in self.stages]
        if None in blocks:
            pytest.skip("this engine has no blocks to share")
        return blocks  # type: ignore[return-value]

    def states(self) -> list[ExactState]:
        """Every stage's states as bytes; skips the test for an engine that exports none."""
        states = [stage.exact_state for stage in self.stages]
        if None in states:
            pytest.skip("this engine exports no states")
        return states  # type: ignore[return-value]

    @contextmanager
    def recorded(self, sequence: int, length: int) -> Iterator[list[list[int]]]:
        """The first ``length`` positions of a sequence are held inside, by these blocks of each stage."""
        every = self.blocks()
        held = [blocks.hold(sequence, 0, -(-length // blocks.block_tokens)) for blocks in every]
        try:
            yield held
        finally:
            for blocks, own in zip(every, held, strict=True):
                for block in own:
                    if blocks.holds(block):
                        blocks.drop(block)

    def adopt(self, sequence: int, held: list[list[int]], length: int) -> None:
        """Let an empty sequence start with ``length`` recorded positions."""
        for blocks, own in zip(self.blocks(), held, strict=True):
            blocks.adopt(sequence, own[: -(-length // blocks.block_tokens)], length)
        for stage in self.stages:
            stage.check_integrity()

    def check_empty(self) -> None:
        """Nothing is held any more."""
        for stage in self.stages:
            stage.check_integrity()
            usage = stage.usage()
            assert (usage.blocks_used, usage.blocks_prefix, usage.cached) == (0, 0, {})

    def shutdown(self) -> None:
        for stage in self.stages:
            stage.shutdown()


def difference(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> float:
    """The largest difference over the largest value; infinite where a number is not finite."""
    assert ours.shape == theirs.shape
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max(initial=0.0) / np.abs(b).max(initial=1e-30))


def assert_close(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic], tolerance: float) -> None:
    """``difference`` is at most ``tolerance``; 0 asks for equal bits."""
    found = difference(ours, theirs)
    assert found <= tolerance, f"relative difference {found:.3g}, allowed {tolerance:.3g}"
