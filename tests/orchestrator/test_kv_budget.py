"""KV accounting, against a model that adds everything up."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
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


PROMPT = tuple(range(100))


def test_a_restored_prefix_counts_once() -> None:
    budget = KvBudget(20, 16)
    for session in (1, 2, 3):
        assert budget.reserve(session, 96)
    assert budget.blocks_free == 2
    assert not budget.reserve(4, 96)
    budget.share(1, "", PROMPT, 70)
    assert budget.blocks_free == 2, "the first one shares with nobody"
    budget.share(2, "", PROMPT, 70)
    assert budget.blocks_free == 6, "four whole blocks of 70 positions count once"
    budget.share(3, "", PROMPT, 40)
    assert budget.blocks_free == 8
    assert budget.reserve(4, 96)
    budget.release(1)
    assert budget.blocks_free == 4, "the second session still holds the prefix"
    budget.release(2)
    assert budget.blocks_free == 8, "the third one holds two blocks of it"
    budget.release(3)
    budget.check_integrity({4})
    assert budget.blocks_free == 14


@pytest.mark.parametrize(
    ("namespace", "tokens", "free"),
    [
        ("", PROMPT[:32], 4 + 2),
        ("", (*PROMPT[:31], 99), 4 + 1),
        ("", (99, *PROMPT[1:32]), 4),
        ("x", PROMPT[:32], 4),
        ("", PROMPT[16:48], 4),
    ],
)
def test_only_the_same_beginning_is_shared(namespace: str, tokens: tuple[int, ...], free: int) -> None:
    budget = KvBudget(10, 16)
    assert budget.reserve(1, 48)
    assert budget.reserve(2, 48)
    budget.share(1, "", PROMPT, 32)
    budget.share(2, namespace, tokens, 32)
    assert budget.blocks_free == free
    budget.check_integrity({1, 2})


def test_less_than_a_block_shares_nothing() -> None:
    budget = KvBudget(10, 16)
    assert budget.reserve(1, 20)
    budget.share(1, "", PROMPT, 15)
    assert budget.blocks_free == 8
    budget.check_integrity({1})


def test_sharing_that_cannot_be_is_refused() -> None:
    budget = KvBudget(10, 16)
    assert budget.reserve(1, 40)
    for tokens, length in [(PROMPT, 64), (PROMPT[:16], 17), (PROMPT, -1)]:
        with pytest.raises(ValueError, match=f"session 1 cannot share {length} positions"):
            budget.share(1, "", tokens, length)
    with pytest.raises(KeyError):
        budget.share(2, "", PROMPT, 16)
    budget.check_integrity({1})
    budget.share(1, "", PROMPT, 16)
    with pytest.raises(ValueError, match="session 1 has restored before"):
        budget.share(1, "", PROMPT, 32)
    budget.check_integrity({1})


@given(st.data())
def test_sharing_equals_a_naive_count(data: st.DataObject) -> None:
    """Few tokens and short blocks, so that prompts share beginnings of all lengths."""
    blocks, block_tokens = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 4))
    budget = KvBudget(blocks, block_tokens)
    held: dict[int, tuple[int, set[tuple[str, tuple[int, ...]]]]] = {}

    def used() -> int:
        shared = {path for _, paths in held.values() for path in paths}
        return sum(private for private, _ in held.values()) + len(shared)

    for session in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(held)))
            del held[victim]
            budget.release(victim)
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)))
        positions = len(tokens) + data.draw(st.integers(0, 5))
        needed = math.ceil(positions / block_tokens)
        fits = used() + needed <= blocks
        assert budget.reserve(session, positions) == fits
        if not fits:
            continue
        held[session] = (needed, set())
        before = budget.blocks_free
        if data.draw(st.booleans()):
            namespace, length = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, len(tokens)))
            budget.share(session, namespace, tokens, length)
            ends = range(block_tokens, length + 1, block_tokens)
            held[session] = (needed - len(ends), {(namespace, tokens[:end]) for end in ends})
        assert budget.blocks_free == blocks - used() >= before
        budget.check_integrity(set(held))
    for session in list(held):
        budget.release(session)
    assert budget.blocks_free == blocks
    budget.check_integrity(set())


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=12),
)
@example([(8, 3), (4, 5)], [(5, 5), (5, 5), (0, 5)])
def test_what_is_shared_fits_on_every_stage(
    stages: list[tuple[int, int]], sessions: list[tuple[int, int]]
) -> None:
    """Every stage counts for itself: its own blocks, those of the one prompt that all restore from once."""
    budget = KvBudget.of_tightest(stages)
    held: dict[int, tuple[int, int]] = {}
    for name, (restored, more) in enumerate(sessions):
        if budget.reserve(name, restored + more):
            budget.share(name, "", PROMPT, restored)
            held[name] = restored, restored + more
    budget.check_integrity(set(held))
    for blocks, tokens in stages:
        shared = max((restored // tokens for restored, _ in held.values()), default=0)
        private = sum(math.ceil(total / tokens) - restored // tokens for restored, total in held.values())
        assert private + shared <= blocks
