"""What a user gave, checked before it goes on the wire; refusals name the field, the value and the limit."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from skippy_client.errors import InvalidRequest

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
INT32: Final = (-(2**31), 2**31 - 1)
UINT64: Final = (0, 2**64 - 1)
_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")


def check_url(url: object) -> str:
    """The address to connect to; raises InvalidRequest for what can't be one."""
    if isinstance(url, str):
        match = _ADDRESS.fullmatch(url)
        if url.startswith("unix:") or (match and 0 < int(match.group(1)) < 65536):
            return url
    raise InvalidRequest(f"url: got {shown(url)}, expected host:port of the gRPC endpoint")


def check_timeout(timeout: object) -> float | None:
    """The seconds of a deadline, None for none; raises InvalidRequest for what isn't a time."""
    if timeout is None:
        return None
    seconds = real("timeout", timeout)
    if not seconds > 0:
        raise InvalidRequest(f"timeout: got {shown(timeout)}, expected seconds above 0")
    return seconds if math.isfinite(seconds) else None


def text_of(field: str, text: object) -> str:
    """The text, which UTF-8 can carry."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}: got {shown(text)}, expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field}: not valid Unicode at character {error.start}") from error
    return text


def items(field: str, values: object) -> list[Any]:
    """The elements of a list, an array or the like; a text isn't one."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    raise InvalidRequest(f"{field}: got {shown(values)}, expected a list")


def integer(field: str, value: Any, limits: tuple[int, int]) -> int:
    """The integer, within the limits of its tensor's type."""
    low, high = limits
    if not isinstance(value, bool | np.bool_):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if low <= number <= high:
                return number
    raise InvalidRequest(f"{field}: got {shown(value)}, expected an integer from {low} to {high}")


def real(field: str, value: Any) -> float:
    """The number; NaN and infinity pass."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise InvalidRequest(f"{field}: got {shown(value)}, expected a number")


def boolean(field: str, value: Any) -> bool:
    """The truth value; nothing else passes for one."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InvalidRequest(f"{field}: got {shown(value)}, expected True or False")


def float32(field: str, value: Any) -> float:
    """The number, finite in 32 bits if it is finite; NaN and infinity are the server's to judge."""
    number = real(field, value)
    if math.isfinite(number) and abs(number) > _FLOAT32_MAX:
        raise InvalidRequest(f"{field}: got {shown(value)}, expected at most {_FLOAT32_MAX:.3g}")
    return number


def shown(value: object) -> str:
    """The value as messages show it, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
