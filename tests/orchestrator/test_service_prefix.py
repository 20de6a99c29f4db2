"""The service with stages that keep prefixes: what clients and operators see, and what outlives a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.prefix.outcome import CacheStats, CacheStatus, HitKind

from tests.orchestrator.serving import Serving, serving, wait_until
from tests.scripted import reference

ON: dict[str, Any] = {"prefix": PrefixCacheSection(min_tokens=4), "blocks": 2048, "block_tokens": 4}
PROMPT = [(5 * i + 2) % 251 for i in range(30)]


def generate(s: Serving, prompt: list[int] = PROMPT, count: int = 12, *, stream: bool = True) -> CacheStats:
    """One generation; its text is checked against the reference."""
    client = s.submit(prompt, count, stream=stream)
    assert client.finish() == "length"
    assert client.tokens == reference(prompt, count)
    assert [span.cache is not None for span in client.spans] == [span.final for span in client.spans]
    cache = client.spans[-1].cache
    assert cache is not None
    s.wait_free()
    return cache


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_prompt_that_comes_again_is_a_hit_and_the_last_span_says_so(stages: int, stream: bool) -> None:
    with serving(stages, **ON) as s:
        assert generate(s, stream=stream).status is CacheStatus.MISS
        warm = generate(s, stream=stream)
        assert (warm.status, warm.hit_kind) == (CacheStatus.HIT, HitKind.EXACT_REPLAY)
        assert (warm.cached_prompt_tokens, warm.hit_stage_count) == (30, stages)
        assert warm.prompt_ms >= warm.restore_ms >= 0
        status = s.service.status()
    counters = status["counters"]
    assert (counters["prefix_queries"], counters["prefix_hits"], counters["hits_exact_replay"]) == (1, 1, 1)
    assert (counters["cached_tokens"], counters["replayed_tokens"]) == (30, 8)
    assert counters["prompt_tokens"] == 60
    for stage in status["stages"]:
        assert stage["prefix"]["payload"] == "resident-kv"


def test_stages_that_keep_nothing_are_not_asked() -> None:
    with serving(2) as s:
        for _ in range(2):
            cache = generate(s)
            assert (cache.status, cache.cached_prompt_tokens) == (CacheStatus.DISABLED, 0)
        assert s.service.status()["counters"]["prefix_queries"] == 0


def start_anew(s: Serving) -> None:
    """A frame is answered with nonsense: the pipeline ends, the stages live on."""
    before = s.service.status()["incarnation"]
    s.stages[1].garbled = True
    assert "INTERNAL: stage_1" in s.submit([1, 2], 5).finish()
    s.stages[1].heal()
    wait_until(lambda: s.service.status()["incarnation"] not in (0, before), "it starts anew")
    s.wait_ready()


def test_prefixes_counters_and_known_output_outlive_a_pipeline() -> None:
    with serving(2, **ON) as s:
        generate(s)
        before = s.service.status()["counters"]
        start_anew(s)
        assert generate(s).hit_kind is HitKind.EXACT_REPLAY
        after = s.service.status()["counters"]
        assert after["finished"] == before["finished"] + 1 == 2
        assert after["prompt_tokens"] == 60


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_stage_has_lost_is_computed_again(index: int) -> None:
    """One stage is a fresh process: it cannot restore, so nobody does, and the text is the same."""
    with serving(2, **ON) as s:
        generate(s)
        before = s.service.status()["incarnation"]
        s.stages[index].restart()
        wait_until(lambda: s.service.status()["incarnation"] not in (0, before), "it starts anew")
        s.wait_ready()
        cache = generate(s)
        assert (cache.status, cache.cached_prompt_tokens) == (CacheStatus.MISS, 0)
        assert s.service.status()["counters"]["prefix_queries"] == 1
        assert generate(s).status is CacheStatus.HIT


def test_cancelled_and_failed_requests_leave_no_lease() -> None:
    with serving(2, **ON) as s:
        generate(s)
        client = s.submit([*PROMPT, 7, 8, 9], 5000)
        client.wait_for_tokens(3)
        client.gone = True
        assert client.finish().startswith("CANCELLED")
        s.wait_free()
        wait_until(
            lambda: all(stage.local.status().prefix.leases == 0 for stage in s.stages), "leases are free"
        )
