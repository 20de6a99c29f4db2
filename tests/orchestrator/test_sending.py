"""Spans on their way to clients: order, merging, and what a slow or broken client does to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefix.outcome import CacheStats, CacheStatus
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sending import OutputStream, Senders, Span, merge, span_of
from skippy_orchestrator.sessions import Commit
from skippy_stage.errors import Cancelled
from skippy_stage.protocol import SamplingParams

GENEROUS_S = 20.0
A, B, LAST = Span((1, 2), "ab"), Span((3,), "c"), Span((4,), "d", "length")


def request(stream: bool = True) -> GenerationRequest:
    return GenerationRequest(prompt=(1,), max_tokens=9, sampling=SamplingParams(), stream=stream)


class Client:
    """A sink whose sends can be held up."""

    def __init__(self, *, open: bool = True, broken: bool = False) -> None:
        self.spans: list[Span] = []
        self.sending = threading.Event()
        self.gate = threading.Event()
        self.ended = threading.Event()
        self.broken = broken
        if open:
            self.gate.set()

    def send(self, request: GenerationRequest, span: Span) -> None:
        self.sending.set()
        self.gate.wait()
        self.spans.append(span)
        if span.final:
            self.ended.set()
        if self.broken:
            raise OSError("broken pipe")

    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def senders() -> Iterator[Senders]:
    senders = Senders(2)
    yield senders
    senders.stop(GENEROUS_S)
    assert not any(thread.is_alive() for thread in senders._threads)


def test_a_span_is_final_with_a_reason_or_an_error() -> None:
    assert not A.final
    assert not Span().final
    assert LAST.final
    assert Span(error=Cancelled("x")).final
    assert span_of(Commit(1, (4,), "d", "length")) == LAST


def test_spans_merge_in_order() -> None:
    assert merge([A]) is A
    assert merge([A, B, LAST]) == Span((1, 2, 3, 4), "abcd", "length")
    error = Cancelled("x")
    assert merge([A, Span(error=error)]).error is error


@pytest.mark.parametrize("streaming", [True, False])
def test_what_the_caches_did_comes_with_the_last_span_however_spans_merge(streaming: bool) -> None:
    cache = CacheStats(status=CacheStatus.HIT, cached_prompt_tokens=7)
    last = span_of(Commit(1, (4,), "d", "length", cache))
    assert last.cache is cache
    assert span_of(Commit(1, (4,), "d")).cache is None
    stream = OutputStream(request(streaming), Client())
    for span in (A, B, last):
        stream.add(span)
    assert stream.take() == Span((1, 2, 3, 4), "abcd", "length", cache=cache)
    assert merge([A, Span(error=Cancelled("x"))]).cache is None


def test_a_stream_is_scheduled_once_until_it_is_empty() -> None:
    stream = OutputStream(request(), Client())
    assert stream.add(A)
    assert not stream.add(B)
    assert stream.take() == Span((1, 2, 3), "abc")
    assert not stream.add(LAST), "the sender looks again by itself"
    assert stream.take() == LAST
    assert stream.take() is None
    assert stream.add(A)


def test_without_streaming_everything_waits_for_the_end() -> None:
    stream = OutputStream(request(stream=False), Client())
    assert not stream.add(A)
    assert stream.take() is None
    assert not stream.add(B)
    assert stream.add(LAST)
    assert stream.take() == Span((1, 2, 3, 4), "abcd", "length")
    assert stream.take() is None


@given(st.lists(st.booleans(), max_size=20), st.booleans())
def test_whenever_a_sender_looks_the_whole_is_the_same(looks: list[bool], streaming: bool) -> None:
    stream = OutputStream(request(streaming), Client())
    got: list[Span] = []
    for i, look in enumerate(looks):
        stream.add(Span((i,), f"<{i}>"))
        if look and (span := stream.take()) is not None:
            got.append(span)
    stream.add(LAST)
    while (span := stream.take()) is not None:
        got.append(span)
    assert [t for s in got for t in s.tokens] == [*range(len(looks)), 4]
    assert "".join(s.text for s in got) == "".join(f"<{i}>" for i in range(len(looks))) + "d"
    assert [s.final for s in got] == [False] * (len(got) - 1) + [True]
    assert streaming or len(got) == 1


def test_what_is_committed_during_a_send_is_merged_into_the_next(senders: Senders) -> None:
    client = Client(open=False)
    stream = OutputStream(request(), client)
    senders.post(stream, A)
    assert client.sending.wait(GENEROUS_S)
    senders.post(stream, B)
    senders.post(stream, LAST)
    client.gate.set()
    assert client.ended.wait(GENEROUS_S)
    assert client.spans == [A, Span((3, 4), "cd", "length")]


def test_streams_keep_their_order_whatever_the_number_of_threads(senders: Senders) -> None:
    clients = [Client() for _ in range(5)]
    streams = [OutputStream(request(), client) for client in clients]
    for i in range(200):
        for stream in streams:
            senders.post(stream, Span((i,), f"{i},"))
    for stream in streams:
        senders.post(stream, LAST)
    for client in clients:
        assert client.ended.wait(GENEROUS_S)
        assert [t for span in client.spans for t in span.tokens] == [*range(200), 4]


def test_a_slow_or_broken_client_delays_nobody(senders: Senders) -> None:
    slow, broken, good = Client(open=False), Client(broken=True), Client()
    senders.post(OutputStream(request(), slow), A)
    broken_stream = OutputStream(request(), broken)
    senders.post(broken_stream, A)
    senders.post(broken_stream, LAST)
    senders.post(OutputStream(request(), good), LAST)
    assert good.ended.wait(GENEROUS_S)
    assert broken.ended.wait(GENEROUS_S)
    assert slow.spans == []
    slow.gate.set()


@pytest.mark.parametrize("threads", [1, 4])
def test_stop_sends_what_waits_even_behind_a_send_under_way(threads: int) -> None:
    senders = Senders(threads)
    slow, others = Client(open=False), [Client() for _ in range(3)]
    stream = OutputStream(request(), slow)
    senders.post(stream, A)
    assert slow.sending.wait(GENEROUS_S)
    for other in others:
        senders.post(OutputStream(request(), other), LAST)
    senders.post(stream, LAST)
    stopping = threading.Thread(target=senders.stop, args=(GENEROUS_S,))
    stopping.start()
    deadline = time.monotonic() + GENEROUS_S
    while sum(thread.is_alive() for thread in senders._threads) > 1:
        assert time.monotonic() < deadline, "threads without work have not ended"
        time.sleep(0.002)
    slow.gate.set()
    stopping.join()
    assert slow.spans == [A, LAST]
    assert all(other.spans == [LAST] for other in others)
    assert not any(thread.is_alive() for thread in senders._threads)


def test_stop_gives_up_on_a_send_that_never_ends() -> None:
    senders = Senders(2)
    stuck = Client(open=False)
    senders.post(OutputStream(request(), stuck), LAST)
    assert stuck.sending.wait(GENEROUS_S)
    senders.stop(0.01)
    assert stuck.spans == []
    stuck.gate.set()
    for thread in senders._threads:
        thread.join(GENEROUS_S)
        assert not thread.is_alive()
