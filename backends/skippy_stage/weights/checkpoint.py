"""One interface over safetensors folders and GGUF files."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.config import ModelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
MTP_PREFIX: Final = "model.mtp_layers."
BYTES_PER_WEIGHT: Final = 2
"""Engines hold weights in 16 bits, whatever the file's format: balancing counts what they hold."""


def layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (after ``model.layers.N.``) and shapes of one layer's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (query,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (key,)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def mtp_tensors(config: ModelConfig, head: int = 0) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a multi-token prediction head's tensors, as MiMo publishes them.

    The head is one layer of the model's own shape, norms around it, and ``input_proj``, which joins a hidden row
    and a token's embedding (DeepSeek-V3, section 2.2).
    """
    hidden = (config.hidden_size,)
    own: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": hidden,
        "hidden_layernorm.weight": hidden,
        "input_proj.weight": (config.hidden_size, 2 * config.hidden_size),
        "final_layernorm.weight": hidden,
    }
    return {f"{MTP_PREFIX}{head}.{suffix}": shape for suffix, shape in (own | layer_tensors(config)).items()}


def model_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model; the head is absent when it is tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    layer = layer_tensors(config)
    for index in range(config.n_layers):
        for suffix, shape in layer.items():
            shapes[f"model.layers.{index}.{suffix}"] = shape
    for head in range(config.mtp_layers):
        shapes |= mtp_tensors(config, head)
    return shapes


class Checkpoint(abc.ABC):
    """Weights of one model by Hugging Face names, read when asked for and not kept."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.config = config
        self._shapes = model_tensors(config)

    @abc.abstractmethod
    def _read(self, name: str) -> npt.NDArray[np.float32]: ...

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read one tensor as float32, row-major, shaped as Hugging Face shapes it.

        ``lm_head.weight`` of a tied model is the embedding. The array may be a read-only view of the
        file. Raises SkippyError for a name that the model does not have.
        """
        return self._read(self._own_name(name))

    def weights(self, name: str) -> int:
        """Number of weights of a tensor."""
        return math.prod(self._shapes[self._own_name(name)])

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor as an engine holds it, in 16 bits per weight."""
        return self.weights(name) * BYTES_PER_WEIGHT

    def layer_names(self, index: int) -> list[str]:
        """Names of all tensors of a layer."""
        return [f"model.layers.{index}.{suffix}" for suffix in layer_tensors(self.config)]

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer."""
        return [sum(map(self.nbytes, self.layer_names(index))) for index in range(self.config.n_layers)]

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the token embedding."""
        return self.nbytes(EMBEDDING)

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head, also when it is tied to the embedding: the last stage reads it whole."""
        return self.nbytes(HEAD)

    def _own_name(self, name: str) -> str:
        """The name under which the file has the tensor."""
        if name == HEAD and self.config.tied_embeddings:
            name = EMBEDDING
        if name not in self._shapes:
            raise SkippyError(f"{self.path}: the model has no tensor {name!r}")
        return name

    def _check_tensors(self, found: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Refuse missing, misshapen and unknown tensors by name: each would change the model's output."""
        skipped = set(ignored)
        for name, shape in self._shapes.items():
            if name not in found:
                raise SkippyError(f"{self.path}: tensor {name!r} is missing")
            if found[name] != shape:
                raise UnsupportedModel(
                    f"{self.path}: tensor {name!r} has shape {list(found[name])}, expected {list(shape)}"
                )
        for name in found:
            if name not in self._shapes and name not in skipped:
                raise UnsupportedModel(f"{self.path}: tensor {name!r} is not computed")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder with safetensors, or a GGUF file.

    Raises SkippyError for what is missing or damaged, and UnsupportedModel naming a feature that is
    not computed.
    """
    # The readers derive from Checkpoint, so they can only be imported once this module stands.
    from skippy_stage.weights.gguf_file import GgufCheckpoint
    from skippy_stage.weights.safetensors_folder import SafetensorsCheckpoint

    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise SkippyError(f"{path}: neither a folder with config.json nor a .gguf file")
