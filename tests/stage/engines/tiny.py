"""Tiny random models of every architecture, written as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB: Final = 97
LAYERS: Final = 3
CONTEXT: Final = 512

# One shape of heads for all, so that kernels are compiled once.
_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KINDS: Final[dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}

LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """What a tiny model is made of."""

    kind: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    """On top of the common shape."""
    dtype: torch.dtype = torch.float32
    """How the weights are stored."""
    shards: int = 1
    """Files; several make an index."""
    seed: int = 0


def make_model(tiny: Tiny) -> PreTrainedModel:
    """The model in transformers, f32, with weights that the storage type holds exactly.

    Unlike transformers' own start values these make every layer count: products keep the size of their
    input, biases and norms differ from 0 and 1.
    """
    config_class, model_class, defaults = _KINDS[tiny.kind]
    model = model_class(config_class(**{**_SHAPE, **defaults, **tiny.config}))
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5)
            weight.copy_(weight.to(tiny.dtype).float())
    return model.eval()


def write_model(model: PreTrainedModel, tiny: Tiny, folder: Path) -> Path:
    """Write ``config.json`` and the weights; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tied = bool(model.config.tie_word_embeddings)
    tensors = {
        name: weight.detach().to(tiny.dtype).contiguous()
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    if tiny.shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(tiny.shards):
        file = f"model-{shard + 1:05d}-of-{tiny.shards:05d}.safetensors"
        own = names[shard :: tiny.shards]
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_folder(folder: Path, tiny: Tiny | None = None) -> Path:
    """Make and write a tiny model; gives its folder."""
    tiny = tiny or Tiny()
    return write_model(make_model(tiny), tiny, folder)


def random_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> npt.NDArray[np.int32]:
    """Token ids ``[count]``."""
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)
