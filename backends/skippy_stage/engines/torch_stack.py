"""The layers in plain torch operations, on any device; what CUDA runs, and a CPU without numba."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.sequences import BatchRows
from skippy_stage.engines.stack import LayerWeights, RotaryTable, StackSettings
from skippy_stage.kv_cache import BlockCopy


class TorchStack:
    """LayerStack of torch operations.

    The residual stream and the norms are float32; queries, keys and values have the cache's type.
    """

    def __init__(self, settings: StackSettings) -> None:
        config = settings.config
        self._layers = settings.layers
        self._link = settings.link
        self._device, self._dtype = settings.device, settings.kv_dtype
        self._heads, self._kv_heads, self._head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self._eps = config.rms_norm_eps
        self._size = settings.block_tokens
        shape = (len(settings.layers), settings.blocks * self._size, config.n_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._values = torch.zeros_like(self._keys)
        self._rotary = RotaryTable(config, settings.device)

    def run(self, x: torch.Tensor, batch: BatchRows, layers: range) -> None:
        """See LayerStack."""
        self._rotary.ensure(int(batch.positions.max()) + 1)
        positions = torch.from_numpy(batch.positions).to(self._device)
        places = torch.from_numpy(batch.blocks * self._size + batch.offsets).to(self._device)
        cos, sin = self._rotary.cos[positions, None], self._rotary.sin[positions, None]
        chunks, single = self._split(batch)
        for index in layers:
            layer = self._layers[index]
            query, key, value = self._project(layer, x, cos, sin)
            keys, values = self._keys[index], self._values[index]
            keys[places], values[places] = key, value
            attended = torch.empty_like(query)
            for rows, past, slots in chunks:
                result = attend_chunk(
                    query[rows].transpose(0, 1),
                    keys[slots].transpose(0, 1),
                    values[slots].transpose(0, 1),
                    past,
                )
                attended[rows] = result.transpose(0, 1)
            if single is not None:
                lone, slots, mask = single
                # [rows, heads, tokens, head_dim]: each row has its own keys and values.
                attended[lone] = torch.nn.functional.scaled_dot_product_attention(
                    query[lone].unsqueeze(2),
                    self._widened(keys[slots].transpose(1, 2)),
                    self._widened(values[slots].transpose(1, 2)),
                    attn_mask=mask,
                ).squeeze(2)
            x += layer.output(attended.flatten(1)).float()
            gate, up = layer.gate_up(self.normalise(x, layer.mlp_norm).to(self._dtype)).chunk(2, -1)
            x += layer.down(torch.nn.functional.silu(gate) * up).float()
            self._link.round_(x)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See LayerStack."""
        for copy in copies:
            source, target = copy.source * self._size, copy.target * self._size
            for cache in (self._keys, self._values):
                cache[:, target : target + copy.tokens] = cache[:, source : source + copy.tokens]

    def read_kv(self, blocks: Sequence[int], length: int) -> torch.Tensor:
        """See LayerStack."""
        places = self._places_in(blocks, length)
        return torch.stack([cache[:, places].transpose(0, 1) for cache in (self._keys, self._values)], 1)

    def write_kv(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """See LayerStack."""
        places = self._places_in(blocks, len(kv))
        for which, cache in enumerate((self._keys, self._values)):
            cache[:, places] = kv[:, which].transpose(0, 1).to(self._device)

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See LayerStack."""
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, self._eps)

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: ``[rows, heads or kv_heads, head_dim]``."""
        qkv = layer.qkv(self.normalise(x, layer.input_norm).to(self._dtype))
        heads = qkv.view(len(x), -1, self._head_dim)
        first_value = self._heads + self._kv_heads
        return (
            self._rotated(heads[:, : self._heads], layer.q_norm, cos, sin),
            self._rotated(heads[:, self._heads : first_value], layer.k_norm, cos, sin),
            heads[:, first_value:],
        )

    def _rotated(
        self, heads: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        low, high = (self.normalise(heads, norm) if len(norm) else heads.float()).chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(self._dtype)

    def _split(
        self, batch: BatchRows
    ) -> tuple[list[tuple[slice, int, torch.Tensor]], tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
        """Chunks with the cache places of their tokens, and all single rows as one batch."""
        chunks, rows = [], []
        for item, start in zip(batch.sequences, batch.starts, strict=True):
            if item.rows > 1:
                places = self._places(batch, np.array([start]), item.past + item.rows)[0]
                chunks.append((slice(start, start + item.rows), item.past, places))
            else:
                rows.append(start)
        if not rows:
            return chunks, None
        index = np.array(rows)
        tokens = batch.positions[index] + 1
        longest = int(tokens.max())
        # Beyond a row's own tokens the table is garbage: any valid place will do, the mask hides it.
        hidden = np.arange(longest)[None] >= tokens[:, None]
        places = self._places(batch, index, longest)
        mask = torch.from_numpy(~hidden).to(self._device)[:, None, None]
        places = places.masked_fill(~mask[:, 0, 0], 0)
        return chunks, (torch.from_numpy(index).to(self._device), places, mask)

    def _places(self, batch: BatchRows, rows: npt.NDArray[np.int64], tokens: int) -> torch.Tensor:
        """Cache places of the first ``tokens`` positions of the rows' sequences, ``[rows, tokens]``."""
        position = np.arange(tokens)
        blocks = batch.tables[batch.slots[rows]][:, position // self._size].astype(np.int64)
        return torch.from_numpy(blocks * self._size + position % self._size).to(self._device)

    def _places_in(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """Cache places of the first ``tokens`` positions in blocks."""
        position = np.arange(tokens)
        places = np.asarray(blocks)[position // self._size] * self._size + position % self._size
        return torch.from_numpy(places).to(self._device)

    def _widened(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat key/value heads ``[rows, kv_heads, ...]`` so that every query head has one."""
        return heads.repeat_interleave(self._heads // self._kv_heads, 1)


def attend_chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int) -> torch.Tensor:
    """Causal attention of a chunk over ``past`` earlier tokens and itself.

    ``query`` is ``[heads, rows, head_dim]``, ``keys`` and ``values`` ``[kv_heads, past + rows, head_dim]``;
    gives ``[heads, rows, head_dim]``.
    """
    rows, tokens = query.shape[1], keys.shape[1]
    mask = None
    if past:
        # Row i sees the past and the chunk up to itself; is_causal alone would align at the first token.
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(past)
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )[0]
