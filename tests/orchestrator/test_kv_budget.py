"""KV accounting, against a model that adds everything up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.kv_budget import KvBudget


@pytest.mark.parametrize(
    ("positions", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)]
)
def test_reservations_round_up_to_whole_blocks(positions: int, blocks: int) -> None:
    budget = KvBudget(10, 16)
    assert budget.tokens == 160
    assert budget.blocks_for(positions) == blocks
    assert budget.fits_ever(positions) == (blocks <= 10)
    assert budget.reserve(1, positions) == (blocks <= 10)
    assert budget.blocks_free == (10 - blocks if blocks <= 10 else 10)


def test_misuse_is_refused() -> None:
    budget = KvBudget(10, 16)
    assert budget.reserve(1, 5)
    with pytest.raises(ValueError, match="session 1 has a reservation"):
        budget.reserve(1, 5)
    with pytest.raises(KeyError):
        budget.release(2)
    budget.check_integrity({1})
    with pytest.raises(AssertionError, match=r"\{1\} by mistake"):
        budget.check_integrity(set())
    with pytest.raises(AssertionError, match=r"\{2\} by mistake"):
        budget.check_integrity({1, 2})


@pytest.mark.parametrize(
    ("stages", "blocks", "tokens"),
    [
        ([(10, 16)], 10, 160),
        ([(10, 16), (12, 16), (9, 16)], 9, 144),
        ([(100, 16), (100, 1)], 6, 96),
        ([(100, 16), (64, 32)], 50, 1600),
        ([(30, 16), (64, 24)], 15, 360),
    ],
)
def test_the_tightest_stage_decides(stages: list[tuple[int, int]], blocks: int, tokens: int) -> None:
    budget = KvBudget.of_tightest(stages)
    assert (budget.blocks_free, budget.tokens) == (blocks, tokens)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4),
    st.lists(st.integers(1, 100), max_size=30),
)
def test_what_is_reserved_fits_on_every_stage(stages: list[tuple[int, int]], sessions: list[int]) -> None:
    budget = KvBudget.of_tightest(stages)
    held = [positions for i, positions in enumerate(sessions) if budget.reserve(i, positions)]
    for blocks, tokens in stages:
        assert sum(math.ceil(positions / tokens) for positions in held) <= blocks


@given(st.data())
def test_reservations_equal_a_naive_count(data: st.DataObject) -> None:
    blocks, block_tokens = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    budget = KvBudget(blocks, block_tokens)
    held: dict[int, int] = {}
    for session in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(held)))
            del held[victim]
            budget.release(victim)
        positions = data.draw(st.integers(1, 80))
        needed = math.ceil(positions / block_tokens)
        fits = sum(held.values()) + needed <= blocks
        assert budget.reserve(session, positions) == fits
        if fits:
            held[session] = needed
        assert budget.blocks_free == blocks - sum(held.values())
        budget.check_integrity(set(held))
