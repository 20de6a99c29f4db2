"""The layers on a CPU: packed matrix products of torch, and fused kernels for all that lies between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.cpu_attention import build_chunk_attention
from skippy_stage.engines.cpu_kernels import build_kernels
from skippy_stage.engines.sequences import BatchRows
from skippy_stage.engines.stack import RotaryTable, StackSettings
from skippy_stage.kv_cache import BlockCopy

_PAGED_ROWS: Final = 4
"""Sequences with at most so many rows attend row by row over the cache; longer chunks tile by tile."""
_SHARED: Final = 6_000_000
"""Multiply-adds of a chunk's scores from which helpers take part: 0.1 ms alone, and asking them takes 0.04."""
_RANGES: Final = 8
"""Ranges that each thread gets of shared work, were all equally fast."""

F32 = npt.NDArray[np.float32]


class CpuStack:
    """LayerStack for the CPU, float32 between the products."""

    def __init__(self, settings: StackSettings) -> None:
        config = settings.config
        self._layers = settings.layers
        self._link = settings.link
        self._heads, self._kv_heads, self._head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._inner = config.intermediate_size
        heads = (config.head_dim, config.n_heads // config.n_kv_heads, settings.block_tokens)
        self._kernels, self._chunks = build_kernels(*heads), build_chunk_attention(*heads)
        self._helpers = _Helpers()
        shape = (
            len(settings.layers),
            settings.blocks,
            config.n_kv_heads,
            settings.block_tokens,
            config.head_dim,
        )
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._key_arrays: list[F32] = list(self._keys.numpy())
        self._value_arrays: list[F32] = list(self._values.numpy())
        self._norms = [
            (layer.input_norm.numpy(), layer.q_norm.numpy(), layer.k_norm.numpy(), layer.mlp_norm.numpy())
            for layer in settings.layers
        ]
        self._rotary = RotaryTable(config, settings.device)
        self._cos, self._sin = self._rotary.cos.numpy(), self._rotary.sin.numpy()

    def run(self, x: torch.Tensor, batch: BatchRows, layers: range) -> None:
        """See LayerStack."""
        if self._rotary.ensure(int(batch.positions.max()) + 1):
            self._cos, self._sin = self._rotary.cos.numpy(), self._rotary.sin.numpy()
        kernels, eps, rounds = self._kernels, self._eps, self._link.rounds
        short, long = _by_length(batch)
        residual = x.numpy()
        normed, activated = torch.empty_like(x), torch.empty(batch.rows, self._inner)
        attended = torch.empty(batch.rows, self._heads * self._head_dim)
        normed_array, activated_array, attended_array = normed.numpy(), activated.numpy(), attended.numpy()
        delta: F32 | None = None
        for index in layers:
            layer = self._layers[index]
            input_norm, q_norm, k_norm, mlp_norm = self._norms[index]
            keys, values = self._key_arrays[index], self._value_arrays[index]
            if delta is None:
                kernels.rms_norm(residual, input_norm, eps, normed_array)
            else:
                kernels.add_rms_norm(residual, delta, input_norm, eps, normed_array)
            qkv = layer.qkv(normed)
            qkv_array = qkv.numpy()
            kernels.rotate_and_store(
                *(qkv_array, self._cos, self._sin, batch.positions, batch.blocks, batch.offsets),
                *(q_norm, k_norm, eps, keys, values),
            )
            if len(short):
                kernels.attend(
                    *(qkv_array, short, batch.positions, batch.slots, batch.tables),
                    *(keys, values, self._scale, attended_array),
                )
            for which in long:
                self._attend_long(index, which, batch, qkv, attended)
            kernels.add_rms_norm(residual, layer.output(attended).numpy(), mlp_norm, eps, normed_array)
            kernels.silu_mul(layer.gate_up(normed).numpy(), activated_array)
            delta = layer.down(activated).numpy()
            if rounds:
                residual += delta
                self._link.round_(x)
                delta = None
        if delta is not None:
            residual += delta

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See LayerStack."""
        for copy in copies:
            for cache in (self._keys, self._values):
                cache[:, copy.target, :, : copy.tokens] = cache[:, copy.source, :, : copy.tokens]

    def read_kv(self, blocks: Sequence[int], length: int) -> torch.Tensor:
        """See LayerStack."""
        size = self._keys.shape[3]
        positions = torch.arange(length)
        places = torch.tensor(blocks)[positions // size], positions % size
        # The cache is [layers, blocks, kv_heads, positions, head_dim].
        return torch.stack([cache[:, places[0], :, places[1]] for cache in (self._keys, self._values)], 1)

    def write_kv(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """See LayerStack."""
        size = self._keys.shape[3]
        positions = torch.arange(len(kv))
        places = torch.tensor(blocks)[positions // size], positions % size
        for which, cache in enumerate((self._keys, self._values)):
            cache[:, places[0], :, places[1]] = kv[:, which]

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See LayerStack."""
        out = torch.empty_like(x)
        self._kernels.rms_norm(x.numpy(), weight.numpy(), self._eps, out.numpy())
        return out

    def _attend_long(
        self, layer: int, which: int, batch: BatchRows, qkv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A chunk of one sequence, by all threads of the frame."""
        item, start = batch.sequences[which], batch.starts[which]
        rows = slice(start, start + item.rows)
        queries, attended = qkv.numpy()[rows], out.numpy()[rows]
        table = batch.tables[batch.slots[start]]
        keys, values = self._key_arrays[layer], self._value_arrays[layer]
        pieces = self._chunks.pieces(item.rows, self._kv_heads)

        def attend(begin: int, end: int) -> None:
            self._chunks.attend(queries, item.past, table, keys, values, self._scale, attended, begin, end)

        if pieces * self._chunks.lanes * self._head_dim * (item.past + item.rows // 2) < _SHARED:
            attend(0, pieces)
        else:
            self._helpers.share(pieces, attend)


class _Helpers:
    """Threads that compute beside the caller's, in kernels that do not hold the interpreter.

    They never enter OpenMP: torch's team, which the caller's thread owns, stays the only one.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._count = 0

    def share(self, pieces: int, work: Callable[[int, int], None]) -> None:
        """Have ``work`` called with ranges ``[begin, end)`` that cover ``pieces``, by as many threads as torch."""
        threads = min(torch.get_num_threads(), pieces)
        if threads == 1:
            work(0, pieces)
            return
        if self._pool is None or threads - 1 > self._count:
            self._count = threads - 1
            self._pool = ThreadPoolExecutor(self._count, "skippy-helper")
        # Who is done early takes more: the ranges differ in work, and other programs use the cores too.
        size = max(1, pieces // (threads * _RANGES))
        begins = iter(range(0, pieces, size))

        def run() -> None:
            for begin in begins:
                work(begin, min(begin + size, pieces))

        others = [self._pool.submit(run) for _ in range(threads - 1)]
        run()
        for other in others:
            other.result()


def _by_length(batch: BatchRows) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Rows that attend one by one, and sequences whose rows attend together."""
    short: list[int] = []
    long: list[int] = []
    for which, (item, start) in enumerate(zip(batch.sequences, batch.starts, strict=True)):
        if item.rows <= _PAGED_ROWS:
            short += range(start, start + item.rows)
        else:
            long.append(which)
    return np.array(short, np.int64), long
