"""Which steps make a frame: budgets, fairness, and decoding sessions spread over the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.sessions import Phase
from skippy_stage.protocol import DecodeStep, PrefillStep, ProbeStep

from tests.orchestrator.scheduling import Driver, steps_of


def test_prompts_share_a_frame_up_to_its_rows_and_take_turns() -> None:
    d = Driver(rows=12, chunk=8)
    d.add(1, 40, 1)
    d.add(2, 40, 1)
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    assert d.send() == [], "credits are out"
    d.complete()
    d.add(3, 2, 1)
    assert steps_of(d.send()) == [(1, 8), (2, 4)]
    d.complete()
    assert steps_of(d.send()) == [(3, 2), (1, 8), (2, 2)]


def test_decode_rows_come_first_and_leave_room_for_so_many_prefill_rows() -> None:
    d = Driver(rows=256, chunk=8, bound=12)
    d.start_decoding(5)
    d.add(10, 100, 1)
    d.add(11, 100, 1)
    assert steps_of(d.send()) == [(i, 1) for i in range(5)] + [(10, 8), (11, 4)]


def test_the_bound_holds_in_frames_without_decode_rows_too() -> None:
    """The streams' next frame has to wait for this one."""
    d = Driver(rows=256, chunk=8, bound=12)
    d.start_decoding(5)
    d.add(10, 100, 1)
    d.add(11, 100, 1)
    d.send()
    picks = d.send()
    assert not any(isinstance(step, DecodeStep) for _, step in picks), "all streams are on their way"
    assert steps_of(picks) == [(10, 8), (11, 4)]


def test_a_prompt_that_is_all_on_its_way_bounds_the_others() -> None:
    d = Driver(rows=256, chunk=8, bound=3)
    d.add(1, 2, 5)
    assert steps_of(d.send()) == [(1, 2)]
    d.add(2, 100, 1)
    assert steps_of(d.send()) == [(2, 3)], "the first token of 1 is awaited"


def test_without_streams_or_without_a_bound_prompts_fill_the_frame() -> None:
    d = Driver(rows=30, chunk=20, bound=3)
    d.add(10, 100, 1)
    d.add(11, 100, 1)
    assert steps_of(d.send()) == [(10, 20), (11, 10)]
    free = Driver(rows=30, chunk=20, bound=0)
    free.start_decoding(5)
    free.add(10, 100, 1)
    free.add(11, 100, 1)
    assert steps_of(free.send()) == [(i, 1) for i in range(5)] + [(10, 20), (11, 5)]
    assert steps_of(free.send()) == [(10, 20), (11, 10)]


def test_when_the_last_stream_ends_the_bound_is_gone() -> None:
    d = Driver(rows=256, chunk=8, bound=3)
    d.start_decoding(1)
    d.add(10, 100, 1)
    assert steps_of(d.send()) == [(0, 1), (10, 3)]
    d.remove(d.running[0])
    assert steps_of(d.send()) == [(10, 8)]


def test_a_bound_above_the_frame_does_not_widen_it() -> None:
    d = Driver(rows=8, chunk=20, bound=100)
    d.start_decoding(5)
    d.add(10, 100, 1)
    assert steps_of(d.send()) == [(i, 1) for i in range(5)] + [(10, 3)]


def test_questions_take_no_room() -> None:
    d = Driver(rows=4, chunk=8)
    d.start_decoding(6)
    d.add(10, 100, 1, restorable=0)
    d.add(11, 100, 1, restorable=90)
    d.add(12, 100, 1)
    picks = d.send()
    assert steps_of(picks) == [(i, 1) for i in range(4)] + [(10, 0), (11, 0)], "the frame is full of rows"
    assert all(isinstance(step, ProbeStep) for _, step in picks[4:])
    assert steps_of(d.send()) == [(12, 4)], "one question is enough"
    d.complete()
    assert steps_of(d.send()) == [(4, 1), (5, 1), (0, 1), (1, 1)]
    picks = d.send()
    assert steps_of(picks) == [(10, 4)], "who only asked takes its turn before who had one"
    d.complete()
    d.complete()
    d.send()
    (session, step), *rest = d.send()
    assert (step, rest) == (PrefillStep(session=11, epoch=0, pos_start=90, rows=4), [])
    assert session.phase is Phase.PREFILL


def test_who_replays_tokens_decodes_without_a_prompt() -> None:
    d = Driver(rows=4, chunk=8)
    session = d.add(1, 20, 9, restorable=21, outputs=(40, 41))
    other = d.add(2, 100, 1)
    assert steps_of(d.send()) == [(1, 0), (2, 4)]
    assert d.decoding == 0, "a question does not bound prompts"
    d.complete()
    assert (session.phase, session.n_output) == (Phase.DECODE, 2)
    assert d.scheduler.groups == 1
    picks = d.send()
    assert picks[0] == (session, DecodeStep(session=1, epoch=0, pos_start=21))
    assert picks[1][0] is other
    d.complete()
    assert d.send()[0][1] == DecodeStep(session=1, epoch=0, pos_start=22)


def test_who_replays_all_tokens_leaves_at_once() -> None:
    d = Driver()
    d.add(1, 20, 2, restorable=21, outputs=(40, 41))
    d.send()
    d.complete()
    assert not d.running
    assert d.send() == []


def test_a_frame_full_of_decode_rows_takes_nothing_else() -> None:
    d = Driver(rows=4, chunk=8)
    d.start_decoding(6)
    d.add(10, 100, 1)
    assert steps_of(d.send()) == [(i, 1) for i in range(4)]
    assert steps_of(d.send()) == [(10, 4)], "no stream is ready"
    d.complete()
    d.complete()
    assert [name for name, _ in steps_of(d.send())][:2] == [4, 5], "who was left out comes first"


@pytest.mark.parametrize(
    ("stages", "sessions", "group", "groups", "share"),
    [
        (1, 8, 1, 1, 8),
        (2, 8, 4, 2, 4),
        (2, 7, 4, 1, 7),
        (3, 9, 3, 3, 3),
        (3, 10, 3, 3, 4),
        (4, 9, 4, 2, 5),
        (4, 3, 1, 3, 1),
        (2, 1, 4, 1, 1),
        (2, 4, 1, 2, 2),
        (2, 5, 1, 2, 3),
        (4, 1, 1, 1, 1),
    ],
)
def test_streams_are_spread_over_as_many_frames_as_it_is_worth(
    stages: int, sessions: int, group: int, groups: int, share: int
) -> None:
    d = Driver(stages, group=group)
    d.start_decoding(sessions)
    assert d.scheduler.groups == groups
    sizes = []
    while picks := d.send():
        sizes.append(len(picks))
    assert len(sizes) == groups
    assert max(sizes) == sizes[0] == share
    assert sum(sizes) == sessions
    for _ in range(40):
        d.complete()
        d.send()
    assert len(d.in_flight) == groups, "groups stay apart"
    assert max(map(len, d.in_flight)) - min(map(len, d.in_flight)) <= groups


def test_nobody_decodes_before_the_prompt_is_done() -> None:
    d = Driver(chunk=8, credits=1)
    d.add(1, 20, 3)
    kinds = []
    while d.running:
        picks = d.send()
        kinds += [type(step) for _, step in picks]
        d.complete()
    assert kinds == [PrefillStep] * 3 + [DecodeStep] * 2


@given(st.data())
def test_any_history_keeps_to_the_budgets_and_starves_nobody(data: st.DataObject) -> None:
    draw = data.draw
    stages = draw(st.integers(1, 4))
    d = Driver(
        stages,
        chunk=draw(st.integers(1, 9)),
        credits=draw(st.integers(0, 3)),
        rows=draw(st.integers(1, 24)),
        group=draw(st.integers(1, 4)),
        bound=draw(st.integers(0, 9)),
    )
    most = stages + draw(st.integers(1, 3)) - 1
    for name in range(1, draw(st.integers(1, 25))):
        match draw(st.sampled_from(["add", "add", "send", "complete", "remove"])):
            case "add":
                n_prompt, outputs = draw(st.integers(1, 30)), draw(st.lists(st.integers(0, 9), max_size=4))
                restorable = draw(st.integers(-1, n_prompt + 4))
                d.add(name, n_prompt, draw(st.integers(1, 6)), restorable, outputs)
            case "send" if len(d.in_flight) < most:
                d.send()
            case "complete" if d.in_flight:
                d.complete()
            case "remove" if d.running:
                d.remove(draw(st.sampled_from(list(d.running.values()))))
    work = sum(len(s.request.prompt) + s.request.max_tokens for s in d.running.values())
    for _ in range(2 * work + 2 * most):
        while len(d.in_flight) < most and d.send():
            pass
        if not d.in_flight:
            break
        d.complete()
    assert not d.running


# What the spec says by example (12.13).


def test_a_session_is_in_a_frame_at_most_once() -> None:
    """Batch selection: queue A, A, B with room for 3."""
    d = Driver(rows=3, chunk=1)
    d.add(1, 3, 1)
    d.add(2, 1, 1)
    assert steps_of(d.send()) == [(1, 1), (2, 1)]
    assert steps_of(d.send()) == [(1, 2)]


def test_sessions_that_are_queued_travel_together() -> None:
    """Continuous batching; it cannot be switched off."""
    d = Driver()
    d.start_decoding(2)
    assert steps_of(d.send()) == [(0, 1), (1, 1)]
    d = Driver()
    d.add(1, 3, 1)
    d.add(2, 4, 1)
    assert steps_of(d.send()) == [(1, 3), (2, 4)]


def test_the_token_budget_splits_what_is_queued() -> None:
    """8 sessions of 128 tokens and a budget of 512: 4 go, 4 are left."""
    d = Driver(rows=512, chunk=128, bound=0)
    for name in range(8):
        d.add(name, 128, 1)
    assert steps_of(d.send()) == [(i, 128) for i in range(4)]
    assert steps_of(d.send()) == [(i, 128) for i in range(4, 8)]
    assert d.send() == []


def test_prefill_and_decode_share_frames_and_neither_waits_for_the_other() -> None:
    """Fairness: where the spec lets the two kinds of work take turns, both are in every frame."""
    d = Driver(rows=64, chunk=8, bound=8, credits=2)
    d.start_decoding(3)
    d.add(10, 400, 1)
    for start in range(0, 160, 8):
        picks = d.send()
        assert steps_of(picks) == [(0, 1), (1, 1), (2, 1), (10, 8)] or start == 0
        assert picks[-1][1] == PrefillStep(session=10, epoch=0, pos_start=start, rows=8)
        d.complete()


def test_however_many_streams_there_are_a_prompt_gets_its_turn() -> None:
    d = Driver(rows=4, chunk=8, bound=2)
    d.start_decoding(9)
    session = d.add(10, 20, 1)
    frames = 0
    while session.id in d.running:
        d.send()
        d.send()
        while d.in_flight:
            d.complete()
        frames += 2
    assert frames <= 30
