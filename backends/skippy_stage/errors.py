"""The errors that cross a module boundary, with the code a client sees.

Every error a client can meet is one of four: its own fault (INVALID_ARG), the server's load or
readiness (UNAVAILABLE), its own wish (CANCELLED), or a fault inside (INTERNAL, which names the stage).
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Codes by the names that Triton's clients know."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class SkippyError(Exception):
    """An error with a code and a message fit for a client."""

    code = ErrorCode.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(SkippyError):
    """Input that is refused: names the field, the value and the limit.

    ``field`` is the tensor or parameter name as the client typed it, ``value`` what was given
    (shortened to 80 characters), ``limit`` what would have been accepted.
    """

    code = ErrorCode.INVALID_ARG

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, expected {limit}")
        self.field = field


class Unavailable(SkippyError):
    """Overload, draining, or a stage that is not there; worth a retry later."""

    code = ErrorCode.UNAVAILABLE


class Cancelled(SkippyError):
    """The client asked for the end."""

    code = ErrorCode.CANCELLED


class StageFault(SkippyError):
    """Something broke in a stage; the message starts with the stage's name."""

    code = ErrorCode.INTERNAL

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage


class ProtocolError(SkippyError):
    """A frame that breaks the protocol: wrong version, gap in numbers, limit exceeded."""

    code = ErrorCode.INTERNAL


class UnsupportedModel(SkippyError):
    """A checkpoint with a feature that is not computed here; named at load, never ignored."""

    code = ErrorCode.INTERNAL
