"""Our side: the engines called in one process, and the whole server through its gRPC stream."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from skippy_client import SkippyClient
from skippy_orchestrator.deployment import Deployment
from skippy_stage.engines import create_engine, prepare_environment
from skippy_stage.engines.base import Batch, SequenceRows, StageEngine

from skippy_tools.bench.decode_rows import Sample
from skippy_tools.bench.timed import read_together
from skippy_tools.bench.workload import Workload
from skippy_tools.repository import read_shape, stage_settings
from skippy_tools.server import ServerProcess


class InProcess:
    """The engines of a deployment's stages, called one after the other: no server, no orchestration."""

    subject = "in_process"

    def __init__(self, deployment: Deployment, workload: Workload, concurrency: int) -> None:
        prepare_environment()
        self.concurrency = concurrency
        self._workload = workload
        self._chunk = deployment.prefill.chunk_tokens
        shape = read_shape(deployment.model.path)
        self._engines: list[StageEngine] = [create_engine(s) for s in stage_settings(deployment, shape)]

    def measure(self) -> Sample:
        """One round: prefill all sequences, decode them as one batch; the long prompt by itself."""
        work = self._workload
        prompts = work.prompts[: self.concurrency]
        started = time.perf_counter()
        current = [self._prefill(i, prompt, work.decode_tokens) for i, prompt in enumerate(prompts)]
        first = time.perf_counter()
        for step in range(work.decode_tokens - 1):
            rows = [SequenceRows(i, len(prompts[0]) + step, 1, 1) for i in range(len(prompts))]
            current = self._forward(rows, current)
        done = time.perf_counter()
        self._close(len(prompts))
        prefill = None
        if self.concurrency == 1:
            again = time.perf_counter()
            self._prefill(0, work.long_prompt, 1)
            prefill = len(work.long_prompt) / (time.perf_counter() - again)
            self._close(1)
        ttft = (first - started) * 1000 if self.concurrency == 1 else None
        return Sample(len(prompts) * (work.decode_tokens - 1) / (done - first), prefill, ttft)

    def _prefill(self, sequence: int, prompt: Sequence[int], room: int) -> int:
        for engine in self._engines:
            engine.open(sequence, len(prompt) + room)
        predicted: list[int] = []
        for start in range(0, len(prompt), self._chunk):
            chunk = prompt[start : start + self._chunk]
            last = start + len(chunk) == len(prompt)
            predicted = self._forward([SequenceRows(sequence, start, len(chunk), int(last))], chunk)
        return predicted[0]

    def _forward(self, rows: list[SequenceRows], tokens: Sequence[int]) -> list[int]:
        hidden = None
        ids = np.array(tokens, np.int32)
        for engine in self._engines:
            wanted = rows if engine.info.is_last else [replace(row, logits=0) for row in rows]
            output = engine.forward(Batch(wanted, ids, hidden))
            hidden = output.hidden
        return [] if output.logits is None else output.logits.argmax(axis=1).tolist()

    def _close(self, sequences: int) -> None:
        for engine in self._engines:
            for sequence in range(sequences):
                engine.close(sequence)

    def close(self) -> None:
        """Free the engines."""
        for engine in self._engines:
            engine.shutdown()
        self._engines.clear()


class Server:
    """The whole server, through its public gRPC stream."""

    subject = "server"

    def __init__(self, server: ServerProcess, workload: Workload, concurrency: int) -> None:
        self.concurrency = concurrency
        self._workload = workload
        self._client = SkippyClient(server.endpoints.grpc, model=server.model_name)

    def measure(self) -> Sample:
        """One round: concurrent streams of the short prompts; the long prompt by itself."""
        work = self._workload
        streams = read_together(self._client, work.prompts[: self.concurrency], work.decode_tokens)
        starts = [stream.arrivals[0][0] for stream in streams]
        ends = [stream.arrivals[-1][0] for stream in streams]
        begin, end = max(starts), min(ends)
        counted = sum(n for stream in streams for at, n in stream.arrivals if begin < at <= end)
        prefill = None
        if self.concurrency == 1:
            (long,) = read_together(self._client, [work.long_prompt], 1)
            prefill = len(work.long_prompt) / long.ttft_s
        ttft = statistics.median(stream.ttft_s for stream in streams) * 1000
        return Sample(counted / (end - begin), prefill, ttft)

    def close(self) -> None:
        """Close the channel; the server is somebody else's."""
        self._client.close()
