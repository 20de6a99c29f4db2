"""Putting chunks together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from skippy_client import Chunk, ServerFault
from skippy_client.collect import Collector


def chunk(text: str, ids: tuple[int, ...], reason: str = "") -> Chunk:
    return Chunk(text, ids, reason, 7, len(ids), 1)


def test_sum_and_times() -> None:
    collector = Collector(100.0)
    collector.add(chunk("", ()), 100.5)
    collector.add(chunk("a", (1,)), 101.0)
    assert not collector.finished
    collector.add(chunk("bc", (2, 3), "stop"), 103.0)
    collector.end()
    result = collector.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("abc", (1, 2, 3), "stop")
    assert (result.num_input_tokens, result.num_output_tokens, result.seed) == (7, 3, 1)
    assert (result.timings.ttft_s, result.timings.total_s) == (1.0, 3.0), (
        "a chunk without tokens isn't the first"
    )
    assert result.tokens_per_s == 1.0
    assert (result.cached_tokens, result.cache_stats) == (0, None)


def test_cache_record_is_the_last_chunk_s() -> None:
    stats = {"status": "hit", "hit_kind": "chain_prefix"}
    collector = Collector(0.0)
    collector.add(chunk("a", (1,)), 1.0)
    collector.add(replace(chunk("b", (2,), "stop"), cached_tokens=5, cache_stats=stats), 2.0)
    result = collector.result()
    assert (result.cached_tokens, result.cache_stats) == (5, stats)


def test_drafts_are_the_last_chunk_s() -> None:
    collector = Collector(0.0)
    collector.add(chunk("a", (1,)), 1.0)
    last = chunk("b", (2,), "stop")
    collector.add(replace(last, total_draft_tokens=4, total_accepted_draft_tokens=1), 2.0)
    result = collector.result()
    assert (result.total_draft_tokens, result.total_accepted_draft_tokens) == (4, 1)
    assert result.acceptance_rate == 0.25


def test_answer_without_tokens() -> None:
    collector = Collector(0.0)
    collector.add(chunk("", (), "stop"), 2.0)
    result = collector.result()
    assert (result.text, result.num_output_tokens, result.tokens_per_s) == ("", 0, None)
    assert result.timings.ttft_s == result.timings.total_s == 2.0


def test_end_before_the_last() -> None:
    collector = Collector(0.0)
    collector.add(chunk("a", (1,)), 1.0)
    with pytest.raises(ServerFault, match="finish_reason"):
        collector.end()


def test_response_after_the_last() -> None:
    collector = Collector(0.0)
    collector.add(chunk("a", (1,), "length"), 1.0)
    with pytest.raises(ServerFault, match="after the last"):
        collector.add(chunk("b", (2,), "length"), 2.0)
