"""What every engine refuses, what it then leaves as it was, and that it gives back what it took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from skippy_stage.engines.base import Batch, SequenceRows
from skippy_stage.errors import SkippyError

from tests.stage.engines.conftest import MakeChain
from tests.stage.engines.driving import Chain, Piece, assert_close
from tests.stage.engines.tiny import VOCAB, random_tokens
from tests.stage.engines.variants import BLOCK, KV_TOKENS, Variant

TOKENS = random_tokens(64)


@pytest.mark.parametrize("past", [6, 7, 40])
def test_a_past_beyond_the_cache_is_an_error(whole: Chain, past: int) -> None:
    with whole.opened(1, 2):
        whole.run(Piece(1, 0, TOKENS[:5]), Piece(2, 0, TOKENS[:3]))
        with pytest.raises(SkippyError, match=rf"sequence 1: past {past} is beyond the 5 cached"):
            whole.run(Piece(2, 1, TOKENS[1:2]), Piece(1, past, TOKENS[:1]))
        assert whole.stages[0].cached(1) == 5
        assert whole.stages[0].cached(2) in (1, 3), "at its past, or unchanged"


def test_a_position_that_was_rolled_back_is_beyond_the_cache(whole: Chain) -> None:
    with whole.opened(1):
        whole.run(Piece(1, 0, TOKENS[:9]))
        whole.run(Piece(1, 2, TOKENS[2:3]))
        with pytest.raises(SkippyError, match="past 4 is beyond the 3 cached"):
            whole.run(Piece(1, 4, TOKENS[4:5]))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([SequenceRows(7, 0, 1)], "sequence 7 is not open"),
        ([SequenceRows(1, -1, 1)], "sequence 1: past -1"),
        ([SequenceRows(1, 0, 1), SequenceRows(1, 0, 1)], "twice"),
        ([SequenceRows(1, 0, 1), SequenceRows(2, 0, 0)], "sequence 2: 0 rows"),
        ([SequenceRows(1, 0, 2, 3)], "sequence 1: 2 rows with 3 logits"),
        ([SequenceRows(1, 0, 2, -1)], "sequence 1: 2 rows with -1 logits"),
        ([SequenceRows(1, 0, 65)], "sequence 1: 65 positions, opened for 64"),
        ([], "without rows"),
    ],
    ids=str,
)
def test_rows_that_make_no_sense(whole: Chain, items: list[SequenceRows], message: str) -> None:
    rows = sum(item.rows for item in items)
    with whole.opened(1, 2):
        with pytest.raises(SkippyError, match=message):
            whole.stages[0].forward(Batch(items, random_tokens(rows)))
        assert whole.stages[0].usage().cached == {1: 0, 2: 0}
        whole.stages[0].check_integrity()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], "2 given, 3 needed"),
        ([], "0 given, 3 needed"),
        ([1, 2, VOCAB], f"from 0 to {VOCAB - 1}"),
        ([1, -1, 2], f"from 0 to {VOCAB - 1}"),
    ],
)
def test_token_ids_that_do_not_fit(whole: Chain, tokens: list[int], message: str) -> None:
    with whole.opened(1):
        with pytest.raises(SkippyError, match=message):
            whole.stages[0].forward(Batch([SequenceRows(1, 0, 3)], np.array(tokens, np.int32)))
        assert whole.stages[0].cached(1) == 0


def test_hidden_rows_that_do_not_fit(make_chain: MakeChain) -> None:
    chain = make_chain(1)
    with chain.opened(1):
        good = chain.outputs(Piece(1, 0, TOKENS[:3]))[0].hidden
        assert good is not None
        other: Any = np.float64 if good.dtype != np.float64 else np.float32
        for bad in (None, good[:2], good[:, :-1], good.astype(other), good[0], good[None]):
            with pytest.raises(SkippyError, match="hidden rows"):
                chain.stages[1].forward(Batch([SequenceRows(1, 0, 3, 1)], TOKENS[:3], bad))
            assert chain.stages[1].cached(1) == 3, "unchanged"


def test_a_sequence_opens_once(whole: Chain) -> None:
    with whole.opened(1), pytest.raises(SkippyError, match="sequence 1 is open already"):
        whole.open(1, 8)


@pytest.mark.parametrize("room", [0, -1, KV_TOKENS + 1])
def test_a_sequence_that_can_never_fit_does_not_open(whole: Chain, room: int) -> None:
    with pytest.raises(SkippyError, match=f"sequence 1: {room} tokens do not fit"):
        whole.open(1, room)
    whole.check_empty()


def test_cached_of_an_unknown_sequence(whole: Chain) -> None:
    with pytest.raises(SkippyError, match="sequence 5 is not open"):
        whole.stages[0].cached(5)


def test_closing_gives_everything_back(whole: Chain) -> None:
    (stage,) = whole.stages
    whole.open(1, KV_TOKENS)
    whole.open(2, 40)
    assert stage.usage().blocks_used == 0, "opening promises room, it takes none"
    whole.run(Piece(1, 0, TOKENS[: 3 * BLOCK + 1]), Piece(2, 0, TOKENS[:BLOCK]))
    usage = stage.usage()
    assert usage.blocks_used == 5
    assert usage.blocks_total == stage.info.kv_blocks == KV_TOKENS // BLOCK
    assert usage.cached == {1: 3 * BLOCK + 1, 2: BLOCK}
    whole.close(1)
    assert stage.usage().blocks_used == 1
    whole.close(1)
    whole.close(99)
    whole.close(2)
    whole.check_empty()


def test_rollback_gives_blocks_back(whole: Chain) -> None:
    with whole.opened(1):
        whole.run(Piece(1, 0, TOKENS[: 5 * BLOCK]))
        whole.run(Piece(1, BLOCK, TOKENS[:1]))
        assert whole.stages[0].usage().blocks_used == 2


def test_a_reopened_name_starts_empty(whole: Chain, variant: Variant) -> None:
    with whole.opened(1):
        expected = whole.run(Piece(1, 0, TOKENS[:7]))
    with whole.opened(1):
        with pytest.raises(SkippyError, match="beyond the 0 cached"):
            whole.run(Piece(1, 3, TOKENS[3:4]))
        assert_close(whole.run(Piece(1, 0, TOKENS[:7])), expected, variant.repeat)


def test_blocks_that_others_used_carry_nothing_over(whole: Chain, variant: Variant) -> None:
    """Many sequences come and go over the same blocks, in changing order."""
    expected = None
    for turn in range(6):
        others = [10 + turn, 20 + turn]
        with whole.opened(*others, 1, room=60):
            whole.run(*[Piece(name, 0, random_tokens(30 + turn, seed=name)) for name in others])
            whole.close(others[turn % 2])
            got = whole.run(Piece(1, 0, TOKENS[:21]))
            expected = got if expected is None else expected
            assert_close(got, expected, variant.repeat)


def test_running_out_of_kv_is_an_error_and_nothing_else_is_lost(
    make_chain: MakeChain, variant: Variant
) -> None:
    small = make_chain(kv_tokens=8 * BLOCK)
    (stage,) = small.stages
    with small.opened(1, 2, room=8 * BLOCK):
        small.run(Piece(1, 0, TOKENS[: 5 * BLOCK]))
        small.run(Piece(2, 0, TOKENS[: 3 * BLOCK]))
        assert stage.usage().blocks_used == 8
        with pytest.raises(SkippyError, match=r"sequence 2: no KV block"):
            small.run(Piece(1, 5 * BLOCK - 1, TOKENS[:1]), Piece(2, 3 * BLOCK, TOKENS[:1]))
        stage.check_integrity()
        assert stage.usage().blocks_used <= 8
        assert stage.cached(1) in (5 * BLOCK - 1, 5 * BLOCK)
        assert stage.cached(2) == 3 * BLOCK
        got = small.run(Piece(1, 5 * BLOCK - 1, TOKENS[5 * BLOCK - 1 : 5 * BLOCK]))
        small.close(2)
        small.run(Piece(1, 5 * BLOCK, TOKENS[: 3 * BLOCK]))
        small.open(2, BLOCK)
        again = small.run(Piece(1, 0, TOKENS[: 5 * BLOCK], 1))
        assert_close(again, got, variant.batching)


def test_a_batch_may_take_what_its_own_rollback_frees(make_chain: MakeChain) -> None:
    small = make_chain(kv_tokens=8 * BLOCK)
    with small.opened(1, 2, room=8 * BLOCK):
        small.run(Piece(1, 0, TOKENS[: 8 * BLOCK]))
        small.run(Piece(2, 0, TOKENS[: 4 * BLOCK]), Piece(1, BLOCK, TOKENS[:1]))
        assert small.stages[0].usage().blocks_used == 6


def test_a_budget_below_one_block_is_one_block(make_chain: MakeChain) -> None:
    assert make_chain(kv_tokens=16, kv_block_tokens=64).stages[0].info.kv_blocks == 1
