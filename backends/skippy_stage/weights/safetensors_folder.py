"""Hugging Face folders: ``config.json`` and one or more ``.safetensors`` files, mapped, not loaded."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.checkpoint import HEAD, Checkpoint
from skippy_stage.weights.huggingface_config import read_config, read_json

_DTYPES: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
}
_MAX_HEADER_BYTES: Final = 100 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsCheckpoint(Checkpoint):
    """A folder with ``model.safetensors``, or shards and ``model.safetensors.index.json``."""

    def __init__(self, folder: Path) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, _Entry] = {}
        for file in _files(folder):
            self._entries.update(_read_header(file))
        kinds = [entry.dtype for entry in self._entries.values()]
        most = max(sorted(set(kinds)), key=kinds.count, default="F32")
        super().__init__(folder, read_config(folder, _DTYPES[most][0] if most in _DTYPES else most))
        # Old exports store the rotary frequencies, which follow from the config, and tied models may
        # store their head twice.
        derived = [name for name in self._entries if name.endswith("rotary_emb.inv_freq")]
        found = {name: entry.shape for name, entry in self._entries.items()}
        self._check_tensors(found, [*derived, HEAD] if self.config.tied_embeddings else derived)

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {entry.dtype}, known: {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[entry.dtype][1]
        if entry.file not in self._maps:
            with entry.file.open("rb") as handle:
                self._maps[entry.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        count = math.prod(entry.shape)
        stored = np.frombuffer(self._maps[entry.file], dtype, count, entry.start)
        if entry.dtype == "BF16":
            # A bfloat16 is the upper half of a float32.
            return (stored.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        return stored.astype(np.float32, copy=False).reshape(entry.shape)


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
    for file in files:
        if not file.is_file():
            raise SkippyError(f"{file} does not exist")
    return files


def _read_header(file: Path) -> dict[str, _Entry]:
    """Parse the header: 8 bytes of length, JSON of names to dtype, shape and offsets, then the data."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise SkippyError(f"{file}: not a safetensors file")
        try:
            header = json.loads(handle.read(length))
            entries = {
                name: _Entry(
                    file,
                    str(item["dtype"]),
                    tuple(int(side) for side in item["shape"]),
                    8 + length + int(item["data_offsets"][0]),
                    8 + length + int(item["data_offsets"][1]),
                )
                for name, item in header.items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise SkippyError(f"{file}: damaged header: {error!r}") from None
    for name, entry in entries.items():
        known = _DTYPES.get(entry.dtype)
        nbytes = math.prod(entry.shape) * known[1].itemsize if known else entry.stop - entry.start
        if (
            min(entry.shape, default=0) < 0
            or entry.stop - entry.start != nbytes
            or not 8 + length <= entry.start <= entry.stop <= size
        ):
            raise SkippyError(f"{file}: tensor {name!r} lies outside the file or has a wrong size")
    return entries
