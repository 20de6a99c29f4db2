"""Building requests and reading responses, without a network."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from typing import Any

import grpc
import numpy as np
import pytest
from skippy_client import (
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    PrefixStatus,
    ServerFault,
    ServerUnavailable,
    SkippyError,
    error_mapping,
    wire,
)
from skippy_stage.errors import ErrorCode
from tritonclient.grpc import service_pb2

from tests.client.tensors import response, tensors_of


def test_request_has_only_what_was_given() -> None:
    request = wire.build_request("skippy", "Grüße 🙂")
    assert (request.model_name, request.id) == ("skippy", "")
    tensors = tensors_of(request)
    assert sorted(tensors) == ["stream", "text_input"]
    assert tensors["text_input"].tolist() == [["Grüße 🙂".encode()]]
    assert tensors["stream"].tolist() == [[True]]


def test_request_types_and_shapes() -> None:
    request = wire.build_request(
        "ensemble",
        None,
        input_ids=[1, 2, np.int64(3)],
        max_tokens=0,
        temperature=0,
        top_k=-2,
        top_p=0.5,
        min_p=float("nan"),
        seed=2**64 - 1,
        ignore_eos=False,
        stop_words=["a", "b\x00é"],
        prompt_cache_key="né",
        speculation="window=4",
        request_id="mine",
        timeout=3,
    )
    assert request.id == "mine"
    tensors = tensors_of(request)
    kinds = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert kinds == {
        "input_ids": ("INT32", [1, 3]),
        "max_tokens": ("INT32", [1, 1]),
        "temperature": ("FP32", [1, 1]),
        "top_k": ("INT32", [1, 1]),
        "top_p": ("FP32", [1, 1]),
        "min_p": ("FP32", [1, 1]),
        "seed": ("UINT64", [1, 1]),
        "ignore_eos": ("BOOL", [1, 1]),
        "stop_words": ("BYTES", [1, 2]),
        "prompt_cache_key": ("BYTES", [1, 1]),
        "speculation": ("BYTES", [1, 1]),
        "stream": ("BOOL", [1, 1]),
    }
    assert tensors["seed"].tolist() == [[2**64 - 1]]
    assert tensors["stop_words"].tolist() == [[b"a", "b\x00é".encode()]]
    assert tensors["prompt_cache_key"].tolist() == [["né".encode()]]
    assert tensors["speculation"].tolist() == [[b"window=4"]]
    assert tensors["max_tokens"].tolist() == [[0]]
    assert np.isnan(tensors["min_p"]).all(), "ranges with a meaning are the server's to judge"


def test_messages_travel_as_json() -> None:
    messages = [{"role": "user", "content": "é"}]
    tensors = tensors_of(wire.build_request("skippy", None, messages=messages))
    assert json.loads(tensors["messages"].item()) == messages


def test_one_stop_word_is_not_a_list_of_characters() -> None:
    tensors = tensors_of(wire.build_request("skippy", "x", stop_words="END"))
    assert tensors["stop_words"].tolist() == [[b"END"]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "exactly one of prompt, input_ids and messages"),
        ({"prompt": "x", "input_ids": [1]}, "got prompt and input_ids"),
        ({"prompt": "x", "seed": -1}, "seed: got -1"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "max_tokens": 2**31}, "max_tokens: got 2147483648"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens: got 1.5"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens: got True"),
        ({"prompt": "x", "top_k": "many"}, "top_k: got 'many'"),
        ({"prompt": "x", "temperature": "hot"}, "temperature: got 'hot'"),
        ({"prompt": "x", "temperature": 1e300}, "temperature: got 1e+300, expected at most 3.4e"),
        ({"prompt": "x", "temperature": 10**400}, "temperature: got 1000"),
        ({"prompt": "x", "temperature": np.bool_(True)}, "temperature: got"),
        ({"prompt": "x", "ignore_eos": "no"}, "ignore_eos: got 'no', expected True or False"),
        ({"prompt": "x", "request_id": 5}, "request_id: got 5"),
        ({"prompt": "x", "stop_words": 5}, "stop_words: got 5, expected a list"),
        ({"prompt": "x", "stop_words": b"ab"}, "stop_words: got b'ab'"),
        ({"input_ids": 5}, "input_ids: got 5, expected a list"),
        ({"input_ids": "12"}, "input_ids: got '12', expected a list"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages: not valid Unicode"),
        ({"prompt": "x", "stop_words": [3]}, "stop_words: got 3"),
        ({"prompt": "x", "prompt_cache_key": b"k"}, "prompt_cache_key: got b'k', expected text"),
        ({"prompt": "x", "speculation": 4}, "speculation: got 4, expected text"),
        ({"prompt": "x", "prompt_cache_key": "\ud800"}, "prompt_cache_key: not valid Unicode"),
        ({"prompt": "x", "temprature": 1}, "temprature: no such option"),
        ({"prompt": "\ud800"}, "prompt: not valid Unicode at character 0"),
        ({"prompt": 3}, "prompt: got 3"),
        ({"input_ids": [2**31]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids: got 'a'"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": "hello"}, "messages: got 'hello'"),
        ({"messages": [{"role": object()}]}, "messages"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(named)):
        wire.build_request("skippy", options.pop("prompt", None), **options)


def test_chunk() -> None:
    chunk = wire.parse_chunk(
        response(
            text_output="né".encode(),
            output_ids=[5, 6],
            finish_reason=b"stop",
            num_input_tokens=9,
            num_output_tokens=2,
            seed=2**64 - 1,
        )
    )
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("né", (5, 6), "stop")
    assert (chunk.num_input_tokens, chunk.num_output_tokens, chunk.seed) == (9, 2, 2**64 - 1)


def test_chunk_with_the_least_outputs() -> None:
    chunk = wire.parse_chunk(response(text_output=b"", finish_reason=b""))
    assert (chunk.text, chunk.token_ids, chunk.num_output_tokens, chunk.seed) == ("", (), 0, None)
    assert (chunk.cached_tokens, chunk.cache_stats) == (0, None), "a server without a prefix cache"
    assert (chunk.total_draft_tokens, chunk.total_accepted_draft_tokens) == (0, 0)


def test_chunk_with_drafts() -> None:
    outputs = {"text_output": b"", "finish_reason": b"stop"}
    chunk = wire.parse_chunk(response(**outputs, total_draft_tokens=6, total_accepted_draft_tokens=3))
    assert (chunk.total_draft_tokens, chunk.total_accepted_draft_tokens) == (6, 3)


def test_chunk_with_the_cache_record() -> None:
    stats = {"status": "hit", "hit_kind": "chain_prefix", "restore_ms": 0.25, "novelty": [None]}
    outputs = {"text_output": b"", "finish_reason": b"stop", "cached_tokens": 96}
    chunk = wire.parse_chunk(response(**outputs, cache_stats=json.dumps(stats)))
    assert (chunk.cached_tokens, chunk.cache_stats) == (96, stats)
    assert hash(chunk) == hash(wire.parse_chunk(response(**outputs))), "a record doesn't make it unhashable"


@pytest.mark.parametrize(
    ("text", "said"), [("", "isn't JSON"), ("{", "isn't JSON"), ("[1]", r"isn't an object: \[1\]")]
)
def test_cache_record_that_is_none(text: str, said: str) -> None:
    with pytest.raises(ServerFault, match=f"cache_stats {said}"):
        wire.parse_chunk(response(text_output=b"", finish_reason=b"stop", cache_stats=text))


@pytest.mark.parametrize("missing", ["text_output", "finish_reason"])
def test_chunk_of_another_model(missing: str) -> None:
    outputs = {"text_output": b"", "finish_reason": b""}
    del outputs[missing]
    with pytest.raises(ServerFault, match=missing):
        wire.parse_chunk(response(**outputs))


def test_text_that_is_none() -> None:
    with pytest.raises(ServerFault, match="text_output isn't UTF-8 at byte 1"):
        wire.parse_chunk(response(text_output=b"a\xff", finish_reason=b""))


def test_status_takes_what_it_knows() -> None:
    report = {
        "ready": True,
        "model": "m",
        "active": 3,
        "waiting": "many",
        "novelty": [1],
        "stages": [{"name": "s0", "ready": True, "kv_blocks": 8, "frames": True, "rows": None, "x": 1}, "?"],
    }
    status = wire.parse_status(json.dumps(report))
    assert (status.ready, status.reason, status.model, status.active, status.waiting) == (
        True,
        "",
        "m",
        3,
        None,
    )
    (stage,) = status.stages
    assert (stage.name, stage.kv_blocks, stage.frames, stage.rows, stage.engine) == (
        "s0",
        8,
        None,
        None,
        None,
    )
    assert status.raw == report
    assert stage.raw["x"] == 1


def test_status_of_the_prefix_cache() -> None:
    kept = {"payload": "resident-kv", "blocks": 12, "hits": 3, "lookups": "some", "novelty": 1}
    report = {
        "counters": {"prefix_hits": 3, "credit_wait_ms": 1.5, "integrity": "fine", "odd": True},
        "stages": [{"name": "a", "prefix": kept}, {"name": "b", "prefix": []}, {"name": "c"}],
    }
    status = wire.parse_status(json.dumps(report))
    assert status.counters == {"prefix_hits": 3, "credit_wait_ms": 1.5}
    assert [stage.prefix for stage in status.stages] == [
        PrefixStatus(payload="resident-kv", blocks=12, hits=3),
        None,
        None,
    ]
    assert wire.parse_status('{"counters": [1]}').counters == {}
    assert wire.parse_status("{}").counters == {}


def test_status_takes_every_number_of_a_stage_prefix_cache() -> None:
    counts = [field.name for field in fields(PrefixStatus) if field.name != "payload"]
    kept = {"payload": "off", **{name: index for index, name in enumerate(counts)}}
    (stage,) = wire.parse_status(json.dumps({"stages": [{"name": "a", "prefix": kept}]})).stages
    assert stage.prefix is not None
    assert asdict(stage.prefix) == kept


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_status_that_is_none(text: str) -> None:
    with pytest.raises(ServerFault, match="status"):
        wire.parse_status(text)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", InvalidRequest),
        ("UNAVAILABLE", ServerUnavailable),
        ("RESOURCE_EXHAUSTED", ServerUnavailable),
        ("CANCELLED", GenerationCancelled),
        ("DEADLINE_EXCEEDED", GenerationTimeout),
        ("INTERNAL", ServerFault),
        ("UNKNOWN", ServerFault),
        ("DATA_LOSS", ServerFault),
    ],
)
def test_errors_by_status(code: str, error: type[SkippyError]) -> None:
    raised = error_mapping.error_of_status(getattr(grpc.StatusCode, code), "why", url="u", timeout=None)
    assert type(raised) is error
    assert str(raised) == "why"


def test_errors_that_say_more() -> None:
    refused = "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: Connection refused"
    raised = error_mapping.error_of_status(grpc.StatusCode.UNAVAILABLE, refused, url="h:1", timeout=None)
    assert str(raised) == "no server answers at h:1: Connection refused"
    late = error_mapping.error_of_status(
        grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", url="h:1", timeout=2.5
    )
    assert str(late) == "no end after 2.5 s"
    assert (
        str(error_mapping.error_of_status(grpc.StatusCode.INTERNAL, None, url="h:1", timeout=None))
        == "INTERNAL"
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Request for unknown model: 'nope' is not found", InvalidRequest),
        ("Request for unknown model: 'skippy' has no available versions", ServerUnavailable),
        ("Request for unknown model: 'skippy' version 1 is not at ready state", ServerUnavailable),
        ("[request id: a] unexpected shape for input 'max_tokens' for model 'skippy'.", InvalidRequest),
        ("[request id: a] inference input 'seed' data-type is 'FP32', but", InvalidRequest),
        ("unexpected inference input 'min_p' for model 'skippy'", InvalidRequest),
        ("the stub died", ServerFault),
        ("INVALID_ARG: bad", InvalidRequest),
        ("UNAVAILABLE: busy", ServerUnavailable),
        ("CANCELLED: gone", GenerationCancelled),
        ("INTERNAL: stage_1: got 3, expected 2", ServerFault),
        ("INVALID_ARG: top_p: got 'a\\nb', expected a number", InvalidRequest),
        ("stage_1: lost its head", ServerFault),
    ],
)
def test_errors_without_status(message: str, error: type[SkippyError]) -> None:
    refused = service_pb2.ModelStreamInferResponse(error_message=message)
    with pytest.raises(error) as raised:
        wire.parse_chunk(refused)
    assert type(raised.value) is error
    assert not str(raised.value).startswith(("[request id", *(f"{code}: " for code in ErrorCode)))
