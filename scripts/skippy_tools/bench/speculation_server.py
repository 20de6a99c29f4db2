"""The server as a subject of ``bench speculation``: streams of one way to guess ahead, all through gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from skippy_client import GenerateOptions, SkippyClient
from skippy_stage.errors import SkippyError

from skippy_tools.bench.speculation_plan import RANDOM_SEED, RANDOM_TEMPERATURE, Way
from skippy_tools.bench.speculation_rows import Sample
from skippy_tools.bench.timed import TimedStream, new_key
from skippy_tools.bench.workload import Tokens
from skippy_tools.server import ServerProcess


class SpeculationServer:
    """Measures one round of something at a time; every request has a key of its own, so all of them are cold."""

    def __init__(self, server: ServerProcess) -> None:
        self._client = SkippyClient(server.endpoints.grpc, model=server.model_name)

    def measure(self, kind: str, prompts: Sequence[Tokens], tokens: int, way: Way) -> Sample:
        """Stream answers to all the prompts at the same time."""
        options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True, "speculation": way.wish}
        if kind == "random":
            options = {**options, "temperature": RANDOM_TEMPERATURE, "seed": RANDOM_SEED}
        before = self._counts()
        streams = [TimedStream() for _ in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.start(self._client, {**options, "input_ids": prompt, "prompt_cache_key": new_key()})
        for stream in streams:
            stream.join()
        after = self._counts()
        for stream in streams:
            if len(stream.token_ids) != tokens:
                raise SkippyError(f"a stream of {tokens} tokens ended after {len(stream.token_ids)}")
        first = max(stream.arrivals[0][0] for stream in streams)
        last = min(stream.arrivals[-1][0] for stream in streams)
        # While all of them decode: behind the last first token, up to the first end.
        decoded = sum(n for stream in streams for at, n in stream.arrivals if first < at <= last)
        return Sample(decoded / (last - first), after[0] - before[0], after[1] - before[1])

    def _counts(self) -> tuple[int, int]:
        counters = self._client.status().raw["speculation"]
        return int(counters["draft_tokens"]), int(counters["accepted_draft_tokens"])

    def close(self) -> None:
        """Close the channel; the server is somebody else's."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
