"""KV accounting: what every session may come to hold on the tightest stage.

The orchestrator alone accounts. Admission reserves whole blocks for all positions that a session can ever
have, so a stage never runs out; a stage that does has a bug.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvBudget:
    """Blocks of the tightest stage, reserved by session."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._reserved: dict[int, int] = {}
        self._used = 0

    @classmethod
    def of_tightest(cls, stages: Sequence[tuple[int, int]]) -> KvBudget:
        """The budget that every stage can hold; ``stages`` are (blocks, tokens per block)."""
        block_tokens = max(tokens for _, tokens in stages)
        return cls(min(blocks // -(-block_tokens // tokens) for blocks, tokens in stages), block_tokens)

    @property
    def tokens(self) -> int:
        """Positions that fit in all."""
        return self._blocks * self._block_tokens

    @property
    def blocks_free(self) -> int:
        """Blocks that no session has reserved."""
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
        self._reserved[session] = blocks
        self._used += blocks
        return True

    def release(self, session: int) -> None:
        """Give back what a session reserved."""
        self._used -= self._reserved.pop(session)

    def check_integrity(self, sessions: set[int]) -> None:
        """Raise AssertionError unless exactly ``sessions`` have reservations and they add up."""
        assert self._reserved.keys() == sessions, f"reserved for {set(self._reserved) ^ sessions} by mistake"
        assert self._used == sum(self._reserved.values()) <= self._blocks, "reservations do not add up"
