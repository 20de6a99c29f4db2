"""The torch engine beyond the common contract: formats, narrow links, what it reads, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from skippy_stage.engines import create_engine
from skippy_stage.engines.base import Batch, SequenceRows
from skippy_stage.engines.linear import make_linear
from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.settings import StageSettings
from skippy_stage.weights import Checkpoint

from tests.stage.engines.driving import Chain, Piece, assert_close
from tests.stage.engines.tiny import LAYERS, make_folder, random_tokens

TOKENS = random_tokens(40)
CPU = torch.device("cpu")


def settings(folder: Path, first: int = 0, last: int = LAYERS, **more: Any) -> StageSettings:
    values = {"threads": 1, "kv_tokens": 256, "kv_block_tokens": 4, **more}
    return StageSettings(name="stage", model=str(folder), first_layer=first, last_layer=last, **values)


def scaled_copy(folder: Path, target: Path, tensor: str, factor: float) -> Path:
    """The model in ``folder`` with one tensor multiplied."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] = tensors[tensor] * factor
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("first", "last", "names"),
    [
        (0, 1, {"model.embed_tokens.weight", "model.layers.0."}),
        (1, 2, {"model.layers.1."}),
        (2, 3, {"model.layers.2.", "model.norm.weight", "lm_head.weight"}),
        (0, 3, {"model.", "lm_head.weight"}),
    ],
)
def test_a_stage_reads_its_own_tensors_and_each_once(
    tiny_llama: Path, first: int, last: int, names: set[str]
) -> None:
    read: list[str] = []
    tensor = Checkpoint.tensor

    def noted(self: Checkpoint, name: str) -> Any:
        read.append(name)
        return tensor(self, name)

    with patch.object(Checkpoint, "tensor", noted):
        create_engine(settings(tiny_llama, first, last)).shutdown()
    assert len(read) == len(set(read))
    assert all(name.startswith(tuple(names)) for name in read)
    per_layer = 9
    assert len(read) == per_layer * (last - first) + (first == 0) + 2 * (last == LAYERS)


@pytest.mark.parametrize(("form", "matrix", "table"), [("f32", 4, 4), ("f16", 2, 2), ("int8", 1, 2)])
def test_weight_bytes_are_what_is_held(tiny_llama: Path, form: str, matrix: int, table: int) -> None:
    engine = create_engine(settings(tiny_llama, 0, 1, weights=form))
    matrices = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    assert engine.info.weight_bytes == matrices * matrix + 2 * 64 * 4 + 97 * 64 * table


@pytest.mark.parametrize(("first", "last"), [(0, 4), (3, 4), (2, 2), (2, 1)])
def test_layers_that_are_not_there(tiny_llama: Path, first: int, last: int) -> None:
    with pytest.raises(SkippyError, match=rf"layers \[{first}, {last}\) of a model with 3"):
        create_engine(settings(tiny_llama, first, last))


@pytest.mark.parametrize(
    "engine", ["nothing", "no.such.module:make", "skippy_stage.errors:Missing", ":x", "x:"]
)
def test_engines_that_are_not_there(tiny_llama: Path, engine: str) -> None:
    with pytest.raises(SkippyError, match=f"engine '{engine}'"):
        create_engine(settings(tiny_llama, engine=engine))


def test_an_engine_of_ones_own(tiny_llama: Path) -> None:
    engine = create_engine(settings(tiny_llama, engine="skippy_stage.engines.torch_engine:TorchEngine"))
    assert engine.info.engine == "torch-cpu-f16"


def test_a_device_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(SkippyError, match=r"device 'cuda:99': this machine has \d+ CUDA devices"):
        create_engine(settings(tiny_llama, device="cuda:99"))


def test_weights_beyond_float16_are_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    big = scaled_copy(tiny_llama, tmp_path / "big", "model.layers.1.mlp.down_proj.weight", 1e6)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*weights = 'f32'"):
        create_engine(settings(big, weights="f16"))
    create_engine(settings(big, 0, 1, weights="f16"))
    create_engine(settings(big, weights="f32"))


def test_weights_that_are_not_numbers_are_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    broken = scaled_copy(tiny_llama, tmp_path / "broken", "model.embed_tokens.weight", float("nan"))
    with pytest.raises(UnsupportedModel, match=r"model\.embed_tokens\.weight"):
        create_engine(settings(broken, weights="f16"))


def test_an_overflow_on_a_float16_link_names_the_sequence(tiny_llama: Path, tmp_path: Path) -> None:
    """Token 5 of this model has a hidden state that float16 cannot hold; other sequences may go on."""
    folder = make_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] *= 1e5
    save_file(tensors, folder / "model.safetensors")
    engine = create_engine(settings(folder, 0, 2, weights="f32", link_dtype="f16"))
    for sequence in (1, 2):
        engine.open(sequence, 16)
    calm = np.array([1, 2, 3], np.int32)
    with pytest.raises(SkippyError, match=r"sequence 2: the hidden state at position 1 .* float16 link"):
        engine.forward(
            Batch(
                [SequenceRows(1, 0, 3), SequenceRows(2, 0, 3)],
                np.concatenate([calm, [4, 5, 6]]).astype(np.int32),
            )
        )
    assert engine.usage().cached == {1: 0, 2: 0}
    engine.check_integrity()
    engine.forward(Batch([SequenceRows(1, 0, 3), SequenceRows(2, 0, 1)], np.array([1, 2, 3, 4], np.int32)))
    wide = create_engine(settings(folder, 0, 2, weights="f32", link_dtype="bf16"))
    wide.open(1, 16)
    assert wide.forward(Batch([SequenceRows(1, 0, 1)], np.array([5], np.int32))).hidden is not None


@pytest.mark.parametrize(("link", "dtype"), [("f32", "float32"), ("f16", "float16"), ("bf16", "uint16")])
def test_hidden_rows_have_the_type_of_the_link(tiny_llama: Path, link: str, dtype: str) -> None:
    chain = Chain([create_engine(settings(tiny_llama, 0, 1, link_dtype=link))])
    with chain.opened(1):
        (output,) = chain.outputs(Piece(1, 0, TOKENS[:3]))
        assert output.hidden is not None
        assert output.hidden.dtype == dtype


def test_positions_beyond_the_first_rotary_table(tiny_llama: Path) -> None:
    """Positions past what the model was made for are the caller's choice; the tables grow with them."""
    long = random_tokens(1100)
    short, grown = (Chain([create_engine(settings(tiny_llama, weights="f32", kv_tokens=1200))]) for _ in "ab")
    with short.opened(1, room=1200), grown.opened(1, 2, room=1100):
        grown.run(Piece(2, 0, long[:500]))
        grown.close(2)
        parts = [grown.run(Piece(1, start, long[start : start + 100])) for start in range(0, 1100, 100)]
        assert_close(np.concatenate(parts), short.run(Piece(1, 0, long)), 5e-6)


@pytest.mark.parametrize("form", ["f32", "f16", "int8"])
def test_a_product_is_its_matrix_and_bias(form: Any) -> None:
    generator = np.random.default_rng(0)
    weight, bias, rows = (
        generator.standard_normal(shape).astype(np.float32) for shape in ((24, 64), (24,), (5, 64))
    )
    product = make_linear("w", weight, bias, form, CPU)
    expected = rows @ weight.T + bias
    before = torch.from_numpy(rows.copy())
    for count in (1, 2, 5):
        given = before[:count].clone()
        assert_close(product(given).numpy(), expected[:count], {"f32": 1e-6, "f16": 1e-3, "int8": 0.03}[form])
        assert torch.equal(given, before[:count]), "the input is left as it is"


def test_int8_rows_do_not_drown_in_a_large_neighbour() -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((24, 64)).astype(np.float32)
    rows = torch.from_numpy(generator.standard_normal((4, 64)).astype(np.float32))
    product = make_linear("w", weight, None, "int8", CPU)
    alone = product(rows[:3]).numpy()
    rows[3] *= 1e4
    assert_close(product(rows).numpy()[:3], alone, 0.02)
    rows[3] = 0.0
    assert_close(product(rows).numpy()[:3], alone, 0.02)
    assert not product(rows).numpy()[3].any()


def test_a_read_only_array_is_taken() -> None:
    weight = np.ones((8, 8), np.float32)
    weight.setflags(write=False)
    for form in ("f32", "f16", "int8"):
        make_linear("w", weight, None, form, CPU)  # type: ignore[arg-type]
