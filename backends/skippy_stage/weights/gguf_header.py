"""The header of a GGUF file: metadata and where each tensor lies.

``gguf.GGUFReader`` makes an object of every vocabulary entry, which takes seconds; a launcher only wants
the model's shape. Arrays of strings are walked over here; ``read_strings`` fetches one when it is wanted.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skippy_stage.errors import SkippyError

Scalar = int | float | bool | str

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """Row-major, as numpy and Hugging Face write it (the file has it reversed)."""
    kind: int
    """Number of the quantisation type (``gguf.GGMLQuantizationType``)."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class StringArray:
    """Where an array of strings lies in the file."""

    offset: int
    """Bytes from the start of the file to the first entry."""
    length: int
    """Number of entries."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    metadata: dict[str, Scalar | tuple[Scalar, ...]]
    """Scalars, strings, and arrays of numbers. Arrays of strings are left out."""
    string_arrays: dict[str, StringArray]
    tensors: dict[str, GgufTensor]


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """Parse the header of the mapped file; raises SkippyError when it isn't GGUF 2 or 3, or is damaged."""
    try:
        return _Reader(data).header()
    except (struct.error, KeyError, OverflowError, UnicodeDecodeError, _DamagedError) as error:
        raise SkippyError(f"{path}: not a readable GGUF file: {error!r}") from None


def read_strings(data: mmap.mmap, array: StringArray) -> list[str]:
    """The entries of an array of strings that ``read_header`` walked over."""
    unpack, at, strings = _U64.unpack_from, array.offset, []
    for _ in range(array.length):
        end = at + 8 + unpack(data, at)[0]
        strings.append(data[at + 8 : end].decode("utf-8", "replace"))
        at = end
    return strings


class _DamagedError(Exception):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise _DamagedError("no GGUF magic")
        self._at = 4
        version = self._number(_U32)
        if version not in (2, 3):
            raise _DamagedError(f"version {version}, known: 2 and 3")
        tensor_count, pair_count = self._number(_U64), self._number(_U64)
        metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
        arrays: dict[str, StringArray] = {}
        for _ in range(pair_count):
            key, kind = self._string(), self._number(_U32)
            if kind != _ARRAY:
                metadata[key] = self._value(kind)
                continue
            item, count = self._number(_U32), self._number(_U64)
            if item == _STRING:
                arrays[key] = StringArray(self._at, count)
                self._skip_strings(count)
            else:
                metadata[key] = self._numbers(item, count)
        tensors = {}
        for _ in range(tensor_count):
            name = self._string()
            dimensions = self._number(_U32)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise _DamagedError(f"tensor {name!r} has {dimensions} dimensions")
            sides = [self._number(_U64) for _ in range(dimensions)]
            kind, offset = self._number(_U32), self._number(_U64)
            tensors[name] = GgufTensor(tuple(reversed(sides)), kind, offset)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamagedError(f"general.alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = {
            name: GgufTensor(tensor.shape, tensor.kind, start + tensor.offset)
            for name, tensor in tensors.items()
        }
        return GgufHeader(metadata, arrays, placed)

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)

    def _string(self) -> str:
        length = self._number(_U64)
        if length > len(self._data) - self._at:
            raise _DamagedError("a string runs past the end")
        text = self._data[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        form = _SCALARS[kind]
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        scalar: Scalar = value
        return scalar

    def _numbers(self, kind: int, count: int) -> tuple[Scalar, ...]:
        form = struct.Struct(f"<{count}{_SCALARS[kind].format[-1]}")
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def _skip_strings(self, count: int) -> None:
        unpack, data, at = _U64.unpack_from, self._data, self._at
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
