"""D-16, D-19: bad input is refused by name, before any stage works, and hurts nobody else."""

from __future__ import annotations

import time
from typing import Any

import pytest
from skippy_client import InvalidRequest, SkippyClient
from skippy_tools.server import ServerProcess

from tests.triton.support import generate_all, raw_stream, tensor

pytestmark = pytest.mark.triton

GOOD = {"prompt": "The capital of France is", "max_tokens": 4}

BAD: list[tuple[str, dict[str, Any]]] = [
    ("text_input", {"prompt": ""}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [-1]}),
    ("input_ids", {"input_ids": [49152]}),
    ("max_tokens", {"prompt": "a", "max_tokens": 0}),
    ("max_tokens", {"prompt": "a", "max_tokens": -3}),
    ("temperature", {"prompt": "a", "temperature": -1.0}),
    ("temperature", {"prompt": "a", "temperature": float("nan")}),
    ("temperature", {"prompt": "a", "temperature": float("inf")}),
    ("top_p", {"prompt": "a", "top_p": 0.0}),
    ("top_p", {"prompt": "a", "top_p": 1.1}),
    ("top_p", {"prompt": "a", "top_p": float("nan")}),
    ("top_k", {"prompt": "a", "top_k": -2}),
    ("min_p", {"prompt": "a", "min_p": -0.1}),
    ("input_ids", {"input_ids": [1] * 8192}),
    ("text_input", {"prompt": "word " * 9000}),
    ("stop_words", {"prompt": "a", "stop_words": [""]}),
    ("messages", {"messages": [{"role": "user", "content": "a", "name": "b"}]}),
]


@pytest.fixture(scope="module")
def _earlier_work_is_counted() -> None:
    """A stage's rows are as old as its last heartbeat, which is a quarter of a second, or more on a busy machine."""
    time.sleep(1.0)


@pytest.mark.usefixtures("_earlier_work_is_counted")
@pytest.mark.parametrize(("field", "options"), BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
def test_refused_by_name(client: SkippyClient, field: str, options: dict[str, Any]) -> None:
    before = client.status().stages[0].rows
    with pytest.raises(InvalidRequest, match=rf"^{field}: got "):
        client.generate(**options)
    assert client.status().stages[0].rows == before


def test_a_bad_request_does_not_hurt_its_neighbours(client: SkippyClient) -> None:
    (alone,) = generate_all(client, [GOOD])
    results = generate_all(
        client, [GOOD, {**GOOD, "temperature": float("nan")}, GOOD, {"input_ids": [-1]}, GOOD]
    )
    assert [isinstance(r, InvalidRequest) for r in results] == [False, True, False, True, False]
    assert [r.text for r in results[::2]] == [alone.text] * 3  # type: ignore[union-attr]


TEXT = tensor("text_input", "BYTES", [b"a"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([TEXT, tensor("max_tokens", "INT32", [1, 2])], "max_tokens"),
        ([TEXT, tensor("input_ids", "INT32", [1])], "text_input and input_ids"),
        ([tensor("max_tokens", "INT32", [1])], "exactly one of text_input, input_ids, messages"),
        ([TEXT, tensor("temperature", "INT32", [1])], "temperature"),
        ([TEXT, tensor("beam_width", "INT32", [2])], "beam_width"),
        ([tensor("text_input", "BYTES", [b"\xff\xfe"])], "UTF-8"),
        ([tensor("status", "BOOL", [True]), TEXT], "status"),
    ],
)
def test_shapes_types_and_combinations(
    two_stage_server: ServerProcess, client: SkippyClient, inputs: list[Any], message: str
) -> None:
    result = raw_stream(two_stage_server, {"a": inputs})
    (error,) = result.errors
    assert message in error
    assert "Traceback" not in error
    assert client.generate(**GOOD).num_output_tokens == 4


@pytest.mark.parametrize("status", [False, True])
def test_unknown_request_parameters_are_refused(
    two_stage_server: ServerProcess, client: SkippyClient, status: bool
) -> None:
    inputs = [tensor("status", "BOOL", [True])] if status else [TEXT]
    result = raw_stream(two_stage_server, {"a": inputs}, parameters={"repetition_penalty": "1.2"})
    (error,) = result.errors
    assert "repetition_penalty: got" in error


def test_edge_values_that_are_fine(client: SkippyClient) -> None:
    greedy = client.generate(**GOOD)
    assert client.generate(**GOOD, temperature=1e-9).token_ids == greedy.token_ids
    assert client.generate(**GOOD, temperature=1.0, top_k=1, seed=5).token_ids == greedy.token_ids
    assert client.generate(**GOOD, temperature=1.0, top_k=10**9, seed=0).seed == 0
    assert client.generate(" ", max_tokens=1).num_input_tokens == 1
