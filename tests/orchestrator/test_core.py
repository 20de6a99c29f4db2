"""The core against scripted stages: output, order, limits and what is left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_orchestrator.deployment import LimitsSection, PrefillSection, SchedulerSection
from skippy_stage.engines.base import Batch
from skippy_stage.errors import Cancelled, InvalidArgument, SkippyError, Unavailable
from skippy_stage.protocol import DecodeStep, PrefillStep, SamplingParams, rows_of

from tests.orchestrator.simulation import Simulation
from tests.scripted import cut, reference


def chunks_of(tokens: int, credits: int = 3) -> PrefillSection:
    return PrefillSection(policy="fixed", chunk_tokens=tokens, credits=credits)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("credits", [0, 1, 3])
def test_tokens_equal_the_reference_for_every_cut(stages: int, credits: int) -> None:
    sim = Simulation(stages, prefill=chunks_of(4, credits))
    prompt = list(range(1, 23))
    seen = sim.submit(1, prompt, 15)
    sim.check_empty()
    assert seen.tokens == reference(prompt, 15)
    assert seen.finish_reason == "length"
    assert sim.history.counters.prefill_chunks == 6


def test_one_token_prompt_and_one_token_answer() -> None:
    sim = Simulation()
    seen = sim.submit(1, [42], 1)
    sim.check_empty()
    assert seen.tokens == reference([42], 1)


def test_end_token_ends_and_is_not_output() -> None:
    expected = reference([5, 6], 10)
    sim = Simulation(end_tokens=frozenset({expected[4]}))
    first = expected.index(expected[4])
    seen = sim.submit(1, [5, 6], 10)
    ignoring = sim.submit(2, [5, 6], 10, ignore_eos=True)
    sim.check_empty()
    assert (seen.tokens, seen.finish_reason) == (expected[:first], "stop")
    assert (ignoring.tokens, ignoring.finish_reason) == (expected, "length")


def test_stop_string_tokens_count_but_its_text_does_not_show() -> None:
    expected = reference([5, 6], 10)
    sim = Simulation()
    first = expected.index(expected[4])
    seen = sim.submit(1, [5, 6], 10, stop=expected[4])
    sim.check_empty()
    assert seen.tokens == expected[: first + 1]
    assert len(seen.text) == first
    assert seen.finish_reason == "stop"


def test_seeded_sampling_is_the_same_alone_and_in_a_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    sim = Simulation()
    seen = [sim.submit(i, [9, 8, 7], 12, sampling=params) for i in range(5)]
    sim.check_empty()
    assert all(s.tokens == reference([9, 8, 7], 12, params) for s in seen)
    other = Simulation()
    different = other.submit(1, [9, 8, 7], 12, sampling=SamplingParams(temperature=1.0, seed=8))
    other.check_empty()
    assert different.tokens != seen[0].tokens


def test_sessions_share_frames_and_all_stages_work_at_once() -> None:
    sim = Simulation(2, scheduler=SchedulerSection(min_group_rows=2))
    for session in range(8):
        sim.submit(session, [session + 1], 30)
    sim.check_empty()
    decodes = [h for stage, h in sim.headers if stage == 0 for s in h.steps if isinstance(s, DecodeStep)]
    sizes = sorted(sum(isinstance(s, DecodeStep) for s in h.steps) for h in decodes)
    assert sizes[len(sizes) // 2] == 4, "eight sessions over two stages travel in two groups of four"
    assert sim.max_in_flight >= 2


def test_a_long_prompt_does_not_hold_up_running_streams() -> None:
    scheduler = SchedulerSection(max_frame_rows=64, prefill_rows_while_decoding=8)
    sim = Simulation(2, scheduler=scheduler, prefill=chunks_of(8))
    running = sim.submit(1, [1, 2], 60)
    while len(running.tokens) < 3:
        sim.advance(0)
        sim.advance(1)
    before = len(sim.headers)
    sim.submit(2, list(range(1, 200)), 1)
    sim.check_empty()
    mixed = [
        h
        for stage, h in sim.headers[before:]
        if stage == 0 and any(isinstance(s, PrefillStep) for s in h.steps)
    ]
    assert len(mixed) >= 24
    for header in mixed:
        assert sum(rows_of(s) for s in header.steps if isinstance(s, PrefillStep)) <= 8


def test_short_prompts_overtake_a_long_one() -> None:
    sim = Simulation(2, scheduler=SchedulerSection(max_frame_rows=8), prefill=chunks_of(8))
    long = sim.submit(1, list(range(1, 240)), 1)
    short = sim.submit(2, [3, 4, 5], 1)
    while not short.ended:
        assert sim.advance(0) | sim.advance(1)
    assert not long.ended
    sim.check_empty()


def test_frame_budget_is_never_exceeded() -> None:
    sim = Simulation(3, scheduler=SchedulerSection(max_frame_rows=10), prefill=chunks_of(7))
    for session in range(20):
        sim.submit(session, list(range(1, 30)), 9)
    sim.check_empty()
    assert max(sum(map(rows_of, h.steps)) for _, h in sim.headers) <= 10


def test_kv_reservations_make_requests_wait_and_no_stage_runs_out() -> None:
    sim = Simulation(2, blocks=16)
    seen = [sim.submit(i, [1, 2, 3], 13) for i in range(10)]
    assert sim.core.active == 4
    assert sim.core.waiting == 6
    sim.check_empty()
    assert all(s.tokens == reference([1, 2, 3], 13) for s in seen)


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    sim = Simulation(blocks=4)
    seen = sim.submit(1, [1] * 10, 7)
    assert isinstance(seen.error, InvalidArgument)
    assert "max_tokens: got 7, expected prompt and max_tokens of at most 16 together" in seen.error.message


def test_queue_is_bounded_and_times_out() -> None:
    limits = LimitsSection(max_queue=2, queue_timeout_s=5)
    sim = Simulation(scheduler=SchedulerSection(max_sessions=1), limits=limits)
    seen = [sim.submit(i, [1, 2], 50) for i in range(4)]
    assert isinstance(seen[3].error, Unavailable)
    assert "queue is full (2 waiting)" in seen[3].error.message
    sim.core.tick(4.9)
    sim.pump()
    assert not seen[1].ended
    sim.core.tick(5.0)
    sim.pump()
    assert isinstance(seen[1].error, Unavailable)
    assert isinstance(seen[2].error, Unavailable)
    sim.check_empty()
    assert seen[0].finish_reason == "length"


def test_the_first_frame_leaves_at_once_and_tells_every_stage_of_the_incarnation() -> None:
    sim = Simulation(3)
    sim.pump()
    sim.run()
    told = [(stage, header.frame, header.steps) for stage, header in sim.headers]
    assert told == [(0, 1, ()), (1, 1, ()), (2, 1, ())]
    sim.check_empty()


@pytest.mark.parametrize("progress", range(12))
def test_cancel_at_any_moment_frees_every_stage_in_the_next_frame(progress: int) -> None:
    sim = Simulation(2, prefill=chunks_of(4))
    seen = sim.submit(1, list(range(1, 14)), 10)
    other = sim.submit(2, [7, 7], 10)
    for i in range(progress):
        sim.advance(i % 2)
    assert not seen.ended, "too late to cancel"
    sim.cancel(1)
    assert isinstance(seen.error, Cancelled)
    later = [h for _, h in sim.headers if 1 in h.ended]
    sim.check_empty()
    assert other.tokens == reference([7, 7], 10)
    if later:
        steps_after = [
            s for _, h in sim.headers if h.frame > later[0].frame for s in h.steps if s.session == 1
        ]
        assert not steps_after


def test_cancel_of_a_waiting_request() -> None:
    sim = Simulation(scheduler=SchedulerSection(max_sessions=1))
    sim.submit(1, [1], 5)
    waiting = sim.submit(2, [1], 5)
    sim.cancel(2)
    assert isinstance(waiting.error, Cancelled)
    sim.check_empty()


def test_a_step_fails_alone_and_names_the_stage() -> None:
    """D-06: a stage fails one session at its third token; the others never notice."""
    engines = cut(3)

    def fault(batch: Batch) -> None:
        for rows in batch.sequences:
            if rows.sequence == 2 and rows.past >= 4:
                raise SkippyError("the device caught fire")

    engines[1].fault = fault
    sim = Simulation(engines=engines)
    seen = {i: sim.submit(i, [i, i + 1], 10) for i in (1, 2, 3)}
    sim.check_empty()
    assert seen[2].error is not None
    assert seen[2].error.message == "stage_1: the device caught fire"
    assert seen[2].tokens == reference([2, 3], 3)
    for i in (1, 3):
        assert seen[i].tokens == reference([i, i + 1], 10)
    again = sim.submit(9, [4, 4], 4)
    sim.check_empty()
    assert again.tokens == reference([4, 4], 4)


def test_pipeline_failure_ends_every_session_once() -> None:
    sim = Simulation(scheduler=SchedulerSection(max_sessions=2))
    seen = [sim.submit(i, [1, 2], 10) for i in range(3)]
    sim.advance(0)
    sim.core.fail_all(SkippyError("stage_1: gone"), 1.0, Unavailable("lost stage_1"))
    sim.pump()
    assert [type(s.error) for s in seen] == [SkippyError, SkippyError, Unavailable]
    assert sim.core.active == sim.core.waiting == 0


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_gives_the_reference_and_leaves_nothing(data: st.DataObject) -> None:
    draw = data.draw
    stages = draw(st.integers(1, 4))
    end = frozenset(draw(st.lists(st.integers(0, 250), max_size=3)))
    sim = Simulation(
        stages,
        scheduler=SchedulerSection(
            max_frame_rows=draw(st.integers(1, 24)),
            max_sessions=draw(st.integers(1, 6)),
            frames_per_link=draw(st.integers(1, 3)),
            min_group_rows=draw(st.integers(1, 4)),
            prefill_rows_while_decoding=draw(st.integers(0, 9)),
        ),
        prefill=draw(
            st.builds(chunks_of, st.integers(1, 9), st.integers(0, 3))
            | st.builds(
                PrefillSection,
                chunk_tokens=st.integers(1, 9),
                adaptive_start=st.integers(1, 3),
                adaptive_step=st.integers(1, 3),
                adaptive_max=st.integers(3, 9),
                adaptive_target_ms=st.sampled_from([0.5, 2.0, 100.0]),
                credits=st.integers(0, 3),
            )
        ),
        limits=LimitsSection(max_queue=3, queue_timeout_s=1000),
        blocks=draw(st.integers(12, 40)),
        end_tokens=end,
    )
    asked: dict[int, tuple[list[int], int, SamplingParams]] = {}
    cancelled: set[int] = set()
    for session in range(1, draw(st.integers(1, 30))):
        match draw(st.sampled_from(["submit", "submit", "advance", "advance", "advance", "cancel"])):
            case "submit":
                prompt = draw(st.lists(st.integers(0, 250), min_size=1, max_size=20))
                params = draw(
                    st.sampled_from([SamplingParams(), SamplingParams(temperature=0.7, seed=3, top_k=40)])
                )
                asked[session] = (prompt, draw(st.integers(1, 12)), params)
                sim.submit(session, prompt, asked[session][1], sampling=params)
            case "advance":
                for _ in range(draw(st.integers(1, 6))):
                    sim.advance(draw(st.integers(0, stages - 1)))
            case "cancel" if asked:
                victim = draw(st.sampled_from(sorted(asked)))
                cancelled.add(victim)
                sim.cancel(victim)
        sim.core.check_integrity()
    sim.check_empty()
    for session, (prompt, count, params) in asked.items():
        seen = sim.seen[session]
        assert seen.ended
        whole = reference(prompt, count, params)
        expected = whole[: next((i for i, token in enumerate(whole) if token in end), count)]
        if seen.error is None:
            assert seen.tokens == expected
            assert seen.finish_reason == ("length" if len(expected) == count else "stop")
        else:
            assert isinstance(seen.error, Cancelled | Unavailable)
            assert isinstance(seen.error, Unavailable) or session in cancelled
            assert seen.tokens == expected[: len(seen.tokens)]
