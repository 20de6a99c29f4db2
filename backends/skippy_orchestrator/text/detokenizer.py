"""Tokens to text without ever showing half a character."""

from __future__ import annotations

import codecs
import json
from typing import Any, Final

from skippy_stage.errors import UnsupportedModel
from tokenizers import Tokenizer

_WORD_START: Final = "\u2581"
"""What SentencePiece writes for a space."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes each token stands for in generated text, by id; special tokens stand for none.

    Raises UnsupportedModel for decoders other than byte-level BPE and SentencePiece with byte fallback.
    """
    description = json.loads(tokenizer.to_str())
    kinds = _decoder_kinds(description.get("decoder") or {})
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        convert = _sentencepiece
    else:
        raise UnsupportedModel(f"tokenizer decoder {', '.join(sorted(kinds)) or 'none'} is not supported")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        table[index] = convert(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            table[index] = b""
    return table


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    kinds = {str(decoder.get("type"))} - {"None", "Sequence"}
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = _byte_characters()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8", "replace")


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_WORD_START, " ").encode()


class Detokenizer:
    """One generation's tokens to text; bytes wait until their character is whole.

    Pushing tokens one by one and flushing gives what decoding all their bytes at once gives, with U+FFFD
    where they are not UTF-8; a character cut off at the end is one U+FFFD.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; tokens without text (special, or padding) complete none."""
        return self._decoder.decode(self._table[token] if token < len(self._table) else b"")

    def flush(self) -> str:
        """What is left at the end."""
        return self._decoder.decode(b"", final=True)
