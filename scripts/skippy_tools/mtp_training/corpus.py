"""Chats that the model writes with itself, with what a head is trained on: tokens, hidden rows, predictions.

The model is given an empty user's turn and writes the question, then the answer (Magpie, arXiv 2406.08464). Half of
the answers are greedy, the others are sampled: a head is to draft for both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.engines.base import Batch, BatchOutput, SequenceRows
from skippy_stage.engines.sequences import BatchRows
from skippy_stage.engines.torch_engine import TorchEngine
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate, open_checkpoint

SLOTS: Final = 48
"""Chats that are written at the same time."""
QUESTION_TOKENS: Final = 60
ANSWER_TOKENS: Final = 200
ANSWER_TEMPERATURE: Final = 0.7
_TOP_K: Final = 50
_MARK: Final = "x"


@dataclass(frozen=True)
class Corpus:
    """Chats one after the other; row i of a chat belongs to its token i."""

    tokens: npt.NDArray[np.int32]
    """``[rows]``."""
    predicted: npt.NDArray[np.int32]
    """``[rows]``: the model's most likely next token."""
    hidden: npt.NDArray[np.float16]
    """``[rows, hidden_size]``, behind the final norm."""
    lengths: npt.NDArray[np.int32]
    """Rows of each chat."""

    def save(self, path: Path) -> None:
        """Write it to one file."""
        np.savez(path, tokens=self.tokens, predicted=self.predicted, hidden=self.hidden, lengths=self.lengths)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what ``save`` wrote."""
        with np.load(path) as stored:
            return cls(stored["tokens"], stored["predicted"], stored["hidden"], stored["lengths"])

    def split(self, part: float) -> tuple[Corpus, Corpus]:
        """The first chats, and the last ``part`` of them, for training and for measuring."""
        chats = max(1, round(len(self.lengths) * (1 - part)))
        rows = int(self.lengths[:chats].sum())
        return (
            Corpus(self.tokens[:rows], self.predicted[:rows], self.hidden[:rows], self.lengths[:chats]),
            Corpus(self.tokens[rows:], self.predicted[rows:], self.hidden[rows:], self.lengths[chats:]),
        )


class _Watched(TorchEngine):
    """The whole model, whose hidden rows behind the final norm are kept."""

    seen: torch.Tensor

    def _run(self, x: torch.Tensor, rows: BatchRows) -> BatchOutput:
        output = super()._run(x, rows)
        self.seen = self._stack.normalise(x, self._final_norm)
        return output


@dataclass
class _Chat:
    """One chat on its way: what is to be computed next, and what it has given."""

    due: list[int]
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    hidden: list[npt.NDArray[np.float16]] = field(default_factory=list)
    asks: bool = True
    """The question is being written, not the answer."""
    turn: int = 0
    """Tokens of the turn so far."""


class ChatWriter:
    """Writes chats with one model, many at a time."""

    def __init__(self, model: str, seed: int, threads: int = 0) -> None:
        path = locate(model)
        layers = open_checkpoint(path).config.n_layers
        self._text = TextModel.load(path)
        self._opening, self._between = self._template()
        self._room = len(self._opening) + len(self._between) + QUESTION_TOKENS + ANSWER_TOKENS + 1
        settings = StageSettings(
            name="writer", model=model, first_layer=0, last_layer=layers, threads=threads,
            kv_tokens=SLOTS * (self._room + 16),
        )  # fmt: skip
        self._engine = _Watched(settings)
        self._random = np.random.default_rng(seed)

    def write(self, rows: int, progress: Callable[[int], None] = lambda count: None) -> Corpus:
        """Chats of so many rows in all, or a few more; ``progress`` is told how many came."""
        done: list[_Chat] = []
        slots: dict[int, _Chat] = {}
        written = 0
        while written < rows:
            for slot in range(SLOTS):
                if slot not in slots:
                    slots[slot] = _Chat(list(self._opening), greedy=bool(self._random.random() < 0.5))
                    self._engine.open(slot, self._room)
            written_before = written
            for slot in self._step(slots):
                chat = slots.pop(slot)
                self._engine.close(slot)
                done.append(chat)
                written += len(chat.tokens)
            progress(written - written_before)
        for slot in slots:
            self._engine.close(slot)
        return Corpus(
            np.concatenate([np.array(chat.tokens, np.int32) for chat in done]),
            np.concatenate([np.array(chat.predicted, np.int32) for chat in done]),
            np.concatenate([rows for chat in done for rows in chat.hidden]),
            np.array([len(chat.tokens) for chat in done], np.int32),
        )

    def _template(self) -> tuple[list[int], list[int]]:
        """The chat template around a question: tokens before it, and between it and the answer."""
        whole = self._text.encode_chat(json.dumps([{"role": "user", "content": _MARK}]))
        mark = self._text.encode(_MARK)[-1]
        at = len(whole) - 1 - whole[::-1].index(mark)
        return whole[:at], whole[at + 1 :]

    def _step(self, slots: dict[int, _Chat]) -> list[int]:
        """One batch over all chats; gives the slots whose chats have ended."""
        order = list(slots.items())
        rows = [SequenceRows(slot, len(chat.tokens), len(chat.due), len(chat.due)) for slot, chat in order]
        tokens = np.concatenate([np.array(chat.due, np.int32) for _, chat in order])
        output = self._engine.forward(Batch(rows, tokens))
        if output.logits is None:
            raise RuntimeError("the engine gave no logits")
        logits = torch.from_numpy(output.logits)
        best = logits.argmax(1).numpy()
        hidden = self._engine.seen.numpy().astype(np.float16)
        ends = np.cumsum([item.rows for item in rows])
        heat = torch.tensor([[1.0 if chat.asks else ANSWER_TEMPERATURE] for _, chat in order])
        drawn = self._draw(logits[torch.from_numpy(ends - 1)] / heat)
        ended: list[int] = []
        for i, (slot, chat) in enumerate(order):
            span = slice(int(ends[i]) - len(chat.due), int(ends[i]))
            chat.tokens += chat.due
            chat.predicted += best[span].tolist()
            chat.hidden.append(hidden[span])
            token = int(best[span][-1]) if chat.greedy and not chat.asks else int(drawn[i])
            if not self._advance(chat, token):
                ended.append(slot)
        return ended

    def _draw(self, logits: torch.Tensor) -> npt.NDArray[np.int64]:
        values, ids = logits.topk(_TOP_K)
        noise = torch.from_numpy(self._random.gumbel(size=values.shape).astype(np.float32))
        picked: npt.NDArray[np.int64] = ids.gather(1, (values + noise).argmax(1, keepdim=True))[:, 0].numpy()
        return picked

    def _advance(self, chat: _Chat, token: int) -> bool:
        """The next token of a chat; False when it has ended."""
        chat.turn += 1
        over = token in self._text.end_tokens
        if chat.asks and (over or chat.turn >= QUESTION_TOKENS):
            chat.asks, chat.turn = False, 0
            chat.due = list(self._between)
        elif not chat.asks and (over or chat.turn >= ANSWER_TOKENS):
            return False
        else:
            chat.due = [token]
        return True


def frequent_tokens(tokens: Sequence[npt.NDArray[np.int32]], count: int, vocab: int) -> npt.NDArray[np.int64]:
    """The most frequent ids, ascending: a head that drafts these alone reads a part of the output head."""
    counts = np.bincount(np.concatenate(tokens), minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
