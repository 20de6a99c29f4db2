"""Reuse never changes what is generated: every kind of hit against the cold text, over whole deployments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_orchestrator.deployment import (
    LimitsSection,
    PrefillSection,
    PrefixCacheSection,
    SchedulerSection,
)
from skippy_orchestrator.prefix.outcome import CacheStatus, HitKind
from skippy_stage.errors import Cancelled, Unavailable
from skippy_stage.protocol import PrefillStep, ProbeStep, RestoreStep, SamplingParams, rows_of

from tests.orchestrator.simulation import Seen, Simulation
from tests.scripted import RecurrentEngine, ScriptedEngine, cut, reference

BLOCK = 4
ON = PrefixCacheSection(min_tokens=1, stride_tokens=4)
NO_REPLAY = PrefixCacheSection(min_tokens=1, stride_tokens=4, replay_tokens=0)
PROMPT = [(7 * i + 3) % 251 for i in range(30)]


def run(sim: Simulation, session: int, prompt: list[int], count: int = 6, **options: object) -> Seen:
    """One generation from start to end; its text is checked against the reference."""
    seen = sim.submit(session, prompt, count, **options)  # type: ignore[arg-type]
    sim.check_empty()
    params = options.get("sampling")
    assert seen.error is None, seen.error
    assert seen.tokens == reference(prompt, count, params)  # type: ignore[arg-type]
    assert seen.cache is not None
    return seen


def rows_since(sim: Simulation, mark: int) -> list[int]:
    """Rows of every frame that stage 0 has got since then, frames without rows left out."""
    rows = [sum(map(rows_of, h.steps)) for stage, h in sim.headers[mark:] if stage == 0]
    return [count for count in rows if count]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_same_prompt_again_computes_one_row_and_the_same_text(stages: int) -> None:
    sim = Simulation(stages, prefix=NO_REPLAY)
    cold = run(sim, 1, PROMPT)
    assert cold.cache is not None
    assert (cold.cache.status, cold.cache.cached_prompt_tokens) == (CacheStatus.MISS, 0)
    mark = len(sim.headers)
    warm = run(sim, 2, PROMPT)
    assert warm.cache is not None
    assert (warm.cache.status, warm.cache.hit_kind) == (CacheStatus.HIT, HitKind.FUSED_EXACT_PREFIX)
    assert warm.cache.cached_prompt_tokens == 29
    assert warm.cache.hit_stage_count == stages
    assert rows_since(sim, mark) == [1] * 6, "at least one token is computed, and no more"
    fused = next(h for stage, h in sim.headers[mark:] if stage == 0 and h.steps and rows_of(h.steps[-1]) == 1)
    assert isinstance(fused.steps[0], RestoreStep), "restore and first decode share a frame"


def test_known_output_is_replayed_without_computing_it() -> None:
    sim = Simulation(2, prefix=ON)
    run(sim, 1, PROMPT, 12)
    mark = len(sim.headers)
    warm = run(sim, 2, PROMPT, 12)
    assert warm.cache is not None
    assert warm.cache.hit_kind is HitKind.EXACT_REPLAY
    assert (warm.cache.cached_prompt_tokens, warm.cache.restored_tokens) == (30, 37)
    assert rows_since(sim, mark) == [1] * 4, "8 of 12 tokens are served from the cache"
    mark = len(sim.headers)
    short = run(sim, 3, PROMPT, 5)
    assert rows_since(sim, mark) == []
    assert short.finish_reason == "length"
    assert sim.history.counters.replayed_tokens == 13


def test_one_known_token_is_the_first_token_of_a_full_prompt() -> None:
    sim = Simulation(2, prefix=ON)
    run(sim, 1, PROMPT, 1)
    warm = run(sim, 2, PROMPT, 6)
    assert warm.cache is not None
    assert warm.cache.hit_kind is HitKind.FULL_PROMPT_FIRST_TOKEN
    assert warm.cache.cached_prompt_tokens == 30


@pytest.mark.parametrize("length", [*range(1, 14), 27, 28, 29])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_prefix_of_every_length_around_a_block_edge(stages: int, length: int) -> None:
    sim = Simulation(stages, prefix=NO_REPLAY)
    run(sim, 1, PROMPT)
    other = [*PROMPT[:length], 249, 248, 247, 246]
    warm = run(sim, 2, other)
    assert warm.cache is not None
    assert warm.cache.hit_kind is HitKind.PREFIX
    assert warm.cache.cached_prompt_tokens == length
    again = run(sim, 3, PROMPT)
    assert again.cache is not None
    assert again.cache.cached_prompt_tokens == 29, "another prompt's tail must not have changed the record"


def test_the_next_turn_of_a_chat_restores_the_answer_too() -> None:
    sim = Simulation(2, prefix=NO_REPLAY)
    first = run(sim, 1, PROMPT, 9)
    turn = [*PROMPT, *first.tokens, 11, 12, 13]
    second = run(sim, 2, turn)
    assert second.cache is not None
    # The last answer token was sampled and never computed.
    assert second.cache.cached_prompt_tokens == 30 + 8
    unrecorded = Simulation(2, prefix=PrefixCacheSection(min_tokens=1, replay_tokens=0, record_output=False))
    run(unrecorded, 1, PROMPT, 9)
    second = run(unrecorded, 2, turn)
    assert second.cache is not None
    assert second.cache.cached_prompt_tokens == 30


def test_prompts_of_equal_length_with_another_middle_do_not_mix() -> None:
    sim = Simulation(2, prefix=ON)
    other = [*PROMPT[:13], 200, *PROMPT[14:]]
    run(sim, 1, PROMPT)
    warm = run(sim, 2, other)
    assert warm.cache is not None
    assert warm.cache.cached_prompt_tokens == 13
    for session in (3, 4):
        run(sim, session, PROMPT)
        run(sim, session + 10, other)


def test_seeds_and_keys_share_what_they_may_and_nothing_more() -> None:
    sim = Simulation(2, prefix=ON)
    hot = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]
    first = run(sim, 1, PROMPT, sampling=hot[0])
    second = run(sim, 2, PROMPT, sampling=hot[1])
    assert second.cache is not None
    assert first.tokens != second.tokens
    assert second.cache.hit_kind is HitKind.FUSED_EXACT_PREFIX, "KV does not depend on the seed, output does"
    again = run(sim, 3, PROMPT, sampling=hot[0])
    assert again.cache is not None
    assert again.cache.hit_kind is HitKind.EXACT_REPLAY
    keyed = run(sim, 4, PROMPT, sampling=hot[0], cache_key="tenant")
    assert keyed.cache is not None
    assert keyed.cache.status is CacheStatus.MISS
    drawn = run(sim, 5, PROMPT, sampling=hot[0], seeded=False)
    assert drawn.cache is not None
    assert drawn.cache.hit_kind is HitKind.FUSED_EXACT_PREFIX, (
        "a drawn seed's output is neither kept nor used"
    )


def test_a_hit_on_one_stage_and_a_miss_on_another_is_a_miss() -> None:
    """I16; and what stage 0 knows of the first chunk spares it the compute all the same (spec 4.9)."""
    sim = Simulation(2, prefix=NO_REPLAY, activation_bytes=1 << 20)
    run(sim, 1, PROMPT)
    sim.forget(1)
    mark = len(sim.engines[0].batches), len(sim.engines[1].batches)
    warm = run(sim, 2, PROMPT)
    assert warm.cache is not None
    assert (warm.cache.status, warm.cache.cached_prompt_tokens) == (CacheStatus.MISS, 0)
    rows = [
        sum(s.rows for b in e.batches[m:] for s in b.sequences)
        for e, m in zip(sim.engines, mark, strict=True)
    ]
    assert rows == [22 + 5, 30 + 5], "the first chunk of 8 was not computed again on stage 0"
    assert sim.runtimes[0].status().prefix.activation_hits == 1


def test_while_another_session_extends_the_same_prefix() -> None:
    sim = Simulation(2, prefix=NO_REPLAY)
    run(sim, 1, PROMPT)
    seen = {i: sim.submit(i, PROMPT, 20) for i in (2, 3, 4)}
    for step in range(8):
        sim.advance(step % 2)
    seen[5] = sim.submit(5, [*PROMPT[:26], 1, 2, 3], 20)
    seen[6] = sim.submit(6, PROMPT, 20)
    sim.check_empty()
    for i, result in seen.items():
        expected = reference(PROMPT if i != 5 else [*PROMPT[:26], 1, 2, 3], 20)
        assert result.tokens == expected


def test_shared_prefixes_count_once_so_more_sessions_run() -> None:
    """A session takes 9 blocks, 7 of them shared: five take 17 together, where two would take 18 alone."""
    sim = Simulation(2, prefix=NO_REPLAY, blocks=24)
    prompt = PROMPT[:29]
    run(sim, 1, prompt, 7)
    seen = [sim.submit(i, prompt, 7) for i in range(2, 7)]
    most = 0
    while not all(s.ended for s in seen):
        assert sim.advance(0) | sim.advance(1)
        sim.core.check_integrity()
        most = max(most, sim.core.active)
    sim.check_empty()
    assert most == 5, "without sharing only two would fit"
    assert all(s.tokens == reference(prompt, 7) for s in seen)


def test_after_eviction_the_prompt_is_computed_again() -> None:
    sim = Simulation(2, prefix=ON, blocks=12)
    run(sim, 1, PROMPT)
    for i, first in enumerate((100, 120, 140), start=2):
        run(sim, i, [first, *PROMPT[1:]])
    assert all(runtime.status().prefix.evicted for runtime in sim.runtimes)
    run(sim, 9, PROMPT)


def test_a_prompt_that_nobody_recorded_is_not_probed() -> None:
    sim = Simulation(2, prefix=PrefixCacheSection(min_tokens=8))
    run(sim, 1, PROMPT)
    run(sim, 2, [5, *PROMPT])
    run(sim, 3, PROMPT[:7])
    assert not any(isinstance(s, ProbeStep) for _, h in sim.headers for s in h.steps)
    run(sim, 4, PROMPT)
    assert any(isinstance(s, ProbeStep) for _, h in sim.headers for s in h.steps)


def test_modes() -> None:
    for mode, status in (("disabled", CacheStatus.DISABLED), ("record", CacheStatus.MISS)):
        sim = Simulation(2, prefix=PrefixCacheSection(mode=mode, min_tokens=1))  # type: ignore[arg-type]
        for session in (1, 2):
            seen = run(sim, session, PROMPT)
            assert seen.cache is not None
            assert seen.cache.status is status
        recorded = sim.runtimes[0].status().prefix.recorded_tokens
        assert (recorded > 0) == (mode == "record")


@pytest.mark.parametrize("progress", range(14))
def test_cancel_at_any_moment_of_a_restore_frees_everything(progress: int) -> None:
    sim = Simulation(2, prefix=ON)
    run(sim, 1, PROMPT)
    seen = sim.submit(2, [*PROMPT[:20], 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 6)
    for i in range(progress):
        sim.advance(i % 2)
    if not seen.ended:
        sim.cancel(2)
        assert isinstance(seen.error, Cancelled)
    sim.check_empty()
    run(sim, 3, PROMPT)


@pytest.mark.parametrize("payload", ["auto", "full-state", "kv-recurrent"])
@pytest.mark.parametrize("exact", [False, True])
def test_exact_states_are_restored_only_where_they_were_recorded(payload: str, exact: bool) -> None:
    """Models whose state can't be cut (spec 3.4): chunks end on the lengths worth keeping."""
    prefix = PrefixCacheSection(payload=payload, min_tokens=4, stride_tokens=4, record_limit=3)  # type: ignore[arg-type]
    sim = Simulation(2, prefix=prefix, engines=cut(2, RecurrentEngine if exact else ScriptedEngine))
    run(sim, 1, PROMPT)
    ends = [
        s.pos_start + s.rows
        for st, h in sim.headers
        if st == 0
        for s in h.steps
        if isinstance(s, PrefillStep)
    ]
    warm = run(sim, 2, PROMPT, 10)
    assert warm.cache is not None
    assert warm.cache.status is CacheStatus.HIT
    if payload == "auto" and not exact:
        return
    assert 24 in ends, "the shared checkpoint: 29 rounded down to 28, and one stride less"
    other = run(sim, 3, [*PROMPT[:26], 1, 2, 3, 4])
    assert other.cache is not None
    assert other.cache.cached_prompt_tokens in ends
    assert 0 < other.cache.cached_prompt_tokens <= 26


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_and_evictions_gives_the_reference(data: st.DataObject) -> None:
    """Random prompts with common parts, chunk policies, credits, cancels and tiny KV budgets."""
    draw = data.draw
    stages = draw(st.integers(1, 3))
    policy = draw(st.sampled_from(["fixed", "schedule", "adaptive-ramp"]))
    exact = draw(st.booleans())
    sim = Simulation(
        stages,
        scheduler=SchedulerSection(
            max_frame_rows=draw(st.integers(1, 24)),
            max_sessions=draw(st.integers(1, 6)),
            frames_per_link=draw(st.integers(1, 3)),
            min_group_rows=draw(st.integers(1, 4)),
            prefill_rows_while_decoding=draw(st.integers(0, 8)),
        ),
        prefill=PrefillSection(
            policy=policy,
            schedule="2,5,3" if policy == "schedule" else "",
            chunk_tokens=draw(st.integers(1, 9)),
            adaptive_start=2,
            adaptive_step=2,
            adaptive_max=8,
            credits=draw(st.integers(0, 3)),
        ),
        limits=LimitsSection(max_queue=4, queue_timeout_s=1000),
        blocks=draw(st.integers(12, 40)),
        prefix=PrefixCacheSection(
            min_tokens=draw(st.integers(1, 6)),
            stride_tokens=draw(st.integers(1, 8)),
            record_limit=draw(st.integers(0, 4)),
            max_entries=draw(st.integers(1, 6)),
            replay_tokens=draw(st.integers(0, 8)),
            record_output=draw(st.booleans()),
        ),
        activation_bytes=draw(st.sampled_from([0, 400, 1 << 20])),
        engines=cut(stages, RecurrentEngine) if exact else None,
    )
    stems = [draw(st.lists(st.integers(0, 250), min_size=1, max_size=14)) for _ in range(2)]
    asked: dict[int, tuple[list[int], int, SamplingParams]] = {}
    cancelled: set[int] = set()
    for session in range(1, draw(st.integers(1, 40))):
        match draw(
            st.sampled_from(["submit", "submit", "advance", "advance", "advance", "cancel", "forget", "run"])
        ):
            case "submit":
                stem = draw(st.sampled_from(stems))
                tail = draw(st.lists(st.integers(0, 3), max_size=6))
                prompt = [*stem[: draw(st.integers(1, len(stem)))], *tail]
                params = draw(
                    st.sampled_from([SamplingParams(), SamplingParams(temperature=0.7, seed=3, top_k=40)])
                )
                asked[session] = (prompt, draw(st.integers(1, 12)), params)
                key = draw(st.sampled_from(["", "", "other"]))
                sim.submit(session, prompt, asked[session][1], sampling=params, cache_key=key)
            case "advance":
                for _ in range(draw(st.integers(1, 6))):
                    sim.advance(draw(st.integers(0, stages - 1)))
            case "cancel" if asked:
                victim = draw(st.sampled_from(sorted(asked)))
                cancelled.add(victim)
                sim.cancel(victim)
            case "forget" if not sim.core.active:
                sim.run()
                sim.forget(draw(st.integers(0, stages - 1)))
            case "run":
                sim.run()
        sim.core.check_integrity()
    sim.check_empty()
    for session, (prompt, count, params) in asked.items():
        seen = sim.seen[session]
        assert seen.ended
        expected = reference(prompt, count, params)
        if seen.error is None:
            assert seen.tokens == expected
            assert seen.cache is not None
            assert seen.cache.cached_prompt_tokens <= len(prompt)
        else:
            assert isinstance(seen.error, Cancelled | Unavailable)
            assert isinstance(seen.error, Unavailable) or session in cancelled
            assert seen.tokens == expected[: len(seen.tokens)]
