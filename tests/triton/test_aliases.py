"""Aliases answer as the model they stand for, errors included."""

from __future__ import annotations

import pytest
from skippy_client import InvalidRequest, SkippyClient
from skippy_tools.server import ServerProcess

from tests.triton.support import generate_all, http_generate, raw_stream, tensor

pytestmark = pytest.mark.triton

ALIASES = ["ensemble", "tensorrt_llm_bls"]


@pytest.mark.parametrize("name", ALIASES)
def test_the_same_answer(two_stage_server: ServerProcess, client: SkippyClient, name: str) -> None:
    with SkippyClient(two_stage_server.endpoints.grpc, model=name) as alias:
        mine = list(client.stream("The capital of France is", max_tokens=8))
        theirs = list(alias.stream("The capital of France is", max_tokens=8))
        assert "".join(c.text for c in theirs) == "".join(c.text for c in mine)
        assert [c.finish_reason for c in theirs if c.finish_reason] == ["length"]
        assert len(theirs) > 1
        assert alias.status().ready
        with pytest.raises(InvalidRequest, match=r"^max_tokens: got 0"):
            alias.generate("a", max_tokens=0)
        results = generate_all(alias, [{"prompt": f"{i}", "max_tokens": 8} for i in range(20)])
        assert {r.num_output_tokens for r in results} == {8}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALIASES)
def test_on_the_wire(two_stage_server: ServerProcess, client: SkippyClient, name: str) -> None:
    inputs = [tensor("text_input", "BYTES", [b"Count: one two"]), tensor("max_tokens", "INT32", [5])]
    result = raw_stream(two_stage_server, {"a": inputs, "b": inputs}, model=name, empty_final=True)
    assert result.errors == []
    assert result.finals == {"a": 1, "b": 1}
    assert all(r.as_numpy("text_output") is not None for r in result.responses)
    refused = raw_stream(two_stage_server, {"a": inputs}, model=name, parameters={"beam_width": 3})
    assert "beam_width: got" in refused.errors[0]
    code, answer = http_generate(
        two_stage_server, {"text_input": "Count: one two", "max_tokens": 5}, model=name
    )
    assert (code, answer["text_output"]) == (200, result.text("a"))
