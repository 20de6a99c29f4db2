"""The layers on a CPU: packed matrix products of torch, and fused kernels for all that lies between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.cpu_kernels import build_kernels
from skippy_stage.engines.sequences import BatchRows
from skippy_stage.engines.stack import RotaryTable, StackSettings
from skippy_stage.engines.torch_stack import attend_chunk
from skippy_stage.kv_cache import BlockCopy

_PAGED_ROWS: Final = 16
"""Sequences with at most so many rows attend row by row over the cache; longer chunks as matrices."""

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
        self._kernels = build_kernels(
            config.head_dim, config.n_heads // config.n_kv_heads, settings.block_tokens
        )
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

    def run(self, x: torch.Tensor, batch: BatchRows) -> None:
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
        for index, layer in enumerate(self._layers):
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

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See LayerStack."""
        out = torch.empty_like(x)
        self._kernels.rms_norm(x.numpy(), weight.numpy(), self._eps, out.numpy())
        return out

    def _attend_long(
        self, layer: int, which: int, batch: BatchRows, qkv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A chunk of one sequence, as matrices over its keys and values gathered from the cache."""
        item, start = batch.sequences[which], batch.starts[which]
        tokens = item.past + item.rows
        size = self._keys.shape[3]
        line = batch.tables[batch.slots[start], : -(-tokens // size)]
        blocks = torch.from_numpy(line.astype(np.int64))
        rows = slice(start, start + item.rows)
        queries = qkv[rows, : self._heads * self._head_dim].view(item.rows, self._heads, self._head_dim)

        def gathered(cache: torch.Tensor) -> torch.Tensor:
            pages = cache[layer].index_select(0, blocks).transpose(0, 1)
            return pages.reshape(self._kv_heads, -1, self._head_dim)[:, :tokens]

        result = attend_chunk(
            queries.transpose(0, 1), gathered(self._keys), gathered(self._values), item.past
        )
        out[rows].view(item.rows, self._heads, self._head_dim).copy_(result.transpose(0, 1))


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
