"""The prefill machine under any order of events, against plain models of what it must do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefill import Chunk, PrefillMachine, PrefillPolicy, ScheduledPlanner

from tests.orchestrator.prefill import reference


class Turn(NamedTuple):
    """Some time passes, the machine is asked with some room, then one of the events that may come does."""

    pause: float
    room: int
    event: int
    times: float = 1.0

    def pick(self, events: list[str]) -> str:
        return events[self.event % len(events)] if events else "nothing"


turns = st.lists(
    st.builds(
        Turn, st.sampled_from([0.0, 0.125, 1.0]), st.integers(0, 14), st.integers(0, 11), st.floats(0, 9)
    ),
    max_size=150,
)
policies = st.sampled_from(
    [
        PrefillPolicy(policy="fixed", chunk_tokens=5),
        PrefillPolicy(policy="schedule", schedule="1,7,3"),
        PrefillPolicy(chunk_tokens=6, adaptive_start=2, adaptive_step=3, adaptive_max=11),
    ]
)
prompts = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
limits = st.integers(0, 3)


def to_the_end(some: list[Turn]) -> Iterator[Turn]:
    """These turns, and then as many as it takes."""
    return chain(some, (Turn(0.125, 14, event) for event in chain.from_iterable(repeat(range(4)))))


@dataclass
class Model:
    """One prefill as the caller sees it."""

    limit: int
    at_stage_0: list[Chunk] = field(default_factory=list)
    holding: list[Chunk] = field(default_factory=list)
    in_flight: list[Chunk] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    waiting_since: float | None = None
    returns: list[float] = field(default_factory=list)
    """The last dispatch, then every return of a credit after it."""

    @property
    def blocked(self) -> bool:
        return bool(self.in_flight) if self.limit == 0 else len(self.holding) == self.limit

    @property
    def drain(self) -> list[float]:
        """Milliseconds between returns."""
        return [(b - a) * 1000 for a, b in zip(self.returns, self.returns[1:], strict=False)]

    def events(self, chunk: Chunk | None) -> list[str]:
        """Events that may come now."""
        oldest = self.in_flight[0] if self.in_flight else None
        back = oldest is not None and oldest not in self.at_stage_0 and oldest not in self.holding
        return (
            ["dispatch"] * (chunk is not None)
            + ["leave"] * bool(self.at_stage_0)
            + ["credit"] * bool(self.holding)
            + ["done"] * back
        )

    def happen(
        self, event: str, chunk: Chunk | None, now: float, times: float, *machines: PrefillMachine
    ) -> None:
        """One event, for the model and for machines."""
        match event:
            case "dispatch":
                assert chunk is not None
                self._dispatched(chunk, now)
                for machine in machines:
                    machine.dispatched(chunk, now)
            case "leave":
                gone = self.at_stage_0.pop(0)
                for machine in machines:
                    machine.left_first_stage(gone.rows, times, 9 - times)
            case "credit":
                self.holding.pop(0)
                self._end_wait(now)
                if self.returns:
                    self.returns.append(now)
                for machine in machines:
                    machine.credit_returned(now)
            case "done":
                self.in_flight.pop(0)
                for machine in machines:
                    machine.completed()

    def _dispatched(self, chunk: Chunk, now: float) -> None:
        self.covered += range(chunk.start, chunk.end)
        self.at_stage_0.append(chunk)
        self.in_flight.append(chunk)
        if self.limit:
            self.holding.append(chunk)
        else:
            self._end_wait(now)
        if chunk.sample:
            self.returns = [now]

    def _end_wait(self, now: float) -> None:
        if self.waiting_since is not None:
            self.waits.append((now - self.waiting_since) * 1000)
            self.waiting_since = None


@given(prompts, limits, policies, st.lists(st.integers(-2, 62), max_size=4), turns)
def test_any_order_of_events_covers_the_prompt_exactly_within_the_credits(
    prompt: tuple[int, int], limit: int, policy: PrefillPolicy, boundaries: list[int], some: list[Turn]
) -> None:
    n_prompt, start = prompt
    machine = PrefillMachine(n_prompt, policy.planner(), limit, start, boundaries)
    model, now = Model(limit), 0.0
    inside = [b for b in boundaries if start < b < n_prompt]
    for turn in to_the_end(some):
        if machine.done:
            break
        now += turn.pause
        left = len(model.covered) < n_prompt - start
        chunk = machine.next_chunk(turn.room, now)
        assert (chunk is None) == (turn.room == 0 or not left or model.blocked)
        if model.blocked and left and turn.room and model.waiting_since is None:
            model.waiting_since = now
        if chunk is not None:
            assert 1 <= chunk.rows <= turn.room
            assert chunk.sample == (chunk.end == n_prompt)
            assert not [b for b in inside if chunk.start < b < chunk.end]
        now += turn.pause / 2
        model.happen(turn.pick(model.events(chunk)), chunk, now, turn.times, machine)
        machine.check_integrity()
        assert machine.pending == len(model.holding) <= limit
        assert machine.stats.pending_max <= limit
        assert machine.stats.credit_waits == len(model.waits) + (model.waiting_since is not None)
    assert model.covered == list(range(start, n_prompt))
    stats = machine.stats
    assert stats.credit_wait_ms == pytest.approx(sum(model.waits))
    assert stats.credit_wait_ms_max == max(model.waits, default=0.0)
    assert stats.drains == len(model.drain)
    assert stats.drain_wait_ms == pytest.approx(sum(model.drain))
    assert stats.drain_wait_ms_max == max(model.drain, default=0.0)
    assert machine.report().wait_ms_max == max([*model.waits, *model.drain], default=0.0)


@given(
    prompts,
    limits,
    st.lists(st.integers(-2, 62), max_size=5),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), max_size=60),
)
def test_chunks_are_those_of_the_reference(
    prompt: tuple[int, int], limit: int, boundaries: list[int], allowed: list[tuple[int, int]]
) -> None:
    n_prompt, start = prompt
    allowed += [(1, 1)] * n_prompt
    sizes, rooms = [size for size, _ in allowed], [room for _, room in allowed]
    machine = PrefillMachine(n_prompt, ScheduledPlanner(tuple(sizes)), limit, start, boundaries)
    model, chunks = Model(limit), []
    for room in rooms:
        chunk = machine.next_chunk(room, 0.0)
        if chunk is None:
            break
        chunks.append((chunk.start, chunk.end, chunk.sample))
        model.happen("dispatch", chunk, 0.0, 1.0, machine)
        while events := model.events(None):
            model.happen(events[0], None, 0.0, 1.0, machine)
    assert machine.done
    assert chunks == reference.chunks(n_prompt, sizes, rooms, start, boundaries)


@given(prompts, limits, policies, turns)
def test_asking_more_often_changes_nothing(
    prompt: tuple[int, int], limit: int, policy: PrefillPolicy, some: list[Turn]
) -> None:
    """Of two machines with the same events, one is asked again and again, with any room."""
    n_prompt, start = prompt
    quiet = PrefillMachine(n_prompt, policy.planner(), limit, start)
    asked = PrefillMachine(n_prompt, policy.planner(), limit, start)
    model, now = Model(limit), 0.0
    for turn in to_the_end(some):
        if quiet.done:
            break
        now += turn.pause
        chunk = quiet.next_chunk(turn.room, now)
        for later in range(1 + turn.event % 3):
            assert asked.next_chunk(turn.room, now + later / 8) == chunk
            asked.next_chunk(0, now + later / 8)
            if chunk is not None:
                asked.next_chunk(1 + turn.event, now + later / 8)
        now += 0.5
        model.happen(turn.pick(model.events(chunk)), chunk, now, turn.times, quiet, asked)
        assert asdict(asked.stats) == asdict(quiet.stats)
        assert asked.report() == quiet.report()
