"""Resident prefixes against a naive model, on pools that are too small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from skippy_stage.errors import SkippyError

from tests.stage.prefix.driving import Resident, forward

SESSIONS = 4
NAMESPACES = st.sampled_from(["", "", "", "own"])
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=9)


def common(one: Sequence[int], two: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


class ResidentMachine(RuleBasedStateMachine):
    """Sessions come, restore, grow, are cut back, record and go; blocks are always short.

    ``texts`` is what every open session holds, ``leases`` the tokens that are leased, ``records`` what was
    recorded and not evicted as far as one can know: an eviction may only shorten what is found.
    """

    @initialize(
        blocks=st.integers(3, 14), size=st.integers(1, 4), max_tokens=st.sampled_from([0, 0, 0, 3, 9])
    )
    def start(self, blocks: int, size: int, max_tokens: int) -> None:
        self.total, self.size, self.max_tokens = blocks, size, max_tokens
        self.stage = Resident(blocks, size, max_tokens)
        self.texts: dict[int, list[int]] = {}
        self.namespaces: dict[int, str] = {}
        self.leases: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.records: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def store(self) -> Any:
        return self.stage.store

    @precondition(lambda self: len(self.texts) < SESSIONS)
    @rule(namespace=NAMESPACES, tokens=TOKENS, data=st.data())
    def begin(self, namespace: str, tokens: list[int], data: Any) -> None:
        """A session opens, starts perhaps with what it can restore, computes its prompt and records it."""
        session = min(set(range(SESSIONS)) - self.texts.keys())
        self.namespaces[session] = namespace
        if data.draw(st.booleans(), label="probe first"):
            self._probe(session, tokens)
        self.stage.engine.open(session, self.total * self.size)
        self.texts[session] = []
        if session not in self.leases:
            self._probe(session, tokens)
        if data.draw(st.booleans(), label="restore"):
            self._restore(session, data)
        rest = tokens[len(self.texts[session]) :]
        if (
            rest
            and data.draw(st.booleans(), label="compute")
            and self._run([(session, len(tokens) - len(rest), rest)])
        ):
            self._record(session, len(tokens))

    @precondition(lambda self: self.texts)
    @rule(tokens=TOKENS, data=st.data())
    def probe(self, tokens: list[int], data: Any) -> None:
        """At any time, whatever the session holds; in place of the lease that it had."""
        self._probe(data.draw(st.sampled_from(sorted(self.texts))), tokens)

    def _probe(self, session: int, tokens: list[int]) -> None:
        namespace = self.namespaces[session]
        found = self.store.probe(session, namespace, tokens)
        there = [common(path, tokens) for space, path in self.stage.paths().values() if space == namespace]
        assert found.longest == max(there, default=0)
        recorded = [common(path, tokens) for space, path in self.records if space == namespace]
        assert found.longest <= max(recorded, default=0)
        status = self.store.status()
        if not (status.evicted or status.dropped):
            assert found.longest == max(recorded, default=0), "nothing was evicted or dropped"
        self._leased(session, tuple(tokens[: found.longest]))

    @precondition(lambda self: self._empty())
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        self._restore(data.draw(st.sampled_from(self._empty())), data)

    def _empty(self) -> list[int]:
        return [session for session, text in self.texts.items() if not text]

    def _restore(self, session: int, data: Any) -> None:
        _, tokens = self.leases.get(session, ("", ()))
        length = data.draw(st.integers(0, len(tokens)), label="length")
        free = self.stage.blocks.blocks_free
        assert self.store.restore(session, length) == tokens[:length]
        assert self.stage.blocks.blocks_free == free, "restoring takes no blocks"
        self.texts[session] = list(tokens[:length])
        self._leased(session, tokens[: length // self.size * self.size])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def forward(self, data: Any) -> None:
        """A batch of some sessions, each perhaps cut back first."""
        pieces = []
        for session in data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, unique=True)):
            text = self.texts[session]
            past = len(text) if data.draw(st.booleans()) else data.draw(st.integers(0, len(text)))
            pieces.append((session, past, data.draw(TOKENS)))
        self._run(pieces)

    @precondition(lambda self: any(self.texts.values()))
    @rule(token=st.integers(1, 2))
    def decode(self, token: int) -> None:
        """One more token for every session that has some."""
        self._run([(session, len(text), [token]) for session, text in self.texts.items() if text])

    def _run(self, pieces: list[tuple[int, int, list[int]]]) -> bool:
        """Run a batch; it fails only where blocks really are short."""
        room = self.total * self.size
        pieces = [(session, past, tokens[: room - past]) for session, past, tokens in pieces if past < room]
        if not pieces:
            return False
        for session, past, _ in pieces:
            del self.texts[session][past:]
        possible = self._fits(pieces)
        try:
            forward(self.stage.engine, *pieces)
        except SkippyError:
            assert not possible, "what nobody needs has to be given up"
            assert {node.block for node in self.stage.nodes()} == self.stage.leased_blocks()
            return False
        assert possible
        for session, _, tokens in pieces:
            self.texts[session] += tokens
        return True

    def _fits(self, pieces: list[tuple[int, int, list[int]]]) -> bool:
        """There is room beside what live sessions and leases need, all else evicted."""
        tables = {
            session: self.stage.blocks.blocks(session)[: -(-len(text) // self.size)]
            for session, text in self.texts.items()
        }
        holders = Counter(block for blocks in tables.values() for block in blocks)
        holders.update(self.stage.leased_blocks())
        needed = len(holders)
        for session, past, tokens in pieces:
            blocks = tables[session]
            needed += -(-(past + len(tokens)) // self.size) - len(blocks)
            if past % self.size:
                needed += holders[blocks[-1]] > 1
                holders[blocks[-1]] -= 1
        return needed <= self.total

    @precondition(lambda self: any(self.texts.values()))
    @rule(data=st.data())
    def record(self, data: Any) -> None:
        session = data.draw(st.sampled_from([name for name, text in self.texts.items() if text]))
        self._record(session, data.draw(st.integers(1, len(self.texts[session]))))

    def _record(self, session: int, length: int) -> None:
        path, namespace = tuple(self.texts[session][:length]), self.namespaces[session]
        before = self.stage.longest(path, namespace)
        free, dropped = self.stage.blocks.blocks_free, self.store.status().dropped
        recorded = self.store.record(session, namespace, path)
        assert self.stage.longest(path, namespace) == before + recorded
        assert self.stage.blocks.blocks_free >= free, "recording takes no blocks"
        assert self.store.status().dropped - dropped == (before + recorded < len(path))
        assert self.max_tokens or before + recorded == len(path)
        self.records.add((namespace, path))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        session = data.draw(st.sampled_from(sorted(self.leases)))
        self.store.release(session)
        self._leased(session, ())

    @precondition(lambda self: len(self.leases) > 1)
    @rule()
    def release_all(self) -> None:
        self.store.release_all()
        self.leases.clear()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        session = data.draw(st.sampled_from(sorted(self.texts)))
        self.stage.engine.close(session)
        self.store.release(session)
        del self.texts[session]
        self._leased(session, ())

    @precondition(lambda self: self.store.status().entries)
    @rule(wanted=st.integers(1, 4))
    def reclaim(self, wanted: int) -> None:
        free, alone = self.stage.blocks.blocks_free, self.stage.blocks.blocks_exclusive
        self.store.reclaim(wanted)
        freed = self.stage.blocks.blocks_free - free
        assert freed <= min(wanted, alone), "no more than was asked for"

    def _leased(self, session: int, tokens: tuple[int, ...]) -> None:
        self.leases.pop(session, None)
        if tokens:
            self.leases[session] = (self.namespaces[session], tokens)

    @invariant()
    def all_is_in_order(self) -> None:
        self.stage.check()
        assert self.stage.engine.usage().cached == {name: len(text) for name, text in self.texts.items()}
        for session, text in self.texts.items():
            assert self.stage.engine.columns(session) == self.stage.engine.columns_of(text)

    @invariant()
    def leases_are_kept(self) -> None:
        assert self.store.status().leases == len(self.leases)
        paths = set(self.stage.paths().values())
        for session, (namespace, tokens) in self.leases.items():
            assert self.store.leased(session) == tokens
            assert any(space == namespace and path[: len(tokens)] == tokens for space, path in paths)

    @invariant()
    def what_is_held_is_needed_or_can_be_had_back(self) -> None:
        usage, status = self.stage.engine.usage(), self.store.status()
        assert usage.blocks_prefix == status.blocks
        tables = {b for session in self.texts for b in self.stage.blocks.blocks(session)}
        assert usage.blocks_used == len(tables)
        assert status.tokens == sum(len(node.tokens) for node in self.stage.nodes())
        assert status.tokens <= (self.max_tokens or self.total * self.size)

    def teardown(self) -> None:
        for session in list(self.texts):
            self.stage.engine.close(session)
        self.store.release_all()
        self.stage.check_empty()


ResidentMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestResident = ResidentMachine.TestCase
