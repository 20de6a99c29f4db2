"""KV of a sequence as bytes: what ExactState carries for engines with an attention cache.

Position by position, so that a longer state begins with the bytes of a shorter one; a trailer then says what
it is. Numbers are as the machine has them: a state is of use to the process that made it.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from skippy_stage.engines.base import StateMismatch

Kv = npt.NDArray[np.generic]
"""``[positions, 2, layers, kv_heads, head_dim]``: keys and values."""

_TRAILER: Final = struct.Struct("<8s2sIIII")
_MAGIC: Final = b"skippykv"


def pack_kv(kv: Kv) -> bytes:
    """Turn keys and values of the first positions into a state."""
    positions, _, *shape = kv.shape
    return kv.tobytes() + _TRAILER.pack(_MAGIC, kv.dtype.str[1:].encode(), positions, *shape)


def unpack_kv(state: bytes, length: int, shape: tuple[int, int, int], dtype: npt.DTypeLike) -> Kv:
    """Give back what was packed, read-only; raises StateMismatch unless it is exactly what is expected.

    ``shape`` is ``(layers, kv_heads, head_dim)``.
    """
    kind = np.dtype(dtype)
    body = len(state) - _TRAILER.size
    found = _TRAILER.unpack_from(state, body) if body >= 0 else ()
    expected = (_MAGIC, kind.str[1:].encode(), length, *shape)
    if found != expected or body != length * 2 * int(np.prod(shape)) * kind.itemsize:
        raise StateMismatch(f"a state of {max(0, body)} bytes is not that of {length} positions here")
    return np.frombuffer(state, kind, body // kind.itemsize).reshape(length, 2, *shape)
