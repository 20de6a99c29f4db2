"""Logits of tiny models of every architecture against transformers' own forward in float32."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from skippy_stage.engines import create_engine
from skippy_stage.settings import StageSettings

from tests.stage.engines.driving import F32, Chain, Piece, assert_close, difference
from tests.stage.engines.tiny import LAYERS, LLAMA3_ROPE, Tiny, make_model, random_tokens, write_model

TOKENS: Final = random_tokens(200)

TOLERANCES: Final = {"f32": 2e-5, "f16": 3e-3, "int8": 0.15}
"""Largest difference over largest logit. f16: weights of 11 bits. int8: weights and activations of 7 to 8
bits, on models so small that errors hardly average out."""

_HALF: Final = torch.bfloat16

MODELS: Final = {
    "llama": Tiny(),
    "llama-tied": Tiny(config={"tie_word_embeddings": True}),
    "llama-mha": Tiny(config={"num_key_value_heads": 4}),
    "llama-mqa": Tiny(config={"num_key_value_heads": 1}),
    "llama-wide-heads": Tiny(config={"head_dim": 32}),
    "llama-attention-bias": Tiny(config={"attention_bias": True}),
    "llama3-rope": Tiny(config={"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}}),
    "llama3-rope-tied-bf16": Tiny(
        config={"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}, "tie_word_embeddings": True},
        dtype=_HALF,
    ),
    "llama-theta": Tiny(config={"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "llama-eps": Tiny(config={"rms_norm_eps": 0.1}),
    "llama-f16": Tiny(dtype=torch.float16),
    "llama-bf16": Tiny(dtype=_HALF),
    "llama-sharded": Tiny(shards=3),
    "llama-sharded-tied-bf16": Tiny(config={"tie_word_embeddings": True}, dtype=_HALF, shards=2),
    "mistral": Tiny("mistral"),
    "mistral-bf16": Tiny("mistral", dtype=_HALF),
    "mistral-window-as-long-as-the-context": Tiny("mistral", {"sliding_window": 512}),
    "qwen2": Tiny("qwen2"),
    "qwen2-tied-f16": Tiny("qwen2", {"tie_word_embeddings": True}, torch.float16),
    "qwen2-unused-window": Tiny("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
    "qwen3": Tiny("qwen3"),
    "qwen3-tied-bf16": Tiny("qwen3", {"tie_word_embeddings": True}, _HALF),
    "qwen3-attention-bias": Tiny("qwen3", {"attention_bias": True}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _reference(name: str, parent: Path) -> tuple[Path, F32]:
    """The model's folder, and transformers' logits ``[tokens, vocab]``."""
    model = make_model(MODELS[name])
    with torch.inference_mode():
        logits: F32 = model(torch.from_numpy(TOKENS).long()[None]).logits[0].numpy()
    return write_model(model, MODELS[name], parent / name), logits


def _engine_logits(folder: Path, form: str) -> F32:
    """A long chunk, a short one and single rows, as serving would run them."""
    settings = StageSettings(
        name="tiny",
        model=str(folder),
        first_layer=0,
        last_layer=LAYERS,
        weights=form,  # type: ignore[arg-type]
        threads=1,
        kv_tokens=256,
        kv_block_tokens=4,
    )
    chain = Chain([create_engine(settings)])
    cuts = [0, 150, 160, 170, *range(171, len(TOKENS) + 1)]
    with chain.opened(1, room=len(TOKENS)):
        parts = [chain.run(Piece(1, start, TOKENS[start:stop])) for start, stop in pairwise(cuts)]
    chain.shutdown()
    return np.concatenate(parts)


@pytest.mark.parametrize("form", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(folders: Path, name: str, form: str) -> None:
    folder, expected = _reference(name, folders)
    ours = _engine_logits(folder, form)
    assert_close(ours, expected, TOLERANCES[form])


def test_every_feature_shows_in_the_logits(folders: Path) -> None:
    """Were a feature ignored, its model would give another's logits: the comparisons above can fail."""
    base = _reference("llama", folders)[1]
    for name in ("llama3-rope", "llama-theta", "llama-eps"):
        assert difference(_reference(name, folders)[1], base) > 0.01
    scaled = _reference("llama3-rope", folders)[0]
    config = (scaled / "config.json").read_text()
    try:
        (scaled / "config.json").write_text(config.replace('"llama3"', '"default"'))
        assert difference(_engine_logits(scaled, "f32"), _reference("llama3-rope", folders)[1]) > 0.01
    finally:
        (scaled / "config.json").write_text(config)


def test_older_spelling_of_rope_settings(folders: Path, tmp_path: Path) -> None:
    """Before version 5 transformers wrote ``rope_theta`` and ``rope_scaling`` side by side."""
    folder, expected = _reference("llama3-rope", folders)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    nested = config.pop("rope_parameters")
    config["rope_theta"] = nested.pop("rope_theta")
    config["rope_scaling"] = nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_close(_engine_logits(tmp_path, "f32"), expected, TOLERANCES["f32"])
