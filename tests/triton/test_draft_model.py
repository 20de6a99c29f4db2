"""A draft model beside the served one, on a real server: some layers of SmolLM2 draft for the whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from skippy_client import Generation, SkippyClient
from skippy_stage.weights import locate
from skippy_tools.server import ServerProcess

from tests import golden
from tests.small_cut import write_cut
from tests.triton.support import client_of, generate_all, wait_until
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

CASES = golden.smollm2()
F32_TIE = 1e-3
KEPT = [*range(20), *range(25, 30)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cut = tmp_path_factory.mktemp("draft") / "cut.gguf"
    write_cut(locate(deployment().model.path), cut, KEPT)
    toml = f"""
[model]
context_tokens = 2048
[pipeline]
weights = "f32"
[kv]
tokens = 8192
[draft]
path = "{cut}"
kv_tokens = 4096
ahead = false
"""
    with running(deployment(toml)) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        yield client


def drafts_are_made(client: SkippyClient) -> bool:
    return bool(client.status().raw["draft"]["ready"])


@pytest.fixture(autouse=True)
def _ready(client: SkippyClient) -> Iterator[None]:
    wait_until(lambda: drafts_are_made(client), 60, "the draft model is ready")
    yield

    def is_free() -> bool:
        draft = client.status().raw["draft"]
        return draft["sessions"] == 0 and draft["kv_blocks_used"] == 0

    wait_until(is_free, 10, "the draft model holds nothing")
    assert client.status().raw["draft"]["integrity"] == ""


def test_text_is_the_reference_with_drafts(client: SkippyClient) -> None:
    right = 0
    for window in (1, 4):
        for case in CASES[window::20]:
            result = client.generate(**case.request(), speculation=f"draft,window={window}")  # type: ignore[arg-type]
            golden.assert_agrees(case, result.token_ids, F32_TIE)
            right += result.total_accepted_draft_tokens
    assert right > 0
    assert client.status().raw["speculation"]["by_source"]["draft-model"]["tokens"] >= right


def test_many_sessions_draft_together(client: SkippyClient) -> None:
    before = client.status().raw["draft"]["counters"]
    results = generate_all(client, [{**case.request(), "speculation": "draft"} for case in CASES[:3]])
    for case, result in zip(CASES, results, strict=False):
        assert isinstance(result, Generation)
        golden.assert_agrees(case, result.token_ids, F32_TIE)
    after = client.status().raw["draft"]["counters"]
    assert after["proposals"] - before["proposals"] > after["frames"] - before["frames"], "no call was shared"


def test_seeded_sampling_is_the_same_with_drafts(client: SkippyClient) -> None:
    options = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    plain = client.generate("The three primary colours are", speculation="off", **options)  # type: ignore[arg-type]
    drafted = client.generate("The three primary colours are", speculation="draft", **options)  # type: ignore[arg-type]
    assert drafted.token_ids == plain.token_ids
    assert drafted.total_draft_tokens > 0


def test_a_draft_model_that_is_killed_comes_back(client: SkippyClient, server: ServerProcess) -> None:
    case = CASES[0]
    pid = server.stub_pids["skippy_draft"]
    os.kill(pid, signal.SIGKILL)
    result = client.generate(**case.request(), speculation="draft")  # type: ignore[arg-type]
    golden.assert_agrees(case, result.token_ids, F32_TIE)
    wait_until(
        lambda: drafts_are_made(client) and server.stub_pids.get("skippy_draft") not in (None, pid),
        60,
        "the draft model is loaded again",
    )
    result = client.generate(**case.request(), speculation="draft")  # type: ignore[arg-type]
    golden.assert_agrees(case, result.token_ids, F32_TIE)
    assert result.total_draft_tokens > 0
