"""What can go wrong, as exceptions; all of them are SkippyError."""

from __future__ import annotations


class SkippyError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidRequest(SkippyError):
    """The request itself is wrong; the message names the field. Sending it again won't help."""


class ServerUnavailable(SkippyError):
    """No server, an overloaded one, or one whose stages aren't ready. Worth another try later."""


class GenerationCancelled(SkippyError):
    """The generation was cancelled, by this client or on the server."""


class GenerationTimeout(SkippyError):
    """The time given for a generation passed; the server was told to stop."""


class ServerFault(SkippyError):
    """Something broke inside the server, or it answered against the protocol."""
