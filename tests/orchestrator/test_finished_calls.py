from __future__ import annotations

import weakref

from skippy_orchestrator.pipeline.finished_calls import FinishedCalls


class Call:
    pass


def kept(calls: FinishedCalls) -> weakref.ref[Call]:
    call = Call()
    calls.keep(call)
    return weakref.ref(call)


def test_a_call_lives_until_a_round_trip_that_began_after_its_end_has_ended() -> None:
    calls = FinishedCalls(clock=lambda: 0.0)
    first = kept(calls)
    mark = calls.mark()
    second = kept(calls)
    assert first() is not None
    calls.passed(mark)
    assert first() is None
    assert second() is not None
    calls.passed(mark)
    assert second() is not None
    calls.passed(calls.mark())
    assert second() is None
    assert len(calls) == 0


def test_without_round_trips_time_is_enough() -> None:
    now = [0.0]
    calls = FinishedCalls(clock=lambda: now[0])
    first = kept(calls)
    now[0] = 4.0
    second = kept(calls)
    assert first() is not None
    now[0] = 6.0
    kept(calls)
    assert first() is None
    assert second() is not None
