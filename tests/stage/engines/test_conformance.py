"""What every engine promises: positions, rollback, ragged batches, chunks and cuts (see engines/base.py)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skippy_stage.engines.base import SequenceRows

from tests.stage.engines.conftest import MakeChain
from tests.stage.engines.driving import Chain, Piece, assert_close
from tests.stage.engines.tiny import LAYERS, VOCAB, random_tokens
from tests.stage.engines.variants import BLOCK, Variant

TOKENS = random_tokens(48)


def test_info_says_what_was_loaded(make_chain: MakeChain, variant: Variant) -> None:
    for stage, (first, last) in zip(make_chain(1).stages, [(0, 1), (1, LAYERS)], strict=True):
        info = stage.info
        assert (info.first_layer, info.last_layer, info.n_layers) == (first, last, LAYERS)
        assert (info.is_first, info.is_last) == (first == 0, last == LAYERS)
        assert (info.hidden_size, info.vocab_size, info.context_length) == (64, VOCAB, 512)
        assert (info.architecture, info.kv_block_tokens) == ("llama", BLOCK)
        assert info.weight_bytes > 0
        for name, value in variant.fields.items():
            assert getattr(info, name) == value


def test_rows_start_at_the_past_that_is_given(whole: Chain) -> None:
    (stage,) = whole.stages
    with whole.opened(1):
        assert stage.cached(1) == 0
        whole.run(Piece(1, 0, TOKENS[:5]))
        assert stage.cached(1) == 5
        whole.run(Piece(1, 5, TOKENS[5:7]))
        assert stage.cached(1) == 7
        whole.run(Piece(1, 2, TOKENS[2:3]))
        assert stage.cached(1) == 3, "past + rows, not what was there before"


def test_a_position_matters(whole: Chain) -> None:
    """The same token at another position or after other tokens gives something else."""
    with whole.opened(1, 2):
        first = whole.run(Piece(1, 0, TOKENS[:6]))
        again = whole.run(Piece(2, 0, np.concatenate([TOKENS[1:2], TOKENS[1:6]])))
        assert np.abs(first[-1] - again[-1]).max() > 1e-3


@pytest.mark.parametrize("past", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 9, 10])
def test_rollback_is_as_if_it_had_never_gone_there(whole: Chain, variant: Variant, past: int) -> None:
    with whole.opened(1, 2):
        for position in range(past):
            for sequence in (1, 2):
                whole.run(Piece(sequence, position, TOKENS[position : position + 1]))
        whole.run(Piece(1, past, random_tokens(21, seed=9)))  # what a rejected window leaves behind
        for position in range(past, past + 6):
            rolled, never = (
                whole.run(Piece(sequence, position, TOKENS[position : position + 1])) for sequence in (1, 2)
            )
            assert_close(rolled, never, variant.repeat)


def test_rollback_inside_a_chunk(whole: Chain, variant: Variant) -> None:
    with whole.opened(1, 2):
        whole.run(Piece(1, 0, random_tokens(30, seed=3)))
        whole.run(Piece(1, 0, TOKENS[:30]))
        rolled = whole.run(Piece(1, 13, TOKENS[13:17]))
        whole.run(Piece(2, 0, TOKENS[:13]))
        assert_close(rolled, whole.run(Piece(2, 13, TOKENS[13:17])), variant.batching)


def test_rollback_leaves_neighbours_alone(whole: Chain, variant: Variant) -> None:
    with whole.opened(1, 2, 3):
        for sequence in (1, 2, 3):
            whole.run(Piece(sequence, 0, TOKENS[:10]))
        whole.run(Piece(1, 3, random_tokens(25, seed=5)))
        whole.run(Piece(1, 1, TOKENS[1:2]))
        whole.run(Piece(3, 10, TOKENS[10:30]))
        assert_close(
            whole.run(Piece(2, 10, TOKENS[10:11])), whole.run(Piece(3, 10, TOKENS[10:11])), variant.repeat
        )


def test_a_ragged_batch_is_its_sequences_one_by_one(whole: Chain, variant: Variant) -> None:
    """Prefill chunks of several lengths, a verify window and decode rows share a batch."""
    pasts = {1: 0, 2: 7, 3: 0, 4: 11, 5: 20, 6: 3}
    counts = {1: 20, 2: 1, 3: 5, 4: 4, 5: 1, 6: 18}
    tokens = {sequence: random_tokens(48, seed=sequence) for sequence in pasts}
    together, alone = list(pasts), [sequence + 10 for sequence in pasts]
    with whole.opened(*together, *alone):
        for sequence, past in pasts.items():
            for name in (sequence, sequence + 10):
                if past:
                    whole.run(Piece(name, 0, tokens[sequence][:past]))

        def piece(sequence: int, name: int) -> Piece:
            past = pasts[sequence]
            return Piece(name, past, tokens[sequence][past : past + counts[sequence]])

        batched = whole.run(*[piece(sequence, sequence) for sequence in pasts])
        separate = [whole.run(piece(sequence, sequence + 10)) for sequence in pasts]
        assert_close(batched, np.concatenate(separate), variant.batching)


def test_the_order_of_sequences_in_a_batch_is_free(whole: Chain, variant: Variant) -> None:
    with whole.opened(1, 2, 3, 4):
        one = whole.run(Piece(1, 0, TOKENS[:3]), Piece(2, 0, TOKENS[3:12]))
        two = whole.run(Piece(4, 0, TOKENS[3:12]), Piece(3, 0, TOKENS[:3]))
        assert_close(np.roll(two, 3, axis=0), one, variant.batching)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK, 16, 17, 33, 47])
def test_a_prompt_in_chunks_is_the_whole_prompt(whole: Chain, variant: Variant, chunk: int) -> None:
    with whole.opened(1, 2):
        at_once = whole.run(Piece(1, 0, TOKENS))
        parts = [
            whole.run(Piece(2, start, TOKENS[start : start + chunk]))
            for start in range(0, len(TOKENS), chunk)
        ]
        assert_close(np.concatenate(parts), at_once, variant.batching)


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)], ids=str)
def test_cut_layers_give_what_whole_ones_give(
    make_chain: MakeChain, whole: Chain, variant: Variant, cuts: tuple[int, ...]
) -> None:
    """Also with a narrow link: the whole stage rounds to it after every layer."""
    cut = make_chain(*cuts)
    calls = [
        [Piece(1, 0, TOKENS[:20]), Piece(2, 0, TOKENS[20:25])],
        [Piece(1, 20, TOKENS[20:21]), Piece(2, 5, TOKENS[25:29])],
        [Piece(2, 7, TOKENS[30:31])],
        [Piece(1, 21, TOKENS[21:22])],
    ]
    with whole.opened(1, 2), cut.opened(1, 2):
        for call in calls:
            assert_close(cut.run(*call), whole.run(*call), variant.repeat)


def test_hidden_rows_are_the_same_wherever_later_cuts_are(make_chain: MakeChain, variant: Variant) -> None:
    one, two = make_chain(2), make_chain(1, 2)
    with one.opened(1), two.opened(1):
        call = Piece(1, 0, TOKENS[:19])
        first, second = one.outputs(call)[0].hidden, two.outputs(call)[1].hidden
        assert first is not None
        assert second is not None
        assert first.dtype == second.dtype
        assert_close(first, second, variant.repeat)


def test_logits_come_for_the_rows_asked_for(whole: Chain, variant: Variant) -> None:
    with whole.opened(1, 2, 3):
        some = whole.run(
            Piece(1, 0, TOKENS[:6], 1), Piece(2, 0, TOKENS[6:9], 0), Piece(3, 0, TOKENS[9:14], 2)
        )
        assert some.shape == (3, VOCAB)
        assert some.dtype == np.float32
        every = whole.run(Piece(1, 0, TOKENS[:6]), Piece(2, 0, TOKENS[6:9]), Piece(3, 0, TOKENS[9:14]))
        assert_close(some, every[[5, 12, 13]], variant.batching)
        none = whole.run(Piece(1, 0, TOKENS[:6], 0))
        assert none.shape == (0, VOCAB)


def test_only_the_last_stage_has_logits(make_chain: MakeChain) -> None:
    chain = make_chain(1)
    with chain.opened(1):
        first, last = chain.outputs(Piece(1, 0, TOKENS[:5]))
        assert first.logits is None
        assert first.hidden is not None
        assert first.hidden.shape == (5, 64)
        assert last.hidden is None


def test_outputs_are_the_callers_to_keep(make_chain: MakeChain) -> None:
    """A later call must not change rows that are still on their way."""
    chain = make_chain(1)
    with chain.opened(1, 2):
        output = chain.outputs(Piece(1, 0, TOKENS[:5]))
        hidden, logits = output[0].hidden, output[1].logits
        assert hidden is not None
        assert logits is not None
        before = hidden.copy(), logits.copy()
        chain.outputs(Piece(2, 0, TOKENS[7:12]))
        assert np.array_equal(hidden, before[0])
        assert np.array_equal(logits, before[1])


def test_received_rows_are_left_as_they_are(make_chain: MakeChain) -> None:
    """They may be views of a message that others read too."""
    chain = make_chain(1)
    with chain.opened(1):
        hidden = chain.outputs(Piece(1, 0, TOKENS[:5]))[0].hidden
        assert hidden is not None
        before = hidden.copy()
        hidden.setflags(write=False)
        from skippy_stage.engines.base import Batch

        chain.stages[1].forward(Batch([SequenceRows(1, 0, 5, 1)], TOKENS[:5], hidden))
        assert np.array_equal(hidden, before)


def test_threads_of_one_call(whole: Chain, variant: Variant) -> None:
    from skippy_stage.engines.base import Batch

    (stage,) = whole.stages
    with whole.opened(1, 2):
        usual = whole.run(Piece(1, 0, TOKENS[:20]))
        two = stage.forward(Batch([SequenceRows(2, 0, 20, 20)], TOKENS[:20]), threads=2).logits
        assert two is not None
        assert_close(two, usual, variant.batching)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_gives_what_one_chunk_gives(whole: Chain, variant: Variant, data: st.DataObject) -> None:
    """Random chunks, rejected windows and batches of three sequences, against each prompt at once."""
    texts = {sequence: random_tokens(24, seed=100 + sequence) for sequence in (1, 2, 3)}
    done = dict.fromkeys(texts, 0)
    with whole.opened(*texts, 9):
        for _ in range(data.draw(st.integers(2, 6))):
            pieces = []
            for sequence in data.draw(st.permutations(list(texts))):
                count = min(data.draw(st.integers(0, 18)), 24 - done[sequence])
                if count:
                    past = done[sequence]
                    tokens = texts[sequence][past : past + count].copy()
                    kept = data.draw(st.integers(0, count))
                    tokens[kept:] = (tokens[kept:] + 1) % VOCAB  # drafts that the target rejects
                    pieces.append((kept, Piece(sequence, past, tokens)))
            if not pieces:
                continue
            got = whole.run(*[piece for _, piece in pieces])
            start = 0
            for kept, piece in pieces:
                if kept:
                    done[piece.sequence] += kept
                    expected = whole.run(Piece(9, 0, texts[piece.sequence][: done[piece.sequence]], kept))
                    assert_close(got[start : start + kept], expected, variant.batching)
                start += len(piece.tokens)
