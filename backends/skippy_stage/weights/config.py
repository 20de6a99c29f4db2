"""The shape of a model: what the engines must know besides the tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import UnsupportedModel

ARCHITECTURES: Final = ("llama", "mimo", "mistral", "qwen2", "qwen3")
MAX_LAYERS: Final = 4096
"""Far above any model: a damaged count must not make a reader list billions of tensors."""
_COUNTS: Final = (
    *("n_layers", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "vocab_size"),
    "context_length",
)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one decoder-only model."""

    architecture: str
    """One of ``ARCHITECTURES``."""
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    rope_factors: tuple[float, ...] | None
    """Divisors of the rotary frequencies, ``head_dim / 2`` of them, when the file gives them outright."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    """How the weights are stored, e.g. ``f32``, ``bf16`` or ``Q4_1``: for people to read."""
    mtp_layers: int = 0
    """Multi-token prediction heads that the checkpoint holds (``num_nextn_predict_layers``); the first is used."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"architecture {self.architecture!r} is not computed; known: {', '.join(ARCHITECTURES)}"
            )
        for name in _COUNTS:
            if not 1 <= getattr(self, name) < 2**31:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}, expected from 1 to {2**31 - 1}")
        if self.n_layers > MAX_LAYERS:
            raise UnsupportedModel(f"n_layers is {self.n_layers}, expected from 1 to {MAX_LAYERS}")
        if not 0 <= self.mtp_layers <= MAX_LAYERS:
            raise UnsupportedModel(f"mtp_layers is {self.mtp_layers}, expected from 0 to {MAX_LAYERS}")
        positive = {"rms_norm_eps": self.rms_norm_eps, "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            positive |= {f"rope scaling's {key}": value for key, value in asdict(self.rope_scaling).items()}
        for index, factor in enumerate(self.rope_factors or ()):
            positive[f"rotary factor {index}"] = factor
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise UnsupportedModel(f"{name} is {value}, expected a positive number")
        if self.n_heads % self.n_kv_heads:
            raise UnsupportedModel(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} key/value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UnsupportedModel(f"head dimension {self.head_dim} is odd: rotary embedding needs pairs")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise UnsupportedModel(
                f"{len(self.rope_factors)} rotary factors for a head dimension of {self.head_dim}"
            )


def rotary_frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """Angular frequencies in radians per position, ``[head_dim / 2]``, with the model's scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype(np.float32)
    if config.rope_factors is not None:
        return (frequencies / np.asarray(config.rope_factors, np.float32)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Wavelengths shorter than the original context allows stay, much longer ones are slowed by the
    # factor, and those between are blended, so that far positions look like ones seen in training.
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_context_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = np.clip(blend, 0.0, 1.0)
    return (blend * frequencies + (1 - blend) * frequencies / scaling.factor).astype(np.float32)
