"""Candidate lengths: the numbers of spec 12.14, and Appendix C of the spec as an oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefix.candidates import (
    exact_boundaries,
    exact_boundary,
    lookup_lengths,
    record_lengths,
    resident_budget,
    shared_checkpoint,
)


def oracle_lookup(tokens: int, minimum: int, stride: int) -> list[int]:
    """Appendix C, step by step as the text of 4.3 says it."""
    if tokens == 0:
        return []
    if minimum == 0 or tokens <= minimum:
        return [tokens]
    stride = min(max(stride, 1), max(minimum, 1))
    current = tokens - tokens % stride
    if current == tokens:
        current -= stride
    current = max(current, minimum)
    found = {tokens, current}
    while current != minimum:
        current = max(current - stride, minimum)
        found.add(current)
    return sorted(found, reverse=True)


def oracle_record(tokens: int, minimum: int, stride: int, limit: int, budget: int) -> list[int]:
    """Appendix C."""
    candidates = oracle_lookup(tokens, minimum, stride)
    if limit == 0 or len(candidates) <= limit:
        return candidates
    selected = [tokens]
    if limit == 1:
        return selected
    shared = [length for length in candidates if length != tokens]
    selected.append(shared[0])
    pinned, slots = 0, limit - 2
    low = max(min(max(minimum, 1), tokens), 1)
    for slot in range(1, slots + 1):
        target = round(low * (tokens / low) ** (slot / (slots + 1)))
        free = [length for length in shared if length not in selected]
        if not free:
            break
        pick = min(free, key=lambda length: abs(length - target))
        if budget and pinned + pick > budget:
            break
        pinned += pick
        selected.append(pick)
    return sorted(set(selected), reverse=True)


@pytest.mark.parametrize(
    ("tokens", "minimum", "stride", "expected"),
    [
        (160, 64, 32, (160, 128, 96, 64)),
        (63, 64, 32, (63,)),
        (64, 64, 32, (64,)),
        (65, 64, 32, (65, 64)),
        (350, 300, 128, (350, 300)),
        (300, 64, 128, (300, 256, 192, 128, 64)),
        (0, 64, 128, ()),
        (100, 0, 128, (100,)),
    ],
)
def test_lookup_grid(tokens: int, minimum: int, stride: int, expected: tuple[int, ...]) -> None:
    assert lookup_lengths(tokens, minimum, stride) == expected


def test_a_longer_prompt_probes_what_a_shorter_one_recorded() -> None:
    assert 2176 in lookup_lengths(2231, 256, 128)


@pytest.mark.parametrize(
    ("tokens", "minimum", "stride", "limit", "budget", "expected"),
    [
        (160, 64, 32, 2, 0, (160, 128)),
        (160, 64, 32, 0, 0, (160, 128, 96, 64)),
        (160, 64, 32, 1, 0, (160,)),
        (63, 64, 32, 2, 0, (63,)),
        (2214, 256, 128, 2, 0, (2214, 2176)),
        (350, 300, 128, 2, 0, (350, 300)),
        (8000, 256, 128, 2, 0, (8000, 7936)),
        (8000, 256, 128, 4, 0, (8000, 7936, 2560, 768)),
        (8000, 256, 128, 6, 0, (8000, 7936, 3968, 2048, 1024, 512)),
        (8000, 256, 128, 6, 4096, (8000, 7936, 2048, 1024, 512)),
        (200, 256, 128, 6, 0, (200,)),
        (12288, 256, 128, 2, 0, (12288, 12160)),
        (300, 64, 128, 2, 0, (300, 256)),
        (0, 64, 128, 2, 0, ()),
    ],
)
def test_record_ladder(
    tokens: int, minimum: int, stride: int, limit: int, budget: int, expected: tuple[int, ...]
) -> None:
    assert record_lengths(tokens, minimum, stride, limit, budget) == expected


@pytest.mark.parametrize(
    ("context", "budget"),
    [(768, 0), (4096, 0), (8191, 0), (8192, 4096), (16384, 8192), (131072, 65536)],
)
def test_resident_cap(context: int, budget: int) -> None:
    assert resident_budget(context) == budget


lengths = st.integers(0, 3000)
minimums = st.integers(0, 400)
strides = st.integers(0, 300)


@given(lengths, minimums, strides)
def test_lookups_are_those_of_the_appendix(tokens: int, minimum: int, stride: int) -> None:
    assert list(lookup_lengths(tokens, minimum, stride)) == oracle_lookup(tokens, minimum, stride)


@given(lengths, minimums, strides, st.integers(0, 12), st.integers(0, 9000))
def test_records_are_those_of_the_appendix(
    tokens: int, minimum: int, stride: int, limit: int, budget: int
) -> None:
    expected = oracle_record(tokens, minimum, stride, limit, budget)
    assert list(record_lengths(tokens, minimum, stride, limit, budget)) == expected


@given(st.integers(1, 3000), st.integers(1, 400), strides, st.integers(1, 12))
def test_what_is_recorded_is_looked_up(tokens: int, minimum: int, stride: int, limit: int) -> None:
    recorded = record_lengths(tokens, minimum, stride, limit)
    assert 1 <= len(recorded) <= limit
    assert recorded[0] == tokens
    assert set(recorded) <= set(lookup_lengths(tokens, minimum, stride))


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 300), st.integers(1, 200))
def test_two_prompts_with_one_beginning_meet_on_the_grid(
    shared: int, minimum: int, stride: int, tail: int
) -> None:
    """The longest grid point inside the shared part is a candidate of both prompts."""
    effective = min(stride, minimum)
    point = shared // effective * effective
    if point > minimum:
        assert point in lookup_lengths(shared + tail, minimum, stride)
        assert point in lookup_lengths(shared + 2 * tail, minimum, stride)


@pytest.mark.parametrize(
    ("tokens", "minimum", "stride", "expected"),
    [
        (1401, 64, 128, 1152),
        (64, 64, 128, None),
        (10, 64, 128, None),
        (65, 64, 128, 64),
        (300, 256, 128, 256),
        (1, 0, 128, None),
        (300, 0, 128, 128),
    ],
)
def test_shared_checkpoint(tokens: int, minimum: int, stride: int, expected: int | None) -> None:
    assert shared_checkpoint(tokens, minimum, stride) == expected


@pytest.mark.parametrize(
    ("n_prefill", "restored", "chat", "boundary", "boundaries"),
    [
        (1401, 0, 0, 1152, (1152, 1344)),  # near tail 1344 of the grid of 64
        (
            1401,
            0,
            700,
            1152,
            (700, 1152, 1344),
        ),  # the shared checkpoint goes first, the chat is worth one too
        (1401, 1152, 1300, 1300, (1300, 1344)),
        (1401, 1152, 0, None, (1344,)),
        (1401, 1344, 1401, None, ()),  # a boundary is strictly inside
        (1401, 1400, 0, None, ()),
        (64, 0, 40, 40, (40,)),  # no shared checkpoint up to min_tokens
        (64, 0, 0, None, ()),
        (0, 0, 0, None, ()),
    ],
)
def test_exact_boundaries(
    n_prefill: int, restored: int, chat: int, boundary: int | None, boundaries: tuple[int, ...]
) -> None:
    assert exact_boundary(n_prefill, restored, 64, 128, chat) == boundary
    assert exact_boundaries(n_prefill, restored, 64, 128, 2, chat) == boundaries


prompts = st.integers(0, 3000)


@given(prompts, prompts, prompts, st.integers(1, 400), st.integers(1, 300), st.integers(0, 8))
def test_boundaries_are_inside_and_hold_the_one_of_the_spec(
    n_prefill: int, restored: int, chat: int, minimum: int, stride: int, limit: int
) -> None:
    found = exact_boundaries(n_prefill, restored, minimum, stride, limit, chat)
    shared = shared_checkpoint(n_prefill, minimum, stride)
    valid = [length for length in (shared, chat) if length and restored < length < n_prefill]
    assert exact_boundary(n_prefill, restored, minimum, stride, chat) == (valid[0] if valid else None)
    recorded = oracle_record(n_prefill, minimum, stride, limit, 0)
    expected = {*valid, *(length for length in recorded if restored < length < n_prefill)}
    assert list(found) == sorted(expected)
