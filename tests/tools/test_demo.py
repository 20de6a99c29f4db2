from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.triton


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skippy_tools.demo", *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_streams_an_answer_with_counts_and_rates() -> None:
    result = demo("--prompt", "What is the capital of France?", "--max-tokens", "12", "--stages", "1")
    assert result.returncode == 0, result.stderr
    said = result.stdout + result.stderr
    assert "The capital of France is Paris." in said
    for part in ("1 stage\n", "finish reason stop", "tokens/s", "first token"):
        assert part in said


def test_what_the_server_refuses_is_an_error_and_no_traceback() -> None:
    result = demo("--prompt", "word " * 9000)
    said = result.stdout + result.stderr
    assert result.returncode == 1
    assert "error: messages: got" in said
    assert "Traceback" not in said
