"""The server under prompts: cold, cached, and beside running streams; all through its public gRPC stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

from skippy_client import GenerateOptions, SkippyClient
from skippy_stage.errors import SkippyError

from skippy_tools.bench.prefill_rows import COLD, Kind, Sample, check_cache, gaps_within
from skippy_tools.bench.timed import TimedStream, new_key, start_together
from skippy_tools.bench.workload import Conversation, SystemPrompt, Tokens, common_tokens
from skippy_tools.server import ServerProcess

ANSWER_TOKENS = 32
STREAM_TOKENS = 2048
"""More than a stream generates while a prompt comes in; it is cancelled after that."""
FIRST_TOKENS = 8
"""Tokens of every stream before anything is measured: then all of them decode together."""
POLL_S = 0.02
"""Seconds; how late a wait ends doesn't matter to any figure."""
IDLE_TIMEOUT_S = 10.0

Measured = Mapping[Kind, Sample]


class PrefillServer:
    """Measures one round of something at a time. Every round has keys of its own, so none finds what another left."""

    def __init__(self, server: ServerProcess) -> None:
        self._client = SkippyClient(server.endpoints.grpc, model=server.model_name)

    def cold(self, prompt: Tokens) -> Measured:
        """A prompt that nobody has seen."""
        return {COLD: self._first(COLD, prompt, new_key())}

    def repeats(self, prompt: Tokens) -> Measured:
        """A cold prompt, the same again, and once more with a token that has to be drawn.

        A greedy repetition can be answered from the known output; the third one computes a row.
        """
        key = new_key()
        cold = self._first(COLD, prompt, key)
        again, sampled = Kind("repeat", "full"), Kind("repeat-sampled", "full")
        return {
            COLD: cold,
            again: self._first(again, prompt, key, shared=len(prompt)),
            sampled: self._first(sampled, prompt, key, shared=len(prompt), temperature=1.0),
        }

    def system_prompt(self, prompts: SystemPrompt) -> Measured:
        """A new question behind a system prompt that another chat had before."""
        key = new_key()
        self._read(prompts.first, key)
        shared = common_tokens(prompts.first, prompts.second)
        return self._with_cold("system-prompt", prompts.second, key, shared)

    def chat(self, conversation: Conversation) -> Measured:
        """The last turn of a chat whose earlier turns were answered here."""
        key = new_key()
        answers: list[str] = []
        context: Tokens = ()
        for _ in range(conversation.turns - 1):
            prompt = conversation.prompt(answers)
            stream = self._read(prompt, key, max_tokens=ANSWER_TOKENS, ignore_eos=False)
            answers.append(stream.text)
            context = (*prompt, *stream.token_ids)
        prompt = conversation.prompt(answers)
        return self._with_cold("chat", prompt, key, common_tokens(context, prompt))

    def interference(self, running: Sequence[Tokens], quiet_tokens: int, prompt: Tokens) -> Measured:
        """A cold prompt that comes in while streams run, after ``quiet_tokens`` of each of them."""
        kind = Kind("interference", "cold")
        streams = start_together(self._client, running, STREAM_TOKENS)
        try:
            _wait_for_tokens(streams, FIRST_TOKENS)
            quiet_from = time.perf_counter()
            _wait_for_tokens(streams, quiet_tokens)
            long = self._read(prompt, new_key())
            if any(stream.ended for stream in streams):
                raise SkippyError("interference: a stream ended before the prompt had come in")
        finally:
            for stream in streams:
                stream.cancel()
        for stream in streams:
            stream.join()
        self._wait_idle()
        times = [[at for at, _ in stream.arrivals] for stream in streams]
        first = long.started + long.ttft_s
        quiet = [[at for at in each if quiet_from <= at <= long.started] for each in times]
        sample = Sample(
            len(prompt),
            long.ttft_s,
            long.cached_tokens,
            streams=len(streams),
            gaps=tuple(gap for each in times for gap in gaps_within(each, long.started, first)),
            quiet_gaps=tuple(gap for each in quiet for gap in gaps_within(each, quiet_from, long.started)),
        )
        return {kind: check_cache(kind, sample)}

    def _with_cold(self, scenario: str, prompt: Tokens, key: str, shared: int) -> Measured:
        known, cold = Kind(scenario, "prefix"), Kind(scenario, "cold")
        return {
            known: self._first(known, prompt, key, shared=shared),
            cold: self._first(cold, prompt, new_key()),
        }

    def _first(
        self, kind: Kind, prompt: Tokens, key: str, *, shared: int = 0, temperature: float | None = None
    ) -> Sample:
        stream = self._read(prompt, key, temperature=temperature)
        return check_cache(kind, Sample(len(prompt), stream.ttft_s, stream.cached_tokens, shared))

    def _read(
        self,
        prompt: Tokens,
        key: str,
        *,
        max_tokens: int = 1,
        ignore_eos: bool = True,
        temperature: float | None = None,
    ) -> TimedStream:
        options: GenerateOptions = {
            "input_ids": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
            "temperature": temperature,
            "prompt_cache_key": key,
        }
        stream = TimedStream()
        stream.read(self._client, options)
        return stream

    def _wait_idle(self) -> None:
        """Until the server has taken note of what was cancelled: it would compute beside what comes next."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self._client.status().active:
            if time.monotonic() > deadline:
                raise SkippyError(f"the server was still busy {IDLE_TIMEOUT_S:g} s after its streams ended")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the channel; the server is somebody else's."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wait_for_tokens(streams: Sequence[TimedStream], tokens: int) -> None:
    """Until every stream has so many more responses with tokens."""
    waiting = [(stream, len(stream.arrivals) + tokens) for stream in streams]
    while any(len(stream.arrivals) < count for stream, count in waiting):
        for stream in streams:
            if stream.error is not None:
                raise stream.error
            if stream.ended:
                raise SkippyError("interference: a running stream ended early")
        time.sleep(POLL_S)
