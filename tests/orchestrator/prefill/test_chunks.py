"""Chunks of a prompt, case by case: sizes, boundaries, and what the machine refuses."""

from __future__ import annotations

import pytest
from skippy_orchestrator.prefill import Chunk, PrefillMachine, ScheduledPlanner, chunk_end

from tests.orchestrator.prefill.drive import chunks_of, dispatch, machine


@pytest.mark.parametrize(
    ("position", "size", "total", "boundary", "end"),
    [
        (0, 1024, 1400, 768, 768),
        (768, 1024, 1400, 768, 1400),
        (0, 256, 1400, 768, 256),
        (256, 256, 1400, 768, 512),
        (512, 512, 1400, 768, 768),
        (0, 256, 100, None, 100),
        (96, 256, 100, None, 100),
        (0, 4, 10, None, 4),
        (8, 4, 10, 20, 10),
    ],
)
def test_chunk_end(position: int, size: int, total: int, boundary: int | None, end: int) -> None:
    assert chunk_end(position, size, total, boundary) == end


@pytest.mark.parametrize(
    ("n_prompt", "size", "room", "start", "expected"),
    [
        (1, 4, 9, 0, [(0, 1, True)]),
        (4, 4, 9, 0, [(0, 4, True)]),
        (5, 4, 9, 0, [(0, 5, True)]),
        (6, 4, 9, 0, [(0, 4, False), (4, 6, True)]),
        (9, 4, 9, 0, [(0, 4, False), (4, 9, True)]),
        (5, 4, 4, 0, [(0, 4, False), (4, 5, True)]),
        (3, 8, 1, 0, [(0, 1, False), (1, 2, False), (2, 3, True)]),
        (9, 4, 9, 6, [(6, 9, True)]),
        (9, 4, 9, 8, [(8, 9, True)]),
    ],
)
@pytest.mark.parametrize("credits", [0, 1, 3])
def test_chunks(
    n_prompt: int, size: int, room: int, start: int, credits: int, expected: list[tuple[int, int, bool]]
) -> None:
    assert chunks_of(machine(n_prompt, size, credits, start), room) == expected


@pytest.mark.parametrize(("n_prompt", "start"), [(0, 0), (3, 3), (3, 4), (3, -1)])
def test_a_prefill_of_nothing_is_a_bug(n_prompt: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"prefill of {n_prompt} tokens from position {start}"):
        machine(n_prompt, start=start)


def test_credits_below_zero_are_a_bug() -> None:
    with pytest.raises(ValueError, match="credits: got -1, expected at least 0"):
        machine(3, credits=-1)


def test_sizes_come_by_chunk_number_and_full_prefill() -> None:
    class Growing(ScheduledPlanner):
        asked: tuple[int, int] = (0, 0)

        def chunk_size(self, index: int, total: int) -> int:
            self.asked = (index, total)
            return index + 1

    planner = Growing((1,))
    prefill = PrefillMachine(21, planner, credits=64, start=5)
    rows = []
    for number in range(5):
        rows.append(dispatch(prefill).rows)
        assert planner.asked == (number, 20)
    assert rows == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("start", "boundaries", "expected"),
    [
        (0, (6,), [(0, 4, False), (4, 6, False), (6, 10, False), (10, 13, True)]),
        (0, (8, 2, 8, 3), [(0, 2, False), (2, 3, False), (3, 7, False), (7, 8, False), (8, 13, True)]),
        (0, (-1, 0, 13, 99), [(0, 4, False), (4, 8, False), (8, 13, True)]),
        (0, (11,), [(0, 4, False), (4, 8, False), (8, 11, False), (11, 13, True)]),
        (5, (3, 5, 6), [(5, 6, False), (6, 10, False), (10, 13, True)]),
        (12, (12,), [(12, 13, True)]),
        (0, (12,), [(0, 4, False), (4, 8, False), (8, 12, False), (12, 13, True)]),
        (5, (12, 13), [(5, 9, False), (9, 12, False), (12, 13, True)]),
        (10, (11, 12), [(10, 11, False), (11, 12, False), (12, 13, True)]),
        (11, (5, 11, 12), [(11, 12, False), (12, 13, True)]),
    ],
)
def test_chunks_end_at_boundaries_inside_the_prompt(
    start: int, boundaries: tuple[int, ...], expected: list[tuple[int, int, bool]]
) -> None:
    assert chunks_of(machine(13, 4, 2, start, boundaries)) == expected


@pytest.mark.parametrize(("n_prompt", "start"), [(1, 0), (13, 12)])
@pytest.mark.parametrize("boundaries", [(), (0,), (12,), (0, 12)])
def test_a_last_token_that_is_all_there_is_goes_as_it_would_anyway(
    n_prompt: int, start: int, boundaries: tuple[int, ...]
) -> None:
    assert chunks_of(machine(n_prompt, 4, 2, start, boundaries)) == [(start, n_prompt, True)]


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_boundary_before_the_last_token_holds_in_any_room(room: int) -> None:
    chunks = chunks_of(machine(8, 4, 2, 0, (7,)), room)
    assert chunks[-2][1] == 7
    assert chunks[-1] == (7, 8, True)


def test_what_was_not_planned_cannot_be_dispatched() -> None:
    prefill = machine(30, credits=1)
    with pytest.raises(ValueError, match="chunk from 4, expected 0"):
        prefill.dispatched(Chunk(4, 8, sample=False), 0.0)
    for end in (0, 31):
        with pytest.raises(ValueError, match=f"chunk to {end}, expected 1 to 30"):
            prefill.dispatched(Chunk(0, end, sample=False), 0.0)
    dispatch(prefill)
    with pytest.raises(ValueError, match="chunk from 4 without a credit"):
        prefill.dispatched(Chunk(4, 8, sample=False), 0.0)
    prefill.check_integrity()


def test_events_without_a_chunk_are_refused() -> None:
    prefill = machine(30)
    with pytest.raises(ValueError, match="a chunk of 4 rows left stage 0, expected none"):
        prefill.left_first_stage(4, 1.0, 1.0)
    with pytest.raises(ValueError, match="a credit returned that no chunk held"):
        prefill.credit_returned(0.0)
    with pytest.raises(ValueError, match="out of order: 0 in flight, 0 at stage 0, 0 credits out"):
        prefill.completed()
    dispatch(prefill)
    with pytest.raises(ValueError, match="a chunk of 3 rows left stage 0, expected 4"):
        prefill.left_first_stage(3, 1.0, 1.0)
    with pytest.raises(ValueError, match="out of order: 1 in flight, 1 at stage 0, 1 credits out"):
        prefill.completed()
    prefill.credit_returned(0.0)
    with pytest.raises(ValueError, match="out of order: 1 in flight, 1 at stage 0, 0 credits out"):
        prefill.completed()
    dispatch(prefill)
    for _ in range(2):
        prefill.left_first_stage(4, 1.0, 1.0)
    prefill.completed()
    with pytest.raises(ValueError, match="out of order: 1 in flight, 0 at stage 0, 1 credits out"):
        prefill.completed()
    with pytest.raises(ValueError, match="stage: got 0, expected at least 1"):
        prefill.observed_at_stage(0, 4, 1, 1, 1, 1)
    prefill.check_integrity()


def test_a_cancelled_prefill_can_be_dropped_at_any_time() -> None:
    prefill = machine(30, credits=2)
    prefill.check_integrity()
    dispatch(prefill)
    dispatch(prefill)
    assert prefill.next_chunk(9, 1.0) is None
    prefill.check_integrity()
    prefill.left_first_stage(4, 1.0, 1.0)
    prefill.check_integrity()
    prefill.credit_returned(2.0)
    prefill.completed()
    prefill.check_integrity()
    assert not prefill.done
