"""What a server or gRPC says went wrong, as our exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc  # type: ignore[import-untyped]

from skippy_client.errors import (
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    ServerFault,
    ServerUnavailable,
    SkippyError,
)

_ERRORS: Final[Mapping[str, type[SkippyError]]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "UNAVAILABLE": ServerUnavailable,
    "RESOURCE_EXHAUSTED": ServerUnavailable,
    "CANCELLED": GenerationCancelled,
    "DEADLINE_EXCEEDED": GenerationTimeout,
}


_UNRESOLVED: Final = re.compile(r"lookup failed for .*: ([^\]]+)")


def error_of_status(code: Any, details: str | None, *, url: str, timeout: float | None) -> SkippyError:
    """The exception for a gRPC status that isn't OK."""
    text = details or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        return GenerationTimeout(f"no end after {timeout:g} s")
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in text.lower():
        return ServerUnavailable(f"no server answers at {url}: {text.rpartition(': ')[2]}")
    if code is grpc.StatusCode.UNAVAILABLE and (match := _UNRESOLVED.search(text)):
        return ServerUnavailable(f"no server answers at {url}: {match.group(1)}")
    return _ERRORS.get(code.name, ServerFault)(text)


_MESSAGES: Final[Sequence[tuple[str, type[SkippyError]]]] = (
    # The orchestrator's begin with the code's name.
    (r"INVALID_ARG: ", InvalidRequest),
    (r"UNAVAILABLE: ", ServerUnavailable),
    (r"CANCELLED: ", GenerationCancelled),
    (r"INTERNAL: ", ServerFault),
    # Triton's own, for what doesn't fit the model's configuration.
    (r"unexpected (inference input|shape for input)", InvalidRequest),
    (r"inference input '.*' data-type is", InvalidRequest),
    (r"Request for unknown model: .* (has no available versions|is not at ready state)", ServerUnavailable),
    (r"Request for unknown model", InvalidRequest),
)


def error_of_message(message: str) -> SkippyError:
    """The exception for an error inside a stream, which has no status, by how its message starts.

    The header ``triton_grpc_error`` would bring statuses, and with a stream per generation its ending of
    the whole stream wouldn't matter. But tritonserver 2.51.0 dies of it (signal 11) when a few
    generations fail at the same time, so it is never sent.
    """
    text = re.sub(r"^\[request id: [^\]]*\] ", "", message)
    for pattern, error in _MESSAGES:
        if re.match(pattern, text, re.DOTALL):
            return error(re.sub(r"^(INVALID_ARG|UNAVAILABLE|CANCELLED|INTERNAL): ", "", text))
    return ServerFault(text)
