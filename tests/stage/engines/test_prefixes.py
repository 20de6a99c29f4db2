"""What every engine promises that shares or exports prefixes: a sequence goes on as one that computed them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from skippy_stage.engines.base import StateMismatch
from skippy_stage.engines.kv_state import pack_kv, unpack_kv
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.resident import ResidentPrefixes

from tests.stage.engines.conftest import MakeChain
from tests.stage.engines.driving import Chain, Piece, assert_close
from tests.stage.engines.tiny import random_tokens
from tests.stage.engines.variants import BLOCK, Variant

TOKENS = random_tokens(48)
OTHERS = random_tokens(48, seed=7)
MADE = 2 * BLOCK + 3
"""Positions that are recorded; they end inside a block."""
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, MADE]


def assert_goes_on_like(
    chain: Chain, sequence: int, cold: int, length: int, tolerance: float, tokens: np.ndarray = OTHERS
) -> None:
    """Two sequences of ``length`` positions give the same: for a chunk, for single rows, and after a rollback."""
    for past, count in ((length, 6), (length + 6, 1), (length + 7, 1), (length + 2, 20)):
        got, expected = (
            chain.run(Piece(name, past, tokens[past : past + count])) for name in (sequence, cold)
        )
        assert_close(got, expected, tolerance)


@pytest.mark.parametrize("cuts", [(), (1,)], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_an_adopted_prefix_is_as_good_as_a_computed_one(
    make_chain: MakeChain, variant: Variant, cuts: tuple[int, ...], length: int
) -> None:
    chain = make_chain(*cuts)
    with chain.opened(1, 2, 3, 4):
        for maker in (1, 3):
            chain.run(Piece(maker, 0, TOKENS[:MADE]))
        with chain.recorded(1, MADE) as held:
            chain.adopt(2, held, length)
            assert [stage.cached(2) for stage in chain.stages] == [length] * len(chain.stages)
            assert_goes_on_like(chain, 2, 3, length, variant.repeat)
            chain.close(2)
            chain.open(2, 64)
            chain.adopt(2, held, length)
            chain.run(Piece(4, 0, TOKENS[:length]))
            assert_goes_on_like(chain, 2, 4, length, variant.batching)


def _closed(chain: Chain) -> None:
    chain.close(1)


def _cut(chain: Chain) -> None:
    chain.run(Piece(1, 1, OTHERS[:1]))
    chain.run(Piece(1, 2, OTHERS[:20]))


def _extended(chain: Chain) -> None:
    for position in range(MADE, MADE + 2 * BLOCK):
        chain.run(Piece(1, position, OTHERS[:1]))


@pytest.mark.parametrize("what_happens", [_closed, _cut, _extended], ids=lambda f: f.__name__.strip("_"))
def test_a_record_outlives_what_its_sequence_does(
    whole: Chain, variant: Variant, what_happens: Callable[[Chain], None]
) -> None:
    with whole.opened(1, 2, 3, 8):
        for maker in (1, 3):
            whole.run(Piece(maker, 0, TOKENS[:MADE]))
        with whole.recorded(1, MADE) as held:
            what_happens(whole)
            whole.run(Piece(8, 0, OTHERS[:30]))  # takes what is free now
            whole.adopt(2, held, MADE)
            assert_goes_on_like(whole, 2, 3, MADE, variant.repeat)


def test_sequences_of_one_record_do_not_see_each_other(whole: Chain, variant: Variant) -> None:
    """They write into the same block at once, in one batch, and so does the sequence that made it."""
    texts = {name: random_tokens(48, seed=name) for name in (1, 2, 3)}
    with whole.opened(1, 2, 3, 11, 12, 13):
        for maker in (1, 11, 12, 13):
            whole.run(Piece(maker, 0, TOKENS[:MADE]))
        with whole.recorded(1, MADE) as held:
            for name in (2, 3):
                whole.adopt(name, held, MADE - 1)
            pasts = {1: MADE, 2: MADE - 1, 3: MADE - 1}
            got = whole.run(*[Piece(name, past, texts[name][:5]) for name, past in pasts.items()])
            expected = whole.run(*[Piece(name + 10, past, texts[name][:5]) for name, past in pasts.items()])
            assert_close(got, expected, variant.repeat)
            for name, past in pasts.items():
                assert_goes_on_like(whole, name, name + 10, past + 5, variant.repeat)


def test_recorded_blocks_are_counted_apart(whole: Chain) -> None:
    (stage,), (blocks,) = whole.stages, whole.blocks()
    with whole.opened(1, 2):
        whole.run(Piece(1, 0, TOKENS[:MADE]))
        with whole.recorded(1, MADE) as held:
            assert (stage.usage().blocks_used, stage.usage().blocks_prefix) == (3, 0)
            whole.adopt(2, held, BLOCK)
            assert (stage.usage().blocks_used, stage.usage().blocks_prefix) == (3, 0)
            whole.close(1)
            assert (stage.usage().blocks_used, stage.usage().blocks_prefix) == (1, 2)
            assert (blocks.blocks_held, blocks.blocks_exclusive) == (3, 2)
            assert blocks.drop(held[0][2])
        assert (stage.usage().blocks_used, stage.usage().blocks_prefix) == (1, 0)


def test_a_batch_takes_what_records_give_up(make_chain: MakeChain, variant: Variant) -> None:
    """With a prefix store behind it a small cache serves one prompt after the other, and repeats them right."""
    small = make_chain(kv_tokens=8 * BLOCK)
    (blocks,) = small.blocks()
    store = ResidentPrefixes(blocks)
    texts = {name: random_tokens(5 * BLOCK + 2, seed=name) for name in (1, 2)}
    expected = {}
    for turn in range(6):
        name = 1 + turn // 2 % 2
        tokens = texts[name]
        found = store.probe(name, "", tokens.tolist()[:-1]).longest
        assert found == (len(tokens) - 1 if turn % 2 else 0)
        small.open(name, 8 * BLOCK)
        store.restore(name, found)
        got = small.run(Piece(name, found, tokens[found:], 1))
        assert_close(got, expected.setdefault(name, got), variant.batching)
        assert store.record(name, "", tokens.tolist()) == (0 if turn % 2 else len(tokens))
        small.run(Piece(name, len(tokens), OTHERS[:BLOCK]))
        small.close(name)
        store.release(name)
        store.check_integrity()
    assert store.status().evicted > 4
    store.reclaim(8)
    small.check_empty()


@pytest.mark.parametrize("cuts", [(), (1,)], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_loaded_state_is_as_good_as_a_computed_one(
    make_chain: MakeChain, variant: Variant, cuts: tuple[int, ...], length: int
) -> None:
    chain = make_chain(*cuts)
    states = chain.states()
    with chain.opened(1, 2, 3):
        for maker in (1, 3):
            chain.run(Piece(maker, 0, TOKENS[:length]))
        kept = [state.export(1) for state in states]
        chain.run(Piece(1, 0, OTHERS[:30]))  # what was exported is no view
        chain.close(1)
        for state, data in zip(states, kept, strict=True):
            state.load(2, data, length)
            assert state.cached(2) == length
            assert state.export(2) == data
        assert_goes_on_like(chain, 2, 3, length, variant.repeat)


def test_states_that_do_not_fit(make_chain: MakeChain, whole: Chain) -> None:
    chain = make_chain(1)
    first, last = chain.states()
    with chain.opened(1, 2), whole.opened(1):
        chain.run(Piece(1, 0, TOKENS[:5]))
        whole.run(Piece(1, 0, TOKENS[:5]))
        state = first.export(1)
        for wrong, length in (
            (state, 4),
            (state, 6),
            (state, 0),
            (state[:-1], 5),
            (state[1:], 5),
            (state + b"x", 5),
            (b"", 5),
            (bytes(len(state)), 5),
            (last.export(1), 5),
            (whole.states()[0].export(1), 5),
        ):
            with pytest.raises(StateMismatch, match=f"not that of {length} positions here"):
                first.load(2, wrong, length)
            assert first.cached(2) == 0
            chain.stages[0].check_integrity()
        first.load(2, state, 5)


def test_sequences_that_take_no_state(make_chain: MakeChain) -> None:
    small = make_chain(kv_tokens=4 * BLOCK)
    (state,) = small.states()
    with small.opened(1, room=4 * BLOCK):
        with pytest.raises(SkippyError, match="sequence 1 has no positions"):
            state.export(1)
        small.run(Piece(1, 0, TOKENS[: 3 * BLOCK]))
        data = state.export(1)
        for sequence, room, message in (
            (1, 0, "has positions"),
            (2, 5, "opened for 5"),
            (2, 16, "no KV block"),
        ):
            if room:
                small.open(sequence, room)
            before = state.cached(sequence)
            with pytest.raises(SkippyError, match=f"sequence {sequence}.*{message}") as caught:
                state.load(sequence, data, 3 * BLOCK)
            assert not isinstance(caught.value, StateMismatch), "the state is not to blame"
            assert state.cached(sequence) == before
            small.close(2)
        for call in (lambda: state.export(9), lambda: state.load(9, data, 3 * BLOCK)):
            with pytest.raises(SkippyError, match="sequence 9 is not open"):
                call()


def test_a_longer_state_begins_with_the_bytes_of_a_shorter_one() -> None:
    """So most of both is kept once."""
    kv = np.random.default_rng(0).standard_normal((7, 2, 3, 2, 4)).astype(np.float16)
    shorter, longer = pack_kv(kv[:5]), pack_kv(kv)
    assert longer.startswith(kv[:5].tobytes())
    assert shorter.startswith(kv[:5].tobytes())
    assert np.array_equal(unpack_kv(longer, 7, (3, 2, 4), np.float16), kv)
    for shape, dtype in (((2, 3, 4), np.float16), ((3, 2, 4), np.int16), ((3, 2, 4), np.float32)):
        with pytest.raises(StateMismatch):
            unpack_kv(longer, 7, shape, dtype)
