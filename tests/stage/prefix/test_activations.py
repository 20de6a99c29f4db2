"""Output rows of first chunks: kept as copies, within a budget, counted by the labels of spec 4.9."""

from __future__ import annotations

import numpy as np
import pytest
from skippy_stage.prefix.activations import ActivationCache, ActivationOutcome


def rows(count: int, value: float = 0) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def test_rows_are_found_for_exactly_their_chunk() -> None:
    cache = ActivationCache(1000)
    assert cache.record("", [1, 2, 3], rows(3, 7))
    found = cache.find("", (1, 2, 3))
    assert found is not None
    assert (found == 7).all()
    for namespace, tokens in (("", [1, 2]), ("", [1, 2, 3, 4]), ("own", [1, 2, 3])):
        assert cache.find(namespace, tokens) is None
    assert not cache.record("", [1, 2, 3], rows(3, 8)), "they are there"


def test_rows_are_copies_that_nobody_writes_to() -> None:
    cache = ActivationCache(1000)
    given = rows(2, 1)
    cache.record("", [1, 2], given)
    given[:] = 9
    found = cache.find("", [1, 2])
    assert found is not None
    assert (found == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 5


def test_the_least_recently_used_rows_go_first() -> None:
    cache = ActivationCache(4 * 16)
    for first in (1, 2, 3, 4):
        cache.record("", [first], rows(1, first))
    cache.find("", [1])
    cache.record("", [2], rows(1, 2))
    cache.record("", [5, 6], rows(2))
    assert [cache.find("", [first]) is not None for first in (1, 2, 3, 4)] == [True, True, False, False]
    cache.check_integrity()
    assert not cache.record("", range(5), rows(5)), "too large alone"
    assert cache.find("", [1]) is not None
    status = cache.status()
    assert (status.entries, status.bytes, status.evicted, status.dropped) == (3, 64, 2, 1)


def test_what_became_of_a_chunk_is_counted() -> None:
    cache = ActivationCache(1000)
    cache.find("", [1])
    cache.record("", [1, 2], rows(2))
    assert [cache.restored(length, 2) for length in (0, 1, 2, 2)] == [
        ActivationOutcome.KV_MISS,
        ActivationOutcome.PREFIX_SHORT,
        ActivationOutcome.RESIDENT_HIT,
        ActivationOutcome.RESIDENT_HIT,
    ]
    status = cache.status()
    assert {str(outcome): count for outcome, count in status.outcomes.items()} == {
        "stage0_activation_miss": 1,
        "stage0_activation_hit_kv_miss": 1,
        "stage0_activation_hit_prefix_short": 1,
        "stage0_activation_resident_hit": 2,
    }
    assert (status.hits, status.misses) == (2, 3)


def test_no_budget_is_no_cache() -> None:
    cache = ActivationCache(0)
    assert not cache.record("", [1], rows(1))
    assert cache.find("", [1]) is None
    assert cache.status() == ActivationCache(0).status(), "nothing is counted"
