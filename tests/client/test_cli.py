"""The command line: as a function where it can be, as a process where signals and exit statuses count."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from skippy_client import SkippyClient
from skippy_client.cli import app
from typer.testing import CliRunner

from tests.client.waiting import LIMIT_S, wait_for

RUNNER = CliRunner()
COMMAND = [sys.executable, "-c", "from skippy_client.cli import app; app()"]


def run_skippy(arguments: list[str], stdin: bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )


def start_skippy(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_help_teaches_with_examples() -> None:
    for command in ([], ["generate"], ["chat"], ["status"]):
        result = RUNNER.invoke(app, [*command, "--help"], env={"COLUMNS": "120"})
        assert result.exit_code == 0
        assert "Examples" in result.output
        assert "skippy " in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "x", "--seed", "-1"], 2, "seed: got -1"),
        (["generate", "x", "--top-k", "two"], 2, "top-k"),
        (["generate"], 2, "PROMPT"),
        (["generate", "x"], 3, "no server answers at 127.0.0.1:9"),
        (["chat", "--json"], 2, "--json needs a message"),
        (["status"], 3, "no server answers"),
        (["status", "--json", "--watch"], 2, "don't go together"),
    ],
)
def test_exit_statuses_without_a_server(arguments: list[str], code: int, said: str) -> None:
    result = RUNNER.invoke(app, arguments, env={"SKIPPY_URL": "127.0.0.1:9"})
    assert result.exit_code == code
    assert said in result.output


@pytest.mark.triton
def test_generate(url: str) -> None:
    result = RUNNER.invoke(app, ["generate", '{"tokens": 3}', "--url", url, "--stats"])
    assert result.exit_code == 0
    assert result.stdout == "t0 t1 t2 \n"
    assert "7 tokens in, 3 out" in result.stderr
    assert "finish_reason length" in result.stderr
    assert "cache" not in result.stderr, "a server without a prefix cache"


@pytest.mark.triton
def test_generate_json_and_options(url: str) -> None:
    arguments = [
        "generate",
        "-",
        "--url",
        url,
        "--json",
        "-n",
        "2",
        "-t",
        "0.5",
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    result = RUNNER.invoke(app, arguments, input='{"echo": true}')
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["num_output_tokens"], answer["finish_reason"]) == (2, "length")
    seen = json.loads(answer["text"])
    assert seen["stop_words"][2] == ["a", "b"]
    assert (seen["max_tokens"][2], seen["temperature"][2]) == ([2], [0.5])
    assert "seed" not in seen


@pytest.mark.triton
def test_cache_key_and_record(url: str) -> None:
    stats = {"status": "hit", "hit_kind": "chain_prefix", "cached_prompt_tokens": 5}
    plan = json.dumps({"echo": True, "cache": stats})
    arguments = ["generate", plan, "--url", url, "--json", "--cache-key", "mine"]
    answer = json.loads(RUNNER.invoke(app, arguments).stdout)
    assert (answer["cached_tokens"], answer["cache_stats"]) == (5, stats)
    assert json.loads(answer["text"])["prompt_cache_key"][2] == ["mine"]
    older = json.loads(RUNNER.invoke(app, ["generate", "x", "--url", url, "--json"]).stdout)
    assert (older["cached_tokens"], older["cache_stats"]) == (0, None)


@pytest.mark.triton
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_how_to_guess_and_what_came_of_it(url: str, command: str) -> None:
    plan = json.dumps({"text": "a", "drafts": [8, 6]})
    result = RUNNER.invoke(app, [command, plan, "--url", url, "--speculation", "ngram", "--stats"])
    assert result.exit_code == 0
    assert ", 6 of 8 drafts right (75%)" in result.stderr
    plain = RUNNER.invoke(app, [command, '{"text": "a"}', "--url", url, "--stats"])
    assert "drafts" not in plain.stderr, "nothing was guessed"
    plan = json.dumps({"echo": True, "drafts": [8, 6]})
    answer = json.loads(
        RUNNER.invoke(app, [command, plan, "--url", url, "--json", "--speculation", "ngram,depth=2"]).stdout
    )
    assert json.loads(answer["text"])["speculation"][2] == ["ngram,depth=2"]
    assert (answer["total_draft_tokens"], answer["total_accepted_draft_tokens"]) == (8, 6)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("stats", "shown", "ends"),
    [
        (
            {"status": "hit", "hit_kind": "chain_prefix", "cached_prompt_tokens": 5},
            "7 tokens in (5 cached), ",
            ", cache hit chain_prefix\n",
        ),
        (
            {"status": "miss", "hit_kind": None, "cached_prompt_tokens": 0},
            "7 tokens in (0 cached), ",
            ", cache miss\n",
        ),
        ({"cached_prompt_tokens": 0}, "7 tokens in (0 cached), ", ", cache ?\n"),
    ],
)
def test_stats_tell_of_the_cache(url: str, stats: dict[str, object], shown: str, ends: str) -> None:
    result = RUNNER.invoke(app, ["generate", json.dumps({"cache": stats}), "--url", url, "--stats"])
    assert shown in result.stderr
    assert result.stderr.endswith(ends)


@pytest.mark.triton
def test_chat_has_one_cache_key(url: str) -> None:
    result = RUNNER.invoke(app, ["chat", "--url", url, "--cache-key", "mine"], input="one\ntwo\n")
    keys = [json.loads(line)["prompt_cache_key"][2] for line in result.stdout.splitlines()]
    assert keys == [["mine"], ["mine"]]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("code", "status"), [("INVALID_ARG", 2), ("UNAVAILABLE", 3), ("CANCELLED", 130), ("INTERNAL", 1)]
)
def test_exit_status_by_error(url: str, code: str, status: int) -> None:
    result = RUNNER.invoke(app, ["generate", json.dumps({"error": [code, "why"]}), "--url", url])
    assert result.exit_code == status
    assert result.stderr == "error: why\n"


@pytest.mark.triton
def test_timeout(url: str) -> None:
    result = RUNNER.invoke(app, ["generate", '{"hang": true}', "--url", url, "--timeout", "0.4"])
    assert result.exit_code == 124


@pytest.mark.triton
def test_status(url: str) -> None:
    result = RUNNER.invoke(app, ["status", "--url", url])
    assert result.exit_code == 0
    assert "stage_0" in result.stdout
    assert "cached 90/200 (45%) prompt tokens" in result.stdout
    assert "3/4 (75%)" in result.stdout
    result = RUNNER.invoke(app, ["status", "--url", url, "--json"])
    assert json.loads(result.stdout)["stages"][0]["novelty"] == 1


@pytest.mark.triton
def test_chat_remembers_and_forgets(url: str) -> None:
    result = RUNNER.invoke(
        app, ["chat", "--url", url, "--system", "s"], input="one\n\ntwo\n/reset\n/what\nthree\n/quit\nfour\n"
    )
    assert result.exit_code == 0
    turns = [json.loads(json.loads(line)["messages"][2][0]) for line in result.stdout.splitlines()]
    roles = [[message["role"] for message in turn] for turn in turns]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert [turn[-1]["content"] for turn in turns] == ["one", "two", "three"]
    assert "/what: no such command" in result.stderr


@pytest.mark.triton
def test_one_message(url: str) -> None:
    result = RUNNER.invoke(app, ["chat", "hello", "--url", url])
    assert result.exit_code == 0
    assert json.loads(json.loads(result.stdout)["messages"][2][0]) == [{"role": "user", "content": "hello"}]


@pytest.mark.triton
@pytest.mark.parametrize(("code", "status"), [("UNAVAILABLE", 3), ("INTERNAL", 1)])
def test_a_failure_ends_a_chat_from_a_file(url: str, code: str, status: int) -> None:
    first = json.dumps({"error": [code, "why"]})
    result = RUNNER.invoke(app, ["chat", "--url", url], input=f"{first}\nsecond\n")
    assert (result.exit_code, result.stdout) == (status, "t0 t1 t2 \n")
    assert result.stderr == "error: why\n"


def test_standard_input_that_is_no_text() -> None:
    result = run_skippy(["generate", "-", "--url", "127.0.0.1:9"], stdin=b"a\xff", PYTHONIOENCODING="utf-8")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"error: standard input isn't utf-8: invalid start byte at byte 1\n"


@pytest.mark.triton
def test_status_waits(url: str) -> None:
    assert RUNNER.invoke(app, ["status", "--wait", "60", "--url", url]).exit_code == 0
    result = RUNNER.invoke(app, ["status", "--wait", "0.1", "--url", "127.0.0.1:9"])
    assert result.exit_code == 3
    assert "not ready after 0.1 s: no server answers" in result.stderr


@pytest.mark.triton
def test_watch_goes_on_until_ctrl_c(url: str) -> None:
    process = start_skippy(["status", "--watch", "--interval", "0.1", "--url", url])
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert sum(line.startswith("ready") for line in itertools.islice(lines, 10)) >= 2
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    finally:
        end(process)


@pytest.mark.triton
def test_a_reader_that_leaves_is_no_traceback(url: str) -> None:
    process = start_skippy(["generate", '{"tokens": 5, "hang": true, "gate": "pipe"}', "--url", url])
    try:
        assert process.stdout is not None
        assert process.stdout.read(3) == "t0 "
        process.stdout.close()
        RUNNER.invoke(app, ["generate", '{"opens": "pipe"}', "--url", url])
        assert process.wait(LIMIT_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        end(process)


@pytest.mark.triton
def test_ctrl_c_stops_the_generation(url: str, client: SkippyClient) -> None:
    before = len(client.status().raw["cancelled"])
    process = start_skippy(["generate", '{"hang": true}', "--url", url])
    try:
        assert process.stdout is not None
        assert process.stdout.read(3) == "t0 "
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        end(process)
    wait_for(lambda: len(client.status().raw["cancelled"]) == before + 1)
