"""What all benchmarks share, and the rows of ``bench decode``; nothing here depends on how fast anything is."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from skippy_client import GenerationCancelled, SkippyClient
from skippy_orchestrator.deployment import Deployment
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.errors import SkippyError
from skippy_stage.weights import locate
from skippy_tools.bench import running
from skippy_tools.bench.decode_rows import Sample, decode_ratios, median_row, print_decode_rows
from skippy_tools.bench.report import Ratios, median, write_json
from skippy_tools.bench.running import ServerPool, Task, in_turns, with_stages
from skippy_tools.bench.timed import TimedStream, new_key, read_together
from skippy_tools.bench.workload import make_workload


def test_medians_leave_out_what_was_not_measured() -> None:
    assert median([3.0, None, 1.0, 2.004]) == 2.0
    assert median([None]) is None


def test_ratios_without_a_side_are_left_out() -> None:
    said = Ratios()
    said.add("a / b", 3.0, 2.0)
    said.add("a / c", 3.0, None)
    said.add("d / b", None, 2.0)
    said.add_share("e", 1.0, 8.0, "f")
    assert said.lines == ["a / b: 1.50x", "e: 12.5 % of f"]


def test_tasks_take_turns_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []

    def task(name: str, rounds: int, *, short: bool = False) -> Task[str]:
        def call(what: str = name) -> str:
            calls.append(what)
            return f"{what}{len(calls)}"

        return Task(call, rounds, (lambda: call(f"short {name}")) if short else None)

    results = in_turns([task("a", 3), task("b", 1, short=True)])
    assert calls == ["a", "short b", "a", "b", "a", "a"]
    assert results == [["a3", "a5", "a6"], ["b4"]]


def test_a_pool_keeps_a_server_until_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Fake:
        def __init__(self, deployment: Deployment) -> None:
            self.deployment = deployment
            self.name = f"{deployment.pipeline.stages} stages"

        def __enter__(self) -> Fake:
            events.append(f"start {self.name}")
            return self

        def __exit__(self, *error: object) -> None:
            events.append(f"stop {self.name}")

    monkeypatch.setattr(running, "ServerProcess", Fake)
    two, three = with_stages(Deployment(), 2), with_stages(Deployment(), 3)
    with ServerPool() as pool:
        first = pool.get(two)
        assert pool.get(with_stages(Deployment(), 2)) is first
        pool.get(three)
    assert events == ["start 2 stages", "stop 2 stages", "start 3 stages", "stop 3 stages"]


def test_another_number_of_stages_is_cut_anew_on_free_ports() -> None:
    cut = with_stages(Deployment(), 3)
    assert (cut.pipeline.stages, cut.stages, cut.server.aliases) == (3, (), ())
    assert (cut.server.http_port, cut.server.grpc_port, cut.server.metrics_port) == (0, 0, 0)


class Streams:
    """A client whose streams have these chunks."""

    def __init__(self, chunks: Iterable[tuple[tuple[int, ...], int]], error: Exception | None = None) -> None:
        self._chunks = list(chunks)
        self._error = error
        self.keys: list[str] = []

    def stream(self, **options: Any) -> Iterable[SimpleNamespace]:
        self.keys.append(options.get("prompt_cache_key", ""))
        for tokens, cached in self._chunks:
            yield SimpleNamespace(token_ids=tokens, text="x" * len(tokens), cached_tokens=cached)
        if self._error is not None:
            raise self._error


def test_a_stream_keeps_times_of_responses_with_tokens() -> None:
    stream = TimedStream()
    stream.read(cast(SkippyClient, Streams([((), 0), ((5,), 0), ((6, 7), 0), ((), 9)])), {})
    assert [count for _, count in stream.arrivals] == [1, 2]
    assert (stream.token_ids, stream.text, stream.cached_tokens, stream.ended) == ([5, 6, 7], "xxx", 9, True)
    assert stream.ttft_s == stream.arrivals[0][0] - stream.started


def test_a_stream_without_a_token_has_no_time_to_the_first() -> None:
    stream = TimedStream()
    stream.read(cast(SkippyClient, Streams([((), 0)])), {})
    with pytest.raises(SkippyError, match="without a token"):
        assert stream.ttft_s


def test_errors_of_a_stream_reach_who_waits_for_it_except_its_own_cancel() -> None:
    for error, raises in ((ValueError("broken"), True), (GenerationCancelled("stop"), False)):
        stream = TimedStream()
        stream.start(cast(SkippyClient, Streams([((1,), 0)], error)), {})
        if raises:
            with pytest.raises(ValueError, match="broken"):
                stream.join()
        else:
            stream.join()
        assert not stream.ended


def test_no_two_streams_share_what_is_cached() -> None:
    client = Streams([((1,), 0)])
    streams = read_together(cast(SkippyClient, client), [(1, 2), (1, 2)], 1)
    assert len(streams) == len(set(client.keys)) == 2
    assert new_key() != new_key()


def test_prompts_have_the_lengths_asked_for_and_differ() -> None:
    work = make_workload(
        locate(Deployment().model.path), sequences=16, prompt_tokens=64, long_tokens=1000, decode_tokens=8
    )
    assert {len(prompt) for prompt in work.prompts} == {work.prompt_tokens} == {64}
    assert len(set(work.prompts)) == 16
    assert len(work.long_prompt) == 1000
    assert TextModel.load(locate(Deployment().model.path)).decode(work.long_prompt).startswith("The harbour")


def test_decode_rows_ratios_and_file(tmp_path: Path) -> None:
    def row(subject: str, stages: int, concurrency: int, rate: float, prefill: float | None) -> Any:
        samples = [Sample(rate + change, prefill, None) for change in (-1, 0, 1)]
        return median_row(subject, stages, concurrency, samples, decode_tokens=8, prompt_tokens=4)

    rows = [
        row("transformers", 1, 1, 25, 500),
        row("llama_cpp_f16", 1, 1, 100, 1000),
        row("llama_cpp_f16", 1, 16, 500, None),
        row("in_process", 2, 1, 100, 1000),
        row("server", 2, 1, 50, 750),
        row("server", 2, 16, 400, None),
    ]
    assert (rows[4].decode_tokens_per_s, rows[4].ms_per_token, rows[5].ms_per_token) == (50, 20, 40)
    assert (rows[4].rounds, rows[5].prefill_tokens_per_s, rows[4].ttft_ms) == (3, None, None)
    said = "\n".join(decode_ratios(rows))
    for line in (
        "two-stage server / transformers, serial decode: 2.00x",
        "two-stage server / llama.cpp F16, prefill: 0.75x",
        "two-stage server, concurrency 16 / 1: 8.00x",
        "two-stage server / llama.cpp F16, 16 sequences: 0.80x",
        "Triton and orchestration add 10.0 ms to a token of the same two engines in one process",
    ):
        assert line in said
    assert decode_ratios(rows[:2]) == []
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        print_decode_rows(console, rows)
    assert "…" not in shown.get()
    write_json(tmp_path / "rows.json", rows)
    assert [each["subject"] for each in json.loads((tmp_path / "rows.json").read_text())] == [
        each.subject for each in rows
    ]
