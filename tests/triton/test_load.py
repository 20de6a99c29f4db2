"""D-33: perf_analyzer drives the decoupled, streaming model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from skippy_client import SkippyClient
from skippy_tools.server import ServerProcess

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("model", ["skippy", "ensemble"])
def test_d33_perf_analyzer_measures_every_request(
    two_stage_server: ServerProcess, client: SkippyClient, tmp_path: Path, model: str
) -> None:
    before = client.status().raw["counters"]
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "skippy_tools.load_test", "--url", two_stage_server.endpoints.grpc]
    options = ["--model", model, "--concurrency", "4", "--requests", "30", "--max-tokens", "8"]
    result = subprocess.run(
        [*command, *options, "--json", str(figures)], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    (level,) = json.loads(figures.read_text())["levels"]
    assert level["concurrency"] == 4
    assert level["requests"] >= 30
    after = client.status().raw["counters"]
    finished = after["finished"] - before["finished"]
    # perf_analyzer may begin requests that it doesn't count; none is lost or answered twice.
    assert finished >= level["requests"]
    assert after["output_tokens"] - before["output_tokens"] == 8 * finished
