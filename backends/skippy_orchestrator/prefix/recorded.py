"""Which prompts the stages may know: the beginnings of all that was ever recorded.

A match is at least ``min_tokens`` long, so a prompt whose first ``min_tokens`` tokens were never recorded in its
namespace cannot match, and asking the stages would cost it a round trip for nothing.

Invariants:

* A beginning that was added is found until ``capacity`` others were added or asked for since.
* A beginning that is found may be gone from the stages: then the probe says so.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class RecordedPrefixes:
    """A bounded set of beginnings, the least recently used dropped first."""

    def __init__(self, capacity: int = 16384) -> None:
        self._capacity = capacity
        # Digests, because a beginning may be thousands of tokens long; two that are equal only cost a probe.
        self._beginnings: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._beginnings)

    def add(self, namespace: str, tokens: Sequence[int], min_tokens: int) -> None:
        """Stages were asked to record these tokens; fewer than ``min_tokens`` never match."""
        if len(tokens) < min_tokens:
            return
        beginning = _digest(namespace, tokens, min_tokens)
        self._beginnings[beginning] = None
        self._beginnings.move_to_end(beginning)
        if len(self._beginnings) > self._capacity:
            self._beginnings.popitem(last=False)

    def may_match(self, namespace: str, tokens: Sequence[int], min_tokens: int) -> bool:
        """Whether something with the same beginning was recorded."""
        if len(tokens) < min_tokens:
            return False
        beginning = _digest(namespace, tokens, min_tokens)
        if beginning not in self._beginnings:
            return False
        self._beginnings.move_to_end(beginning)
        return True


def _digest(namespace: str, tokens: Sequence[int], length: int) -> bytes:
    # The number of tokens goes first, so that they can't run over into the namespace.
    data = array("q", (length, *tokens[:length])).tobytes() + namespace.encode()
    return hashlib.blake2b(data, digest_size=16).digest()
