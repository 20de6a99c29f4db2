"""D-03: half characters are never shown, however tokens cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.text.detokenizer import Detokenizer, token_bytes
from skippy_stage.errors import UnsupportedModel
from tokenizers import AddedToken, Tokenizer, decoders, models

pieces = st.lists(st.binary(max_size=5), max_size=20)


def run(table: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [detokenizer.push(index) for index in range(len(table))] + [detokenizer.flush()]


@given(pieces)
def test_piecewise_equals_at_once(table: list[bytes]) -> None:
    assert "".join(run(table)) == b"".join(table).decode("utf-8", "replace")


@given(st.text(max_size=12), st.data())
def test_text_in_any_cut_has_no_replacement_character(text: str, data: st.DataObject) -> None:
    whole = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    table = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shown = run(table)
    assert "".join(shown) == whole.decode()
    assert shown[-1] == ""


@pytest.mark.parametrize("text", ["🙂", "中", "é", "👩‍👩‍👧"])
def test_one_byte_at_a_time(text: str) -> None:
    table = [bytes([byte]) for byte in text.encode()]
    shown = run(table)
    assert "".join(shown) == text
    assert all(len(piece) <= 1 for piece in shown)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_off_at_the_end_is_one_replacement_character(kept: int) -> None:
    assert run([b"ok", "🙂".encode()[:kept]]) == ["ok", "", "\ufffd"]


def test_tokens_beyond_the_vocabulary_have_no_text() -> None:
    detokenizer = Detokenizer([b"a"])
    assert detokenizer.push(0) + detokenizer.push(77) + detokenizer.flush() == "a"


def sentencepiece() -> Tokenizer:
    vocabulary = {
        "<unk>": 0,
        "</s>": 1,
        "<0xF0>": 2,
        "<0x9F>": 3,
        "<0x99>": 4,
        "<0x82>": 5,
        "▁Paris": 6,
        "s▁": 7,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    return tokenizer


def test_byte_fallback_pieces() -> None:
    table = token_bytes(sentencepiece())
    assert [table[i] for i in (1, 6, 7)] == [b"", b" Paris", b"s "]
    assert b"".join(table[2:6]).decode() == "🙂"


def test_byte_level_pieces_and_added_tokens() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"Ġa": 0, "ðŁ": 1, "ĻĤ": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<think> it"), AddedToken("naïve 中")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    table = token_bytes(tokenizer)
    assert table[0] == b" a"
    assert (table[1] + table[2]).decode() == "🙂"
    assert [t.decode() for t in table[3:]] == ["<think> it", "naïve 中", ""]


def test_other_decoders_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        token_bytes(tokenizer)
