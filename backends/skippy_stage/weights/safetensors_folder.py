"""Hugging Face folders: ``config.json`` and one or more ``.safetensors`` files, mapped, not loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError
from skippy_stage.weights.checkpoint import HEAD, Checkpoint
from skippy_stage.weights.huggingface_config import read_config, read_json
from skippy_stage.weights.safetensors_file import FLOATS, SafetensorsFile


class SafetensorsCheckpoint(Checkpoint):
    """A folder with ``model.safetensors``, or shards and ``model.safetensors.index.json``."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, _files(folder)):
            self._files.update(dict.fromkeys(file.entries, file))
        entries = {name: file.entries[name] for name, file in self._files.items()}
        kinds = [entry.dtype for entry in entries.values()]
        most = max(sorted(set(kinds)), key=kinds.count, default="F32")
        super().__init__(folder, read_config(folder, FLOATS[most][0] if most in FLOATS else most))
        # Old exports store the rotary frequencies, which follow from the config, and tied models may
        # store their head twice.
        derived = [name for name in entries if name.endswith("rotary_emb.inv_freq")]
        found = {name: entry.shape for name, entry in entries.items()}
        self._check_tensors(found, [*derived, HEAD] if self.config.tied_embeddings else derived)

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        return self._files[name].floats(name)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SkippyError(f"{index}: no weight_map")
        files = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
        for file in files:
            if file.parent != folder or file.name == "..":
                raise SkippyError(f"{index}: {file} is outside the folder")
    else:
        files = [folder / "model.safetensors"]
    return files
