"""The load test: its figures, and a real perf_analyzer against a real server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from skippy_tools.load_test import load_test, make_inputs, parse_levels
from skippy_tools.load_test_analyzer import Load, as_input, complaint_in, find_analyzer, run_load
from skippy_tools.load_test_report import render, summarize
from typer.testing import CliRunner

from tests.client.triton_server import run_scripted_server

MS = 1_000_000
APP = typer.Typer()
APP.command()(load_test)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_scripted_server(tmp_path_factory.mktemp("triton")) as server:
        yield server.endpoints.grpc


def request(started: int, times: list[int], counts: list[int], finals: int = 1) -> dict[str, Any]:
    """An exported request; times in ms."""
    last = len(times) - 1
    return {
        "timestamp": started * MS,
        "response_timestamps": [time * MS for time in times],
        "response_outputs": [
            {
                "num_output_tokens": count,
                "num_input_tokens": 7,
                "finish_reason": "length" if index > last - finals else "",
            }
            for index, count in enumerate(counts)
        ],
    }


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("1:16", [1, 2, 4, 8, 16]),
        ("1:12", [1, 2, 4, 8, 12]),
        ("4:4", [4]),
        ("1:8:3", [1, 4, 7]),
        ("8,1,4,4", [1, 4, 8]),
        ("3", [3]),
    ],
)
def test_levels(text: str, levels: list[int]) -> None:
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["", "a", "0:4", "4:1", "1:2:3:4", "1:4,8", "1:8:0"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_levels(text)


def test_prompts_differ_from_the_start() -> None:
    inputs = [
        entry["text_input"] for level in ("r.1", "r.16") for entry in make_inputs(level, None, 8, 5, 99)
    ]
    assert len(inputs) == 198
    assert len({text.split()[0] for text in inputs}) == len(inputs)
    assert as_input(make_inputs("r.1", "p", 8, 5, 99)[0]) == {
        "text_input": ["p"],
        "max_tokens": [5],
        "ignore_eos": [True],
        "stream": [True],
    }


def test_figures() -> None:
    # The first response of the second request brings no token, and its last two at once.
    level = summarize(2, [request(0, [10, 20, 30], [1, 1, 1]), request(5, [6, 25, 35], [0, 1, 2])], [])
    assert (level.requests, level.output_tokens, level.input_tokens) == (2, 6, 14)
    assert level.seconds == pytest.approx(0.035)
    assert level.output_tokens_per_s == pytest.approx(6 / 0.035)
    assert level.requests_per_s == pytest.approx(2 / 0.035)
    assert level.ttft_ms["p50"] == pytest.approx(15)
    assert level.itl_ms["mean"] == pytest.approx((10 + 5) / 2)
    assert level.errors == ()


def test_requests_without_exactly_one_final_are_errors() -> None:
    bad = [request(0, [1, 2], [1, 1], finals=0), request(0, [1, 2], [1, 1], finals=2)]
    level = summarize(1, [*bad, request(0, [1], [1])], ["broke"])
    assert level.requests == 1
    assert len(level.errors) == 3
    assert level.itl_ms == {}, "one token has no time between tokens"
    assert summarize(1, bad, []).requests == 0


def test_a_response_without_outputs_is_no_token() -> None:
    exported = request(0, [1, 2, 3], [1, 1, 1])
    exported["response_outputs"][0] = {}
    level = summarize(1, [exported], [])
    assert (level.requests, level.output_tokens, level.ttft_ms["p50"]) == (1, 2, 2.0)


def test_table_fits_80_columns() -> None:
    slow = [request(0, [123_456, 234_567, 999_999], [1, 100, 100])]
    levels = [summarize(64, slow * 500, []), summarize(128, [], ["broke"])]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(render(levels))
    text = shown.get()
    assert "…" not in text
    for figure in ("123456", "4383", "tok/s", "req/s", "128"):
        assert figure in text
    assert text.splitlines()[-1].split() == ["128", "0", "1", *["-"] * 8]


def test_complaints() -> None:
    assert complaint_in(" Error: Failed to parse --x. Why.\nUsage: perf_analyzer\n  a\n  b") == (
        "Failed to parse --x. Why."
    )
    assert complaint_in("a\nb\nc\nd\n") == "b / c / d"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--concurrency", "4:1"], 2, "the last is below the first"),
        (["--json", "nowhere/at/all.json"], 2, "no folder"),
        (["--url", "http://here"], 2, "url: got"),
        (["--url", "127.0.0.1:9"], 3, "no server answers at 127.0.0.1:9"),
    ],
)
def test_what_is_wrong_beforehand(arguments: list[str], code: int, said: str) -> None:
    result = RUNNER.invoke(APP, arguments)
    assert (result.exit_code, said in result.output) == (code, True), result.output


@pytest.mark.triton
def test_perf_analyzer_runs(url: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--url", url, "--concurrency", "1,4", "--requests", "20", "--max-tokens", "8"]
    result = RUNNER.invoke(APP, [*arguments, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    levels = json.loads(figures.read_text())["levels"]
    assert [(level["concurrency"], level["requests"], level["errors"]) for level in levels] == [
        (1, 20, []),
        (4, 20, []),
    ]
    for level in levels:
        assert level["output_tokens"] == 20 * 8
        assert level["ttft_ms"]["p50"] > 0
    assert "tok/s" in result.stdout


@pytest.mark.triton
def test_json_to_standard_output_and_any_text(url: str) -> None:
    # The export of perf_analyzer has the answers' text: it must not matter what is in it.
    prompt = json.dumps({"tokens": 2, "text": 'a"\\\n\t\x01é🙂 {"'})
    arguments = ["--url", url, "--concurrency", "2", "--requests", "4", "--max-tokens", "2"]
    result = RUNNER.invoke(APP, [*arguments, "--prompt", prompt, "--json", "-"])
    assert result.exit_code == 0, result.output
    (level,) = json.loads(result.stdout)["levels"]
    assert (level["requests"], level["output_tokens"], level["errors"]) == (4, 8, [])


@pytest.mark.triton
def test_failing_requests_are_shown(url: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    plan = json.dumps({"error": ["UNAVAILABLE", "full"]})
    run = run_load(
        find_analyzer(tmp_path / "lib"),
        Load(url, "skippy", 2, 4, [{"text_input": plan, "stream": True}], 60.0),
        tmp_path,
    )
    assert run.requests == []
    assert run.errors
    assert all("full" in error for error in run.errors)


@pytest.mark.triton
def test_a_level_that_hangs_is_given_up(url: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    run = run_load(
        find_analyzer(tmp_path / "lib"),
        Load(url, "skippy", 1, 1, [{"text_input": '{"hang": true}', "stream": True}], 3.0),
        tmp_path,
    )
    assert (run.requests, run.errors) == ([], ["perf_analyzer had not finished after 3 s"])
