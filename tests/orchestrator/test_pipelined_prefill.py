"""A long prompt keeps every stage busy; running streams don't wait for it longer than the bound says."""

from __future__ import annotations

import pytest
from skippy_orchestrator.deployment import PrefillSection, SchedulerSection
from skippy_stage.protocol import DecodeStep, PrefillStep, rows_of

from tests.orchestrator.simulation import Simulation
from tests.scripted import reference

PROMPT = [(11 * i + 5) % 251 for i in range(161)]


def simulation(stages: int, credits: int, **options: object) -> Simulation:
    return Simulation(
        stages,
        prefill=PrefillSection(policy="fixed", chunk_tokens=8, credits=credits),
        scheduler=SchedulerSection(**options),  # type: ignore[arg-type]
    )


def ticks(sim: Simulation) -> list[int]:
    """Let every stage that has a frame execute it, all at the same time; how many did, tick by tick."""
    busy: list[int] = []
    while not sim.core.idle:
        with_frame = [stage for stage, runtime in enumerate(sim.runtimes) if runtime.status().pending]
        for stage in with_frame:
            sim.advance(stage)
        busy.append(len(with_frame))
    return busy


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_long_prompt_keeps_all_stages_busy(stages: int) -> None:
    sim = simulation(stages, credits=3)
    sim.pump()
    ticks(sim)
    seen = sim.submit(1, PROMPT, 1)
    busy = ticks(sim)
    assert seen.tokens == reference(PROMPT, 1)
    chunks = 20
    assert busy[stages - 1 : chunks] == [stages] * (chunks - stages + 1), busy
    # The last frame carries the session's end.
    assert len(busy) <= chunks + 2 * stages


@pytest.mark.parametrize("stages", [2, 3])
def test_lock_step_keeps_one_stage_busy(stages: int) -> None:
    sim = simulation(stages, credits=0)
    sim.pump()
    ticks(sim)
    seen = sim.submit(1, PROMPT, 1)
    busy = ticks(sim)
    assert seen.tokens == reference(PROMPT, 1)
    assert set(busy) == {1}
    assert len(busy) == 20 * stages + stages
    counters = sim.history.counters
    assert (counters.prefill_chunks, counters.credit_waits, counters.credits_max) == (20, 19, 0)


def test_credits_are_counted() -> None:
    sim = simulation(2, credits=1)
    sim.pump()
    ticks(sim)
    sim.submit(1, PROMPT, 1)
    ticks(sim)
    counters = sim.history.counters
    assert (counters.prefill_chunks, counters.credits_max, counters.credit_drains) == (20, 1, 1)
    assert counters.credit_waits == 19
    assert counters.credit_wait_ms > 0


@pytest.mark.parametrize(("bound", "most"), [(8, 8), (3, 3), (0, 64)])
def test_no_frame_takes_more_prefill_rows_than_the_bound_while_streams_run(bound: int, most: int) -> None:
    sim = Simulation(
        2,
        prefill=PrefillSection(policy="fixed", chunk_tokens=40),
        scheduler=SchedulerSection(max_frame_rows=64, prefill_rows_while_decoding=bound),
    )
    running = sim.submit(1, [1, 2], 200)
    while len(running.tokens) < 3:
        sim.advance(0)
        sim.advance(1)
    mark = len(sim.headers)
    sim.submit(2, PROMPT, 1)
    sim.submit(3, PROMPT[1:], 1)
    while not (sim.seen[2].ended and sim.seen[3].ended):
        sim.advance(0)
        sim.advance(1)
    assert not running.ended
    rows = [
        sum(rows_of(s) for s in h.steps if isinstance(s, PrefillStep))
        for stage, h in sim.headers[mark:]
        if stage == 0
    ]
    assert max(rows) <= most
    assert bound or max(rows) > 40, "without a bound a frame takes what it has room for"
    decodes = [
        any(isinstance(s, DecodeStep) for s in h.steps) for stage, h in sim.headers[mark:] if stage == 0
    ]
    gaps = "".join("d" if decoding else "." for decoding in decodes).split("d")
    assert max(map(len, gaps[:-1])) <= 2, "at most as many frames as the pipeline holds pass a stream"
    sim.check_empty()
    assert running.tokens == reference([1, 2], 200)
