"""Every message survives the way there and back; what breaks the protocol is refused by name."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_stage import protocol
from skippy_stage.errors import ErrorCode, ProtocolError
from skippy_stage.protocol import (
    PROTOCOL_VERSION,
    DecodeStep,
    FrameHeader,
    FrameResult,
    OpenStep,
    PrefillStep,
    PrefixStatus,
    ProbeStep,
    ProposeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    SamplingParams,
    StageStatus,
    StatusRequest,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    StopStep,
    TrimStep,
    VerifyStep,
)

ids = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31 - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=small,
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
steps = st.one_of(
    st.builds(
        OpenStep,
        session=ids,
        max_tokens=st.integers(1, 2**31),
        sampling=samplings,
        namespace=st.text(max_size=9),
    ),
    *(
        st.builds(kind, session=ids, epoch=small, length=st.integers(1, protocol.MAX_FRAME_ROWS))
        for kind in (ProbeStep, RestoreStep, RecordStep)
    ),
    st.builds(StopStep, session=ids),
    st.builds(
        PrefillStep,
        session=ids,
        epoch=small,
        pos_start=small,
        rows=st.integers(1, 999),
        sample=st.booleans(),
        lookahead=st.integers(0, 1),
    ),
    st.builds(DecodeStep, session=ids, epoch=small, pos_start=small),
    st.builds(VerifyStep, session=ids, epoch=small, pos_start=small, rows=st.integers(1, 64), window=small),
    st.builds(
        ProposeStep,
        session=ids,
        epoch=small,
        pos_start=small,
        rows=st.integers(1, 999),
        drafts=st.integers(1, protocol.MAX_DRAFTS),
    ),
    st.builds(TrimStep, session=ids, epoch=small, length=small),
)


def _one_row_step_each(drawn: list[Step]) -> list[Step]:
    seen: set[int] = set()
    kept: list[Step] = []
    for step in drawn:
        if protocol.rows_of(step):
            if step.session in seen:
                continue
            seen.add(step.session)
        kept.append(step)
    return kept


frames = st.builds(
    FrameHeader,
    incarnation=ids,
    frame=st.integers(1, 2**63 - 1),
    steps=st.lists(steps, max_size=8).map(_one_row_step_each).map(tuple),
    ended=st.lists(ids, max_size=3).map(tuple),
    live_epochs=st.lists(st.tuples(ids, small), max_size=3).map(tuple),
    busy_stages=st.integers(1, 64),
)
lengths = st.lists(st.integers(1, 40), max_size=5).map(lambda drawn: tuple(sorted(set(drawn))))
restorables = st.one_of(
    st.builds(Restorable, st.integers(0, 40)),
    lengths.map(lambda drawn: Restorable(drawn[-1] if drawn else 0, drawn)),
)
statuses = st.one_of(
    st.builds(StepOk, tokens=st.lists(small, max_size=5).map(tuple), restorable=st.none() | restorables),
    st.just(StepSkipped()),
    st.builds(StepFailed, code=st.sampled_from(ErrorCode), message=st.text(max_size=20)),
)
results = st.builds(
    FrameResult,
    incarnation=ids,
    frame=ids,
    statuses=st.lists(statuses, max_size=5).map(tuple),
    queue_us=small,
)


@given(st.one_of(frames, st.builds(StatusRequest, check_integrity=st.booleans())))
def test_requests_round_trip(message: protocol.Request) -> None:
    assert protocol.decode_request(protocol.encode(message)) == message


@given(results)
def test_results_round_trip(message: FrameResult) -> None:
    assert protocol.decode_reply(protocol.encode(message)) == message


def _all_lengths(restorable: Restorable) -> set[int]:
    return {n for n in range(1, 41) if restorable.best(n) == n}


@given(restorables, restorables, st.integers(-1, 45))
def test_what_two_stages_have_in_common(one: Restorable, other: Restorable, most: int) -> None:
    both = one.common(other)
    assert _all_lengths(both) == _all_lengths(one) & _all_lengths(other)
    assert both.longest == max(_all_lengths(both), default=0)
    assert both.best(most) == max((n for n in _all_lengths(both) if n <= most), default=0)
    assert other.common(one) == both


def test_status_round_trips() -> None:
    status = StageStatus(
        name="s",
        prefix=PrefixStatus(payload="resident-kv", hits=3),
        index=1,
        engine="e",
        architecture="llama",
        first_layer=0,
        last_layer=2,
        n_layers=4,
        hidden_size=8,
        vocab_size=9,
        context_length=10,
        link_dtype="f32",
        kv_block_tokens=16,
        kv_blocks=7,
    )
    assert protocol.decode_reply(protocol.encode(status)) == status


def test_another_version_is_refused_by_number() -> None:
    with pytest.raises(ProtocolError, match=f"protocol version 99, this stage speaks {PROTOCOL_VERSION}"):
        protocol.decode_request(protocol.encode(FrameHeader(version=99, incarnation=1, frame=1)))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_request(b"\xc1" + data)
    with contextlib.suppress(ProtocolError):
        protocol.decode_request(data)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (PrefillStep(session=1, epoch=0, pos_start=0, rows=0), "step with 0 rows"),
        (PrefillStep(session=1, epoch=0, pos_start=0, rows=-3), "step with -3 rows"),
        (PrefillStep(session=1, epoch=0, pos_start=-1, rows=1), "position -1"),
        (PrefillStep(session=1, epoch=0, pos_start=0, rows=1, lookahead=-1), "-1 look-ahead"),
        (
            PrefillStep(session=1, epoch=0, pos_start=0, rows=protocol.MAX_FRAME_ROWS + 1),
            "rows in a frame, limit",
        ),
        (DecodeStep(session=1, epoch=-1, pos_start=0), "epoch -1"),
        (VerifyStep(session=1, epoch=0, pos_start=0, rows=0, window=1), "step with 0 rows"),
        (ProposeStep(session=1, epoch=0, pos_start=0, rows=0, drafts=1), "step with 0 rows"),
        (ProposeStep(session=1, epoch=0, pos_start=-1, rows=1, drafts=1), "position -1"),
        (ProposeStep(session=1, epoch=-1, pos_start=0, rows=1, drafts=1), "epoch -1"),
        (ProposeStep(session=1, epoch=0, pos_start=0, rows=1, drafts=0), "propose of 0 drafts, 1 to 64"),
        (ProposeStep(session=1, epoch=0, pos_start=0, rows=1, drafts=65), "propose of 65 drafts, 1 to 64"),
        (
            ProposeStep(session=1, epoch=0, pos_start=0, rows=protocol.MAX_FRAME_ROWS + 1, drafts=1),
            "rows in a frame, limit",
        ),
        (OpenStep(session=1, max_tokens=0), "room for 0"),
        (TrimStep(session=1, epoch=0, length=-1), "trim to -1"),
        (ProbeStep(session=1, epoch=0, length=0), "probe of 0 tokens"),
        (RestoreStep(session=1, epoch=0, length=-1), "restore of -1 tokens"),
        (RecordStep(session=1, epoch=0, length=protocol.MAX_FRAME_ROWS + 1), "record of 1048577 tokens"),
    ],
)
def test_negative_counts_and_limits_are_refused(step: Step, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        protocol.decode_request(protocol.encode(FrameHeader(incarnation=1, frame=1, steps=(step,))))


@pytest.mark.parametrize(
    "first",
    [
        DecodeStep(session=1, epoch=0, pos_start=3),
        ProposeStep(session=1, epoch=0, pos_start=3, rows=1, drafts=2),
    ],
)
def test_a_session_has_one_row_step_per_frame(first: Step) -> None:
    twice = (first, DecodeStep(session=1, epoch=0, pos_start=4))
    with pytest.raises(ProtocolError, match="session 1 has two row steps"):
        protocol.decode_request(protocol.encode(FrameHeader(incarnation=1, frame=1, steps=twice)))


def test_a_proposal_has_its_rows_in_the_frame_and_fills_positions_for_its_drafts() -> None:
    step = ProposeStep(session=1, epoch=0, pos_start=7, rows=3, drafts=4)
    assert (protocol.rows_of(step), protocol.tokens_of(step), protocol.predictions_of(step)) == (3, 3, 1)
    assert protocol.positions_of(step) == 6


@given(steps.filter(lambda step: not isinstance(step, ProposeStep)))
def test_other_steps_fill_as_many_positions_as_they_have_rows(step: Step) -> None:
    assert protocol.positions_of(step) == protocol.rows_of(step)


def test_unknown_content_is_refused() -> None:
    plain = msgspec.msgpack.decode(protocol.encode(StatusRequest()))
    with pytest.raises(ProtocolError, match="malformed"):
        protocol.decode_request(msgspec.msgpack.encode([*plain, 1]))
