"""Sampling against naive definitions, and as a distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from skippy_stage.protocol import SamplingParams
from skippy_stage.sampling import candidates, gumbel, sample, sample_rows

rows = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-20, 20, width=32))
wide = np.random.default_rng(1).normal(0, 3, 5000).astype(np.float32)


def naive(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The filters one after the other, as their definitions read."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    p = np.exp(logits[ids].astype(np.float64) - logits[ids].max())
    p /= p.sum()
    if params.top_p < 1:
        keep = 1
        while keep < len(ids) and p[:keep].sum() < params.top_p:
            keep += 1
        ids, p = ids[:keep], p[:keep]
    if params.min_p:
        ids = [i for i, q in zip(ids, p, strict=True) if q >= params.min_p * p[0]]
    return set(ids)


@given(
    rows, st.integers(0, 70), st.sampled_from([1.0, 0.9, 0.5, 0.05]), st.sampled_from([0.0, 0.01, 0.3, 1.0])
)
@settings(max_examples=300, deadline=None)
def test_filters_equal_their_definitions(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    got, expected = set(candidates(logits, params).tolist()), naive(logits, params)
    # At a filter's edge rounding may decide: then the odd ones out are as likely as an accepted one.
    for odd in got ^ expected:
        assert any(abs(float(logits[odd]) - float(logits[i])) < 1e-4 for i in got | expected if i != odd)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
def test_nucleus_beyond_the_head_it_looks_at_first(top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert set(candidates(wide, params).tolist()) == naive(wide, params)
    flat = np.zeros(5000, np.float32)
    assert len(candidates(flat, params)) == pytest.approx(5000 * top_p, abs=2)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(np.array([1, 5, 5, 2], np.float32), SamplingParams(), 0) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite at position 3"):
        sample(np.array([1, bad, 2], np.float32), SamplingParams(), 3)


def test_masked_logits_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[7, 9]] = 0
    drawn = {sample(logits, SamplingParams(temperature=2.0, seed=s), 1) for s in range(50)}
    assert drawn == {7, 9}


def test_noise_is_a_pure_function_and_differs_in_every_argument() -> None:
    ids = np.arange(1000)
    base = gumbel(1, 0, 5, ids)
    np.testing.assert_array_equal(base[100:200], gumbel(1, 0, 5, ids[100:200]))
    for other in (
        gumbel(2, 0, 5, ids),
        gumbel(1, 1, 5, ids),
        gumbel(1, 0, 6, ids),
        gumbel(2**64 - 1, 0, 5, ids),
    ):
        assert np.abs(np.corrcoef(base, other)[0, 1]) < 0.15
        assert not np.array_equal(base, other)


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel(seed, 0, seed, np.arange(2000)) for seed in range(100)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_softmax(vary: str) -> None:
    """Chi-square against softmax(logits / T), over seeds and over positions of one seed."""
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    n = 20_000
    draws = np.zeros(5)
    for i in range(n):
        seed, position = (i, 3) if vary == "seed" else (3, i)
        draws[sample(logits, SamplingParams(temperature=0.8, seed=seed), position)] += 1
    p = np.exp(logits / 0.8)
    expected = n * p / p.sum()
    assert ((draws - expected) ** 2 / expected).sum() < 23.5, "p < 1e-4 at 4 degrees of freedom"


def test_rows_draw_at_consecutive_positions() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    logits = np.stack([wide, wide, wide])
    assert sample_rows(logits, params, 10) == tuple(sample(wide, params, 10 + i) for i in range(3))
