"""Chunks of a prompt: they cover it exactly, in order, within their credits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefill import Chunk, FixedChunks, PrefillMachine, chunk_end


def machine(n_prompt: int, size: int = 4, credits: int = 2, start: int = 0) -> PrefillMachine:
    return PrefillMachine(n_prompt, FixedChunks(size), credits, start)


def chunks_of(n_prompt: int, size: int, room: int = 1000, start: int = 0) -> list[tuple[int, int, bool]]:
    """All chunks when each is done before the next."""
    prefill = machine(n_prompt, size, 1, start)
    chunks: list[tuple[int, int, bool]] = []
    while (chunk := prefill.next_chunk(room)) is not None:
        prefill.dispatched(chunk)
        prefill.left_first_stage()
        prefill.completed()
        chunks.append(tuple(chunk))  # type: ignore[arg-type]
    assert prefill.done
    return chunks


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
def test_chunks(
    n_prompt: int, size: int, room: int, start: int, expected: list[tuple[int, int, bool]]
) -> None:
    assert chunks_of(n_prompt, size, room, start) == expected


@pytest.mark.parametrize(("n_prompt", "start"), [(0, 0), (3, 3), (3, 4), (3, -1)])
def test_a_prefill_of_nothing_is_a_bug(n_prompt: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"prefill of {n_prompt} tokens from position {start}"):
        machine(n_prompt, start=start)


@pytest.mark.parametrize(
    ("position", "size", "total", "boundary", "end"),
    [
        (0, 4, 10, None, 4),
        (8, 4, 10, None, 10),
        (0, 4, 10, 3, 3),
        (3, 4, 10, 3, 7),
        (2, 4, 10, 6, 6),
        (2, 4, 10, 7, 6),
        (8, 4, 10, 20, 10),
    ],
)
def test_chunk_end(position: int, size: int, total: int, boundary: int | None, end: int) -> None:
    assert chunk_end(position, size, total, boundary) == end


def test_credits_return_when_a_chunk_leaves_the_first_stage() -> None:
    prefill = machine(30, credits=2)
    for _ in range(2):
        chunk = prefill.next_chunk(9)
        assert chunk is not None
        prefill.dispatched(chunk)
    assert prefill.next_chunk(9) is None
    prefill.left_first_stage()
    assert prefill.next_chunk(9) == Chunk(8, 12, sample=False)


def test_lock_step_waits_for_the_end_of_the_pipeline() -> None:
    prefill = machine(30, credits=0)
    chunk = prefill.next_chunk(9)
    assert chunk is not None
    prefill.dispatched(chunk)
    prefill.left_first_stage()
    assert prefill.next_chunk(9) is None
    prefill.completed()
    assert prefill.next_chunk(9) == Chunk(4, 8, sample=False)


def test_asking_changes_nothing_and_no_room_is_no_chunk() -> None:
    prefill = machine(30)
    assert prefill.next_chunk(0) is None
    assert prefill.next_chunk(9) == prefill.next_chunk(9) == Chunk(0, 4, sample=False)
    with pytest.raises(ValueError, match="chunk from 4, expected 0"):
        prefill.dispatched(Chunk(4, 8, sample=False))


def test_the_size_may_differ_from_chunk_to_chunk() -> None:
    class Growing:
        def chunk_size(self, index: int, total: int) -> int:
            assert total == 20
            return index + 1

    prefill = PrefillMachine(21, Growing(), credits=64)
    rows = []
    while (chunk := prefill.next_chunk(100)) is not None:
        prefill.dispatched(chunk)
        rows.append(chunk.rows)
    assert rows == [1, 2, 3, 4, 5, 6]


@given(st.data())
def test_any_order_of_events_covers_the_prompt_exactly_within_the_credits(data: st.DataObject) -> None:
    n_prompt, size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 12))
    credits, start = data.draw(st.integers(0, 3)), data.draw(st.integers(0, n_prompt - 1))
    prefill = machine(n_prompt, size, credits, start)
    at_stage_0: list[Chunk] = []
    beyond: list[Chunk] = []
    covered: list[int] = []
    while not prefill.done:
        room = data.draw(st.integers(1, 14))
        chunk = prefill.next_chunk(room)
        must_wait = at_stage_0 or beyond if credits == 0 else len(at_stage_0) == credits
        assert (chunk is None) == bool(must_wait or len(covered) == n_prompt - start)
        events = ["dispatch"] * (chunk is not None) + ["leave"] * bool(at_stage_0) + ["done"] * bool(beyond)
        match data.draw(st.sampled_from(events)):
            case "dispatch":
                assert chunk is not None
                prefill.dispatched(chunk)
                at_stage_0.append(chunk)
                covered += range(chunk.start, chunk.end)
                assert chunk.rows <= room
                assert chunk.rows <= size + chunk.sample
                assert chunk.sample == (chunk.end == n_prompt)
            case "leave":
                beyond.append(at_stage_0.pop(0))
                prefill.left_first_stage()
            case "done":
                beyond.pop(0)
                prefill.completed()
        prefill.check_integrity()
    assert covered == list(range(start, n_prompt))
