"""Attention of a chunk over cache blocks, against plain softmax in float64."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_stage.engines import cpu_attention, cpu_stack

pytest.importorskip("numba", reason="without numba a CPU runs the plain torch stack")

SHAPES = [(64, 3, 16), (64, 1, 16), (8, 2, 4), (20, 5, 3), (128, 7, 32), (80, 4, 48)]
"""Head size, query heads per key head, tokens per block: those of real models, and odd ones."""
Array = npt.NDArray[Any]


def attention(qkv: Array, past: int, keys: Array, values: Array, heads: int) -> Array:
    """``keys`` and ``values`` are ``[kv_heads, tokens, head_dim]``; returns ``[rows, heads * head_dim]``."""
    rows, (kv_heads, tokens, head_dim) = len(qkv), keys.shape
    queries = qkv[:, : heads * head_dim].reshape(rows, kv_heads, -1, head_dim).astype(np.float64)
    scores = np.einsum("rkgd,ktd->rkgt", queries, keys.astype(np.float64)) * head_dim**-0.5
    hidden = np.arange(tokens)[None, :] > past + np.arange(rows)[:, None]
    scores[np.broadcast_to(hidden[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed: Array = np.einsum("rkgt,ktd->rkgd", weights, values.astype(np.float64))
    return mixed.reshape(rows, -1)


def in_blocks(states: Array, table: Array, blocks: int, block_tokens: int) -> Array:
    """A cache that holds ``[kv_heads, tokens, head_dim]`` in the table's blocks, and NaN everywhere else."""
    kv_heads, tokens, head_dim = states.shape
    cache = np.full((blocks, kv_heads, block_tokens, head_dim), np.nan, np.float32)
    for at in range(tokens):
        cache[table[at // block_tokens], :, at % block_tokens] = states[:, at]
    return cache


def check(
    shape: tuple[int, int, int], kv_heads: int, past: int, rows: int, parts: int, size: float, seed: int
) -> None:
    head_dim, group, block_tokens = shape
    random = np.random.default_rng(seed)
    tokens, heads = past + rows, kv_heads * group
    qkv = random.standard_normal((rows, (heads + 2 * kv_heads) * head_dim), np.float32) * np.float32(size)
    keys, values = random.standard_normal((2, kv_heads, tokens, head_dim), np.float32)
    used = -(-tokens // block_tokens)
    blocks = used + 3
    table = random.permutation(blocks)[:used].astype(np.int32)
    caches = [in_blocks(states, table, blocks, block_tokens) for states in (keys, values)]
    kernel = cpu_attention.build_chunk_attention(*shape)
    out = np.full((rows, heads * head_dim), np.nan, np.float32)
    pieces = kernel.pieces(rows, kv_heads)
    cuts = [pieces * part // parts for part in range(parts + 1)]
    for begin, end in pairwise(cuts):
        kernel.attend(qkv, past, table, *caches, np.float32(head_dim**-0.5), out, begin, end)
    wanted = attention(qkv, past, keys, values, heads)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5 * np.abs(values).max())


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    kv_heads=st.integers(1, 3),
    past=st.integers(0, 150),
    rows=st.integers(1, 90),
    parts=st.integers(1, 4),
    size=st.sampled_from([0.1, 1.0, 12.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_plain_softmax(
    shape: tuple[int, int, int], kv_heads: int, past: int, rows: int, parts: int, size: float, seed: int
) -> None:
    check(shape, kv_heads, past, rows, parts, size, seed)


@pytest.mark.parametrize("machine", [(8, 16), (4, 32)], ids=["avx2", "neon"])
def test_with_the_vectors_of_other_machines(
    machine: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_vectors", lambda: machine)
    check((64, 3, 16), kv_heads=2, past=37, rows=50, parts=1, size=1.0, seed=0)


@pytest.mark.parametrize("machine", [(16, 32), (8, 16), (4, 32)])
def test_tiles_fit_the_registers(machine: tuple[int, int]) -> None:
    lanes, registers = machine
    for rows in (1, 3, 16, 20, 64, 128):
        for width in (48, 64, 80, 112):
            m, n = cpu_attention._tile(rows, width // lanes, registers)
            assert rows % m == 0
            assert width // lanes % n == 0
            assert m * n + n + 1 <= registers


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_helpers_do_every_piece_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    helpers = cpu_stack._Helpers()
    for pieces in (1, 2, 7, 100):
        done: list[int] = []
        helpers.share(pieces, lambda begin, end, done=done: done.extend(range(begin, end)))
        assert Counter(done) == Counter(range(pieces))


def test_what_goes_wrong_in_a_helper_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def fail(begin: int, end: int) -> None:
        if end == 100:
            raise ValueError("the last piece")

    with pytest.raises(ValueError, match="the last piece"):
        cpu_stack._Helpers().share(100, fail)
