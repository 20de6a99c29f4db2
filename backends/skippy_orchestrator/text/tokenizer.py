"""The text side of a model: prompts to tokens, tokens to bytes, and which tokens end a generation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from skippy_stage.errors import InvalidArgument, SkippyError
from tokenizers import Tokenizer

from skippy_orchestrator.text.chat import ChatTemplate, parse_messages
from skippy_orchestrator.text.detokenizer import Detokenizer, token_bytes
from skippy_orchestrator.text.vocabulary import read_vocabulary


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's tokenizer and chat template; safe to use from several threads."""

    token_bytes: list[bytes] = field(repr=False)
    """What each token stands for in generated text, by id (detokenizer.token_bytes)."""
    end_tokens: frozenset[int]
    _tokenizer: Tokenizer = field(repr=False)
    _template: ChatTemplate | None = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> TextModel:
        """Read the tokenizer of a safetensors folder or a GGUF file.

        Raises SkippyError when it cannot be read, UnsupportedModel for a tokenizer that isn't computed here.
        """
        vocabulary = read_vocabulary(path)
        template = vocabulary.chat_template
        return cls(
            token_bytes(vocabulary.tokenizer),
            vocabulary.end_tokens,
            vocabulary.tokenizer,
            ChatTemplate(template, vocabulary.bos_token, vocabulary.eos_token) if template else None,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return len(self.token_bytes)

    @property
    def identity(self) -> str:
        """Names the vocabulary: equal identities mean the same by the same token ids. Milliseconds."""
        digest = hashlib.sha256()
        for token in self.token_bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(repr(sorted(self.end_tokens)).encode())
        return digest.hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the tokenizer itself adds (BOS, mostly)."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: str) -> list[int]:
        """Tokens of a conversation given as JSON; the template brings all special tokens itself.

        Raises InvalidArgument for ``messages`` that aren't a conversation, or when the model has no template.
        """
        conversation = parse_messages(messages)
        if self._template is None:
            raise InvalidArgument(
                "messages", messages, "text_input or input_ids: this model has no chat template"
            )
        return self._encode(self._template.render(conversation), add_special_tokens=False)

    def chat_prefix(self, messages: str, tokens: Sequence[int]) -> int:
        """How many of a conversation's ``tokens`` its next turn will begin with too (spec 3.4); 0 if unknown.

        That is the conversation without what asks for the answer, where those are a beginning of the tokens.
        ``messages`` are those that ``encode_chat`` made the tokens from.
        """
        if self._template is None:
            return 0
        text = self._template.render(parse_messages(messages), to_answer=False)
        prefix = self._encode(text, add_special_tokens=False)
        return len(prefix) if prefix == list(tokens[: len(prefix)]) else 0

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one: encode() holds the GIL, for seconds where the text is long.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of a whole generation; special tokens are left out."""
        detokenizer = Detokenizer(self.token_bytes)
        return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()


def check_tokenizers(model: str, text: TextModel, draft_model: str, draft_text: TextModel) -> None:
    """Raise SkippyError unless both models mean the same by the same token ids, saying where they differ first.

    Tokens that only one of them has are no difference when nothing is written with them: padding of a vocabulary.
    """
    mine, theirs = text.token_bytes, draft_text.token_bytes
    for token, (ours, other) in enumerate(zip_longest(mine, theirs, fillvalue=b"")):
        if ours != other:
            raise SkippyError(
                f"draft.path: {draft_model} has another tokenizer than {model}: token {token} is {other!r} there "
                f"and {ours!r} here"
            )
