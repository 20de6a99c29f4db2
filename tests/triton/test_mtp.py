"""The trained MTP head on a real server: it drafts, the text is the reference, and n-grams extend its drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from skippy_client import Generation, InvalidRequest, SkippyClient
from skippy_tools.paths import HEAD_FILE
from skippy_tools.server import ServerProcess

from tests import golden
from tests.triton.support import assert_idle, client_of, generate_all
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

CASES = golden.smollm2()
F32_TIE = 1e-3
WISHES = ("mtp", "mtp,window=1", "composite,depth=1", "composite,depth=2")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    toml = f"""
[model]
context_tokens = 2048
mtp_head = "{HEAD_FILE}"
[pipeline]
weights = "f32"
[kv]
tokens = 8192
"""
    with running(deployment(toml)) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        yield client
        status = assert_idle(client)
        assert status.raw["stages"][-1]["head"]["failures"] == 0


def test_text_is_the_reference(client: SkippyClient) -> None:
    before = client.status().raw["stages"][-1]["head"]["drafts"]
    for i, wish in enumerate(WISHES):
        cases = CASES[i * 3 :: 12]
        requests = [{**case.request(), "speculation": wish} for case in cases]
        for case, result in zip(cases, generate_all(client, requests), strict=True):
            assert isinstance(result, Generation)
            golden.assert_agrees(case, result.token_ids, F32_TIE)
    status = client.status().raw
    assert status["stages"][-1]["head"]["drafts"] > before
    assert status["speculation"]["by_source"]["native-mtp"]["accepted"] > 0


def test_with_other_sessions_in_the_batch(client: SkippyClient) -> None:
    requests = [
        {**case.request(), "speculation": wish}
        for case, wish in zip(CASES, ("mtp", "off", "composite", "mtp", "ngram", "composite"), strict=False)
    ]
    for case, result in zip(CASES, generate_all(client, requests), strict=False):
        assert isinstance(result, Generation)
        golden.assert_agrees(case, result.token_ids, F32_TIE)


def test_behind_a_restored_prompt(client: SkippyClient) -> None:
    prompt = "The lighthouse stood on the cliff above the fish market. " * 6
    first = client.generate(prompt, max_tokens=32, speculation="mtp")
    again = client.generate(prompt, max_tokens=32, speculation="mtp")
    assert again.cached_tokens > 0
    assert again.token_ids == first.token_ids


def test_a_plan_with_a_draft_model_is_refused_where_there_is_none(client: SkippyClient) -> None:
    with pytest.raises(InvalidRequest, match="`draft` needs a draft model"):
        client.generate("x", speculation="draft")
