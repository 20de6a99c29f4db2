"""One ``.safetensors`` file, mapped, not loaded."""

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

FLOATS: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
}
_INTEGERS: Final[dict[str, np.dtype[Any]]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_MAX_HEADER_BYTES: Final = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """The tensors of one file by name. Raises SkippyError for a file that is damaged."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise SkippyError(f"{path} does not exist")
        self.path = path
        self.entries = _read_header(path)
        self._map: mmap.mmap | None = None

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor of floats as float32; it may be a read-only view of the file."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {entry.dtype}, known: {', '.join(FLOATS)}"
            )
        stored = self._stored(entry, FLOATS[entry.dtype][1])
        if entry.dtype == "BF16":
            # A bfloat16 is the upper half of a float32.
            return (stored.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        return stored.astype(np.float32, copy=False).reshape(entry.shape)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """A tensor of integers."""
        entry = self.entries[name]
        if entry.dtype not in _INTEGERS:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {entry.dtype}, known: {', '.join(_INTEGERS)}"
            )
        return self._stored(entry, _INTEGERS[entry.dtype]).astype(np.int64).reshape(entry.shape)

    def _stored(self, entry: Entry, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if self._map is None:
            with self.path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.start)


def _read_header(file: Path) -> dict[str, Entry]:
    """Parse the header: 8 bytes of length, JSON of names to dtype, shape and offsets, then the data."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise SkippyError(f"{file}: not a safetensors file")
        try:
            header = json.loads(handle.read(length))
            entries = {
                name: Entry(
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
    sizes = {name: dtype.itemsize for name, (_, dtype) in FLOATS.items()}
    sizes |= {name: dtype.itemsize for name, dtype in _INTEGERS.items()}
    for name, entry in entries.items():
        known = sizes.get(entry.dtype)
        nbytes = math.prod(entry.shape) * known if known else entry.stop - entry.start
        if (
            min(entry.shape, default=0) < 0
            or entry.stop - entry.start != nbytes
            or not 8 + length <= entry.start <= entry.stop <= size
        ):
            raise SkippyError(f"{file}: tensor {name!r} lies outside the file or has a wrong size")
    return entries
