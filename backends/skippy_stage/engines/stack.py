"""What the torch engine asks of the code that runs its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.linear import Linear, make_linear
from skippy_stage.engines.link import Link
from skippy_stage.engines.sequences import BatchRows
from skippy_stage.kv_cache import BlockCopy
from skippy_stage.settings import WeightFormat
from skippy_stage.weights import ModelConfig, rotary_frequencies


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; norms are float32 on the stack's device, ``[hidden]`` and ``[head_dim]``."""

    input_norm: torch.Tensor
    qkv: Linear
    """Queries, keys and values of all heads side by side."""
    q_norm: torch.Tensor
    """Empty where the model has none; ``k_norm`` too."""
    k_norm: torch.Tensor
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    """Gate and up side by side."""
    down: Linear


class LayerStack(Protocol):
    """The layers of a stage with their KV cache."""

    def run(self, x: torch.Tensor, batch: BatchRows, layers: range) -> None:
        """Run some of the stack's layers on the residual stream in place, writing the KV cache.

        ``x`` is ``[rows, hidden]`` float32 on the stack's device.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy KV positions between blocks in every layer."""
        ...

    def read_kv(self, blocks: Sequence[int], length: int) -> torch.Tensor:
        """Keys and values of ``length`` positions in blocks: ``[length, 2, layers, kv_heads, head_dim]``."""
        ...

    def write_kv(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """Put back what ``read_kv`` gave, on the CPU or the stack's device, into blocks."""
        ...

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of rows."""
        ...


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What a stack is built from."""

    config: ModelConfig
    layers: list[LayerWeights]
    link: Link
    blocks: int
    block_tokens: int
    device: torch.device
    kv_dtype: torch.dtype


class TensorSource(Protocol):
    """Where weights are read from: a checkpoint, or the file of a head."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor by its name in the checkpoint's format."""
        ...


def load_layer(
    source: TensorSource, prefix: str, config: ModelConfig, form: WeightFormat, device: torch.device
) -> LayerWeights:
    """Read the layer whose tensors' names begin with ``prefix``, in the format that the stage computes with."""

    def norm(name: str, present: bool = True) -> torch.Tensor:
        values = source.tensor(f"{prefix}{name}.weight") if present else np.empty(0, np.float32)
        return torch.from_numpy(np.array(values, np.float32)).to(device)

    def linear(parts: Sequence[str], biased: bool) -> Linear:
        def joined(kind: str) -> npt.NDArray[np.float32]:
            arrays = [source.tensor(f"{prefix}{part}.{kind}") for part in parts]
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

        name = f"{prefix}{'+'.join(parts)}.weight"
        return make_linear(name, joined("weight"), joined("bias") if biased else None, form, device)

    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=linear([f"self_attn.{part}_proj" for part in "qkv"], config.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.qk_norm),
        k_norm=norm("self_attn.k_norm", config.qk_norm),
        output=linear(["self_attn.o_proj"], config.o_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], False),
        down=linear(["mlp.down_proj"], False),
    )


class RotaryTable:
    """Cosines and sines by position, ``[positions, head_dim / 2]`` float32, grown on demand."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = torch.from_numpy(rotary_frequencies(config))
        self._device = device
        self._grow(min(config.context_length, 4096))

    def ensure(self, positions: int) -> bool:
        """Make the tables reach ``positions``; True when they are new tensors now."""
        if positions <= len(self.cos):
            return False
        self._grow(max(positions, 2 * len(self.cos)))
        return True

    def _grow(self, positions: int) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self._frequencies)
        self.cos = angles.cos().to(self._device)
        self.sin = angles.sin().to(self._device)
