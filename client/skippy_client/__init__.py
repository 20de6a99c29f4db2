"""Client for Skippy servers: blocking and asyncio, streaming, many generations on one connection.

Example::

    with SkippyClient("127.0.0.1:8001") as client:
        for chunk in client.stream("The capital of France is", max_tokens=32):
            print(chunk.text, end="", flush=True)
"""

from skippy_client.aio import AsyncGenerationStream, AsyncSkippyClient
from skippy_client.errors import (
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    ServerFault,
    ServerUnavailable,
    SkippyError,
)
from skippy_client.sync import GenerationStream, SkippyClient
from skippy_client.types import (
    Chunk,
    GenerateOptions,
    Generation,
    HeadStatus,
    Message,
    PrefixStatus,
    ServerStatus,
    SpeculationStatus,
    StageStatus,
    Timings,
)

__all__ = [
    "AsyncGenerationStream",
    "AsyncSkippyClient",
    "Chunk",
    "GenerateOptions",
    "Generation",
    "GenerationCancelled",
    "GenerationStream",
    "GenerationTimeout",
    "HeadStatus",
    "InvalidRequest",
    "Message",
    "PrefixStatus",
    "ServerFault",
    "ServerStatus",
    "ServerUnavailable",
    "SkippyClient",
    "SkippyError",
    "SpeculationStatus",
    "StageStatus",
    "Timings",
]
