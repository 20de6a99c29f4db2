"""Reading ``config.json``, and refusing what it asks for and nobody computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.config import ARCHITECTURES, Llama3Scaling, ModelConfig

# transformers' own defaults for keys that a config.json may leave out.
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_WINDOW = {"mistral": 4096}


def read_config(folder: Path, dtype: str) -> ModelConfig:
    """Build the model's shape from ``config.json`` and ``generation_config.json`` (which is optional)."""
    raw = read_json(folder / "config.json")
    architecture = str(raw.get("model_type"))
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    try:
        _refuse(folder, raw, architecture)
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        head_dim = raw.get("head_dim") or _DEFAULT_HEAD_DIM.get(architecture) or hidden // heads
        biased = bool(raw.get("attention_bias", False))
        theta, scaling = _rotary(folder, raw)
        return ModelConfig(
            architecture=architecture,
            n_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            n_heads=heads,
            n_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            vocab_size=int(raw["vocab_size"]),
            context_length=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_factors=None,
            qkv_bias=architecture in ("mimo", "qwen2") or biased,
            o_bias=architecture in ("llama", "qwen3") and biased,
            qk_norm=architecture == "qwen3",
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=_first_id(generation.get("bos_token_id", raw.get("bos_token_id"))),
            eos_token_ids=_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
            dtype=dtype,
            mtp_layers=int(raw.get("num_nextn_predict_layers") or 0) if architecture == "mimo" else 0,
        )
    except KeyError as error:
        raise SkippyError(f"{folder}/config.json: {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SkippyError(f"{folder}/config.json: a value of the wrong kind: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises SkippyError naming the file when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SkippyError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise SkippyError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise SkippyError(f"{path}: expected a JSON object")
    return content


def _refuse(folder: Path, raw: Mapping[str, Any], architecture: str) -> None:
    def unsupported(what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{folder}/config.json: {what} is not computed")

    if architecture not in ARCHITECTURES:
        raise unsupported(f"model_type {architecture!r} (known: {', '.join(ARCHITECTURES)})")
    for name in raw.get("architectures") or ():
        if not str(name).endswith("ForCausalLM"):
            raise unsupported(f"architectures {name!r}")
    if raw.get("quantization_config"):
        raise unsupported(f"quantization_config {raw['quantization_config'].get('quant_method')!r}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise unsupported(f"hidden_act {activation!r}")
    if raw.get("mlp_bias"):
        raise unsupported("mlp_bias")
    for key in ("num_experts", "num_local_experts"):
        if raw.get(key):
            raise unsupported(f"{key} {raw[key]} (mixture of experts)")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(f"partial_rotary_factor {raw['partial_rotary_factor']}")
    window = raw.get("sliding_window", _DEFAULT_WINDOW.get(architecture))
    # Qwen configs carry a window that only counts when they say so; Mistral's counts unless it is null.
    # A window as long as the context hides nothing.
    used = bool(raw.get("use_sliding_window")) if architecture in ("mimo", "qwen2", "qwen3") else True
    if used and window is not None and window < raw.get("max_position_embeddings", 0):
        raise unsupported(f"sliding_window {window}")
    if "sliding_attention" in (raw.get("layer_types") or ()) and used and window is not None:
        raise unsupported("layer_types 'sliding_attention'")


def _rotary(folder: Path, raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    # transformers 5 writes rope_parameters, with the base inside; before, rope_theta and rope_scaling.
    nested = raw.get("rope_parameters") or {}
    scaling = nested or raw.get("rope_scaling") or {}
    theta = float(nested.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if nested.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{folder}/config.json: partial_rotary_factor {nested['partial_rotary_factor']} is not computed"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"{folder}/config.json: rope type {kind!r} is not computed")
    return theta, Llama3Scaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_context_length=int(scaling["original_max_position_embeddings"]),
    )


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def _ids(*values: Any) -> tuple[int, ...]:
    """Token ids out of numbers, lists and nulls: in order, each once."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                found[int(item)] = None
    return tuple(found)
