"""The service with its threads over scripted stages: what clients get, and what is left behind."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from skippy_orchestrator.deployment import SchedulerSection
from skippy_orchestrator.sending import Span
from skippy_stage.engines.base import Batch
from skippy_stage.errors import InvalidArgument, SkippyError, Unavailable
from skippy_stage.protocol import SamplingParams

from tests.orchestrator.serving import Client, Serving, serving, text_of, wait_until
from tests.scripted import reference

ONE_AT_A_TIME = SchedulerSection(max_sessions=1)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_generations_equal_the_reference(stages: int, stream: bool) -> None:
    seeded = SamplingParams(temperature=0.8, top_k=20, seed=5)
    asked = [(list(range(1, 3 + 7 * i)), 5 + 3 * i, seeded if i % 2 else SamplingParams()) for i in range(6)]
    with serving(stages) as s:
        clients = [s.submit(p, n, stream=stream, sampling=params) for p, n, params in asked]
        for client, (prompt, count, params) in zip(clients, asked, strict=True):
            assert client.finish() == "length"
            assert client.tokens == reference(prompt, count, params)
            assert client.text == text_of(client.tokens)
            assert stream or len(client.spans) == 1
        s.wait_free()
        counters = s.service.status()["counters"]
    assert counters["requests"] == counters["finished"] == 6
    assert counters["output_tokens"] == sum(count for _, count, _ in asked)
    assert counters["prompt_tokens"] == sum(len(prompt) for prompt, _, _ in asked)


def test_a_stream_is_sent_as_it_is_made() -> None:
    with serving() as s:
        client = s.submit([1, 2, 3], 50_000)
        client.wait_for_tokens(5)
        assert not client.ended
        client.gone = True
        assert client.finish() == "CANCELLED: cancelled by the client"
        assert client.tokens == reference([1, 2, 3], len(client.tokens))
        s.wait_free()


@pytest.mark.parametrize("stream", [True, False])
def test_end_tokens_and_stop_strings_end_a_generation(stream: bool) -> None:
    expected = reference([5, 6], 10)
    first = expected.index(expected[4])
    with serving(end_tokens=frozenset({expected[4]})) as s:
        client = s.submit([5, 6], 10, stream=stream)
        assert client.finish() == "stop"
        assert client.tokens == expected[:first]
    with serving() as s:
        word = text_of(expected[3:5])
        client = s.submit([5, 6], 10, stream=stream, stop_words=(word,))
        assert client.finish() == "stop"
        assert client.text == text_of(expected[:3])
        assert client.tokens == expected[:5]
        s.wait_free()


def test_requests_are_checked_against_the_deployment() -> None:
    with serving() as s:
        ids = {"input_ids": np.array([[1, 2]], np.int32)}
        first, second = s.service.parse(ids, {}), s.service.parse(ids, {})
        assert first.prompt == (1, 2)
        assert first.sampling.seed != second.sampling.seed, "seeds are drawn"
        with pytest.raises(InvalidArgument, match="input_ids: got 251"):
            s.service.parse({"input_ids": np.array([[251]], np.int32)}, {})


def test_until_all_stages_answer_requests_are_refused_with_the_reason() -> None:
    with serving(start=False) as s:
        s.stages[1].broken = "still loading"
        s.service.start()
        wait_until(lambda: "loading" in s.service.status()["reason"], "the stage was asked")
        with pytest.raises(Unavailable, match=r"^stage_1: still loading$"):
            s.service.check_ready()
        assert s.submit([1], 3).finish() == "UNAVAILABLE: stage_1: still loading"
        status = s.service.status()
        assert (status["ready"], status["incarnation"]) == (False, 0)
        assert [stage["ready"] for stage in status["stages"]] == [True, False]
        s.stages[1].heal()
        s.wait_ready()
        s.service.check_ready()
        assert s.submit([1], 3).finish() == "length"


def test_stages_that_do_not_make_one_model_are_named() -> None:
    with serving(2, start=False) as s:
        s.stages[0].index = 1
        s.stages[0].restart()
        s.service.start()
        wait_until(lambda: "is stage 1" in s.service.status()["reason"], "the stages were asked")
        assert s.submit([1], 3).finish() == "UNAVAILABLE: stage_0: is stage 1, expected 0"


@pytest.mark.parametrize("way", ["poll", "call", "unreadable"])
def test_cancel_frees_every_stage(way: str) -> None:
    class Broken(Client):
        def is_cancelled(self) -> bool:
            if self.gone:
                raise OSError("connection reset")
            return False

    with serving() as s:
        other = s.submit([7, 7], 60, stream=False)
        client = s.submit([1, 2], 50_000, client=Broken() if way == "unreadable" else None)
        client.wait_for_tokens(3)
        if way == "call":
            s.service.cancel(client.session)
        client.gone = way != "call"
        assert client.finish().startswith("CANCELLED")
        assert other.finish() == "length"
        assert other.tokens == reference([7, 7], 60)
        s.service.cancel(client.session)
        s.service.cancel(12345)
        s.wait_free()
        assert s.service.status()["counters"]["cancelled"] == 1


def test_waiting_requests_can_be_cancelled_expire_and_start_in_turn() -> None:
    with serving(scheduler=ONE_AT_A_TIME, limits={"queue_timeout_s": 60.0, "max_queue": 2}) as s:
        running = s.submit([1, 2], 50_000)
        running.wait_for_tokens(1)
        first, second = s.submit([3], 4), s.submit([4], 4)
        assert "queue is full (2 waiting)" in s.submit([5], 4).finish()
        wait_until(lambda: s.service.status()["waiting"] == 2, "two wait")
        first.gone = True
        assert first.finish().startswith("CANCELLED")
        s.let_pass(61.0)
        assert second.finish() == "UNAVAILABLE: waited 60 s for a place, retry later"
        last = s.submit([6], 4)
        running.gone = True
        assert last.finish() == "length"
        assert last.tokens == reference([6], 4)
        s.wait_free()


def test_a_request_that_can_never_fit_is_the_clients_fault() -> None:
    with serving(blocks=8, block_tokens=4) as s:
        assert "INVALID_ARG: max_tokens: got 30, expected" in s.submit([1, 2, 3], 30).finish()
        assert s.submit([1, 2, 3], 29).finish() == "length"


def test_a_step_fails_alone_and_names_the_stage() -> None:
    with serving(3) as s:

        def fault(batch: Batch) -> None:
            if any(rows.sequence == bad.session and rows.past >= 5 for rows in batch.sequences):
                raise SkippyError("the device caught fire")

        bad = Client()
        s.stages[1].engine.fault = fault
        others = [s.submit([i, i], 20) for i in (1, 2)]
        s.submit([3, 4], 20, client=bad)
        assert bad.finish() == "INTERNAL: stage_1: the device caught fire"
        assert bad.tokens == reference([3, 4], 20)[: len(bad.tokens)]
        for i, other in zip((1, 2), others, strict=True):
            assert other.finish() == "length"
            assert other.tokens == reference([i, i], 20)
        s.wait_free()


@pytest.mark.parametrize("lost", ["first", "last"])
def test_a_response_that_cannot_be_sent_is_an_error_and_harms_nobody_else(lost: str) -> None:
    class Deaf(Client):
        def send(self, request: object, span: Span) -> None:
            if span.error is None and (span.final or lost == "first"):
                raise OSError("broken pipe")
            super().send(request, span)  # type: ignore[arg-type]

    with serving() as s:
        deaf, other = s.submit([1], 30, client=Deaf()), s.submit([2], 30)
        assert deaf.finish() == "INTERNAL: orchestrator: a response could not be sent"
        assert lost == "last" or not deaf.tokens
        assert other.finish() == "length"
        assert other.tokens == reference([2], 30)
        s.wait_free()


def test_a_drain_file_refuses_new_requests_and_lets_running_ones_finish(tmp_path: Path) -> None:
    drain = tmp_path / "drain"
    with serving(drain_file=drain) as s:
        running = s.submit([1, 2], 2000)
        running.wait_for_tokens(1)
        drain.touch()
        wait_until(lambda: bool(s.service.status()["draining"]), "the file is seen")
        assert s.submit([3], 3).finish() == "UNAVAILABLE: the server is shutting down"
        with pytest.raises(Unavailable, match="shutting down"):
            s.service.check_ready()
        assert running.finish() == "length"
        assert running.tokens == reference([1, 2], 2000)
        s.wait_free()


def stop_in_background(s: Serving) -> threading.Thread:
    thread = threading.Thread(target=s.service.stop)
    thread.start()
    wait_until(lambda: bool(s.service.status()["draining"]), "it drains")
    return thread


def test_stop_lets_running_requests_finish() -> None:
    with serving() as s:
        running = [s.submit([1, i], 800, stream=bool(i % 2)) for i in range(3)]
        running[1].wait_for_tokens(1)
        stopping = stop_in_background(s)
        assert s.submit([3], 3).finish().startswith("UNAVAILABLE")
        stopping.join()
        for i, client in enumerate(running):
            assert client.finish() == "length"
            assert client.tokens == reference([1, i], 800)
        s.wait_free()


def test_after_the_drain_limit_the_rest_is_ended_and_every_stage_is_free() -> None:
    with serving(scheduler=SchedulerSection(max_sessions=3), limits={"drain_timeout_s": 100.0}) as s:
        running = [s.submit([1, i], 50_000) for i in range(3)]
        waiting = s.submit([9], 50_000)
        for client in running:
            client.wait_for_tokens(1)
        stopping = stop_in_background(s)
        assert not any(client.ended for client in running)
        s.let_pass(101.0)
        stopping.join()
        for client in [*running, waiting]:
            assert client.finish() == "UNAVAILABLE: the server is shutting down"
        s.wait_free()


def test_after_the_stop_requests_are_refused_and_a_second_stop_is_harmless() -> None:
    with serving() as s:
        s.service.stop()
        assert s.submit([1], 3).finish() == "UNAVAILABLE: the server is shutting down"
        with pytest.raises(Unavailable, match=re.escape("the server is shutting down")):
            s.service.check_ready()
        s.service.cancel(1)
        s.service.stop()
        assert s.service.status()["ready"] is False
