"""Deterministic engines for tests: every row depends on every row before it, on every stage.

A row's value at a layer is a hash of the value below it and of the same layer's value one position earlier.
A lost, doubled or misplaced row anywhere changes all that follows. Values are integers below 2**16, exact in
float32, and do not depend on where the layers are cut.

``ScriptedEngine`` keeps these values where a real engine has its KV: by block and offset, with the product's own
block accounting. So a block that is shared, copied or recorded wrongly gives wrong values too, and
``check_integrity`` finds it even where nothing depends on it yet.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from skippy_stage.engines.base import (
    Batch,
    BatchOutput,
    DraftRows,
    EngineInfo,
    KvUsage,
    SequenceRows,
    StateMismatch,
)
from skippy_stage.engines.sequences import SequenceStore
from skippy_stage.errors import SkippyError
from skippy_stage.protocol import SamplingParams
from skippy_stage.sampling import sample
from skippy_stage.settings import StageSettings

PRIME = 65521
HIDDEN = 4
VOCAB = 251
LAYERS = 6
ANY = -1
"""A token that the scripted head need not have been right about."""


def _next(layer: int, before: int, below: int) -> int:
    return (before * 31 + below * 17 + layer * 101 + 7) % PRIME


def _logits(state: int) -> np.ndarray:
    ids = np.arange(VOCAB, dtype=np.int64)
    return ((state * 7919 + ids * ids * 104729 + ids * 31) % 10007 / 1000).astype(np.float32)


E = TypeVar("E", bound="_Scripted")
Column = tuple[int, ...]
"""What enters at a position, and its value at each of the engine's layers."""


class _Scripted(ABC):
    """What the engines below share: layers [first, last). ``fault`` may raise before a batch runs."""

    def __init__(
        self,
        first: int = 0,
        last: int = LAYERS,
        blocks: int = 4096,
        block_tokens: int = 4,
        fault: Callable[[Batch], None] | None = None,
        mtp: bool = False,
    ) -> None:
        self._info = EngineInfo(
            engine="scripted",
            architecture="scripted",
            first_layer=first,
            last_layer=last,
            n_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            context_length=4096,
            link_dtype="f32",
            kv_block_tokens=block_tokens,
            kv_blocks=blocks,
            weight_bytes=0,
            mtp_layers=int(mtp and last == LAYERS),
        )
        self.fault = fault
        self.batches: list[Batch] = []

    @property
    def info(self) -> EngineInfo:
        return self._info

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        if self.fault is not None:
            self.fault(batch)
        self.batches.append(batch)
        self._prepare(batch.sequences)
        outs: list[int] = []
        logits: list[np.ndarray] = []
        for rows in batch.sequences:
            for i in range(rows.rows):
                row = len(outs)
                below = int(batch.token_ids[row] if self._info.is_first else batch.hidden[row, 0])  # type: ignore[index]
                column = self._column(self._before(rows.sequence, rows.past + i), below)
                self._keep(rows.sequence, rows.past + i, column)
                outs.append(column[-1])
                if rows.rows - i <= rows.logits:
                    logits.append(_logits(column[-1]))
        if self._info.is_last:
            return BatchOutput(logits=np.stack(logits) if logits else None)
        hidden = np.repeat(np.array(outs, dtype=np.float32)[:, None], HIDDEN, axis=1)
        return BatchOutput(hidden=hidden)

    def _column(self, before: Column | None, below: int) -> Column:
        column = [below]
        for layer in range(self._info.first_layer, self._info.last_layer):
            earlier = layer if before is None else before[len(column)]
            column.append(_next(layer, earlier, column[-1]))
        return tuple(column)

    def columns_of(self, inputs: Sequence[int]) -> list[Column]:
        """What a sequence holds after these inputs: token ids on the first stage, else hidden values."""
        columns: list[Column] = []
        for below in inputs:
            columns.append(self._column(columns[-1] if columns else None, below))
        return columns

    def draft(self, rows: Sequence[DraftRows], *, threads: int | None = None) -> list[tuple[int, ...]]:
        raise SkippyError("the model has no MTP head")

    @abstractmethod
    def _prepare(self, rows: Sequence[SequenceRows]) -> None:
        """Make room for rows, or raise."""

    @abstractmethod
    def _before(self, sequence: int, position: int) -> Column | None:
        """The column that ``position`` follows on; None for the first."""

    @abstractmethod
    def _keep(self, sequence: int, position: int, column: Column) -> None:
        """Write a position's column."""


class ScriptedEngine(_Scripted):
    """Columns in blocks that sequences share, as an attention model's KV."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        size = self._info.kv_block_tokens
        self._store = SequenceStore(self._info.kv_blocks * size, size)
        self._memory: dict[int, list[Column]] = {}
        """Columns by block, up to the offset that was written last."""
        self._seen: dict[int, dict[int, int]] = {}
        """Of a head: the token that follows a position, by block and offset."""
        self._started: set[int] = set()
        """Sequences that have had rows."""
        self.draft_fault: Callable[[Sequence[DraftRows]], None] | None = None

    def open(self, sequence: int, max_tokens: int) -> None:
        self._store.open(sequence, max_tokens)

    def close(self, sequence: int) -> None:
        self._store.close(sequence)
        self._started.discard(sequence)

    def cached(self, sequence: int) -> int:
        return self._store.cached(sequence)

    @property
    def prefix_blocks(self) -> SequenceStore:
        return self._store

    @property
    def exact_state(self) -> ScriptedEngine:
        return self

    def export(self, sequence: int) -> bytes:
        columns = self.columns(sequence)
        if not columns:
            raise SkippyError(f"sequence {sequence} is empty")
        return json.dumps([columns, [self._next_token(sequence, i) for i in range(len(columns))]]).encode()

    def load(self, sequence: int, state: bytes, length: int) -> None:
        if self.cached(sequence):
            raise SkippyError(f"sequence {sequence} is not empty")
        columns, following = json.loads(state)
        if len(columns) != length:
            raise StateMismatch(f"{len(columns)} columns for {length} positions")
        self._prepare([SequenceRows(sequence, 0, length)])
        for position, column in enumerate(columns):
            self._keep(sequence, position, tuple(column))
            self._see(sequence, position, following[position])

    def draft(self, rows: Sequence[DraftRows], *, threads: int | None = None) -> list[tuple[int, ...]]:
        """The true continuation, but for some drafts that are off by one; asserts what the head has seen."""
        if not self._info.mtp_layers:
            return super().draft(rows)
        if self.draft_fault is not None:
            self.draft_fault(rows)
        drafts = []
        for item in rows:
            for i, token in enumerate(item.next_tokens):
                self._see(item.sequence, item.past + i, token)
            text = self._text_seen(item.sequence, item.past + len(item.next_tokens))
            true = reference(text, item.drafts)
            drafts.append(
                tuple(token if (token + i) % 5 else (token + 1) % VOCAB for i, token in enumerate(true))
            )
        return drafts

    def _text_seen(self, sequence: int, length: int) -> list[int]:
        """The text that the head has seen; asserts that it is what the model has computed.

        Only the first token is unknown, and the one behind a restored prefix: the head saw its last position with
        the token that followed it in the session that recorded it.
        """
        following = [self._next_token(sequence, position) for position in range(length)]
        assert None not in following, f"the head has not seen position {following.index(None)}"
        states, text = tuple(range(LAYERS)), []
        for seen, column in zip([ANY, *following[:-1]], self.columns(sequence), strict=False):
            for token in range(VOCAB) if seen == ANY else [seen]:
                above = _through(states, token or 0)
                if above[-1] == column[-1]:
                    break
            else:
                raise AssertionError(
                    f"position {len(text)}: the head was shown {seen}, the model something else"
                )
            states = above
            text.append(token or 0)
        return [*text, following[-1] or 0]

    def _see(self, sequence: int, position: int, token: int | None) -> None:
        block, offset = divmod(position, self._store.block_tokens)
        seen = self._seen.setdefault(self._store.blocks(sequence)[block], {})
        if token is not None:
            seen[offset] = token

    def _next_token(self, sequence: int, position: int) -> int | None:
        block, offset = divmod(position, self._store.block_tokens)
        return self._seen.get(self._store.blocks(sequence)[block], {}).get(offset)

    def columns(self, sequence: int) -> list[Column]:
        """What a sequence holds, by position."""
        return [self._read(sequence, position) for position in range(self.cached(sequence))]

    def memory(self, block: int) -> list[Column]:
        """What a block holds, by offset."""
        return self._memory[block]

    def _prepare(self, rows: Sequence[SequenceRows]) -> None:
        starting = {item.sequence for item in rows if item.sequence not in self._started}
        copies = self._store.extend(rows).copies
        for copy in copies:
            self._memory[copy.target] = self._memory[copy.source][: copy.tokens]
            self._seen[copy.target] = dict(self._seen.get(copy.source, {}))
        for item in rows:
            if item.sequence in starting and item.past:
                self._see(item.sequence, item.past - 1, ANY)
        self._started |= starting

    def _before(self, sequence: int, position: int) -> Column | None:
        return self._read(sequence, position - 1) if position else None

    def _keep(self, sequence: int, position: int, column: Column) -> None:
        size = self._store.block_tokens
        block = self._store.blocks(sequence)[position // size]
        # What lay behind the offset is lost: a block that somebody else needs must not be written to.
        self._memory[block] = [*self._memory.get(block, [])[: position % size], column]
        self._seen.get(block, {}).pop(position % size, None)

    def _read(self, sequence: int, position: int) -> Column:
        size = self._store.block_tokens
        return self._memory[self._store.blocks(sequence)[position // size]][position % size]

    def usage(self) -> KvUsage:
        return self._store.usage()

    def check_integrity(self) -> None:
        self._store.check_integrity()
        for sequence in self._store.usage().cached:
            columns = self.columns(sequence)
            assert columns == self.columns_of([column[0] for column in columns]), f"sequence {sequence}"

    def shutdown(self) -> None:
        self._memory.clear()


class RecurrentEngine(_Scripted):
    """Keeps the latest column of a sequence only, as a recurrent model: nothing can be shared or cut."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rooms: dict[int, int] = {}
        self._states: dict[int, tuple[int, Column]] = {}
        """Length and latest column."""

    def open(self, sequence: int, max_tokens: int) -> None:
        if sequence in self._rooms:
            raise SkippyError(f"sequence {sequence} is open already")
        self._rooms[sequence] = max_tokens
        self._states[sequence] = (0, ())

    def close(self, sequence: int) -> None:
        self._rooms.pop(sequence, None)
        self._states.pop(sequence, None)

    def cached(self, sequence: int) -> int:
        if sequence not in self._states:
            raise SkippyError(f"sequence {sequence} is not open")
        return self._states[sequence][0]

    @property
    def prefix_blocks(self) -> None:
        return None

    @property
    def exact_state(self) -> RecurrentEngine:
        return self

    def export(self, sequence: int) -> bytes:
        if not self.cached(sequence):
            raise SkippyError(f"sequence {sequence} is empty")
        return json.dumps(self._states[sequence]).encode()

    def load(self, sequence: int, state: bytes, length: int) -> None:
        if self.cached(sequence) or length > self._rooms[sequence]:
            raise SkippyError(f"sequence {sequence} cannot take {length} positions")
        have, column = json.loads(state)
        if have != length:
            raise StateMismatch(f"a state of {have} positions, not {length}")
        self._states[sequence] = (length, tuple(column))

    def _prepare(self, rows: Sequence[SequenceRows]) -> None:
        for item in rows:
            have = self.cached(item.sequence)
            if item.past != have:
                raise SkippyError(f"sequence {item.sequence}: past {item.past}, the state is that of {have}")
            if have + item.rows > self._rooms[item.sequence]:
                raise SkippyError(f"sequence {item.sequence}: {have + item.rows} positions do not fit")

    def _before(self, sequence: int, position: int) -> Column | None:
        return self._states[sequence][1] if position else None

    def _keep(self, sequence: int, position: int, column: Column) -> None:
        self._states[sequence] = (position + 1, column)

    def usage(self) -> KvUsage:
        cached = {sequence: length for sequence, (length, _) in self._states.items()}
        return KvUsage(self._info.kv_blocks, 0, cached)

    def check_integrity(self) -> None:
        assert self._rooms.keys() == self._states.keys()

    def shutdown(self) -> None:
        self._states.clear()


def _through(states: Column, token: int) -> Column:
    """What all layers hold at a position behind one where they hold ``states``."""
    above, below = [], token
    for layer in range(LAYERS):
        below = _next(layer, states[layer], below)
        above.append(below)
    return tuple(above)


def logits_behind(text: Sequence[int]) -> np.ndarray:
    """The target's logits for the token behind a text."""
    states: Column = tuple(range(LAYERS))
    for token in text:
        states = _through(states, token)
    return _logits(states[-1])


def create(settings: StageSettings) -> ScriptedEngine:
    """The engine factory: ``engine = "scripted:create"`` in a deployment."""
    return ScriptedEngine(settings.first_layer, settings.last_layer)


def reference(prompt: Sequence[int], count: int, sampling: SamplingParams | None = None) -> list[int]:
    """The next ``count`` tokens after a prompt, computed without any of the product's machinery."""
    params = sampling or SamplingParams()
    states = list(range(LAYERS))
    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        below = tokens[position]
        for layer in range(LAYERS):
            below = states[layer] = _next(layer, states[layer], below)
        if position >= len(prompt) - 1:
            tokens.append(sample(_logits(below), params, position + 1))
    return tokens[len(prompt) :]


def cut(stages: int, kind: type[E] = ScriptedEngine, **options: object) -> list[E]:  # type: ignore[assignment]
    """The scripted model in so many stages."""
    ends = [LAYERS * i // stages for i in range(stages + 1)]
    return [kind(a, b, **options) for a, b in itertools.pairwise(ends)]  # type: ignore[arg-type]
