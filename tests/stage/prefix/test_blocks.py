"""Blocks that sequences share with a prefix store: what is refused, and what is asked for when they run short."""

from __future__ import annotations

import pytest
from skippy_stage.engines.base import SequenceRows
from skippy_stage.engines.sequences import SequenceStore
from skippy_stage.errors import SkippyError


def store(blocks: int = 8, filled: int = 10) -> SequenceStore:
    """Blocks of four; sequence 1 has some positions, sequence 2 is open and empty."""
    made = SequenceStore(blocks * 4, 4)
    made.open(1, blocks * 4)
    made.extend([SequenceRows(1, 0, filled)])
    made.open(2, blocks * 4)
    return made


def test_held_blocks_outlive_their_sequence() -> None:
    blocks = store()
    held = blocks.hold(1, 1, 2)
    assert held == list(blocks.blocks(1)[1:3])
    assert not any(map(blocks.exclusive, held))
    assert (blocks.blocks_held, blocks.blocks_exclusive, blocks.blocks_free) == (2, 0, 5)
    blocks.close(1)
    assert all(map(blocks.exclusive, held))
    usage = blocks.usage()
    assert (usage.blocks_used, usage.blocks_prefix, blocks.blocks_free) == (0, 2, 6)
    blocks.check_integrity()
    assert all(map(blocks.drop, held))
    assert blocks.blocks_free == 8


def test_a_dropped_block_that_a_sequence_holds_is_not_free() -> None:
    blocks = store()
    (held,) = blocks.hold(1, 0, 1)
    assert blocks.holds(held)
    assert not blocks.drop(held)
    assert not blocks.holds(held)
    blocks.check_integrity()


@pytest.mark.parametrize(
    ("sequence", "first", "count", "message"),
    [
        (9, 0, 1, "sequence 9 is not open"),
        (1, 2, 2, "sequence 1: blocks 2 to 4 of 3 cannot be recorded"),
        (1, -1, 1, "cannot be recorded"),
        (1, 0, 2, "a block is recorded already"),
    ],
)
def test_blocks_that_cannot_be_held(sequence: int, first: int, count: int, message: str) -> None:
    blocks = store()
    blocks.hold(1, 1, 1)
    with pytest.raises(SkippyError, match=message):
        blocks.hold(sequence, first, count)
    assert blocks.blocks_held == 1
    blocks.check_integrity()


def test_an_adopted_block_is_copied_before_it_is_written() -> None:
    blocks = store()
    held = blocks.hold(1, 0, 2)
    blocks.adopt(2, held, 6)
    assert blocks.cached(2) == 6
    rows = blocks.extend([SequenceRows(2, 6, 1)])
    (copy,) = rows.copies
    assert (copy.source, copy.tokens) == (held[1], 2)
    assert rows.tables[rows.slots[0], :2].tolist() == [held[0], copy.target]
    blocks.check_integrity()


def test_adoptions_that_are_refused() -> None:
    blocks = store()
    held = blocks.hold(1, 0, 2)
    blocks.open(3, 5)
    for sequence, message in (
        (1, "has 10 positions"),
        (3, "6 positions restored, opened for 5"),
        (9, "open"),
    ):
        with pytest.raises(SkippyError, match=f"sequence {sequence}.*{message}"):
            blocks.adopt(sequence, held, 6)
    assert blocks.cached(3) == 0
    blocks.check_integrity()


def test_just_what_is_missing_is_asked_for_until_nothing_more_comes() -> None:
    blocks = store(blocks=4, filled=12)
    held = blocks.hold(1, 0, 3)
    blocks.close(1)
    asked: list[int] = []

    def reclaim(wanted: int) -> None:
        asked.append(wanted)
        if held:
            blocks.drop(held.pop())

    blocks.set_reclaim(reclaim)
    blocks.extend([SequenceRows(2, 0, 10)])
    assert asked == [2, 1]
    blocks.open(3, 16)
    with pytest.raises(SkippyError, match="sequence 3: no KV block is free"):
        blocks.extend([SequenceRows(2, 10, 2), SequenceRows(3, 0, 5)])
    assert asked == [2, 1, 2, 1], "the last time nothing came"
    assert (blocks.cached(2), blocks.cached(3), blocks.blocks_held) == (10, 0, 0)
    blocks.check_integrity()
