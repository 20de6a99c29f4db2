"""Exact prefixes on an engine whose state cannot be cut, and on one whose state could."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from skippy_stage.engines.base import StateMismatch
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.exact import ExactPrefixes
from skippy_stage.prefix.states import StateShelf

from tests.scripted import RecurrentEngine, ScriptedEngine
from tests.stage.prefix.driving import forward

A = tuple(range(1, 21))


class Exact:
    """One stage with exact prefixes."""

    def __init__(self, engine: Any = None, **limits: int) -> None:
        self.engine = engine or RecurrentEngine()
        self.shelf = StateShelf(**{"max_entries": 8, **limits})
        self.store = ExactPrefixes(self.engine.exact_state, self.shelf)

    def made(self, session: int, tokens: Sequence[int], *lengths: int) -> None:
        """A session computes tokens, records on the way at these lengths, and ends."""
        self.engine.open(session, 64)
        done = 0
        for length in lengths:
            forward(self.engine, (session, done, tokens[done:length]))
            assert self.store.record(session, "", tokens[:length]) == length
            done = length
        self.engine.close(session)
        self.store.check_integrity()


@pytest.mark.parametrize("kind", [RecurrentEngine, ScriptedEngine])
def test_a_restored_session_goes_on_as_if_it_had_computed_all(kind: Any) -> None:
    stage = Exact(kind())
    stage.made(1, A, 4, 9)
    found = stage.store.probe(2, "", A)
    assert (found.longest, found.lengths) == (9, (4, 9))
    assert stage.store.leased(2) == A[:9]
    for session, length in ((2, 9), (3, 4)):
        stage.store.probe(session, "", A)
        stage.engine.open(session, 64)
        stage.engine.open(session + 10, 64)
        assert stage.store.restore(session, length) == A[:length]
        assert stage.engine.cached(session) == length
        assert stage.store.leased(session) == ()
        forward(stage.engine, (session, length, A[length:]))
        forward(stage.engine, (session + 10, 0, A))
        assert stage.engine.export(session) == stage.engine.export(session + 10)
    stage.store.check_integrity()
    assert stage.store.status().leases == 0


def test_only_recorded_lengths_can_be_restored() -> None:
    stage = Exact()
    stage.made(1, A, 4, 9)
    stage.engine.open(2, 64)
    stage.store.probe(2, "", A)
    for length in (3, 8):
        with pytest.raises(SkippyError, match=f"session 2: no state of {length} positions is leased"):
            stage.store.restore(2, length)
    with pytest.raises(SkippyError, match="restore of 10 positions, 9 are leased"):
        stage.store.restore(2, 10)
    with pytest.raises(SkippyError, match="restore of 1 positions, 0 are leased"):
        stage.store.restore(3, 1)
    assert stage.store.restore(2, 0) == ()
    assert stage.store.leased(2) == ()
    nothing = stage.store.probe(2, "", A[:3])
    assert (nothing.longest, nothing.lengths) == (0, ())
    stage.store.check_integrity()


def test_only_the_length_that_a_session_has_is_recorded() -> None:
    stage = Exact()
    stage.engine.open(1, 64)
    forward(stage.engine, (1, 0, A[:6]))
    assert stage.store.record(1, "", A[:5]) == 0
    assert stage.store.status().dropped == 1
    assert stage.store.record(1, "", A[:6]) == 6
    assert stage.store.record(1, "", A[:6]) == 0, "it is there"
    for tokens in ((), A[:7]):
        with pytest.raises(SkippyError, match=f"session 1: record of {len(tokens)} positions, 6 are cached"):
            stage.store.record(1, "", tokens)
    status = stage.store.status()
    assert (status.payload, status.entries, status.tokens) == ("full-state", 1, 6)
    assert (status.recorded_tokens, status.dropped) == (6, 1)
    assert status.bytes == len(stage.engine.export(1))


def test_a_session_that_is_in_use_is_not_overwritten() -> None:
    stage = Exact()
    stage.made(1, A, 4)
    stage.engine.open(2, 64)
    forward(stage.engine, (2, 0, A[:2]))
    stage.store.probe(2, "", A)
    with pytest.raises(SkippyError, match="sequence 2"):
        stage.store.restore(2, 4)
    assert stage.store.leased(2) == A[:4]
    assert stage.engine.cached(2) == 2
    assert stage.store.status().entries == 1, "the state is not to blame"


def test_a_state_that_cannot_be_loaded_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    stage = Exact()
    stage.made(1, A, 4, 9)
    for session in (2, 3):
        stage.store.probe(session, "", A)
        stage.engine.open(session, 64)
    stage.shelf.find("", A)[1].blocks[0].data = stage.shelf.find("", A)[0].payload
    with caplog.at_level(logging.WARNING), pytest.raises(StateMismatch):
        stage.store.restore(2, 9)
    assert "a recorded state of 9 tokens is removed: a state of 4 positions, not 9" in caplog.text
    assert stage.engine.cached(2) == 0
    assert stage.store.leased(2) == stage.store.leased(3) == A[:4]
    with pytest.raises(SkippyError, match="restore of 9 positions, 4 are leased"):
        stage.store.restore(3, 9)
    assert stage.store.restore(3, 4) == A[:4]
    assert stage.store.probe(4, "", A).lengths == (4,)


def test_no_room_because_of_leases() -> None:
    stage = Exact(max_entries=1)
    stage.made(1, A, 4)
    stage.store.probe(2, "", A)
    stage.engine.open(3, 64)
    forward(stage.engine, (3, 0, A[:9]))
    assert stage.store.record(3, "", A[:9]) == 0
    assert stage.store.status().dropped == 1
    stage.store.release_all()
    assert stage.store.record(3, "", A[:9]) == 9
    status = stage.store.status()
    assert (status.entries, status.evicted, status.leases) == (1, 1, 0)
    stage.store.check_integrity()


class ExactMachine(RuleBasedStateMachine):
    """Sessions that start from exact states, against a list of what was recorded."""

    @initialize(recurrent=st.booleans(), entries=st.integers(1, 5), most=st.sampled_from([0, 150]))
    def start(self, recurrent: bool, entries: int, most: int) -> None:
        kind = RecurrentEngine if recurrent else ScriptedEngine
        self.stage = Exact(kind(), max_entries=entries, max_bytes=most, block_bytes=16)
        self.texts: dict[int, list[int]] = {}
        self.records: set[tuple[int, ...]] = set()

    @precondition(lambda self: len(self.texts) < 3)
    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=7), data=st.data())
    def begin(self, tokens: list[int], data: Any) -> None:
        session = min(set(range(3)) - self.texts.keys())
        found = self.stage.store.probe(session, "", tokens)
        there = tuple(n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in self.records)
        assert set(found.lengths or ()) <= set(there)
        if not self.stage.store.status().evicted + self.stage.store.status().dropped:
            assert found.lengths == there
        self.stage.engine.open(session, 32)
        length = data.draw(st.sampled_from([0, *(found.lengths or ())]))
        if length or data.draw(st.booleans()):
            assert self.stage.store.restore(session, length) == tuple(tokens[:length])
        self.texts[session] = tokens[:length]

    @precondition(lambda self: self.texts)
    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=4), data=st.data())
    def go_on(self, tokens: list[int], data: Any) -> None:
        session = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[session]
        if len(text) + len(tokens) <= 32:
            forward(self.stage.engine, (session, len(text), tokens))
            text += tokens

    @precondition(lambda self: any(self.texts.values()))
    @rule(data=st.data())
    def record(self, data: Any) -> None:
        session = data.draw(st.sampled_from([name for name, text in self.texts.items() if text]))
        tokens = tuple(self.texts[session])
        if self.stage.store.record(session, "", tokens):
            self.records.add(tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        session = data.draw(st.sampled_from(sorted(self.texts)))
        self.stage.engine.close(session)
        self.stage.store.release(session)
        del self.texts[session]

    @invariant()
    def all_is_in_order(self) -> None:
        self.stage.store.check_integrity()
        self.stage.engine.check_integrity()
        for session, text in self.texts.items():
            assert self.stage.engine.cached(session) == len(text)
            if text:
                self.stage.engine.open(9, 32)
                forward(self.stage.engine, (9, 0, text))
                assert self.stage.engine.export(session) == self.stage.engine.export(9)
                self.stage.engine.close(9)


ExactMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestExact = ExactMachine.TestCase
