"""Drives a prefill machine by hand."""

from __future__ import annotations

from skippy_orchestrator.prefill import Chunk, PrefillMachine, ScheduledPlanner


def machine(
    n_prompt: int, size: int = 4, credits: int = 2, start: int = 0, boundaries: tuple[int, ...] = ()
) -> PrefillMachine:
    return PrefillMachine(n_prompt, ScheduledPlanner((size,)), credits, start, boundaries)


def dispatch(prefill: PrefillMachine, now: float = 0.0, room: int = 1000) -> Chunk:
    chunk = prefill.next_chunk(room, now)
    assert chunk is not None
    prefill.dispatched(chunk, now)
    prefill.check_integrity()
    return chunk


def finish(prefill: PrefillMachine, chunk: Chunk, now: float = 0.0) -> None:
    prefill.left_first_stage(chunk.rows, 1.0, 0.0)
    prefill.credit_returned(now)
    prefill.completed()
    prefill.check_integrity()


def chunks_of(prefill: PrefillMachine, room: int = 1000) -> list[tuple[int, int, bool]]:
    """All chunks when each is done before the next."""
    chunks: list[Chunk] = []
    while not prefill.planned:
        chunks.append(dispatch(prefill, room=room))
        finish(prefill, chunks[-1])
    assert prefill.done
    return [(chunk.start, chunk.end, chunk.sample) for chunk in chunks]
