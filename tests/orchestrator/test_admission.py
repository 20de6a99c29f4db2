"""Who waits, who runs, who is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.admission import Admission
from skippy_orchestrator.core import Core
from skippy_orchestrator.deployment import LimitsSection, PrefillSection, SchedulerSection
from skippy_orchestrator.history import History
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.prefix.cache import PrefixCache, StageFacts
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sessions import Session
from skippy_stage.errors import InvalidArgument, Unavailable

from tests.orchestrator.making import a_request, fixed
from tests.orchestrator.simulation import OFF, TokenText


def request(positions: int) -> GenerationRequest:
    return a_request([1], positions - 1)


def session(name: int, positions: int = 4) -> Session:
    return Session(name, request(positions), TokenText(), frozenset(), fixed(8))


def admission(
    blocks: int = 100, max_sessions: int = 2, max_queue: int = 2, timeout_s: float = 5.0, block: int = 4
) -> Admission:
    return Admission(KvBudget(blocks, block), max_sessions, max_queue, timeout_s)


def names(sessions: list[Session]) -> list[int]:
    return [session.id for session in sessions]


def test_first_come_first_served() -> None:
    a = admission()
    one, two = session(1), session(2)
    assert names(a.submit(one, 0.0)) == [1]
    assert names(a.submit(two, 0.0)) == [2]
    assert names(a.submit(session(3), 0.0)) == []
    assert names(a.submit(session(4), 0.0)) == []
    assert a.waiting == 2
    with pytest.raises(Unavailable, match=r"queue is full \(2 waiting\), retry later"):
        a.submit(session(5), 0.0)
    a.release(two)
    assert names(a.admit()) == [3]
    a.release(one)
    assert names(a.admit()) == [4]
    a.check_integrity({3, 4})


def test_without_a_queue_only_who_runs_at_once_is_taken() -> None:
    a = admission(max_sessions=1, max_queue=0)
    assert names(a.submit(session(1), 0.0)) == [1]
    with pytest.raises(Unavailable, match="0 waiting"):
        a.submit(session(2), 0.0)
    a.check_integrity({1})


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    a = admission(blocks=4, max_sessions=9)
    first = session(1, 12)
    assert names(a.submit(first, 0.0)) == [1]
    assert names(a.submit(session(2, 16), 0.0)) == []
    assert names(a.submit(session(3, 1 + 1), 0.0)) == []
    a.release(first)
    assert names(a.admit()) == [2]


@pytest.mark.parametrize(("positions", "fits"), [(16, True), (17, False)])
def test_what_can_never_run_is_refused_by_name(positions: int, fits: bool) -> None:
    a = admission(blocks=4)
    if fits:
        assert names(a.submit(session(1, positions), 0.0)) == [1]
        return
    with pytest.raises(
        InvalidArgument, match=r"max_tokens: got 16, expected .* at most 16 together"
    ) as refusal:
        a.submit(session(1, positions), 0.0)
    assert refusal.value.field == "max_tokens"
    assert a.waiting == 0


def test_waiting_has_an_end() -> None:
    a = admission(max_sessions=1)
    a.submit(session(1), 0.0)
    a.submit(session(2), 1.0)
    a.submit(session(3), 2.0)
    assert a.expire(5.9) == []
    ((name, error),) = a.expire(6.0)
    assert name == 2
    assert isinstance(error, Unavailable)
    assert error.message == "waited 5 s for a place, retry later"
    assert a.waiting == 1
    assert [name for name, _ in a.expire(100.0)] == [3]
    assert a.expire(100.0) == []
    a.check_integrity({1})


def test_withdrawal() -> None:
    a = admission(max_sessions=1)
    for name in (1, 2, 3):
        a.submit(session(name), 0.0)
    assert not a.withdraw(1), "it runs"
    assert a.withdraw(2)
    assert not a.withdraw(2)
    assert a.withdraw_all() == [3]
    assert a.waiting == 0
    a.check_integrity({1})
    with pytest.raises(AssertionError):
        a.check_integrity({1, 2})


@pytest.mark.parametrize("way", ["cancel", "timeout"])
def test_when_the_head_of_the_queue_gives_up_who_fits_runs_at_once(way: str) -> None:
    history = History.of(OFF)
    core = Core(
        1,
        KvBudget(10, 4),
        frozenset(),
        SchedulerSection(),
        PrefillSection(),
        LimitsSection(queue_timeout_s=5.0),
        PrefixCache(OFF, "test", StageFacts(), history.prefixes),
        history,
    )
    core.submit(1, request(24), TokenText(), 0.0)
    core.submit(2, request(40), TokenText(), 0.0)
    core.submit(3, request(8), TokenText(), 3.0)
    assert (core.active, core.waiting) == (1, 2)
    if way == "cancel":
        core.cancel(2, 4.0)
    else:
        core.tick(5.0)
    assert (core.active, core.waiting) == (2, 0)
    core.check_integrity()


# What the spec says by example (12.13).


@pytest.mark.parametrize(("new", "running", "waiting"), [(3, 2, 1), (2, 2, 0)])
def test_more_new_sessions_than_places(new: int, running: int, waiting: int) -> None:
    """Two places: of three new sessions one waits, or is refused where none may wait; two run."""
    a = admission(max_sessions=2)
    for name in range(new):
        a.submit(session(name), 0.0)
    assert a.waiting == waiting
    a.check_integrity(set(range(running)))
    strict = admission(max_sessions=2, max_queue=0)
    for name in range(running):
        assert names(strict.submit(session(name), 0.0)) == [name]
    if new > running:
        with pytest.raises(Unavailable):
            strict.submit(session(running), 0.0)
    strict.check_integrity(set(range(running)))


def test_a_full_queue_refuses_at_once() -> None:
    """Capacity 1, one waits, another comes."""
    a = admission(max_sessions=1, max_queue=1)
    a.submit(session(1), 0.0)
    a.submit(session(2), 0.0)
    with pytest.raises(Unavailable, match=r"^generation queue is full \(1 waiting\), retry later$"):
        a.submit(session(3), 0.0)
    assert a.waiting == 1, "who waits already keeps its place"


def test_a_place_that_becomes_free_goes_to_who_comes_next() -> None:
    """Both places are used and a third is refused; after the first has ended the next one gets its place."""
    a = admission(max_sessions=2, max_queue=0)
    first = session(1)
    a.submit(first, 0.0)
    a.submit(session(2), 0.0)
    with pytest.raises(Unavailable):
        a.submit(session(3), 0.0)
    a.release(first)
    assert names(a.submit(session(4), 0.0)) == [4]
    a.check_integrity({2, 4})


def test_a_session_that_is_refused_leaves_its_place_free() -> None:
    a = admission(blocks=4, max_sessions=1, max_queue=0)
    with pytest.raises(InvalidArgument):
        a.submit(session(1, 17), 0.0)
    assert names(a.submit(session(2, 16), 0.0)) == [2]


def test_the_kv_pool_bounds_who_runs_where_there_are_places_left() -> None:
    """A pool of 131,072 tokens: 32 sessions of 4,096 run, and not one more token."""
    a = admission(blocks=8192, max_sessions=64, max_queue=64, block=16)
    for name in range(32):
        assert names(a.submit(session(name, 4096), 0.0)) == [name]
    assert names(a.submit(session(32, 2), 0.0)) == []
    a.check_integrity(set(range(32)))


@given(st.data())
def test_any_history_equals_a_naive_queue(data: st.DataObject) -> None:
    blocks, places = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    max_queue = data.draw(st.integers(0, 4))
    a = admission(blocks, places, max_queue)
    queue: list[tuple[Session, float]] = []
    running: list[Session] = []
    now = 0.0

    def blocks_of(s: Session) -> int:
        return -(-s.max_positions // 4)

    def started() -> list[int]:
        result = []
        while queue and len(running) < places:
            if blocks_of(queue[0][0]) + sum(map(blocks_of, running)) > blocks:
                break
            running.append(queue.pop(0)[0])
            result.append(running[-1].id)
        return result

    for name in range(1, data.draw(st.integers(2, 30))):
        now += data.draw(st.sampled_from([0.0, 1.0, 3.0]))
        match data.draw(st.sampled_from(["submit", "submit", "release", "withdraw", "expire"])):
            case "submit":
                new = session(name, data.draw(st.integers(2, 50)))
                if blocks_of(new) > blocks:
                    with pytest.raises(InvalidArgument):
                        a.submit(new, now)
                    continue
                queue.append((new, now + 5.0))
                expected = started()
                if len(queue) > max_queue and queue[-1][0] is new:
                    queue.pop()
                    with pytest.raises(Unavailable):
                        a.submit(new, now)
                else:
                    assert names(a.submit(new, now)) == expected
            case "release" if running:
                a.release(running.pop(data.draw(st.integers(0, len(running) - 1))))
                assert names(a.admit()) == started()
            case "withdraw" if queue:
                victim = queue.pop(data.draw(st.integers(0, len(queue) - 1)))[0]
                assert a.withdraw(victim.id)
                assert names(a.admit()) == started()
            case "expire":
                late = [s.id for s, deadline in queue if deadline <= now]
                queue = [(s, deadline) for s, deadline in queue if deadline > now]
                assert [n for n, _ in a.expire(now)] == late
                assert names(a.admit()) == started()
        assert a.waiting == len(queue) <= max_queue
        a.check_integrity({s.id for s in running})
