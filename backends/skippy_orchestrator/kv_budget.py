"""KV accounting: what every session may come to hold on the tightest stage.

The orchestrator alone accounts. Admission reserves whole blocks for all positions that a session can ever
have, so a stage never runs out; a stage that does has a bug. Positions that a session has restored from the
resident prefix store lie in blocks that it shares with whoever restored the same: those count once.

Invariants:

* Blocks in use are those that sessions have reserved for themselves, plus the shared ones that any session
  holds, and never more than there are. Recorded prefixes that nobody holds are free: a stage gives them up.
* Sharing never takes blocks, it only gives some back.
* Shared blocks are told apart by all tokens in front of them, not by a digest: two of them are one only if
  stages hold them as one.

It follows for a stage: a prefix that a session has restored stays in its store until the session ends, so that
who restores it later gets the same blocks. It may pin no more than the whole blocks of what was restored. And only
resident KV shares blocks: exact states are copied into every session, and must not be shared here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _SharedUnit:
    """Shared blocks of one stretch of tokens behind one beginning."""

    parent: _SharedUnit | str
    """What comes before it, at first the namespace."""
    tokens: tuple[int, ...]
    holders: int = 0


@dataclass(slots=True)
class _Reservation:
    private: int
    """Blocks for the session alone."""
    shared: _SharedUnit | None = None
    """The last unit that the session holds, with all units before it."""


class KvBudget:
    """Blocks of the tightest stage, reserved by session.

    Sharing goes by ``share_tokens``, a multiple of ``block_tokens``; 0 takes the block itself.
    """

    def __init__(self, blocks: int, block_tokens: int, share_tokens: int = 0) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._unit_tokens = share_tokens or block_tokens
        self._unit_blocks = self._unit_tokens // block_tokens
        self._reserved: dict[int, _Reservation] = {}
        self._units: dict[tuple[_SharedUnit | str, tuple[int, ...]], _SharedUnit] = {}
        self._used = 0

    @classmethod
    def of_tightest(cls, stages: Sequence[tuple[int, int]]) -> KvBudget:
        """The budget that every stage can hold; ``stages`` are (blocks, tokens per block).

        Where blocks differ, sharing goes by the length at which all stages' blocks end together: in between a
        stage with small blocks may share fewer of them than one large block holds.
        """
        block_tokens = max(tokens for _, tokens in stages)
        return cls(
            min(blocks // -(-block_tokens // tokens) for blocks, tokens in stages),
            block_tokens,
            math.lcm(*(tokens for _, tokens in stages)),
        )

    @property
    def tokens(self) -> int:
        """Positions that fit in all."""
        return self._blocks * self._block_tokens

    @property
    def blocks_free(self) -> int:
        """Blocks that no session has reserved or shares."""
        return self._blocks - self._used

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self._block_tokens)

    def fits_ever(self, positions: int) -> bool:
        """Whether a session of so many positions fits into the empty cache."""
        return self.blocks_for(positions) <= self._blocks

    def reserve(self, session: int, positions: int) -> bool:
        """Reserve room for a session; False when it does not fit now."""
        if session in self._reserved:
            raise ValueError(f"session {session} has a reservation")
        blocks = self.blocks_for(positions)
        if blocks > self.blocks_free:
            return False
        self._reserved[session] = _Reservation(blocks)
        self._used += blocks
        return True

    def share(self, session: int, namespace: str, tokens: Sequence[int], length: int) -> None:
        """A session has restored its first ``length`` positions, which hold the first of ``tokens``.

        Its whole blocks of them are no longer reserved for it alone. A session restores once. Blocks may be free
        now that were not before.
        """
        reservation = self._reserved[session]
        units = length // self._unit_tokens
        blocks = units * self._unit_blocks
        if reservation.shared is not None:
            raise ValueError(f"session {session} has restored before")
        if not 0 <= length <= len(tokens) or blocks > reservation.private:
            raise ValueError(
                f"session {session} cannot share {length} positions of {len(tokens)} tokens, "
                f"{reservation.private} blocks are reserved"
            )
        parent: _SharedUnit | str = namespace
        for start in range(0, units * self._unit_tokens, self._unit_tokens):
            key = parent, tuple(tokens[start : start + self._unit_tokens])
            unit = self._units.get(key)
            if unit is None:
                unit = self._units[key] = _SharedUnit(*key)
                self._used += self._unit_blocks
            unit.holders += 1
            reservation.shared = parent = unit
        reservation.private -= blocks
        self._used -= blocks

    def release(self, session: int) -> None:
        """Give back what a session reserved, and of what it shared that which nobody else holds."""
        reservation = self._reserved.pop(session)
        self._used -= reservation.private
        unit: _SharedUnit | str | None = reservation.shared
        while isinstance(unit, _SharedUnit):
            unit.holders -= 1
            if unit.holders == 0:
                del self._units[unit.parent, unit.tokens]
                self._used -= self._unit_blocks
            unit = unit.parent

    def check_integrity(self, sessions: set[int]) -> None:
        """Raise AssertionError unless exactly ``sessions`` have reservations and they add up."""
        assert self._reserved.keys() == sessions, f"reserved for {set(self._reserved) ^ sessions} by mistake"
        holders = dict.fromkeys(self._units.values(), 0)
        private = 0
        for reservation in self._reserved.values():
            assert reservation.private >= 0, "a session shares more than it has reserved"
            private += reservation.private
            unit: _SharedUnit | str | None = reservation.shared
            while isinstance(unit, _SharedUnit):
                assert unit in holders, "a session holds blocks that are not in use"
                holders[unit] += 1
                unit = unit.parent
        for unit, count in holders.items():
            assert unit.holders == count > 0, f"shared blocks have {unit.holders} holders, {count} are known"
        shared = len(self._units) * self._unit_blocks
        assert self._used == private + shared <= self._blocks, "reservations do not add up"
