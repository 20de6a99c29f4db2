"""A link: order, frames outstanding, failures, and calls that never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from skippy_orchestrator.pipeline.flight import Flight
from skippy_orchestrator.pipeline.link import Link
from skippy_stage.engines.base import Hidden
from skippy_stage.errors import SkippyError, StageFault
from skippy_stage.protocol import Draft, DraftResult, FrameHeader, FrameResult

from tests.orchestrator.pipeline.manual import GENEROUS_S, ManualTransport, a_frame, wait_until


class Rig:
    """A link to a transport that is answered by hand, and what the link reports."""

    def __init__(self, depth: int = 2) -> None:
        self.now = 0.0
        self.transport = ManualTransport("stage_0")
        self.results: list[int] = []
        self.drafts: list[DraftResult] = []
        self.call_times: list[float] = []
        self.failures: list[tuple[str, str]] = []
        self.failed = threading.Event()
        self.link = Link(
            self.transport,
            depth,
            lambda flight: flight.header(1, 1),
            self.on_result,
            self.drafts.append,
            self.on_failure,
            clock=lambda: self.now,
        )
        self.link.start()

    def on_result(self, flight: Flight, result: FrameResult, hidden: Hidden | None, call_s: float) -> None:
        assert flight.frame.number == result.frame
        self.call_times.append(call_s)
        self.results.append(result.frame)

    def on_failure(self, stage: str, message: str) -> None:
        self.failures.append((stage, message))
        self.failed.set()

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.link.submit(Flight(a_frame(number), ["stage_0"]))

    def close(self) -> bool:
        self.link.stop()
        return self.link.join(GENEROUS_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.close(), "a thread of the link is stuck"


def test_frames_go_and_come_back_in_order(rig: Rig) -> None:
    rig.submit(*range(1, 21))
    for number in range(1, 21):
        pending = rig.transport.next()
        assert pending.header.frame == number
        pending.answer()
    wait_until(lambda: rig.results == list(range(1, 21)))
    assert rig.failures == []


def test_results_are_reported_in_the_order_of_frames_whatever_comes_first(rig: Rig) -> None:
    rig.submit(1, 2)
    first, second = rig.transport.next(), rig.transport.next()
    second.answer()
    first.answer()
    wait_until(lambda: rig.results == [1, 2])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_frames_than_the_depth_are_outstanding(depth: int) -> None:
    rig = Rig(depth)
    rig.submit(*range(1, 13))
    for _ in range(12):
        wait_until(lambda: rig.transport.outstanding == min(depth, 12 - len(rig.results)))
        done = len(rig.results)
        rig.transport.next().answer()
        wait_until(lambda done=done: len(rig.results) > done)  # type: ignore[misc]
    assert rig.transport.most_outstanding == depth
    assert rig.close()


@pytest.mark.parametrize("error", [StageFault("stage_0", "broke"), SkippyError("broke")])
@pytest.mark.parametrize("where", ["send", "wait"])
def test_a_failure_is_reported_once_with_the_stage_named_once(
    rig: Rig, where: str, error: SkippyError
) -> None:
    def refuse(header: FrameHeader) -> None:
        if header.frame == 2:
            raise error

    if where == "send":
        rig.transport.on_send = refuse
    rig.submit(1)
    rig.transport.next().answer()
    wait_until(lambda: rig.results == [1])
    rig.submit(2, 3)
    if where == "wait":
        rig.transport.next().fail(error)
        rig.transport.next().fail(error)
    assert rig.failed.wait(GENEROUS_S)
    assert rig.close()
    assert rig.results == [1]
    assert rig.failures == [("stage_0", "broke")]


@pytest.mark.parametrize("part", ["make_header", "on_result"])
def test_a_fault_of_the_pipeline_itself_is_reported_too(part: str) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("off by one")

    rig = Rig()
    setattr(rig.link, f"_{part}", broken)
    rig.submit(1)
    if part == "on_result":
        rig.transport.next().answer()
    assert rig.failed.wait(GENEROUS_S)
    assert rig.failures == [("stage_0", "off by one")]
    assert rig.close()


@pytest.mark.parametrize("outcome", ["answer", "failure"])
def test_after_stop_nothing_is_reported_and_nothing_more_is_sent(rig: Rig, outcome: str) -> None:
    rig.submit(1, 2, 3, 4)
    first, second = rig.transport.next(), rig.transport.next()
    rig.link.stop()
    first.answer()
    if outcome == "answer":
        second.answer()
    else:
        second.fail(SkippyError("too late"))
    assert rig.link.join(GENEROUS_S)
    assert not rig.transport.has_frames
    assert first.waited_for
    assert second.waited_for
    assert (rig.results, rig.failures) == ([], [])


@pytest.mark.parametrize("where", ["send", "wait"])
def test_a_call_that_never_returns_holds_nobody_up(where: str) -> None:
    rig = Rig()
    entered, released = threading.Event(), threading.Event()

    def block(header: FrameHeader) -> None:
        entered.set()
        released.wait()
        raise SkippyError("was killed")

    if where == "send":
        rig.transport.on_send = block
    rig.submit(1)
    pending = None
    if where == "send":
        assert entered.wait(GENEROUS_S)
    else:
        pending = rig.transport.next()
    rig.link.stop()
    assert not rig.link.join(0.0), "a thread that is stuck was given up on"
    released.set()
    if pending is not None:
        pending.fail(SkippyError("was killed"))
    assert rig.link.join(GENEROUS_S), "it ends by itself once its call has returned"
    assert rig.failures == []


def test_the_oldest_frame_that_a_stage_has_not_answered_decides_what_is_overdue(rig: Rig) -> None:
    assert not rig.link.overdue(1e9, 5.0)
    rig.submit(1)
    first = rig.transport.next()
    rig.now = 4.0
    rig.submit(2, 3)
    second = rig.transport.next()
    assert not rig.link.overdue(5.0, 5.0)
    assert rig.link.overdue(5.1, 5.0)
    first.answer()
    third = rig.transport.next()
    assert not rig.link.overdue(9.0, 5.0)
    assert rig.link.overdue(9.1, 5.0)
    second.answer()
    third.answer()
    wait_until(lambda: not rig.link.overdue(1e9, 5.0))
    assert rig.results[:2] == [1, 2]


def test_a_call_lasts_from_the_sending_of_a_frame_to_its_result(rig: Rig) -> None:
    """The wait for a place is not in it: the frame was not with the stage then."""
    rig.submit(1)
    first = rig.transport.next()
    rig.now = 1.0
    rig.submit(2, 3)
    second = rig.transport.next()
    rig.now = 4.0
    first.answer()
    third = rig.transport.next()
    rig.now = 4.5
    second.answer()
    wait_until(lambda: rig.results == [1, 2])
    rig.now = 10.0
    third.answer()
    wait_until(lambda: rig.results == [1, 2, 3])
    assert rig.call_times == [4.0, 3.5, 6.0]


def test_the_time_of_a_call_includes_its_acknowledgement(rig: Rig) -> None:
    def slowly(header: FrameHeader) -> None:
        rig.now += 2.0

    rig.transport.on_send = slowly
    rig.submit(1)
    pending = rig.transport.next()
    rig.now += 0.5
    pending.answer()
    wait_until(lambda: rig.results == [1])
    assert rig.call_times == [2.5]


def test_drafts_come_behind_their_result_and_hold_no_place() -> None:
    rig = Rig(depth=1)
    rig.submit(1, 2)
    first = rig.transport.next()
    first.answer(drafts_follow=True)
    second = rig.transport.next()
    wait_until(lambda: rig.results == [1])
    second.answer()
    assert rig.drafts == []
    first.follow(Draft(session=1, epoch=0, pos_start=4, position=6, tokens=(7,)))
    wait_until(lambda: rig.results == [1, 2])
    assert [drafts.frame for drafts in rig.drafts] == [1]
    assert rig.close()


def test_drafts_that_do_not_come_are_overdue(rig: Rig) -> None:
    rig.submit(1)
    pending = rig.transport.next()
    pending.answer(drafts_follow=True)
    wait_until(lambda: rig.results == [1])
    wait_until(lambda: rig.link.overdue(11.0, 10.0))
    assert not rig.link.overdue(9.0, 10.0)
    pending.follow()
    wait_until(lambda: not rig.link.overdue(11.0, 10.0))


def test_a_stage_that_is_lost_while_it_drafts_is_a_failure(rig: Rig) -> None:
    rig.submit(1)
    pending = rig.transport.next()
    pending.answer(drafts_follow=True)
    pending.fail_to_follow(StageFault("stage_0", "its process has ended"))
    assert rig.failed.wait(GENEROUS_S)
    assert rig.failures == [("stage_0", "its process has ended")]


def test_frames_of_a_slow_network_come_in_order_and_overlap(rig: Rig) -> None:
    rig.now = time.monotonic()
    for number in (1, 2):
        rig.link.submit(Flight(a_frame(number), ["stage_0"]), rig.now + 0.2)
    first = rig.transport.next()
    assert first.header.frame == 1
    assert time.monotonic() - rig.now >= 0.2
    rig.now += 0.2
    second = rig.transport.next()
    assert second.header.frame == 2
    for pending in (first, second):
        pending.answer()
    wait_until(lambda: rig.results == [1, 2])
