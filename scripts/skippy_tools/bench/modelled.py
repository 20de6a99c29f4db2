"""A stage that waits instead of computing: ``engine = "skippy_tools.bench.modelled:create"``.

Four stages on one machine share its cores; four machines do not. Here a frame takes the time that a stage of its
own would, so that what slow links cost, and what windows in flight win back, is seen alone. The text it gives goes on
with what its prompt repeats, with a new token now and then, as an edit of a file does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from skippy_stage.engines.base import Batch, BatchOutput, DraftRows, EngineInfo, KvUsage
from skippy_stage.engines.sequences import SequenceStore
from skippy_stage.errors import SkippyError
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate, open_checkpoint

PERIOD: Final = 128
"""A text that repeats nothing yet begins to repeat itself after so many tokens."""
REPEATED: Final = 16
"""Tokens at the end of a prompt that came before in it: the text goes on as it did there."""
EDIT_EVERY: Final = 96
"""But for every so many-th token, which nothing foretells."""
FRAME_S: Final = 0.004
ROW_S: Final = 0.0001


class ModelledEngine:
    """A StageEngine with the shape of a model, its KV accounting, and none of its weights."""

    prefix_blocks = None
    exact_state = None

    def __init__(self, settings: StageSettings) -> None:
        config = open_checkpoint(locate(settings.model)).config
        self._sequences = SequenceStore(settings.kv_tokens, settings.kv_block_tokens)
        self._texts: dict[int, list[int]] = {}
        self._periods: dict[int, int] = {}
        self.info = EngineInfo(
            engine="modelled",
            architecture=config.architecture,
            first_layer=settings.first_layer,
            last_layer=settings.last_layer,
            n_layers=config.n_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            link_dtype="f32",
            kv_block_tokens=settings.kv_block_tokens,
            kv_blocks=self._sequences.pool.total,
            weight_bytes=0,
        )

    def open(self, sequence: int, max_tokens: int) -> None:
        """See StageEngine."""
        self._sequences.open(sequence, max_tokens)
        self._texts[sequence] = []

    def close(self, sequence: int) -> None:
        """See StageEngine."""
        self._sequences.close(sequence)
        self._texts.pop(sequence, None)
        self._periods.pop(sequence, None)

    def cached(self, sequence: int) -> int:
        """See StageEngine."""
        return self._sequences.cached(sequence)

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        """See StageEngine; takes ``FRAME_S`` and ``ROW_S`` for each row."""
        started = time.monotonic()
        self._sequences.extend(batch.sequences)
        tokens = batch.token_ids if batch.hidden is None else batch.hidden[:, 0].astype(np.int64)
        predicted: list[int] = []
        start = 0
        for item in batch.sequences:
            text = self._texts[item.sequence]
            text[item.past :] = [int(token) for token in tokens[start : start + item.rows]]
            end = item.past + item.rows
            if item.logits and item.sequence not in self._periods:
                self._periods[item.sequence] = period_of(text)
            period = self._periods.get(item.sequence, PERIOD)
            predicted += [self._next(text, end - i, period) for i in range(item.logits - 1, -1, -1)]
            start += item.rows
        time.sleep(max(0.0, started + FRAME_S + ROW_S * start - time.monotonic()))
        if self.info.is_last:
            logits = np.zeros((len(predicted), self.info.vocab_size), np.float32)
            logits[np.arange(len(predicted)), predicted] = 1.0
            return BatchOutput(logits=logits)
        hidden = np.zeros((start, self.info.hidden_size), np.float32)
        hidden[:, 0] = tokens
        return BatchOutput(hidden=hidden)

    def _next(self, text: Sequence[int], position: int, period: int) -> int:
        if position % EDIT_EVERY == 0 or position < period:
            return position * 7919 % self.info.vocab_size
        return text[position - period]

    def draft(self, rows: Sequence[DraftRows], *, threads: int | None = None) -> list[tuple[int, ...]]:
        """Refused: there is no head."""
        raise SkippyError("the modelled engine has no MTP head")

    def usage(self) -> KvUsage:
        """See StageEngine."""
        return self._sequences.usage()

    def check_integrity(self) -> None:
        """See StageEngine."""
        self._sequences.check_integrity()

    def shutdown(self) -> None:
        """See StageEngine."""
        self._texts.clear()


def period_of(prompt: Sequence[int]) -> int:
    """How far back the prompt's end came before, most recently; ``PERIOD`` where it did not."""
    end = list(prompt[-REPEATED:])
    for period in range(1, len(prompt) - REPEATED + 1):
        if list(prompt[-REPEATED - period : -period]) == end:
            return period
    return PERIOD


def create(settings: StageSettings) -> ModelledEngine:
    """The engine factory."""
    return ModelledEngine(settings)
