"""Fused float32 kernels for the small operations of a layer on a CPU, compiled by numba.

Run one by one in eager torch these cost as much as all matrix products of a token; here each is one call
of a few microseconds. All arrays are C-contiguous. Every row is computed by itself, in an order that does
not depend on the batch: batching changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numba import types

# Sums may be reordered (into vector lanes) and products fused; infinities and NaN keep their meaning.
FAST: Final = {"reassoc", "contract", "nsz", "arcp"}

_F32: Final = types.float32
ROWS: Final = types.Array(_F32, 2, "C")
_VECTOR: Final = types.Array(_F32, 1, "C")
_INDEX: Final = types.Array(types.int64, 1, "C")
_TABLES: Final = types.Array(types.int32, 2, "C")
CACHE: Final = types.Array(_F32, 4, "C")


@numba.njit(fastmath=FAST, inline="always")  # type: ignore[untyped-decorator]
def fast_exp(x: Any) -> Any:
    """e to the x in float32 to 2 units in the last place, in operations that vectorise; 0 below -87."""
    clipped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(clipped * np.float32(1.44269504) + np.float32(0.5))
    rest = clipped - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    poly = np.float32(1.9875691500e-4)
    poly = poly * rest + np.float32(1.3981999507e-3)
    poly = poly * rest + np.float32(8.3334519073e-3)
    poly = poly * rest + np.float32(4.1665795894e-2)
    poly = poly * rest + np.float32(1.6666665459e-1)
    poly = poly * rest + np.float32(5.0000001201e-1)
    poly = poly * rest * rest + rest + np.float32(1.0)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return poly * power if x > np.float32(-87.0) else np.float32(0.0)


def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """``out = x / rms(x) * weight`` by row."""
    rows, width = x.shape
    for row in range(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


def _add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """``x += delta``, then ``out = x / rms(x) * weight``, by row."""
    rows, width = x.shape
    for row in range(rows):
        total = np.float32(0.0)
        for i in range(width):
            value = x[row, i] + delta[row, i]
            x[row, i] = value
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


def _silu_mul(gate_up: Any, out: Any) -> None:
    """``out = silu(gate) * up`` for rows of gate and up side by side."""
    rows, width = out.shape
    for row in range(rows):
        for i in range(width):
            gate = gate_up[row, i]
            out[row, i] = gate / (np.float32(1.0) + fast_exp(-gate)) * gate_up[row, width + i]


def _rotate_and_store(head_dim: int, group: int) -> Callable[..., None]:
    half = head_dim // 2

    def rotate_and_store(
        qkv: Any,
        cos: Any,
        sin: Any,
        positions: Any,
        blocks: Any,
        offsets: Any,
        q_norm: Any,
        k_norm: Any,
        eps: Any,
        keys: Any,
        values: Any,
    ) -> None:
        kv_heads = keys.shape[1]
        heads = kv_heads * group
        for row in range(qkv.shape[0]):
            position = positions[row]
            block, offset = blocks[row], offsets[row]
            for head in range(heads + kv_heads):
                start = head * head_dim
                norm = q_norm if head < heads else k_norm
                if norm.shape[0] > 0:
                    total = np.float32(0.0)
                    for i in range(head_dim):
                        total += qkv[row, start + i] * qkv[row, start + i]
                    scale = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + eps)
                    for i in range(head_dim):
                        qkv[row, start + i] = qkv[row, start + i] * scale * norm[i]
                for i in range(half):
                    low, high = qkv[row, start + i], qkv[row, start + half + i]
                    qkv[row, start + i] = low * cos[position, i] - high * sin[position, i]
                    qkv[row, start + half + i] = high * cos[position, i] + low * sin[position, i]
            for head in range(kv_heads):
                start = (heads + head) * head_dim
                for i in range(head_dim):
                    keys[block, head, offset, i] = qkv[row, start + i]
                start += kv_heads * head_dim
                for i in range(head_dim):
                    values[block, head, offset, i] = qkv[row, start + i]

    return rotate_and_store


def _attend(head_dim: int, group: int, block_tokens: int) -> Callable[..., None]:
    def attend(
        qkv: Any,
        rows: Any,
        positions: Any,
        slots: Any,
        tables: Any,
        keys: Any,
        values: Any,
        scale: Any,
        out: Any,
    ) -> None:
        kv_heads = keys.shape[1]
        scores = np.empty((group, block_tokens), np.float32)
        sums = np.empty((group, head_dim), np.float32)
        highest = np.empty(group, np.float32)
        weights = np.empty(group, np.float32)
        for index in range(rows.shape[0]):
            row = rows[index]
            tokens = positions[row] + 1
            table = tables[slots[row]]
            for kv_head in range(kv_heads):
                first = kv_head * group * head_dim
                for g in range(group):
                    highest[g] = -np.inf
                    weights[g] = 0.0
                    for i in range(head_dim):
                        sums[g, i] = 0.0
                for start in range(0, tokens, block_tokens):
                    block = table[start // block_tokens]
                    count = min(block_tokens, tokens - start)
                    for g in range(group):
                        top = highest[g]
                        for t in range(count):
                            dot = np.float32(0.0)
                            for i in range(head_dim):
                                dot += qkv[row, first + g * head_dim + i] * keys[block, kv_head, t, i]
                            dot *= scale
                            scores[g, t] = dot
                            top = max(top, dot)
                        # Online softmax: what was summed so far shrinks when a higher score turns up.
                        if top > highest[g]:
                            shrink = fast_exp(highest[g] - top)
                            highest[g] = top
                            weights[g] *= shrink
                            for i in range(head_dim):
                                sums[g, i] *= shrink
                        total = np.float32(0.0)
                        for t in range(count):
                            scores[g, t] = fast_exp(scores[g, t] - top)
                            total += scores[g, t]
                        weights[g] += total
                        for t in range(count):
                            weight = scores[g, t]
                            for i in range(head_dim):
                                sums[g, i] += weight * values[block, kv_head, t, i]
                for g in range(group):
                    inverse = np.float32(1.0) / weights[g]
                    for i in range(head_dim):
                        out[row, first + g * head_dim + i] = sums[g, i] * inverse

    return attend


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Kernels compiled for one shape of heads; see ``build_kernels``."""

    rms_norm: Callable[..., None]
    """(x ``[rows, hidden]``, weight ``[hidden]``, eps, out ``[rows, hidden]``)"""
    add_rms_norm: Callable[..., None]
    """(x, delta, weight, eps, out): adds delta to x in place, then normalises into out."""
    silu_mul: Callable[..., None]
    """(gate_up ``[rows, 2 * inner]``, out ``[rows, inner]``)"""
    rotate_and_store: Callable[..., None]
    """(qkv ``[rows, (heads + 2 * kv_heads) * head_dim]``, cos and sin ``[positions, head_dim / 2]``,
    positions, blocks and offsets int64 ``[rows]``, q_norm and k_norm ``[head_dim]`` or empty, eps, keys and
    values ``[blocks, kv_heads, block_tokens, head_dim]``): normalises and rotates queries and keys in place
    and writes keys and values to the cache."""
    attend: Callable[..., None]
    """(qkv, rows int64 ``[n]``, positions and slots of all rows, tables int32 ``[slots, blocks]``, keys,
    values, scale, out ``[rows, heads * head_dim]``): causal attention over the cache for the listed rows."""


def build_kernels(head_dim: int, group: int, block_tokens: int) -> CpuKernels:
    """Compile the kernels, or load them from numba's cache on disk.

    ``group`` is query heads per key/value head. Takes seconds the first time on a machine and tens of
    milliseconds afterwards.
    """

    def compiled(function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
        # numpy's errors: a row that overflowed turns into NaN and is found after the layers, by name.
        make = numba.njit(types.void(*arguments), cache=True, nogil=True, fastmath=FAST, error_model="numpy")
        kernel: Callable[..., None] = make(function)
        return kernel

    return CpuKernels(
        rms_norm=compiled(_rms_norm, ROWS, _VECTOR, _F32, ROWS),
        add_rms_norm=compiled(_add_rms_norm, ROWS, ROWS, _VECTOR, _F32, ROWS),
        silu_mul=compiled(_silu_mul, ROWS, ROWS),
        rotate_and_store=compiled(
            _rotate_and_store(head_dim, group),
            *(ROWS, ROWS, ROWS, _INDEX, _INDEX, _INDEX, _VECTOR, _VECTOR, _F32, CACHE, CACHE),
        ),
        attend=compiled(
            _attend(head_dim, group, block_tokens),
            *(ROWS, _INDEX, _INDEX, _INDEX, _TABLES, CACHE, CACHE, _F32, ROWS),
        ),
    )
