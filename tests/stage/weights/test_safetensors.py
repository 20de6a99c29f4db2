"""Safetensors folders: values against the safetensors package, what is touched, shards, and damage."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from skippy_stage.errors import SkippyError
from skippy_stage.weights import open_checkpoint

from tests.stage.engines.tiny import Tiny, make_folder


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_of_the_safetensors_package(
    tmp_path: Path, dtype: torch.dtype, shown: str, shards: int
) -> None:
    folder = make_folder(tmp_path, Tiny(dtype=dtype, shards=shards))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.dtype == shown
    theirs = {}
    for file in folder.glob("*.safetensors"):
        theirs |= load_file(file)
    assert len(theirs) == 3 + 9 * 3
    for name, tensor in theirs.items():
        ours = checkpoint.tensor(name)
        assert ours.dtype == np.float32
        assert ours.flags.c_contiguous
        assert np.array_equal(ours, tensor.float().numpy())
        assert checkpoint.weights(name) == tensor.numel()
        assert checkpoint.nbytes(name) == 2 * tensor.numel()


def test_a_layer_reads_its_own_shards_only(tmp_path: Path) -> None:
    """A stage's machine may hold the rest of the model on slow storage: files of others stay closed."""
    folder = make_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {
        name: f"{'layer' + name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"
        for name in tensors
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    checkpoint = open_checkpoint(folder)
    opened: list[str] = []
    path_open = Path.open

    def noted(self: Path, *arguments: object, **more: object) -> object:
        opened.append(self.name)
        return path_open(self, *arguments, **more)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", noted)
        for name in checkpoint.layer_names(1):
            checkpoint.tensor(name)
    assert opened == ["layer1.safetensors"]


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path, Tiny(config={"tie_word_embeddings": True})))
    head = checkpoint.tensor("lm_head.weight")
    assert np.array_equal(head, checkpoint.tensor("model.embed_tokens.weight"))
    assert checkpoint.head_bytes == checkpoint.embedding_bytes == 97 * 64 * 2


def test_tensors_that_follow_from_others_are_left_out(tmp_path: Path) -> None:
    """Tied models may store the head twice, old exports their rotary frequencies."""
    folder = make_folder(tmp_path, Tiny(config={"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    open_checkpoint(folder)


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(SkippyError, match=r"no tensor 'model\.layers\.3\.input_layernorm\.weight'"):
        open_checkpoint(make_folder(tmp_path)).tensor("model.layers.3.input_layernorm.weight")


@pytest.mark.parametrize(
    ("stop", "listed", "expected"),
    [(2, None, (2,)), ([2, 7], None, (2, 7)), (2, [7, 2], (7, 2)), (None, None, ()), (None, 9, (9,))],
)
def test_end_tokens_of_both_configs(
    tmp_path: Path, stop: object, listed: object, expected: tuple[int, ...]
) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": stop}))
    if listed is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert open_checkpoint(folder).config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "outside the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside the folder"),
        ({"weight_map": {"a": ".."}}, "outside the folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors does not exist"),
        ({"weight_map": {"a": 3}}, "3 does not exist"),
        ([], "expected a JSON object"),
    ],
)
def test_indices_that_lead_nowhere(tmp_path: Path, index: object, message: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SkippyError, match=message):
        open_checkpoint(folder)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(SkippyError, match=r"model\.safetensors does not exist"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(SkippyError, match="neither a folder"):
        open_checkpoint(tmp_path / "model.bin")
    with pytest.raises(SkippyError, match=r"m\.gguf"):
        open_checkpoint(tmp_path / "m.gguf")
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(SkippyError, match=r"config\.json"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(SkippyError, match=r"config\.json does not exist"):
        open_checkpoint(folder)


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x01", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (_file(b"{"), "damaged header"),
        (_file(b"\xff\xfe\xff"), "damaged header"),
        (_file([1]), "damaged header"),
        (_file({"t": 1}), "damaged header"),
        (_file(b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}'), "damaged header"),
        (_file({"t": {"dtype": "F32", "shape": [2]}}), "damaged header"),
        (_file({"t": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}, bytes(8)), "damaged header"),
        (_file({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "'t' lies outside"),
        (_file({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)), "'t' .* wrong size"),
        (
            _file({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, bytes(8)),
            "'t' .* wrong size",
        ),
        (_file({"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, bytes(8)), "'t' lies outside"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(SkippyError, match=message):
        open_checkpoint(folder)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_of_ours_or_read(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "model"
    good = tmp_path / "good"
    if not good.exists():
        make_folder(folder)
        (folder / "model.safetensors").rename(good)
    content = bytearray(good.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header))] = data.draw(st.sampled_from(b'\x00\xff"0-9[{}e.,'))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (folder / "model.safetensors").write_bytes(content)
    with suppress(SkippyError):
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.layer_names(1):
            checkpoint.tensor(name)
