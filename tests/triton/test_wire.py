"""D-01, D-02, D-34: what clients see on the wire."""

from __future__ import annotations

import json

import pytest
from skippy_client import SkippyClient
from skippy_tools.server import ServerProcess

from tests.triton.support import http_generate, raw_stream, tensor

pytestmark = pytest.mark.triton


def request(max_tokens: int, *more: object) -> list[object]:
    return [
        tensor("text_input", "BYTES", [b"Count: one two three"]),
        tensor("max_tokens", "INT32", [max_tokens]),
        tensor("ignore_eos", "BOOL", [True]),
        *more,
    ]


@pytest.mark.parametrize("empty_final", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_d01_every_request_has_exactly_one_final_response(
    two_stage_server: ServerProcess, client: SkippyClient, empty_final: bool, stream: bool
) -> None:
    flag = tensor("stream", "BOOL", [stream])
    requests = {str(n): request(n, flag) for n in (1, 5, 20)}
    result = raw_stream(two_stage_server, requests, empty_final=empty_final)  # type: ignore[arg-type]
    assert result.errors == []
    assert result.finals == {"1": 1, "5": 1, "20": 1}
    for count in (1, 5, 20):
        mine = [r for r in result.responses if r.get_response().id == str(count)]
        assert sum(int(r.as_numpy("num_output_tokens").item()) for r in mine) == count
        if not stream:
            assert len(mine) == 1


def test_d02_the_final_response_carries_data(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    """An old client indexes every response and stops at the final flag."""
    flag = tensor("stream", "BOOL", [True])
    result = raw_stream(two_stage_server, {"a": request(6, flag)}, empty_final=True)  # type: ignore[arg-type]
    for response in result.responses:
        for name in ("text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens"):
            assert response.as_numpy(name) is not None
            assert response.as_numpy(name).shape[0] == 1
    assert [r.as_numpy("finish_reason").item() for r in result.responses][-1] == b"length"
    assert {r.as_numpy("finish_reason").item() for r in result.responses[:-1]} <= {b""}
    whole = client.generate("Count: one two three", max_tokens=6, ignore_eos=True)
    assert result.text("a") == whole.text


def test_d34_http_generate(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    expected = client.generate("Count: one two three", max_tokens=5, ignore_eos=True)
    body = {"text_input": "Count: one two three", "max_tokens": 5, "ignore_eos": True}
    code, answer = http_generate(two_stage_server, body)
    assert code == 200
    assert answer["text_output"] == expected.text
    assert answer["output_ids"] == list(expected.token_ids)
    assert answer["finish_reason"] == "length"
    code, events = http_generate(two_stage_server, {**body, "stream": True}, stream=True)
    assert code == 200
    assert "".join(event["text_output"] for event in events) == expected.text
    assert events[-1]["finish_reason"] == "length"


def test_d34_http_keys_that_are_not_inputs_are_refused(
    two_stage_server: ServerProcess, client: SkippyClient
) -> None:
    code, answer = http_generate(two_stage_server, {"text_input": "a", "max_token": 5})
    assert code == 400
    assert "max_token: got" in answer["error"]


def test_http_chat_and_stop_words(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    code, answer = http_generate(two_stage_server, {"messages": messages, "stop_words": [" Paris"]})
    assert code == 200
    assert answer["finish_reason"] == "stop"
    assert answer["text_output"] == "The capital of France is"


def test_a_token_without_text_is_a_response_all_the_same(
    two_stage_server: ServerProcess, client: SkippyClient
) -> None:
    """The end token straight away: no tokens, and still one final response that can be read."""
    prompt = "<|im_start|>user\nSay OK<|im_end|>\n<|im_start|>assistant\nOK"
    inputs = [tensor("text_input", "BYTES", [prompt.encode()]), tensor("max_tokens", "INT32", [30])]
    result = raw_stream(two_stage_server, {"a": inputs})
    assert result.finals == {"a": 1}
    last = result.responses[-1]
    assert last.as_numpy("finish_reason").item() in (b"stop", b"length")
    assert last.as_numpy("output_ids").shape[0] == 1
