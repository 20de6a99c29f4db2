"""Models that cannot be computed are refused when they are opened, by the name of the feature."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights import open_checkpoint

from tests.stage.engines.tiny import Tiny, make_model, write_model
from tests.stage.weights.gguf_files import HIDDEN, VOCAB, Change, small_gguf

Edit = dict[str, Any]
"""Keys of config.json to set."""

ROPE: Final = {"rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per architecture."""
    made = {}
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        tiny = Tiny(kind, {"tie_word_embeddings": kind == "qwen3"})
        made[kind] = write_model(make_model(tiny), tiny, tmp_path_factory.mktemp(kind))
    return made


def edited(source: Path, target: Path, edit: Edit, remove: tuple[str, ...] = ()) -> Path:
    """The folder with its config changed."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    for key in remove:
        del config[key]
    (target / "config.json").write_text(json.dumps(config | edit))
    return target


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window 64"),
        ("llama", {"sliding_window": 100}, "sliding_window 100"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128}, "sliding_window 128"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 128}, "sliding_window 128"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"] * 3},
            "layer_types 'sliding_attention'",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}, "rope type 'yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}, "rope type 'linear'"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "rope type 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", **ROPE}}, "rope type 'longrope'"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5, **ROPE}}, "partial_rotary_factor 0.5"),
        ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ("llama", {"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ("llama", {"model_type": "mixtral", "num_local_experts": 8}, "model_type 'mixtral'"),
        ("llama", {"model_type": "gemma3_text"}, "model_type 'gemma3_text'"),
        ("qwen3", {"num_experts": 16}, "mixture of experts"),
        ("llama", {"num_local_experts": 8}, "mixture of experts"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ("llama", {"head_dim": 15}, "head dimension 15"),
        ("llama", {"num_hidden_layers": 2}, r"tensor 'model\.layers\.2\..*' is not computed"),
        ("llama", {"attention_bias": True}, r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"),
        ("qwen2", {"model_type": "llama"}, r"tensor 'model\.layers\.\d\.self_attn\.._proj\.bias' is not computed"),
        ("qwen3", {"model_type": "llama"}, r"tensor 'model\.layers\.\d\.self_attn\.._norm\.weight' is not computed"),
        ("qwen3", {"tie_word_embeddings": False}, r"tensor 'lm_head\.weight' is missing"),
        ("llama", {"vocab_size": 96}, r"'model\.embed_tokens\.weight' has shape \[97, 64\], expected \[96, 64\]"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("llama", {"num_hidden_layers": 10**9}, "n_layers is 1000000000"),
        ("llama", {"num_hidden_layers": 0}, "n_layers is 0"),
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "a value of the wrong kind"),
        ("llama", {"hidden_size": "wide"}, "a value of the wrong kind.*wide"),
        ("llama", {"sliding_window": "x"}, "a value of the wrong kind"),
        ("llama", {"rope_parameters": "x"}, "a value of the wrong kind"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", **ROPE}}, "'low_freq_factor' is missing"),
    ],
)  # fmt: skip
def test_configs(folders: dict[str, Path], tmp_path: Path, kind: str, edit: Edit, message: str) -> None:
    with pytest.raises(SkippyError, match=message) as caught:
        open_checkpoint(edited(folders[kind], tmp_path, edit))
    if "is not computed" in caught.value.message:
        assert isinstance(caught.value, UnsupportedModel)


def test_a_mistral_without_a_word_on_its_window_has_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers' default is 4096 positions, which a longer context feels."""
    edit = {"max_position_embeddings": 8192}
    with pytest.raises(UnsupportedModel, match="sliding_window 4096"):
        open_checkpoint(edited(folders["mistral"], tmp_path, edit, remove=("sliding_window",)))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"])
def test_configs_with_a_hole(folders: dict[str, Path], tmp_path: Path, key: str) -> None:
    with pytest.raises(SkippyError, match=f"'{key}' is missing"):
        open_checkpoint(edited(folders["llama"], tmp_path, {}, remove=(key,)))


def _set(key: str, value: Any) -> Change:
    def change(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields[key] = value

    return change


def _tensor(name: str, shape: tuple[int, ...] | None, fill: float = 1.0) -> Change:
    def change(_: dict[str, Any], weights: dict[str, Any]) -> None:
        weights.pop(name, None)
        if shape is not None:
            weights[name] = np.full(shape, fill, np.float32)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("general.architecture", "gemma3"), "general.architecture 'gemma3'"),
        (_set("general.architecture", "qwen3moe"), "general.architecture 'qwen3moe'"),
        (_set("general.architecture", "mistral3"), "general.architecture 'mistral3'"),
        (_set("expert_count", 8), "llama.expert_count 8"),
        (_set("rope.scaling.type", "yarn"), "llama.rope.scaling.type 'yarn'"),
        (_set("rope.scaling.type", "linear"), "llama.rope.scaling.type 'linear'"),
        (_set("rope.scale_linear", 2.0), "llama.rope.scale_linear 2.0"),
        (_set("attention.sliding_window", 16), "llama.attention.sliding_window 16"),
        (_set("attention.value_length", 8), "attention.value_length"),
        (_set("rope.dimension_count", 8), "rope.dimension_count 8"),
        (_set("logit_scale", 0.5), "llama.logit_scale 0.5"),
        (_set("final_logit_softcapping", 30.0), "llama.final_logit_softcapping 30.0"),
        (_set("attention.causal", False), "llama.attention.causal False"),
        (_set("attention.head_count_kv", [2, 1]), "head_count_kv that differs between layers"),
        (_set("attention.head_count", 0), "llama.attention.head_count 0"),
        (_set("block_count", 0), "n_layers is 0"),
        (_set("block_count", 4000000000), "n_layers is 4000000000"),
        (_set("block_count", 1), r"tensor 'blk\.1\..*' is not computed"),
        (_set("block_count", 3), r"tensor 'model\.layers\.2\..*' is missing"),
        (_set("context_length", float("nan")), "llama.context_length is nan, expected a whole number"),
        (_set("context_length", "long"), "llama.context_length is 'long', expected a number"),
        (_set("attention.layer_norm_rms_epsilon", float("nan")), "rms_norm_eps is nan"),
        (_set("rope.freq_base", float("inf")), "rope_theta is inf"),
        (_tensor("rope_freqs.weight", (3,)), "3 rotary factors"),
        (_tensor("rope_freqs.weight", (8,), 0.0), "rotary factor 0 is 0.0"),
        (_tensor("blk.1.ffn_up.weight", None), r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        (_tensor("token_embd.weight", None), "vocab_size is 0"),
        (_tensor("blk.0.ffn_gate_inp.weight", (4, HIDDEN)), r"tensor 'blk\.0\.ffn_gate_inp\.weight' is not computed"),
        (_tensor("blk.0.attn_sinks.weight", (4,)), r"tensor 'blk\.0\.attn_sinks\.weight' is not computed"),
        (_tensor("output.weight", (VOCAB, HIDDEN + 1)), r"tensor 'lm_head\.weight' has shape \[50, 65\]"),
        (_tensor("blk.0.attn_q.bias", (HIDDEN,)), r"self_attn\.k_proj\.bias' is missing"),
    ],
)  # fmt: skip
def test_gguf_files(tmp_path: Path, change: Change, message: str) -> None:
    file = small_gguf(tmp_path / "m.gguf", change)
    with pytest.raises(SkippyError, match=message) as caught:
        open_checkpoint(file)
    if "is not computed" in caught.value.message:
        assert isinstance(caught.value, UnsupportedModel)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


_START: Final = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text(b"a.b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"GGUX" + bytes(60), "no GGUF magic"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1, known: 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version 50331648"),
        (b"GGUF" + struct.pack("<I", 3) + bytes(2), "not a readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "not a readable GGUF file"),
        (_START + struct.pack("<I", 77) + bytes(64), "not a readable GGUF file"),
        (_START + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "not a readable GGUF file"),
        (_START + struct.pack("<IIQ", 9, 6, 2**64 - 1) + bytes(64), "not a readable GGUF file"),
        (_START + struct.pack("<IIQ", 9, 8, 2**62) + b"\xff" * 32, "not a readable GGUF file"),
        (_START[:24] + b"\xff" * 8 + bytes(64), "a string runs past the end"),
        (_START + struct.pack("<I", 8) + _text(b"\xff\xfe") + bytes(64), "not a readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _text(b"t") + struct.pack("<I", 2**31) + bytes(64), "dimensions"),
        (_START + struct.pack("<I", 4) + bytes(64), "general.architecture 'None'"),
    ],
)  # fmt: skip
def test_damaged_gguf_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(SkippyError, match=message):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("kind", "message"), [(99, "unknown type 99"), (26, "type I32, which cannot be read")]
)
def test_gguf_types_that_cannot_be_read(tmp_path: Path, kind: int, message: str) -> None:
    file = small_gguf(tmp_path / "m.gguf")
    content = bytearray(file.read_bytes())
    name = b"blk.1.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", kind)
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=rf"'blk\.1\.ffn_down\.weight' has .*{message}"):
        open_checkpoint(file).tensor("model.layers.1.mlp.down_proj.weight")


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("model.layers.1.mlp.up_proj.weight"), r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        (_without("lm_head.weight"), r"'lm_head\.weight' is missing"),
        (_with("model.norm.weight", torch.ones(65)), r"'model\.norm\.weight' has shape \[65\], expected \[64\]"),
        (_with("model.layers.0.mlp.gate.weight", torch.ones(4, 64)), r"'model\.layers\.0\.mlp\.gate\.weight' is not"),
        (_with("model.layers.0.self_attn.q_proj.weight_scale", torch.ones(1)), r"weight_scale' is not computed"),
    ],
)  # fmt: skip
def test_tensors(
    folders: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    folder = edited(folders["llama"], tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SkippyError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.float64, "F64")]
)
def test_stored_types_that_cannot_be_read(
    folders: dict[str, Path], tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    folder = edited(folders["llama"], tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"'model\.layers\.1\.mlp\.up_proj\.weight' has type {name}"):
        open_checkpoint(folder).tensor("model.layers.1.mlp.up_proj.weight")
