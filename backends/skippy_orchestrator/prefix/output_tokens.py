"""The first output tokens of prompts that were answered before (spec 4.7).

Tokens cached here are served only where the stages can also restore the positions behind them. They are true for
one prompt, one sampling, one namespace and one set of stages; all four are in the key.

Invariants:

* An entry is one list: its first token, and what follows it. It is never empty and has at most
  ``MAX_EXACT_REPLAY_TOKENS`` tokens.
* The list grows only behind exactly itself. Only another first token starts it anew.
* There are at most ``capacity`` entries; whatever is asked for or recorded is the last one to be dropped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_EXACT_REPLAY_TOKENS: Final = 8
_MAX_ENTRIES: Final = 512


class OutputKey(NamedTuple):
    """What output tokens depend on."""

    prompt: bytes
    """A digest of the tokens."""
    namespace: str
    """fingerprint.namespace_of."""
    fingerprint: bytes
    """fingerprint.sampling_fingerprint."""
    stages: str
    """Names the model, its stages, and how they compute (spec 4.2)."""

    @classmethod
    def of(cls, prompt: Sequence[int], namespace: str, fingerprint: bytes, stages: str) -> OutputKey:
        """The key of a prompt."""
        digest = hashlib.sha256(array("q", prompt).tobytes()).digest()
        return cls(digest, namespace, fingerprint, stages)


@dataclass(slots=True)
class OutputTokenCounters:
    """Totals since the cache was made."""

    lookups: int = 0
    hits: int = 0
    served: int = 0
    """Tokens that lookups gave."""
    recorded: int = 0
    """Tokens that were new."""
    refused: int = 0
    """Tokens that did not continue what is stored."""
    evicted: int = 0
    """Entries that were dropped for newer ones."""


class OutputTokenCache:
    """Output tokens by what they depend on, the least recently used dropped first."""

    def __init__(self, max_entries: int) -> None:
        self.counters = OutputTokenCounters()
        self._capacity = min(max(max_entries, 1), _MAX_ENTRIES)
        self._entries: OrderedDict[OutputKey, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def capacity(self) -> int:
        """Entries that fit: ``max_entries``, but at least 1 and at most 512 (spec 4.7)."""
        return self._capacity

    def first_token(self, key: OutputKey) -> int | None:
        """The first output token, or None when it is not known."""
        tokens = self._lookup(key, 1)
        return tokens[0] if tokens else None

    def replay(self, key: OutputKey, limit: int) -> tuple[int, ...]:
        """At most ``limit`` of the first output tokens; empty when none are known."""
        return self._lookup(key, limit)

    def record_first_token(self, key: OutputKey, token: int) -> bool:
        """Keep the first output token; returns whether none was known.

        One that differs from the token known so far takes its place, and what followed that one is gone.
        """
        known = self._touch(key)
        if known[:1] != (token,):
            self._store(key, (token,))
        return not known

    def record_replay(self, key: OutputKey, previous: Sequence[int], token: int) -> int | None:
        """Keep ``token``, which came after the output tokens ``previous``; returns how many are known then.

        None when nothing was kept: 8 tokens are enough, and ``previous`` has to be just what is known. Where more
        is known already that stays as it is, and counts.
        """
        if len(previous) >= MAX_EXACT_REPLAY_TOKENS:
            return None
        known = self._touch(key)
        if len(known) > len(previous):
            return len(known)
        if known != tuple(previous):
            self.counters.refused += 1
            return None
        self._store(key, (*known, token))
        return len(known) + 1

    def _lookup(self, key: OutputKey, limit: int) -> tuple[int, ...]:
        tokens = self._touch(key)[: max(limit, 0)]
        self.counters.lookups += 1
        self.counters.hits += bool(tokens)
        self.counters.served += len(tokens)
        return tokens

    def _touch(self, key: OutputKey) -> tuple[int, ...]:
        tokens = self._entries.get(key, ())
        if tokens:
            self._entries.move_to_end(key)
        return tokens

    def _store(self, key: OutputKey, tokens: tuple[int, ...]) -> None:
        self._entries[key] = tokens
        self.counters.recorded += 1
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
            self.counters.evicted += 1

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry or their number is out of bounds."""
        assert len(self._entries) <= self._capacity, f"{len(self._entries)} entries of {self._capacity}"
        for tokens in self._entries.values():
            assert 1 <= len(tokens) <= MAX_EXACT_REPLAY_TOKENS, f"{len(tokens)} tokens in an entry"
