"""Exact states by namespace and tokens, their bytes kept once (spec 4.1, 12.14).

A payload is cut into blocks of a fixed size, and equal blocks of all payloads are one block in memory: states of
prompts that start the same differ late, or in part.

Invariants:

* A block is kept as long as a state needs it, and no longer.
* At most ``max_entries`` states are kept, in at most ``max_bytes`` (0: no limit); the least recently used go
  first, leased ones not at all. A state that cannot be kept that way is not.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from skippy_stage.errors import SkippyError

Tokens = tuple[int, ...]
_Key = tuple[str, int, bytes]


@dataclass(slots=True, eq=False)
class _Block:
    data: bytes
    holders: int = 0


@dataclass(slots=True, eq=False)
class State:
    """A state that is kept; it is not evicted while it has leases."""

    key: _Key
    tokens: Tokens
    blocks: list[_Block]
    leases: int = 0

    @property
    def payload(self) -> bytes:
        """Its bytes; none once it is gone."""
        return b"".join(block.data for block in self.blocks)


class StateShelf:
    """States of one stage."""

    def __init__(self, *, max_entries: int, max_bytes: int = 0, block_bytes: int = 64 << 10) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._states: OrderedDict[_Key, State] = OrderedDict()
        self._blocks: dict[bytes, _Block] = {}
        self._lengths: dict[str, Counter[int]] = {}
        self.bytes = 0
        """Bytes of all blocks."""
        self.tokens = 0
        """Tokens of all states."""
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._states)

    def find(self, namespace: str, tokens: Tokens) -> list[State]:
        """States of prefixes of ``tokens``, by length; they count as used."""
        found = []
        for key in _keys(namespace, tokens, self._lengths.get(namespace, ())):
            state = self._states.get(key)
            if state is not None and state.tokens == tokens[: key[1]]:
                self._states.move_to_end(key)
                found.append(state)
        return found

    def has(self, namespace: str, tokens: Tokens) -> bool:
        """The state of exactly these tokens is there; it counts as used."""
        (key,) = _keys(namespace, tokens, [len(tokens)])
        if key in self._states:
            self._states.move_to_end(key)
        return key in self._states

    def holds(self, state: State) -> bool:
        """The state is still there."""
        return self._states.get(state.key) is state

    def put(self, namespace: str, tokens: Tokens, payload: bytes) -> bool:
        """Keep a state, unless that of the same tokens is there; False when there is no room for it.

        Raises SkippyError for no tokens; nothing is kept then.
        """
        if not tokens:
            raise SkippyError("a state needs the tokens that it is the state of")
        if self.has(namespace, tokens):
            return True
        size = self._block_bytes
        pieces = [payload[at : at + size] for at in range(0, len(payload), size)]
        if self._max_bytes and sum(map(len, set(pieces))) > self._max_bytes:
            return False
        (key,) = _keys(namespace, tokens, [len(tokens)])
        state = State(key, tokens, [self._retain(piece) for piece in pieces], leases=1)
        self._states[key] = state
        self._lengths.setdefault(namespace, Counter())[len(tokens)] += 1
        self.tokens += len(tokens)
        self._make_room()
        state.leases = 0
        if self._is_over():
            self.remove(state)
            return False
        return True

    def remove(self, state: State) -> None:
        """Let go of a state, leased or not; one that is gone is ignored."""
        if not self.holds(state):
            return
        del self._states[state.key]
        self.tokens -= len(state.tokens)
        lengths = self._lengths[state.key[0]]
        lengths[state.key[1]] -= 1
        if not lengths[state.key[1]]:
            del lengths[state.key[1]]
        if not lengths:
            del self._lengths[state.key[0]]
        for block in state.blocks:
            block.holders -= 1
            if not block.holders:
                del self._blocks[block.data]
                self.bytes -= len(block.data)
        state.blocks = []

    def _retain(self, piece: bytes) -> _Block:
        block = self._blocks.get(piece)
        if block is None:
            block = self._blocks[piece] = _Block(piece)
            self.bytes += len(piece)
        block.holders += 1
        return block

    def _make_room(self) -> None:
        for state in list(self._states.values()):
            if not self._is_over():
                return
            if not state.leases:
                self.remove(state)
                self.evicted += 1

    def _is_over(self) -> bool:
        return len(self._states) > self._max_entries or 0 < self._max_bytes < self.bytes

    def check_integrity(self, leased: Iterable[State] = ()) -> None:
        """Raise AssertionError if anything is miscounted or too much, or leases are not those of ``leased``."""
        leases = Counter(id(state) for state in leased)
        if any(state.leases != leases[id(state)] for state in self._states.values()):
            raise AssertionError("leases are miscounted")
        holders: Counter[bytes] = Counter()
        lengths: dict[str, Counter[int]] = {}
        for key, state in self._states.items():
            holders.update(block.data for block in state.blocks)
            lengths.setdefault(key[0], Counter())[len(state.tokens)] += 1
        if holders != {data: block.holders for data, block in self._blocks.items()}:
            raise AssertionError("blocks are not those of the states")
        if self.bytes != sum(map(len, self._blocks)) or lengths != self._lengths or self._is_over():
            raise AssertionError("states are miscounted, or too many")
        if self.tokens != sum(len(state.tokens) for state in self._states.values()):
            raise AssertionError("tokens are miscounted")


def _keys(namespace: str, tokens: Tokens, lengths: Iterable[int]) -> list[_Key]:
    """The keys of the prefixes of these lengths, ascending; longer ones than ``tokens`` are left out."""
    data = memoryview(array("q", tokens).tobytes())
    digest, done, keys = blake2b(digest_size=16), 0, []
    for length in sorted(lengths):
        if length > len(tokens):
            break
        digest.update(data[8 * done : 8 * length])
        done = length
        keys.append((namespace, length, digest.digest()))
    return keys
