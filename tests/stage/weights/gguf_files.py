"""Writing small GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

F32 = npt.NDArray[np.float32]

HIDDEN: Final = 64
INNER: Final = 96
HEADS: Final = 4
KV_HEADS: Final = 2
VOCAB: Final = 50
LAYERS: Final = 2

_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Change = Callable[[dict[str, Any], dict[str, F32]], None]


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives to a Hugging Face tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *parts, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(parts)]}.{kind}"


def interleave(weight: F32, heads: int) -> F32:
    """The row order in which llama.cpp stores queries and keys of the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def metadata(architecture: str = "llama") -> dict[str, Any]:
    """What the header of a small model says, keys without the architecture's name."""
    return {
        "general.architecture": architecture,
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tensors() -> dict[str, F32]:
    """Random tensors of a small tied llama, by GGUF names."""
    generator = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (KV_HEADS * head, HIDDEN),
                "attn_v": (KV_HEADS * head, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
            }.items()
        }
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, fields: Mapping[str, Any], weights: Mapping[str, F32], kinds: Mapping[str, Kind] | None = None
) -> Path:
    """Write a file; matrices named in ``kinds`` are quantised, all else is F32."""
    architecture = str(fields["general.architecture"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if key == "general.architecture":
            continue
        full = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, weight in weights.items():
        kind = (kinds or {}).get(name, Kind.F32)
        data = weight if kind == Kind.F32 else quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_gguf(path: Path, change: Change | None = None) -> Path:
    """Write a small llama, after ``change`` has had its way with metadata and tensors."""
    fields, weights = metadata(), tensors()
    if change is not None:
        change(fields, weights)
    return write_gguf(path, fields, weights)
