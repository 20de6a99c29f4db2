"""The blocking client against a real tritonserver."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
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
    SkippyClient,
    SkippyError,
    wire,
)

from tests.client.waiting import wait_for

pytestmark = pytest.mark.triton


def script(**plan: Any) -> str:
    return json.dumps(plan)


def cancelled(client: SkippyClient) -> list[str]:
    """Request ids whose cancellation the model saw."""
    seen: list[str] = client.status().raw["cancelled"]
    return seen


def test_generate(client: SkippyClient) -> None:
    result = client.generate(script(tokens=5))
    assert (result.text, result.token_ids) == ("t0 t1 t2 t3 t4 ", (0, 1, 2, 3, 4))
    assert (result.finish_reason, result.num_input_tokens, result.num_output_tokens) == ("length", 7, 5)
    assert result.seed == 2**64 - 1
    assert 0 < result.timings.ttft_s <= result.timings.total_s


def test_stream_comes_in_pieces(client: SkippyClient) -> None:
    stream = client.stream(script(tokens=3, gate="pieces"))
    first = next(stream)
    assert (first.text, first.token_ids, first.finish_reason) == ("t0 ", (0,), "")
    client.generate(script(opens="pieces"))
    assert [(chunk.text, chunk.finish_reason) for chunk in stream] == [("t1 ", ""), ("t2 ", "length")]
    assert stream.result().text == "t0 t1 t2 "


def test_inputs_arrive_as_sent(client: SkippyClient) -> None:
    options: dict[str, Any] = {
        "max_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "ignore_eos": True,
        "stop_words": ["a", "é"],
        "prompt_cache_key": "né",
        "speculation": "ngram,depth=2",
    }
    seen = json.loads(client.generate(script(echo=True), **options).text)
    assert seen.pop("text_input") == ["object", [1, 1], [script(echo=True)]]
    assert seen.pop("stream") == ["bool", [1, 1], [True]]
    assert seen.pop("stop_words") == ["object", [1, 2], ["a", "é"]]
    assert seen.pop("prompt_cache_key") == ["object", [1, 1], ["né"]]
    assert seen.pop("speculation") == ["object", [1, 1], ["ngram,depth=2"]]
    kinds = {"seed": "uint64", "ignore_eos": "bool", "max_tokens": "int32", "top_k": "int32"}
    for name in seen:
        assert seen[name] == [kinds.get(name, "float32"), [1, 1], [options[name]]]
    assert sorted(seen) == sorted(options.keys() - {"stop_words", "prompt_cache_key", "speculation"})


def test_cache_record_comes_with_the_last_chunk(client: SkippyClient) -> None:
    stats = {"status": "hit", "hit_kind": "chain_prefix", "cached_prompt_tokens": 5, "restore_ms": 0.5}
    stream = client.stream(script(tokens=2, cache=stats))
    assert [(chunk.cached_tokens, chunk.cache_stats) for chunk in stream] == [(0, None), (5, stats)]
    result = stream.result()
    assert (result.cached_tokens, result.cache_stats) == (5, stats)
    older = client.generate(script(tokens=2))
    assert (older.cached_tokens, older.cache_stats) == (0, None)


def test_what_was_guessed_comes_with_the_last_chunk(client: SkippyClient) -> None:
    stream = client.stream(script(tokens=2, drafts=[8, 6]))
    assert [(chunk.total_draft_tokens, chunk.total_accepted_draft_tokens) for chunk in stream] == [
        (0, 0),
        (8, 6),
    ]
    result = stream.result()
    assert (result.total_draft_tokens, result.total_accepted_draft_tokens) == (8, 6)
    assert result.acceptance_rate == 0.75
    older = client.generate(script(tokens=2))
    assert (older.total_draft_tokens, older.total_accepted_draft_tokens, older.acceptance_rate) == (
        0,
        0,
        None,
    )


def test_ids_and_messages(client: SkippyClient) -> None:
    seen = json.loads(client.generate(input_ids=[4, 5, 6]).text)
    assert seen["input_ids"] == ["int32", [1, 3], [4, 5, 6]]
    seen = json.loads(client.generate(messages=[{"role": "user", "content": "né"}]).text)
    assert json.loads(seen["messages"][2][0]) == [{"role": "user", "content": "né"}]


def test_64_at_once_on_one_connection(client: SkippyClient) -> None:
    def one(index: int) -> tuple[int, ...]:
        return client.generate(script(together=["threads", 64]), max_tokens=10 + index % 5).token_ids

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(one, range(64)))
    assert results == [tuple(range(10 + index % 5)) for index in range(64)]


def test_an_error_ends_only_its_own_generation(client: SkippyClient) -> None:
    good = [client.stream(script(tokens=10, gate="errors")) for _ in range(4)]
    for stream in good:
        assert next(stream).token_ids == (0,)
    with ThreadPoolExecutor(8) as pool:
        # With the header triton_grpc_error this many kill tritonserver 2.51.0 in most runs.
        bad = [pool.submit(client.generate, script(error=["INTERNAL", "broke"])) for _ in range(100)]
        for each in bad:
            with pytest.raises(ServerFault, match="broke"):
                each.result()
    client.generate(script(opens="errors"))
    assert all(stream.result().num_output_tokens == 10 for stream in good)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARG", InvalidRequest),
        ("UNAVAILABLE", ServerUnavailable),
        ("CANCELLED", GenerationCancelled),
        ("INTERNAL", ServerFault),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
def test_errors_by_kind(client: SkippyClient, code: str, error: type[SkippyError], tokens: int) -> None:
    stream = client.stream(script(tokens=tokens, error=[code, "stage_1: why"]))
    for index in range(tokens):
        assert next(stream).token_ids == (index,), "what came before the error is delivered"
    with pytest.raises(error, match=r"^stage_1: why$") as raised:
        next(stream)
    assert type(raised.value) is error
    with pytest.raises(error, match="why"):
        stream.result()


def test_refusals_of_triton_itself(client: SkippyClient, url: str) -> None:
    with SkippyClient(url, model="nope") as other, pytest.raises(InvalidRequest, match="nope"):
        other.generate("x")
    request = wire.build_request("skippy", "x")
    request.inputs.add(name="novelty", datatype="BOOL", shape=[1, 1])
    request.raw_input_contents.append(np.array([[True]]).tobytes())
    with pytest.raises(InvalidRequest, match="novelty"):
        wire.parse_chunk(next(client._start(request, 5.0)))


def test_leaving_the_loop_cancels(client: SkippyClient) -> None:
    stream = client.stream(script(hang=True), request_id="left")
    for _ in stream:
        break
    wait_for(lambda: "left" in cancelled(client))
    with pytest.raises(GenerationCancelled):
        next(stream)


def test_with_block_cancels(client: SkippyClient) -> None:
    with client.stream(script(hang=True), request_id="block") as stream:
        assert next(stream).text == "t0 "
        assert next(stream).text == "t1 "
    wait_for(lambda: "block" in cancelled(client))


def test_dropped_stream_cancels(client: SkippyClient) -> None:
    stream = client.stream(script(hang=True), request_id="dropped")
    next(stream)
    del stream
    gc.collect()
    wait_for(lambda: "dropped" in cancelled(client))


def test_cancel_from_another_thread(client: SkippyClient) -> None:
    stream = client.stream(script(tokens=1, hang=True), request_id="other")
    next(stream)
    timer = threading.Timer(0.2, stream.cancel)
    timer.start()
    with pytest.raises(GenerationCancelled):
        next(stream)
    timer.join()
    wait_for(lambda: "other" in cancelled(client))


def test_cancel_after_the_end_does_nothing(client: SkippyClient) -> None:
    stream = client.stream(script(tokens=2))
    assert stream.result().num_output_tokens == 2
    stream.cancel()
    assert stream.result().text == "t0 t1 "


def test_timeout(client: SkippyClient) -> None:
    with pytest.raises(GenerationTimeout, match=r"0\.4 s"):
        client.generate(script(hang=True), timeout=0.4)
    assert client.generate("x").text, "the connection goes on"


def test_timeout_of_the_client(url: str) -> None:
    with SkippyClient(url, timeout=0.3) as client:
        with pytest.raises(GenerationTimeout, match=r"0\.3 s"):
            client.generate(script(hang=True))
        assert client.generate(script(tokens=5, delay_s=0.1), timeout=60).num_output_tokens == 5


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"finals": 0}, "no response had a finish_reason"),
        ({"finals": 2}, "after the last"),
        ({"omit": ["text_output"], "hang": True}, "text_output"),
    ],
)
def test_broken_protocol(client: SkippyClient, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerFault, match=message):
        client.generate(script(**plan))


def test_status(client: SkippyClient) -> None:
    status = client.status()
    assert (status.ready, status.model) == (True, "scripted")
    (stage,) = status.stages
    assert (stage.name, stage.prefix) == (
        "stage_0",
        PrefixStatus(payload="resident-kv", blocks=12, lookups=4, hits=3),
    )
    assert status.counters["cached_tokens"] == 90
    assert client.wait_ready().ready


def test_close_ends_what_runs(url: str) -> None:
    client = SkippyClient(url)
    stream = client.stream(script(hang=True), request_id="closed")
    next(stream)
    client.close()
    with pytest.raises(GenerationCancelled):
        stream.result()
    with pytest.raises(GenerationCancelled, match="closed"):
        client.generate("x")
    with SkippyClient(url) as other:
        wait_for(lambda: "closed" in cancelled(other))


def test_leaving_at_the_last_chunk_finds_the_stream_ended(client: SkippyClient) -> None:
    stream = client.stream("x")
    for chunk in stream:
        if chunk.finish_reason:
            break
    assert stream._call.code() is grpc.StatusCode.OK, (
        "a cancel at the end makes tritonserver keep the request"
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:8001", "localhost", "127.0.0.1:99999", "", 3])
def test_address_that_is_none(url: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^url: got .*, expected host:port"):
        SkippyClient(url)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon", True])
def test_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout: got "):
        SkippyClient(timeout=timeout)
    with SkippyClient() as client, pytest.raises(InvalidRequest, match="timeout: got "):
        client.stream("x", timeout=timeout)


def test_no_server() -> None:
    with SkippyClient("127.0.0.1:9") as client:
        with pytest.raises(ServerUnavailable, match=r"no server answers at 127\.0\.0\.1:9"):
            client.generate("x")
        with pytest.raises(ServerUnavailable, match=r"not ready after 0\.5 s: no server answers"):
            client.wait_ready(0.5)
